"""Callbacks that touch states between steps are bitwise as resident."""

import json
from pathlib import Path

import pytest
from gpu_lane import MANY_ACTIVATIONS, PACKED, SMALL, arm

from harness.arms import runner

RAN_ON = "one H200"

STEPS = ("--steps", "20")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [SMALL, (*SMALL, *PACKED), (*MANY_ACTIVATIONS, *PACKED)], ids=["whole", "packed", "held_by_a_plan"]
)
def test_what_callbacks_touch_between_steps_is_bitwise_as_resident(tmp_path: Path, options: tuple[str, ...]) -> None:
    def run(name: str, offload: str) -> runner.ArmRun:
        given = [option for option in options if offload == "on" or option not in PACKED]
        return arm(name, tmp_path, *given, *STEPS, "--offload", offload, f"TOUCHED={tmp_path / name}.touched")

    resident, offloaded = run("resident", "off"), run("offloaded", "on")
    expected, found = (
        [json.loads(line) for line in (tmp_path / f"{name}.touched").read_text().splitlines()]
        for name in ("resident", "offloaded")
    )
    assert len(expected) > 10
    for mine, of_resident in zip(found, expected, strict=True):
        assert mine == of_resident, mine[0]
    same = runner.compare(resident, offloaded)
    assert same.bitwise_equal, same.parts
    said = [line for line in (tmp_path / "offloaded.log").read_text().splitlines() if "came back" in line]
    print("\n".join(said))
    assert said
