"""Every kind of parallelism, and checkpoints from one to another, through Bridge's own ``pretrain()``."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_background_saves import shards
from test_pretrain import ARM, PACKED, SMALL, assert_bitwise_equal, both_arms, needs_gpus, side_by_side, torchrun

from bridge_fgo.tools.arms import runner

EXPERTS = ("--experts", "4", "--topk", "2")
CASES = {
    "tensor": (2, ("--tp", "2")),
    "data_without_overlap": (2, ("--no-dp-overlap",)),
    "pipeline": (2, ("--pp", "2")),
    "interleaved_pipeline": (2, ("--pp", "2", "--vpp", "2")),
    "context": (2, ("--cp", "2")),
    "expert": (2, ("--ep", "2", *EXPERTS)),
    "optimizer_instances": (2, ("--instances", "2")),
    "tensor_and_pipeline": (4, ("--tp", "2", "--pp", "2")),
    "data_and_optimizer_instances": (4, ("--instances", "2")),
    "expert_and_interleaved_pipeline": (4, ("--ep", "2", "--pp", "2", "--vpp", "2", *EXPERTS)),
    "context_and_tensor": (4, ("--cp", "2", "--tp", "2")),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_30_steps_are_bitwise_equal_to_resident_under_parallelism(tmp_path: Path, case: str) -> None:
    ranks, options = CASES[case]
    needs_gpus(ranks)
    resident, offloaded = both_arms(tmp_path, *SMALL, *options, steps=30, ranks=ranks)
    assert_bitwise_equal(resident, offloaded, steps=30)


def run_arm(
    name: str, folder: Path, ranks: int, *options: str, module: str = ARM, packed: tuple[str, ...] = PACKED
) -> runner.ArmRun:
    """Runs an arm of eight steps; ends it long before NCCL's ten minutes are over where it hangs."""
    steps = ("--steps", "8", "--save-interval", "4", "--fully-reshardable", *packed)
    return runner.run_arm(name, module, [*SMALL, *steps, *options], folder, launcher=torchrun(ranks), timeout=240)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [((2, "--tp=2"), (2, "--pp=2")), ((2, "--tp=1"), (1, "--tp=1")), ((1, "--tp=1"), (2, "--tp=1"))],
    ids=["tp2_to_pp2", "dp2_to_dp1", "dp1_to_dp2"],
)
def test_a_checkpoint_loads_into_another_layout_as_a_resident_runs_does(
    tmp_path: Path, saved: tuple[int, str], loaded: tuple[int, str]
) -> None:
    needs_gpus(2)
    kept = {offload: tmp_path / offload for offload in ("off", "on")}

    def save(offload: str) -> runner.ArmRun:
        return run_arm(f"saved_{offload}", tmp_path, *saved, "--offload", offload, "--save", str(kept[offload]))

    side_by_side(save)
    mine, theirs = shards(kept["on"]), shards(kept["off"])
    assert mine.keys() == theirs.keys() and mine
    assert not [name for name in mine if mine[name].read_bytes() != theirs[name].read_bytes()]

    def load(offload: str) -> runner.ArmRun:
        options = ("--offload", offload, "--load", str(kept["on"]), "--load-step", "4")
        return run_arm(f"loaded_{offload}", tmp_path, *loaded, *options)

    assert_bitwise_equal(*side_by_side(load), steps=4)


@pytest.mark.gpu
def test_a_checkpoint_loads_without_its_optimizer_states(tmp_path: Path) -> None:
    run_arm("saved", tmp_path, 1, "--offload", "on", "--save", str(tmp_path / "kept"))

    def load(offload: str) -> runner.ArmRun:
        options = ("--load", str(tmp_path / "kept"), "--load-step", "4", "--no-load-optim", "--offload", offload)
        return run_arm(f"loaded_{offload}", tmp_path, 1, *options)

    assert_bitwise_equal(*side_by_side(load), steps=4)
