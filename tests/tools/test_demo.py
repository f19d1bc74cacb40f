"""The demos: what counts as bitwise equal, what exit statuses say, and where they run."""

import json
import math
import os
import struct
import subprocess
from pathlib import Path
from types import SimpleNamespace

import children
import pytest
from cli import invoke

from bridge_fgo.tools.report import bits
from harness import demo, rl_demo
from harness.arms import runner
from harness.arms.rl.arm import parse
from harness.arms.rl.options import RlOptions

NAN_BITS = 0x7FF8000000000000


def step(number, loss=1.0, grad_norm=0.5, skipped=False, seconds=0.1):
    """Return a step's event as an arm writes it."""
    exact = {"loss_hex": loss.hex(), "grad_norm_hex": grad_norm.hex()}
    made = {"event": "step", "step": number, "loss": loss, "grad_norm": grad_norm, "skipped": skipped}
    return {**made, **exact, "passes": 1, "seconds": seconds}


def arm(name, steps, **digests):
    """Return an arm that has ended, without a training."""
    all_digests = {"params": "p", "masters": "m", "moments": "o"} | digests
    result = {"event": "result", "digests": all_digests, "released_bytes": 10, "state_bytes": 10}
    return runner.ArmRun(name, {"device": "cpu", "bridge": "0.6.2"}, steps, result)


# --- the comparison ---

