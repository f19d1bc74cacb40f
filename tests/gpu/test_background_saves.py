"""Background saves have a resident run's bytes, and resume bitwise."""

from pathlib import Path

import pytest
from gpu_lane import MANY_ACTIVATIONS, PACKED, PRECISION_AWARE, arm, assert_same_shards

from harness.arms import runner

RAN_ON = "one H200"

STEPS = ("--steps", "12", "--save-interval", "4")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [("--fully-reshardable", *PACKED), PACKED, PRECISION_AWARE],
    ids=["fused_adam-fully_reshardable", "fused_adam-dp_reshardable", "precision_aware_bf16_moments-dp_reshardable"],
)
def test_background_checkpoints_have_a_resident_runs_bytes_and_resume_bitwise(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    def run(name: str, *more: str) -> runner.ArmRun:
        return arm(name, tmp_path, *MANY_ACTIVATIONS, *STEPS, *options, *more, timeout=240)

    kept = {name: tmp_path / name for name in ("resident", "offloaded")}
    resident = run("resident", "--offload", "off", "--save", str(kept["resident"]))
    offloaded = run("offloaded", "--offload", "on", "--save", str(kept["offloaded"]), "--async-save")
    same = runner.compare(resident, offloaded)
    assert same.bitwise_equal, same.parts
    saved = assert_same_shards(kept["offloaded"], kept["resident"])
    assert len({name.split("/")[0] for name in saved}) == 3  # after steps 4, 8 and 12
    # No writer, cache or worker keeps a slab: after the saves forward has as much memory as without them.
    fallen = resident.result["peak_allocated_bytes"] - offloaded.result["peak_allocated_bytes"]
    assert fallen >= 0.95 * offloaded.result["released_bytes"]
    resumed = run("resumed", "--offload", "on", "--load", str(kept["offloaded"]), "--load-step", "8")
    assert [event["loss_hex"] for event in resumed.steps] == [event["loss_hex"] for event in resident.steps[8:]]
    assert resumed.result["digests"] == resident.result["digests"]
    assert resumed.result["peak_allocated_bytes"] <= 1.01 * offloaded.result["peak_allocated_bytes"]
