"""Lengths that change stay bitwise, below the peak of a full release."""

from pathlib import Path

import pytest
from gpu_lane import SMALL, arm

from harness.arms import runner

RAN_ON = "one H200"

STEPS = 24
# Attention scores of 4096 tokens hold many times what the states do; those of 512 a fraction of them.
LENGTHS = (*SMALL[:6], "--seq", "4096", "LENGTHS=512,4096", "--mbs", "1", "--gbs", "4", "--steps", str(STEPS))
VOCABULARY, HIDDEN = 32000, 1024


@pytest.mark.gpu
def test_lengths_in_turn_are_bitwise_equal_and_no_step_needs_more_than_releasing_throughout(tmp_path: Path) -> None:
    resident = arm("resident", tmp_path, *LENGTHS, "--offload", "off")
    planned = arm("planned", tmp_path, *LENGTHS, "--offload", "on")
    released = arm("released", tmp_path, *LENGTHS, "--offload", "on", "RELEASED_THROUGHOUT=1")
    assert resident.result["released_bytes"] == 0 < planned.result["released_bytes"]
    for offloaded in (planned, released):
        same = runner.compare(resident, offloaded)
        assert same.bitwise_equal and len(offloaded.steps) == STEPS, same.parts
    # A part is at least one tensor's states, and the embeddings are the largest; the margin is a part of the states.
    allowed = 12 * VOCABULARY * HIDDEN + planned.result["state_bytes"] // 16
    reached, above = 0, []
    for mine, theirs in zip(planned.values("peak_bytes"), released.values("peak_bytes"), strict=True):
        assert mine is not None and theirs is not None
        reached = max(reached, theirs)
        above.append(mine - reached)
    assert max(above) <= allowed, above
    ends = "measured" in (tmp_path / "planned.log").read_text()
    assert ends and "measured" in (tmp_path / "released.log").read_text()
