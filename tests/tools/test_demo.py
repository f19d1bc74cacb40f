"""The demo: what counts as bitwise equal, and what its exit status says."""

from __future__ import annotations

import importlib.util
import json
import math
import struct
import textwrap
from pathlib import Path
from typing import Any

import pytest
from finished_arms import arm, step

from bridge_fgo.tools import demo
from bridge_fgo.tools.arms import comparator, runner

NAN_BITS = 0x7FF8000000000000

Captured = pytest.CaptureFixture[str]


# --- the comparison -----------------------------------------------------------------

LAST_BIT = {"loss": math.nextafter(1.0, 2.0), "grad_norm": math.nextafter(0.5, 1.0)}
DIFFERENT: dict[str, tuple[list[runner.Event], list[runner.Event], dict[str, str], list[str]]] = {
    "nothing": ([step(1), step(2)], [step(1), step(2)], {}, []),
    "the same NaN": ([step(1, loss=math.nan)], [step(1, loss=math.nan)], {}, []),
    "a NaN": ([step(1, loss=math.nan)], [step(1)], {}, ["losses"]),
    "the sign of zero": ([step(1, loss=0.0)], [step(1, loss=-0.0)], {}, ["losses"]),
    "the last bit of a loss": ([step(1)], [step(1, loss=LAST_BIT["loss"])], {}, ["losses"]),
    "the last bit of a norm": ([step(1)], [step(1, grad_norm=LAST_BIT["grad_norm"])], {}, ["grad norms"]),
    "a skipped step": ([step(1)], [step(1, skipped=True)], {}, ["losses"]),
    "a missing step": ([step(1), step(2)], [step(1)], {}, ["losses", "grad norms"]),
    "no steps at all": ([], [], {}, ["losses", "grad norms"]),
    **{name: ([step(1)], [step(1)], {name: "other"}, [name]) for name in ("params", "masters", "moments")},
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_arms_are_equal_but_for_the_parts_whose_bits_differ(what: str) -> None:
    theirs, ours, digests, different = DIFFERENT[what]
    same = comparator.compare(arm("resident", theirs), arm("offloaded", ours, **digests))
    assert [part for part, equal in same.parts.items() if not equal] == different
    assert same.bitwise_equal is not bool(different)


def test_a_digest_that_neither_arm_has_is_no_equality() -> None:
    resident, offloaded = arm("resident", [step(1)]), arm("offloaded", [step(1)])
    for run in (resident, offloaded):
        del run.result["digests"]["moments"]
    assert not comparator.compare(resident, offloaded).bitwise_equal


def test_bits_tell_nans_apart_and_a_number_from_none() -> None:
    nan, other = (struct.unpack("<d", struct.pack("<Q", NAN_BITS | payload))[0] for payload in (1, 2))
    assert comparator.bits(nan) == comparator.bits(nan) != comparator.bits(other)
    assert comparator.bits(None) != comparator.bits(0.0)


# --- following an arm ---------------------------------------------------------------


def test_a_line_that_is_still_being_written_waits(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = runner.EventTail(path)
    assert list(tail.new_events()) == []
    path.write_bytes(b'{"event": "start"}\n{"event": "st')
    assert list(tail.new_events()) == [{"event": "start"}]
    with path.open("ab") as file:
        file.write(b'ep"}\n')
    assert list(tail.new_events()) == [{"event": "step"}]
    assert list(tail.new_events()) == []


FAKE_ARM = """
    import argparse, json, sys

    parser = argparse.ArgumentParser()
    for name in ("--steps", "--offload", "--events"):
        parser.add_argument(name)
    options = parser.parse_args()
    on = options.offload == "on"
    trouble = {trouble!r} if on else ""

    with open(options.events, "a", buffering=1) as file:
        def write(**event):
            print(json.dumps(event), file=file)

        write(event="start", device="fake", bridge="0.6.2", mcore="0.19.2", torch="2")
        for step in range(1, int(options.steps) + 1):
            loss = float("nan") if trouble == "nan" else step / 3 + (1e-15 if trouble == "loss" else 0)
            write(event="step", step=step, loss=loss, loss_hex=loss.hex(), grad_norm=1.0,
                  grad_norm_hex=(1.0).hex(), skipped=False, passes=1, seconds=0.1)
            print("trained step", step)
        if trouble == "crash":
            sys.exit("out of luck")
        if trouble != "silent":
            write(event="result", digests=dict(params="p", masters="m", moments="o"),
                  engine="native" if on else None, state_bytes=100,
                  released_bytes=60 if on and trouble != "nothing" else 0, pinned_bytes=60 if on else 0,
                  peak_allocated_bytes=200, peak_reserved_bytes=300, peak_forward_backward_bytes=0,
                  peak_step_bytes=0, step_seconds=[0.1])
"""


@pytest.fixture
def run_fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that runs the demo with an arm whose offloaded run has the given trouble."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.01)

    def run(trouble: str = "", steps: int = 3, **settings: Any) -> int:
        (tmp_path / "fake_arm.py").write_text(textwrap.dedent(FAKE_ARM.format(trouble=trouble)))
        return demo.run(demo.Settings(arm_module="fake_arm", steps=steps, **settings))

    return run


def test_equal_arms_exit_with_0_and_print_one_json_object(run_fake: Any, capfd: Captured) -> None:
    assert run_fake(json_output=True) == 0
    printed = json.loads(capfd.readouterr().out)
    assert printed["loss_resident"] == printed["loss_offloaded"] == [1 / 3, 2 / 3, 1.0]
    wanted = {
        "device": "fake",
        "bridge": "0.6.2",
        "mcore": "0.19.2",
        "engine": "native",
        "steps": 3,
        "bitwise_equal": True,
        "state_bytes": 100,
        "released_bytes": 60,
    }
    assert {name: printed[name] for name in wanted} == wanted


def test_a_folder_that_cannot_be_made_has_a_status_of_its_own(run_fake: Any, capfd: Captured) -> None:
    assert run_fake(keep=Path("/dev/null/x")) == 2
    assert "/dev/null/x" in capfd.readouterr().err


def test_the_report_says_bitwise_equal(run_fake: Any, capfd: Captured) -> None:
    assert run_fake() == 0
    printed = capfd.readouterr().out
    assert "Bitwise equal" in printed
    assert "correctness and bytes, not speed" in " ".join(printed.split())
    assert "0.333333333" in printed


def test_arms_that_differ_exit_with_1(run_fake: Any, capfd: Captured) -> None:
    assert run_fake("loss") == 1
    assert "NOT bitwise equal" in capfd.readouterr().out
    assert run_fake("loss", json_output=True) == 1
    assert json.loads(capfd.readouterr().out)["bitwise_equal"] is False


def test_an_offloaded_arm_that_released_nothing_exits_with_1(run_fake: Any, capfd: Captured) -> None:
    assert run_fake("nothing") == 1
    assert "released no memory" in capfd.readouterr().err


def test_an_arm_that_fails_exits_with_2_and_shows_its_last_lines(run_fake: Any, capfd: Captured) -> None:
    assert run_fake("crash", json_output=True, steps=40) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "out of luck" in captured.err
    assert "trained step 40" in captured.err
    assert "trained step 11\n" not in captured.err, "only the last 30 lines are shown"


def test_an_arm_without_a_result_exits_with_2(run_fake: Any, capfd: Captured) -> None:
    assert run_fake("silent") == 2
    assert "no result" in capfd.readouterr().err


def test_json_has_null_for_a_loss_that_is_nan(run_fake: Any, capfd: Captured) -> None:
    assert run_fake("nan", json_output=True) == 1
    text = capfd.readouterr().out
    printed = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert printed["loss_offloaded"] == [None] * 3


def test_keep_leaves_logs_and_events_and_a_second_demo_starts_afresh(run_fake: Any, tmp_path: Path) -> None:
    for _ in range(2):
        assert run_fake(keep=tmp_path / "kept") == 0
    kept = sorted(path.name for path in (tmp_path / "kept").iterdir())
    assert kept == ["offloaded.events.jsonl", "offloaded.log", "resident.events.jsonl", "resident.log"]
    assert len((tmp_path / "kept" / "resident.events.jsonl").read_text().splitlines()) == 5


def test_without_megatron_bridge_the_error_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capfd: Captured
) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    assert demo.run(demo.Settings()) == 2
    assert "megatron-bridge" in capfd.readouterr().err


def test_a_missing_megatron_core_is_named_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None if name == "megatron.core" else object())
    assert demo.missing_packages() == ["megatron-core"]


# --- the real thing -----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("bridge_fgo.tools.arms") is None
    or importlib.util.find_spec("bridge_fgo.tools.arms.cpu") is None,
    reason="the CPU arm is not there",
)
def test_demo_on_the_cpu_is_bitwise_equal(tmp_path: Path, capfd: Captured) -> None:
    status = demo.run(demo.Settings(steps=4, json_output=True, device="cpu", keep=tmp_path))
    captured = capfd.readouterr()
    assert status == 0, captured.err
    printed = json.loads(captured.out)
    assert printed["bitwise_equal"] is True
    assert printed["steps"] == 4 == len(printed["loss_resident"]) == len(printed["loss_offloaded"])
    assert 0 < printed["released_bytes"] <= printed["state_bytes"]
