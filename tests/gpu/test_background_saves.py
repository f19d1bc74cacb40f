"""Saves in the background and resumes on a GPU, through Bridge's own ``pretrain()``."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_pretrain import ARM, MANY_ACTIVATIONS, PACKED, PRECISION_AWARE

from bridge_fgo.tools.arms import comparator, runner

STEPS = ("--steps", "12", "--save-interval", "4")


def arm(name: str, folder: Path, *options: str) -> runner.ArmRun:
    """Runs an arm of twelve steps."""
    return runner.run_arm(name, ARM, [*MANY_ACTIVATIONS, *STEPS, *options], folder, timeout=240)


def shards(folder: Path) -> dict[str, Path]:
    """Returns the files with tensors below a folder, by their paths in it."""
    return {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*.distcp"))}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [("--fully-reshardable", *PACKED), PACKED, PRECISION_AWARE],
    ids=["fused_adam-fully_reshardable", "fused_adam-dp_reshardable", "precision_aware_bf16_moments-dp_reshardable"],
)
def test_background_checkpoints_have_a_resident_runs_bytes_and_resume_bitwise(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    kept = {name: tmp_path / name for name in ("resident", "offloaded")}
    resident = arm("resident", tmp_path, *options, "--offload", "off", "--save", str(kept["resident"]))
    offloaded = arm(
        "offloaded", tmp_path, *options, "--offload", "on", "--save", str(kept["offloaded"]), "--async-save"
    )
    same = comparator.compare(resident, offloaded)
    assert same.bitwise_equal, same.parts
    mine, theirs = shards(kept["offloaded"]), shards(kept["resident"])
    assert mine.keys() == theirs.keys()
    assert len({name.split("/")[0] for name in mine}) == 3  # after steps 4, 8 and 12
    different = [name for name in mine if mine[name].read_bytes() != theirs[name].read_bytes()]
    assert not different
    # No writer, cache or worker keeps a slab: after the saves forward has as much memory as without them.
    fallen = resident.result["peak_allocated_bytes"] - offloaded.result["peak_allocated_bytes"]
    assert fallen >= 0.95 * offloaded.result["released_bytes"]
    resumed = arm(
        "resumed", tmp_path, *options, "--offload", "on", "--load", str(kept["offloaded"]), "--load-step", "8"
    )
    assert [event["loss_hex"] for event in resumed.steps] == [event["loss_hex"] for event in resident.steps[8:]]
    assert resumed.result["digests"] == resident.result["digests"]
    assert resumed.result["peak_allocated_bytes"] <= 1.01 * offloaded.result["peak_allocated_bytes"]
