"""Sequences whose lengths change from step to step and within one, through Bridge's own ``pretrain()``."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_pretrain import ARM, SMALL

from bridge_fgo.tools.arms import comparator, runner

STEPS = 24
# Attention scores of 4096 tokens hold many times what the states do; those of 512 a fraction of them.
LENGTHS = (*SMALL[:6], "--seq", "4096", "--lengths", "512,4096", "--mbs", "1", "--gbs", "4", "--steps", str(STEPS))
VOCABULARY, HIDDEN = 32000, 1024


def run(name: str, folder: Path, *options: str) -> runner.ArmRun:
    return runner.run_arm(name, ARM, [*LENGTHS, *options], folder, timeout=300)


@pytest.mark.gpu
def test_lengths_in_turn_are_bitwise_equal_and_no_step_needs_more_than_releasing_throughout(tmp_path: Path) -> None:
    resident = run("resident", tmp_path, "--offload", "off")
    planned = run("planned", tmp_path, "--offload", "on")
    released = run("released", tmp_path, "--offload", "on", "--released-throughout")
    assert resident.result["released_bytes"] == 0 < planned.result["released_bytes"]
    for arm in (planned, released):
        same = comparator.compare(resident, arm)
        assert same.bitwise_equal and len(arm.steps) == STEPS, same.parts
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
