"""Bridge's own ``pretrain()`` with TE FusedAdam: offloaded training against resident training.

Each arm is a process (under torchrun: several), so that neither inherits anything from
the other. Imports alone take about half a minute an arm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bridge_fgo.tools.arms import comparator, runner

ARM = "bridge_fgo.tools.arms.gpu"

# 128M parameters, 1.5 GB of masters and moments; four microbatches a step.
SMALL = ("--layers", "4", "--hidden", "1024", "--heads", "16", "--seq", "1024", "--mbs", "2", "--gbs", "8")
# The same parameters with larger microbatches. Attention scores of 16 heads over 4 x 2048
# tokens and the logits hold several GB more than the states do. So the peak lies in the
# backward pass, and not in the optimizer step, where the states have to be resident.
MANY_ACTIVATIONS = (*SMALL[:6], "--seq", "2048", "--mbs", "4", "--gbs", "16")
# The same with so few tokens that the states are larger than all else but weights and gradients.
FEW_ACTIVATIONS = (*SMALL[:6], "--seq", "256", "--mbs", "1", "--gbs", "4")
PRECISION_AWARE = ("--precision-aware", "--moments-dtype", "bf16")
PACKED = ("--master-remainders",)
"""For runs that are over before training is seen to wait for copies."""


def torchrun(ranks: int) -> tuple[str, ...]:
    """Returns what goes between ``python`` and ``-m ARM`` to start ``ranks`` processes; () for one."""
    if ranks == 1:
        return ()
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))


def side_by_side[T](run: Callable[[T], runner.ArmRun], arms: Sequence[T] = ("off", "on")) -> list[runner.ArmRun]:
    """Calls ``run`` with each of ``arms`` at the same time."""
    with ThreadPoolExecutor(len(arms)) as pool:
        started = [pool.submit(run, arm) for arm in arms]
    return [future.result() for future in started]


def both_arms(folder: Path, *options: str, steps: int, ranks: int = 1, at_once: bool = True) -> list[runner.ArmRun]:
    """Runs the resident and the offloaded arm, on the same GPUs; one after the other if they do not fit at once."""

    def run(offload: str) -> runner.ArmRun:
        name = {"off": "resident", "on": "offloaded"}[offload]
        all_options = [*options, "--steps", str(steps), "--offload", offload]
        return runner.run_arm(name, ARM, all_options, folder, launcher=torchrun(ranks), timeout=300)

    return side_by_side(run) if at_once else [run("off"), run("on")]


def assert_bitwise_equal(resident: runner.ArmRun, offloaded: runner.ArmRun, steps: int) -> None:
    """Also checks that the comparison is one: all steps ran, and states did leave the GPU."""
    assert len(resident.steps) == len(offloaded.steps) == steps
    assert all(loss is not None for loss in resident.values("loss"))
    assert resident.result["released_bytes"] == 0 < offloaded.result["released_bytes"]
    same = comparator.compare(resident, offloaded)
    first = next((index + 1 for index, equal in enumerate(same.steps) if not equal), None)
    assert same.bitwise_equal, f"{same.parts}, first different step: {first}"


def needs_gpus(count: int) -> None:
    """Skips the test where fewer than ``count`` GPUs are visible."""
    import torch

    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")


@pytest.mark.gpu
@pytest.mark.parametrize("options", [(), PRECISION_AWARE], ids=["fused_adam", "precision_aware_bf16_moments"])
def test_50_steps_are_bitwise_equal_to_resident(tmp_path: Path, options: tuple[str, ...]) -> None:
    resident, offloaded = both_arms(tmp_path, *SMALL, *options, steps=50)
    assert_bitwise_equal(resident, offloaded, steps=50)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [PACKED, ("--no-master-remainders",)], ids=["packed", "whole"])
def test_parts_of_a_tensor_each_that_move_in_groups_are_bitwise_equal_to_resident(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    resident, offloaded = both_arms(tmp_path, *SMALL, *options, "--slab-bytes", "1048576", steps=20)
    assert_bitwise_equal(resident, offloaded, steps=20)


@pytest.mark.gpu
def test_peak_allocated_falls_by_the_bytes_offloaded(tmp_path: Path) -> None:
    resident, offloaded = both_arms(tmp_path, *MANY_ACTIVATIONS, steps=8)
    assert_bitwise_equal(resident, offloaded, steps=8)
    fallen = resident.result["peak_allocated_bytes"] - offloaded.result["peak_allocated_bytes"]
    assert fallen >= 0.95 * offloaded.result["released_bytes"], (resident.result, offloaded.result)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [(), PRECISION_AWARE], ids=["fused_adam", "precision_aware_bf16_moments"])
def test_the_step_that_makes_the_states_needs_no_more_memory_than_others(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    resident, offloaded = both_arms(tmp_path, *FEW_ACTIVATIONS, *options, steps=8)
    assert_bitwise_equal(resident, offloaded, steps=8)
    two_parts = offloaded.result["released_bytes"] // 8  # of 16
    assert offloaded.result["first_step_peak_bytes"] <= offloaded.result["peak_allocated_bytes"] + two_parts


@pytest.mark.gpu
def test_cuda_graphs_of_layers_are_bitwise_equal_to_resident(tmp_path: Path) -> None:
    resident, offloaded = both_arms(tmp_path, *SMALL, "--te-graphs", steps=12)
    assert_bitwise_equal(resident, offloaded, steps=12)
    assert "Start CUDA Graphs capture" in (tmp_path / "offloaded.log").read_text()


@pytest.mark.gpu
def test_tensor_parallel_2_is_bitwise_equal_to_resident(tmp_path: Path) -> None:
    needs_gpus(2)
    resident, offloaded = both_arms(tmp_path, *SMALL, "--tp", "2", steps=20, ranks=2)
    assert_bitwise_equal(resident, offloaded, steps=20)


@pytest.mark.gpu
def test_data_parallel_2_with_overlap_is_bitwise_equal_to_resident(tmp_path: Path) -> None:
    needs_gpus(2)
    resident, offloaded = both_arms(tmp_path, *SMALL, "--dp-overlap", steps=20, ranks=2)
    assert_bitwise_equal(resident, offloaded, steps=20)
