"""Under the debug mode a missing wait changes bits."""

from pathlib import Path

import pytest
from changed_arm import RACES
from gpu_lane import PACKED, SMALL, arm

from harness.arms import runner

RAN_ON = "one H200"


@pytest.mark.gpu
@pytest.mark.parametrize("race", RACES)
def test_a_missing_wait_shows_in_the_bits_under_the_debug_mode(tmp_path: Path, monkeypatch, race: str) -> None:
    options = (*SMALL, *PACKED, "--steps", "8")
    monkeypatch.setenv("BRIDGE_FGO_DEBUG", "1")
    resident = arm("resident", tmp_path, *options, "--offload", "off")
    try:
        raced = arm("raced", tmp_path, *options, "--offload", "on", f"RACE={race}")
    except runner.ArmFailed as failure:  # Bridge ends a run whose loss or gradients are not finite
        assert "found nan" in (tmp_path / "raced.log").read_text().lower(), failure.log_tail
    else:
        assert not runner.compare(resident, raced).bitwise_equal