DIFFERENT = {
    "nothing": ([step(1), step(2)], [step(1), step(2)], {}, []),
    "the same NaN": ([step(1, loss=math.nan)], [step(1, loss=math.nan)], {}, []),
    "the sign of zero": ([step(1, loss=0.0)], [step(1, loss=-0.0)], {}, ["losses"]),
    "the last bit of a loss": ([step(1)], [step(1, loss=math.nextafter(1.0, 2.0))], {}, ["losses"]),
    "the last bit of a norm": ([step(1)], [step(1, grad_norm=math.nextafter(0.5, 1.0))], {}, ["grad norms"]),
    "a skipped step": ([step(1)], [step(1, skipped=True)], {}, ["losses"]),
    "a missing step": ([step(1), step(2)], [step(1)], {}, ["losses", "grad norms"]),
    "no steps at all": ([], [], {}, ["losses", "grad norms"]),
    **{name: ([step(1)], [step(1)], {name: "other"}, [name]) for name in ("params", "masters", "moments")},
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_arms_are_equal_but_for_the_parts_whose_bits_differ(what):
    theirs, ours, digests, different = DIFFERENT[what]
    runs = arm("resident", theirs), arm("offloaded", ours, **digests)
    same = runner.compare(*runs)
    assert [part for part, equal in same.parts.items() if not equal] == different
    assert same.bitwise_equal is not bool(different)
    for run in runs:
        del run.result["digests"]["moments"]
    assert not runner.compare(*runs).bitwise_equal, "a digest that neither has is no equality"


def test_bits_tell_nans_apart_and_a_number_from_none():
    nan, other = (struct.unpack("<d", struct.pack("<Q", NAN_BITS | payload))[0] for payload in (1, 2))
    assert bits(nan) == bits(nan) != bits(other)
    assert bits(None) != bits(0.0)


# --- following an arm ---


def test_a_line_that_is_still_being_written_waits(tmp_path):
    path = tmp_path / "events.jsonl"
    tail = runner.EventTail(path)
    path.write_bytes(b'{"event": "start"}\n{"event": "st')
    assert list(tail.new_events()) == [{"event": "start"}]
    with path.open("ab") as file:
        file.write(b'ep"}\n')
    assert list(tail.new_events()) == [{"event": "step"}]
    assert list(tail.new_events()) == []


def test_an_arm_finds_the_harness_and_the_package_behind_what_is_on_the_path():
    own = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    for given, path in (({}, []), ({"PYTHONPATH": ""}, []), ({"PYTHONPATH": "mine:too"}, ["mine", "too"])):
        assert runner.environment_of(given)["PYTHONPATH"].split(os.pathsep) == [*path, *own]


def run(*words):
    """Run the command; returns status, output and errors."""
    result = invoke("demo", *words)
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def run_fake(tmp_path, monkeypatch):
    """Run the demo with two arms that leave these events and train nothing; returns what `run` does."""

    def run_fake(arms, *words):
        events = [[{"event": "start", **arm.start}, *arm.steps, *([arm.result] if arm.result else [])] for arm in arms]
        (tmp_path / "arms.json").write_text(json.dumps(events))
        return run(*words, "--device", "cpu", "--steps", 3)

    for module in (demo, rl_demo):
        monkeypatch.setattr(module, "MODULE", "fake_arm")
    monkeypatch.setenv("FAKE_ARMS", str(tmp_path / "arms.json"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.01)
    return run_fake


LOSSES = [1 / 3, 2 / 3, 1.0]


@pytest.mark.parametrize(
    ("losses", "result", "status", "said"),
    [
        (LOSSES, {"engine": "native", "released_bytes": 6, "peak_allocated_bytes": 7}, 0, '"bitwise_equal": true'),
        ([*LOSSES[:2], math.nextafter(1.0, 2.0)], {}, 1, '"bitwise_equal": false'),
        ([math.nan] * 3, {}, 1, '"loss_offloaded": [null, null, null]'),
        (LOSSES, {"released_bytes": 0}, 1, "released no memory"),
        (LOSSES, None, 2, "no result"),
    ],
)
def test_the_status_is_0_only_if_arms_are_equal_and_memory_was_released(run_fake, losses, result, status, said):
    arms = [arm(name, [step(i + 1, loss=loss) for i, loss in enumerate(of_arm)])
            for name, of_arm in (("resident", LOSSES), ("offloaded", losses))]  # fmt: skip
    arms[1].result = {} if result is None else arms[1].result | result
    found, out, errors = run_fake(arms, "--json")
    assert found == status and said in out + errors
    if status == 0:
        printed = json.loads(out)
        assert printed["loss_resident"] == printed["loss_offloaded"] == LOSSES
        wanted = {"device": "cpu", "bridge": "0.6.2", "engine": "native", "steps": 3, "released_bytes": 6}
        assert wanted.items() <= printed.items()
        assert printed["peak_allocated_bytes"] == {"resident": None, "offloaded": 7}
        assert "Bitwise equal" in run_fake(arms)[1]


def test_options_of_rl_are_refused_without_it():
    status, _, errors = run("--tp", 2, "--crowd")
    assert status == 2 and "--tp, --crowd: only of --rl" in errors


def test_the_median_of_a_step_is_without_the_first_three():
    steps = [step(number, seconds=9.0 if number <= 3 else 0.25) for number in range(1, 6)]
    assert demo.median_seconds(arm("resident", steps)) == 0.25


# --- where it runs ---


def test_arms_are_the_gpus_or_the_cpus_and_differ_in_the_offload_alone(monkeypatch):
    called = []

    def run_arm(name, module, options, *_, **__):
        called.append((module, options))
        return arm(name, [step(1)])

    monkeypatch.setattr(demo, "run_arm", run_arm)
    monkeypatch.setattr(demo, "missing_packages", lambda: [])
    monkeypatch.setattr(demo, "choose_device", lambda requested: (requested, None))
    for device, own in (("cuda", []), ("cpu", ["--cpu"])):
        called.clear()
        assert run("--steps", 5, "--device", device)[0] == 0
        options = [*own, "--steps", "5", "--offload"]
        assert called == [("harness.arms.gpu", [*options, on]) for on in ("off", "on")]


@pytest.mark.slow
def test_demo_on_the_cpu_is_bitwise_equal(tmp_path):
    status, out, errors = run("--steps", 4, "--json", "--device", "cpu", "--keep", tmp_path)
    assert status == 0, errors
    printed = json.loads(out)
    assert printed["bitwise_equal"] is True
    assert printed["steps"] == 4 == len(printed["loss_resident"]) == len(printed["loss_offloaded"])
    assert 0 < printed["released_bytes"] <= printed["state_bytes"]


# --- GRPO, asleep between updates ---


def iteration(number, more):
    """Return the event of an iteration; the first sleep of all takes longer."""
    moved = {"copied": 1400, "freed": 1800, "returned": 1800, "seconds": 9.0 if number == 1 else 0.25}
    phases = [{"phase": "begins"}, {"phase": "asleep", **moved}, {"phase": "trained"}]
    return step(number, seconds=2.0) | {"reward": number / 100 + more, "held": 1000 + number, "phases": phases}


@pytest.mark.parametrize(
    ("more_reward", "digests", "status"), [(0.0, {}, 0), (0.0, {"params": "other"}, 1), (1e-9, {}, 1)]
)
def test_with_rl_rewards_are_compared_too_and_moves_are_medians_without_the_first(
    run_fake, more_reward, digests, status
):
    arms = [arm(name, [iteration(number, more) for number in range(1, 31)], **own)
            for name, more, own in (("resident", 0.0, {}), ("sleeping", more_reward, digests))]  # fmt: skip
    found, out, _ = run_fake(arms, "--rl", "--json")
    printed = json.loads(out)
    assert found == status and printed["bitwise_equal"] is not bool(status)
    assert printed["reward"] == pytest.approx({"first": 0.055, "last": 0.255})
    assert printed["moves"] == {"asleep": {"seconds": 0.25, "copied": 1400, "freed": 1800, "returned": 1800}}
    assert printed["held_bytes"] == 1002, "the least that the second process got, but in the first sleep"
    assert printed["equal"].keys() == {"rewards", "losses", "grad norms", "params", "masters", "moments"}
    assert ("Bitwise equal" in run_fake(arms, "--rl")[1]) is not bool(status)


def test_what_the_user_gives_reaches_the_arm_and_several_ranks_are_launched_by_torchrun(monkeypatch):
    launched = []

    def run_arm(name, module, options, folder, on_event, launcher):
        launched.append((name, parse([*options, "--events", "x.jsonl"])[0], launcher[-1:]))
        raise runner.ArmFailed(name, "it is a test", "")

    monkeypatch.setattr(demo, "run_arm", run_arm)
    monkeypatch.setattr(demo, "choose_device", lambda requested: (requested, None))
    assert run("--rl", "--steps", 7, "--device", "cuda", "--ranks", 4, "--tp", 2, "--pp", 2, "--crowd")[0] == 2
    given = {"steps": 7, "tp": 2, "pp": 2, "crowd": True, "device": "cuda"}
    options = RlOptions(**rl_demo.DEFAULTS["cuda"] | given, sleep=False)
    assert launched == [("resident", options, ("4",))]


@pytest.mark.slow
def test_the_reward_rises_and_the_run_that_sleeps_ends_bitwise_the_same(monkeypatch, tmp_path):
    names = {name: getattr(subprocess, name) for name in ("STDOUT", "DEVNULL")}
    monkeypatch.setattr(runner, "subprocess", SimpleNamespace(Popen=children.Program, **names))
    monkeypatch.setitem(rl_demo.DEFAULTS, "cpu", {"length": 2, "lr": 2e-3})
    status, out, errors = run("--rl", "--steps", 60, "--json", "--device", "cpu", "--keep", tmp_path)
    assert status == 0, errors
    printed = json.loads(out)
    assert printed["bitwise_equal"] is True and printed["steps"] == 60
    assert printed["reward"]["first"] < 0.2 and printed["reward"]["last"] > 2 * printed["reward"]["first"]
