"""Checkpoints load under another parallelism, also Megatron-FSDP's, bitwise."""

from itertools import product
from pathlib import Path

import pytest
from gpu_lane import EXPERTS, PACKED, assert_bitwise_equal, assert_same_shards, needs_gpus, saving_arm, side_by_side

from harness.arms import runner

RAN_ON = "two H200; one and two H100 (Megatron-FSDP)"

FSDP = ("--fsdp", "optim_grads_params")
LAZY, OFF = ("--gradients", "lazy"), ("--layers", "24", "--gradients", "true")
LAYOUTS = {
    "tp2_to_pp2": ((2, *PACKED, "--tp=2"), (2, *PACKED, "--pp=2")),
    "dp2_to_dp1": ((2, *PACKED), (1, *PACKED)),
    "dp1_to_dp2": ((1, *PACKED), (2, *PACKED)),
    "tp2_dp2_to_pp2_dp2": ((4, "--tp=2", "--ep=2", *EXPERTS), (4, "--pp=2", "--ep=2", *EXPERTS)),
    "lazy_dp2_to_dp1": ((2, *PACKED, *LAZY, "--gbs=4"), (1, *PACKED, *LAZY, "--gbs=2")),
    "off_tp2_to_dp2": ((2, *PACKED, *OFF, "--tp=2"), (2, *PACKED, *OFF)),
    "off_interleaved_to_dp1": ((2, *PACKED, *OFF, "--pp=2", "--vpp=2"), (1, *PACKED, *OFF)),
    # Bridge keeps a state of random numbers for each expert-parallel rank, and loads into no other number of them.
    "lazy_experts2_to_experts2": ((2, "--ep=2", *EXPERTS, *LAZY, "--gbs=4"),) * 2,
    "fsdp1_to_fsdp1": ((1, *FSDP), (1, *FSDP)),
    "fsdp2_to_fsdp1": ((2, *FSDP), (1, *FSDP)),
    "fsdp1_to_fsdp2": ((1, *FSDP), (2, *FSDP)),
}
"""Ranks and options that save, and those that load."""


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_has_a_resident_runs_bytes_and_loads_into_another_layout_as_it_does(
    tmp_path: Path, layout: str
) -> None:
    saved, loaded = LAYOUTS[layout]
    needs_gpus(max(saved[0], loaded[0]))
    kept = {offload: tmp_path / offload for offload in ("off", "on")}

    def save(offload: str) -> runner.ArmRun:
        return saving_arm(f"saved_{offload}", tmp_path, *saved, "--offload", offload, "--save", str(kept[offload]))

    side_by_side(save)
    assert_same_shards(kept["on"], kept["off"])

    def load(arm: tuple[str, str]) -> runner.ArmRun:
        where, offload = arm
        options = ("--offload", offload, "--load", str(kept[where]), "--load-step", "4")
        return saving_arm(f"loaded_{where}_{offload}", tmp_path, *loaded, *options)

    for where in ("off", "on") if layout.startswith("fsdp") else ("on",):
        arms = side_by_side(load, list(product([where], ("off", "on"))))
        assert_bitwise_equal(*arms, steps=4)
        print(f"\npeak of setup with the load: {[arm.result['peak_setup_bytes'] for arm in arms]}")


@pytest.mark.gpu
def test_a_checkpoint_loads_without_its_optimizer_states(tmp_path: Path) -> None:
    saving_arm("saved", tmp_path, 1, *PACKED, "--offload", "on", "--save", str(tmp_path / "kept"))

    def load(offload: str) -> runner.ArmRun:
        options = ("--load", str(tmp_path / "kept"), "--load-step", "4", "--no-load-optim", "--offload", offload)
        return saving_arm(f"loaded_{offload}", tmp_path, 1, *PACKED, *options)

    assert_bitwise_equal(*side_by_side(load), steps=4)
