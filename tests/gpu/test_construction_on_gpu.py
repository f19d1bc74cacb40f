"""Building and loading hold two parts of the states; 9.17B parameters train."""

import shutil
from math import isqrt
from pathlib import Path

import pytest
from gpu_lane import PRECISION_AWARE, arm

from bridge_fgo.memory.layout import BYTES_WHILE_ENQUEUING
from harness.arms import runner

RAN_ON = "one H200 (9.17B), one H100 (the others)"

VOCABULARY = 32000
# 1.64B parameters, 19.7 GB of masters and moments. A checkpoint has 23 GB.
MIDDLE = (
    "--layers", "24", "--hidden", "2048", "--ffn", "8192", "--heads", "16", "--vocab", str(VOCABULARY),
    "--seq", "1024", "--mbs", "1", "--gbs", "2",
)  # fmt: skip
# 9.17B parameters: 55 GB of weights and gradients, and 110 GB of masters and moments, which are page-locked: so much
# host memory is needed, and some 10 GB more. Resident it would need 165 GB of the GPU.
LARGE = (
    "--layers", "48", "--hidden", "4096", "--ffn", "11008", "--heads", "32", "--vocab", str(VOCABULARY),
    "--seq", "2048", "--mbs", "1", "--gbs", "1", "--recompute", "attention", "--digest-by-parameter",
)  # fmt: skip
SLACK = 64 * 2**20
"""Bytes for what libraries take of the allocator, for padding, and for rounding."""
MERGED = 24 * 2 * 8192 * 2048 * 2
"""Bytes of the first products of all gated MLPs, which mcore makes anew in a load, of halves that it saves apart
(`sh_ten_merge_fn`). They are there until the states are loaded, in a resident run too."""
SAVED, STEPS = 4, 8


def assert_set_up_in_two_parts(run: runner.ArmRun, hidden: int, beside: int = 0) -> None:
    """Checks the peak from when weights and gradients are there until training starts, through a load if any.

    A part is of the size that is aimed for, or of the states of the largest tensor, which are those of the embedding.
    """
    result = run.result
    numel = result["model_bytes"] // 6  # weights in bf16 and gradients in fp32
    largest = result["state_bytes"] * VOCABULARY * hidden // numel
    two_parts = 2 * max(isqrt(result["state_bytes"] * BYTES_WHILE_ENQUEUING), largest)
    assert result["peak_setup_bytes"] <= result["model_bytes"] + two_parts + beside + SLACK, result


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [(), PRECISION_AWARE, ("--fully-reshardable",)],
    ids=["fused_adam", "precision_aware_bf16_moments", "fully_reshardable"],
)
def test_building_and_loading_hold_weights_gradients_and_two_parts(tmp_path: Path, options: tuple[str, ...]) -> None:
    folder = tmp_path / "saved"
    save = ("--steps", str(SAVED), "--save", str(folder), "--save-interval", str(SAVED))
    load = ("--steps", str(STEPS), "--load", str(folder))
    try:
        fresh = arm("fresh", tmp_path, *MIDDLE, *options, *save, "--offload", "on", timeout=400)
        assert_set_up_in_two_parts(fresh, hidden=2048)
        resumed = arm("resumed", tmp_path, *MIDDLE, *options, *load, "--offload", "on", timeout=400)
        # States in 16 bits are loaded on the GPU, where the merged weights are by then; others on the host.
        assert_set_up_in_two_parts(resumed, hidden=2048, beside=MERGED if options == PRECISION_AWARE else 0)
        resident = arm("resident", tmp_path, *MIDDLE, *options, *load, "--offload", "off", timeout=400)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # three of them would fill a disk
    assert len(resumed.steps) == STEPS - SAVED
    assert runner.compare(resident, resumed).bitwise_equal
    grown = resident.result["peak_setup_bytes"] - resident.result["model_bytes"]
    assert grown >= resident.result["state_bytes"], "what is measured here shows states"


@pytest.mark.gpu
def test_9b_parameters_train_on_one_gpu_that_could_not_hold_them_resident(tmp_path: Path) -> None:
    import torch

    large = arm("large", tmp_path, *LARGE, "--steps", str(SAVED), "--offload", "on", timeout=580)
    result = large.result
    assert result["state_bytes"] >= 12 * 9 * 10**9
    assert len(large.steps) == SAVED and all(loss is not None for loss in large.values("loss"))
    resident = result["model_bytes"] + result["state_bytes"]
    assert resident > torch.cuda.get_device_properties(0).total_memory
    assert_set_up_in_two_parts(large, hidden=4096)
