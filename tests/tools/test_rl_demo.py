"""`bridge-fgo demo --rl`: what it asks of its arms, and what it reports of them."""

import json
import subprocess
from functools import partial
from types import SimpleNamespace

import children
import pytest
from test_demo import arm, fake, step
from test_demo import run as demo_with

from bridge_fgo.tools import demo, rl_demo
from bridge_fgo.tools.arms import runner
from bridge_fgo.tools.arms.rl.arm import parse
from bridge_fgo.tools.arms.rl.options import RlOptions
from bridge_fgo.tools.rl_demo import State, states_of_run

run = partial(demo_with, "--rl")
FULL = {"params": 200, "grads": 400, "optimizer": 1200, "reference": 0}
NONE = dict.fromkeys(FULL, 0)
ALONE = NONE | {"params": 200}
MOVES = [("asleep", NONE, 1400, 1800), ("params wake", ALONE, 200, -200),
         ("reference wakes", ALONE | {"reference": 200}, 200, -200), ("reference sleeps", ALONE, 0, 200),
         ("awake", FULL, 1200, -1600)]  # fmt: skip


def iteration(number, reward):
    """Return the event of an iteration; the first sleep of all takes longer."""
    phases = [{"phase": "begins", "at": 0.0, "memory": FULL}]
    for at, (phase, memory, copied, freed) in enumerate(MOVES):
        bytes_of = {"copied": copied, "freed": freed, "returned": freed, "memory": memory}
        phases.append({"phase": phase, "at": at, "seconds": 9.0 if number == 1 else 0.25, **bytes_of})
    phases.append({"phase": "trained", "at": 9.0, "memory": FULL})
    return step(number, seconds=2.0) | {"reward": reward, "held": 1000 + number, "phases": phases}


@pytest.fixture
def run_fake(tmp_path, monkeypatch):
    """Run the demo with arms that train nothing, changed as is said of the sleeping one; returns what `run` does."""
    monkeypatch.setattr(rl_demo, "MODULE", "fake_arm")

    def run_fake(*words, device="cpu", more_reward=0.0, digests=None, **ends):
        arms = []
        for name, more in (("resident", 0.0), ("sleeping", more_reward)):
            arms.append(arm(name, [iteration(number, number / 100 + more) for number in range(1, 31)]))
            arms[-1].start = {"device": device}
            arms[-1].result |= {"pinned_bytes": 5, "bytes_by_kind": {"params": 200}}
        arms[1].result["digests"] |= digests or {}
        fake(monkeypatch, tmp_path, arms, **ends)
        return run("--device", "cpu", "--steps", 30, *words)

    return run_fake


def test_json_has_rewards_moves_and_what_is_equal(run_fake):
    status, out, _ = run_fake("--json")
    printed = json.loads(out)
    assert status == 0 and printed["bitwise_equal"] is True and printed["steps"] == 30
    assert printed["reward"] == pytest.approx({"first": 0.055, "last": 0.255})
    assert printed["moves"]["asleep"] == {"seconds": 0.25, "copied": 1400, "freed": 1800, "returned": 1800}
    assert printed["held_bytes"] == 1002, "the least that the second process got, but in the first sleep"
    assert printed["equal"] == dict.fromkeys(("rewards", "losses", "grad norms", "params", "masters", "moments"), True)


def test_the_tables_say_what_each_move_took(run_fake):
    status, out, _ = run_fake()
    printed = " ".join(out.split())
    assert status == 0 and "Bitwise equal, asleep between updates or not" in printed
    assert "sleep: offload everything │ 0.2500 │ 1.40 kB │ 1.80 kB │ - │" in printed
    assert "no second process" in printed and "correctness and bytes, not speed" in printed
    status, out, _ = run_fake(device="a GPU")
    printed = " ".join(out.split())
    assert status == 0 and "│ 1.40 kB │ 1.80 kB │ 1.80 kB │" in printed
    assert "took and filled 1.00 kB in each sleep" in printed and "not speed" not in printed


@pytest.mark.parametrize(
    ("trouble", "words", "status", "said"),
    [
        ({"digests": {"params": "other"}}, "", 1, ["NOT bitwise equal"]),
        ({"more_reward": 1e-9}, "", 1, ["NOT bitwise equal"]),
        ({"log": "out of luck", "status": 1}, "", 2, ["the sleeping arm failed", "out of luck"]),
        ({}, "--ranks 3 --tp 2", 2, ["--ranks 3: use a multiple of --tp x --pp = 2"]),
    ],
)
def test_what_went_wrong_has_its_status_and_is_said(run_fake, trouble, words, status, said):
    found, *printed = run_fake(*words.split(), **trouble)
    assert found == status and all(text in "".join(printed) for text in said)


def test_what_the_user_gives_reaches_the_arm_and_several_ranks_are_launched_by_torchrun(monkeypatch):
    launched = []

    def run_arm(name, module, options, folder, on_event, launcher):
        assert module == rl_demo.MODULE
        launched.append((name, parse([*options, "--events", "x.jsonl"])[0], launcher[-1:]))
        raise runner.ArmFailed(name, "it is a test", "")

    monkeypatch.setattr(demo, "run_arm", run_arm)
    monkeypatch.setattr(demo, "choose_device", lambda requested: (requested, None))
    words = "--steps 7 --json --device cuda --ranks 4 --tp 2 --pp 2 --layers 8 --crowd"
    assert run(*words.split())[0] == 2
    given = {"steps": 7, "tp": 2, "pp": 2, "crowd": True, "layers": 8, "device": "cuda"}
    options = RlOptions(**rl_demo.DEFAULTS["cuda"] | given, sleep=False)
    assert launched == [("resident", options, ("4",))]


def test_the_picture_of_a_demo_has_the_phases_of_an_iteration(run_fake, tmp_path):
    kept, picture = (tmp_path / name for name in ("kept", "iteration.png"))
    assert run_fake("--keep", kept, "--picture", picture, device="a GPU")[0] == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"
    arm = runner.ArmRun("sleeping")
    for event in runner.EventTail(kept / "sleeping.events.jsonl").new_events():
        arm.add(event)
    states = states_of_run(arm)
    assert [sum(state.bytes.values()) for state in states] == [1800, 0, 200, 400, 1800]
    assert states[2] == State("weights alone:\nrollouts", ALONE, 0.25, 200)


def test_what_is_of_this_demo_alone_is_refused_by_the_other():
    status, _, errors = demo_with("--tp", 2, "--crowd")
    assert status == 2 and "--tp, --crowd: only of --rl" in errors


@pytest.mark.slow
def test_the_reward_rises_and_the_run_that_sleeps_ends_bitwise_the_same(monkeypatch, tmp_path):
    names = {name: getattr(subprocess, name) for name in ("STDOUT", "DEVNULL")}
    monkeypatch.setattr(runner, "subprocess", SimpleNamespace(Popen=children.Program, **names))
    monkeypatch.setitem(rl_demo.DEFAULTS, "cpu", {"length": 2, "lr": 2e-3})
    status, out, errors = run("--steps", 60, "--json", "--device", "cpu", "--keep", tmp_path)
    assert status == 0, errors
    printed = json.loads(out)
    assert printed["bitwise_equal"] is True and printed["steps"] == 60
    assert printed["reward"]["first"] < 0.2 and printed["reward"]["last"] > 2 * printed["reward"]["first"]
