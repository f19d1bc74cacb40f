"""Arms in turn: threads and processes that take turns and train nothing, and figures of rounds on made-up events."""

import itertools
import os
from pathlib import Path

import pytest
from built_jobs import parsed
from test_bench import GB, LINK, arm, made_up, names_of, ran  # noqa: F401 (a fixture)

from bridge_fgo.tools.link import launcher
from harness.bench import command, figures, in_turn


@pytest.fixture
def turns(tmp_path):
    """Runs arms of the given names and options; returns results, failures, and their diary as tuples."""

    def run(arms, ranks=1, rounds=2):
        diary, here = tmp_path / "diary", Path(__file__).parent
        environment = {"PYTHONPATH": os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])}
        how = {"module": "turning_arm", "folder": tmp_path, "launcher": launcher(ranks), "environment": environment}
        steps = str(in_turn.WARM_UP_STEPS + in_turn.TURN_STEPS * rounds)
        arms = {
            name: how | {"options": ["--steps", steps, "--name", name, "--diary", str(diary), *options.split()]}
            for name, options in arms.items()
        }
        results, failures = in_turn.InTurn(arms, rounds, timeout=60.0).run()
        return results, failures, [tuple(line.split()) for line in diary.read_text().splitlines()]

    return run


def blocks(lines):
    """Return who trained how many steps in which turn, in the order of time."""
    return [
        (int(turn), name, sum(line[3] == "begin" and line[2] == "0" for line in of_turn))
        for (turn, name), of_turn in ((key, list(lines)) for key, lines in itertools.groupby(lines, lambda x: x[:2]))
    ]


def test_arms_train_one_at_a_time_and_the_order_rotates(turns):
    results, failures, lines = turns(dict.fromkeys("abc", ""))
    assert list(results) == ["a", "b", "c"] and not failures
    assert blocks(lines) == [
        *[(0, name, in_turn.WARM_UP_STEPS) for name in "abc"],
        *[(1, name, in_turn.TURN_STEPS) for name in "abc"],
        *[(2, name, in_turn.TURN_STEPS) for name in "bca"],
        *[(3, name, 1) for name in "abc"],
    ]


def test_both_ranks_of_an_arm_take_their_turn_together_and_one_that_dies_ends_its_arm_alone(turns):
    results, failures, lines = turns({"a": "", "b": "--die-in 2"}, ranks=2)
    assert list(results) == ["a"] and list(failures) == ["b"]
    of_turns = [line[:2] for line in lines]
    assert len(list(itertools.groupby(of_turns))) == len(set(of_turns)) >= 6, "each turn ends before the next begins"
    assert {line[1:3] for line in lines} == {(name, rank) for name in "ab" for rank in "01"}


def in_turns(name, of_rounds, first=9.0):
    """An arm whose steps of each round take these seconds, after a cold first one."""
    warm_up = [5.0] * in_turn.WARM_UP_STEPS
    seconds = [*warm_up, *itertools.chain.from_iterable([first, *of_round] for of_round in of_rounds)]
    run = arm(name, seconds, 40 * GB, 0 if name.startswith("resident") else 10 * GB)
    turns = [0] * len(warm_up) + [i + 1 for i, of_round in enumerate(of_rounds) for _ in range(len(of_round) + 1)]
    for event, turn in zip(run.steps, turns, strict=True):
        event["turn"] = turn
    return run


def test_arms_are_compared_within_each_round_without_warm_up_and_first_steps():
    slow, fast = [0.8, 1.0, 1.2], [0.4, 0.5, 0.6]
    # Both take twice the time in slow rounds: the difference of all steps' medians would be that of the host's speed.
    resident, native = in_turns("resident", [fast, slow, slow]), in_turns("native", [[0.6] * 3, [1.2] * 3, [1.1] * 3])
    assert [step["seconds"] for step in figures.warm_steps(native)] == [0.6] * 3 + [1.2] * 3 + [1.1] * 3
    row = figures.make_row(resident, native, LINK, True)
    assert row.round_seconds == [0.6, 1.2, 1.1] and row.step_seconds == 1.1
    assert row.added_seconds == pytest.approx(0.1)
    assert row.e == pytest.approx(0.1 * 50 / 10)


@pytest.fixture
def trained_in_turn(made_up, monkeypatch):  # noqa: F811
    """Arms in turn that train nothing; returns the options that each was started with."""
    started = {}

    def run(settings, chosen, console):
        for one in chosen:
            started[one.name] = command.arm_options(settings, one)
        rounds = {one.name: [[0.5 + i / 10] * 4] * settings.rounds for i, one in enumerate(chosen)}
        return {name: in_turns(name, of_rounds) for name, of_rounds in rounds.items()}, {}

    monkeypatch.setattr(command, "run_in_turn", run)
    return started


def test_the_bench_in_turn_compares_arms_of_the_same_variables(trained_in_turn, tmp_path):
    names = "resident,native,resident:A=1,native:A=1"
    saved = ran(tmp_path, f"--in-turn --rounds 3 --arms {names}")
    compared = {row["arm"]: row["compared_with"] for row in saved["arms"]}
    assert list(compared) == names.split(",") and compared["native:A=1"] == "resident:A=1"
    assert [row["added_seconds"] for row in saved["arms"]] == pytest.approx([0, 0.1, 0, 0.1])
    assert parsed(*trained_in_turn["native"]).steps == in_turn.WARM_UP_STEPS + 3 * in_turn.TURN_STEPS


@pytest.mark.parametrize(("released", "status"), [(0, 0), (3 * GB, 2)], ids=["all fits", "some left"])
def test_auto_in_turn_counts_only_where_others_took_none_of_its_memory(
    trained_in_turn, monkeypatch, tmp_path, released, status
):
    run = command.run_in_turn

    def with_auto(*args):
        runs, failures = run(*args)
        runs["auto"].result["released_bytes"] = released
        return runs, failures

    monkeypatch.setattr(command, "run_in_turn", with_auto)
    saved = ran(tmp_path, "--in-turn --arms resident,auto", status)
    assert (names_of(saved) == ["resident", "auto"]) == (not released)
    assert ("without --in-turn" in saved["failed"].get("auto", "")) == bool(released)
