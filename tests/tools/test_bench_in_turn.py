"""Arms in turn: threads and processes that take turns and train nothing, and figures of rounds on made-up events."""

import contextlib
import itertools
import json
import os
from pathlib import Path

import pytest
from built_jobs import parsed
from test_bench import GB, LINK, arm, bench, made_up, names_of, ran  # noqa: F401 (a fixture)

from bridge_fgo.tools.link import launcher
from harness.arms.runner import ArmFailed
from harness.arms.turns import Turnstile, TurnTaker
from harness.bench import command, in_turn
from harness.bench import figures as of_bench

# --- arms ---

STEPS = 3


@pytest.fixture
def turns(tmp_path):
    """Runs arms of the given names and options; returns results, failures, and the lines of their diary as tuples."""

    def run(arms, ranks=1, timeout=60.0, count=2, **settings):
        diary, here = tmp_path / "diary", Path(__file__).parent
        environment = {"PYTHONPATH": os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])}
        how = {"module": "turning_arm", "folder": tmp_path, "launcher": launcher(ranks), "environment": environment}
        steps = str(in_turn.WARM_UP_STEPS + STEPS * count)
        arms = {
            name: how | {"options": ["--steps", steps, "--name", name, "--diary", str(diary), *options]}
            for name, options in arms.items()
        }
        ended = in_turn.InTurn(arms, count, STEPS, timeout, **settings).run()
        return *ended, [tuple(line.split()) for line in diary.read_text().splitlines()]

    return run


def blocks(lines):
    """Return who trained how many steps in which turn, in the order of time."""
    return [
        (int(turn), name, sum(line[3] == "begin" and line[2] == "0" for line in of_turn))
        for (turn, name), of_turn in ((key, list(lines)) for key, lines in itertools.groupby(lines, lambda x: x[:2]))
    ]


def test_within_the_time_limit_arms_train_one_at_a_time_and_the_order_rotates_and_is_told(turns):
    told = []
    results, failures, lines = turns({"a": [], "b": [], "c": []}, time_limit=600, tell=told.append)
    assert list(results) == ["a", "b", "c"] and not failures
    assert told[1:] == [f"round {number} of 2: a 0.100 s, b 0.100 s, c 0.100 s" for number in (1, 2)]
    warm_up = in_turn.WARM_UP_STEPS
    assert blocks(lines) == [
        *[(0, name, warm_up) for name in "abc"],
        *[(1, name, STEPS) for name in "abc"],
        *[(2, name, STEPS) for name in "bca"],
        *[(3, name, 1) for name in "abc"],
    ]


@pytest.mark.slow
def test_if_time_runs_out_arms_end_after_the_round_under_way_with_one_step_more(turns):
    results, failures, lines = turns({"a": [], "b": []}, count=5, time_limit=0.001)
    assert list(results) == ["a", "b"] and not failures
    assert blocks(lines) == [
        *[(0, name, in_turn.WARM_UP_STEPS) for name in "ab"],
        *[(1, name, STEPS) for name in "ab"],
        *[(2, name, 1) for name in "ab"],
    ]


@pytest.mark.slow
def test_both_ranks_of_an_arm_take_their_turn_together_and_one_that_dies_ends_its_arm_alone(turns):
    results, failures, lines = turns({"a": [], "b": ["--die-in", "2"]}, ranks=2)
    assert list(results) == ["a"] and list(failures) == ["b"]
    of_turns = [line[:2] for line in lines]
    assert len(list(itertools.groupby(of_turns))) == len(set(of_turns)) >= 6, "each turn ends before the next begins"
    assert {line[1:3] for line in lines} == {(name, rank) for name in "ab" for rank in "01"}


@pytest.mark.parametrize(
    ("ends", "timeout", "said", "left"),
    [
        ("--die-in -1", 60, "it died as it started", 0),
        ("--die-in 0", 60, "it died in turn 0", 0),
        ("--die-in 2", 60, "it died in turn 2", 1),
        pytest.param("--hang-in 2", 8, "turn 2 took longer than 8 s", 1, marks=pytest.mark.slow),
    ],
)
def test_an_arm_that_dies_or_keeps_its_turn_is_ended_and_told_of_and_others_go_on(turns, ends, timeout, said, left):
    told = []
    results, failures, lines = turns({"a": [], "b": ends.split(), "c": []}, timeout=timeout, tell=told.append)
    assert list(results) == ["a", "c"] and list(failures) == ["b"]
    assert any(said in line for line in told)
    assert told[-1] == "round 2 of 2: a 0.100 s, c 0.100 s"
    assert [block for block in blocks(lines) if block[1] == "c"][-2:] == [(2, "c", STEPS), (3, "c", 1)]
    assert len([block for block in blocks(lines) if block[1] == "b" and block[0] > 0]) == left


def test_the_arm_that_others_are_compared_with_ends_all_when_it_fails(turns):
    with pytest.raises(ArmFailed, match="the a arm failed"):
        turns({"a": ["--die-in", "0"], "b": []})


def test_an_arm_is_awaited_when_all_its_ranks_wait_and_a_rank_that_waits_ends_with_the_turnstile(tmp_path):
    with contextlib.closing(Turnstile(tmp_path / "arm")) as turnstile:
        takers, is_awaited = [TurnTaker(tmp_path / "arm", 2) for _ in range(2)], []
        for taker in takers:
            taker._connection.send(2)
            for _ in range(4):
                turnstile.poll(0.1)
            is_awaited.append(turnstile.is_awaited)
        assert is_awaited == [False, True]
        takers[0]._connection.close()
        turnstile.poll(1.0)
        assert not turnstile.is_awaited
    with pytest.raises(ConnectionError):
        takers[1].take()


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
    one = in_turns("native", [[0.5, 0.6], [0.7, 0.8]])
    assert [step["seconds"] for step in of_bench.warm_steps(one)] == [0.5, 0.6, 0.7, 0.8]
    # Both take twice the time in slow rounds: the difference of all steps' medians would be that of the host's speed.
    resident, native = figures(native=[[0.6] * 3, [1.2] * 3, [1.1] * 3])
    assert resident.seconds == (0.5, 1.0, 1.0) and resident.e is None
    assert native.ratio == pytest.approx((1.2, 1.2, 1.1))
    assert native.added_seconds == pytest.approx(0.1)
    assert native.e == pytest.approx(0.1 * 50 / 10)
    arms = figures(native=[[0.6], [1.0], [1.2]], mcore=[[0.7], [1.1], [1.1]])
    assert of_bench.faster(arms, {"resident"}) == [
        "native faster than mcore in 2 of 3 rounds",
        "native faster than resident in 0 of 3 rounds",
        "mcore faster than resident in 0 of 3 rounds",
    ]
    cells = of_bench.table_of_rounds(figures(native=[[0.6] * 3, [1.2] * 3, [1.1] * 3], mcore=[[1.0]] * 3))
    assert [row[0] for row in cells] == ["round", "1", "2", "3", "median", "E by rounds"]
    assert [cell.partition(":")[0] for cell in cells[0][1:]] == ["resident", "native", "mcore"]
    assert cells[3][2:] == ["1.100  1.100", "1.000  1.000"]
    assert cells[4][2] == "1.100  1.200" and cells[5][1:3] == ["-", "0.50"]


SLOW, FAST = [0.8, 1.0, 1.2], [0.4, 0.5, 0.6]


def figures(**others):
    runs = {name: in_turns(name, of_rounds) for name, of_rounds in ({"resident": [FAST, SLOW, SLOW]} | others).items()}
    return of_bench.rounds_of(runs, {name: "resident" for name in runs}, LINK)


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


def test_the_bench_in_turn_leaves_the_rounds_in_its_json_and_half_takes_the_budget_given(trained_in_turn, tmp_path):
    names = "resident,native,resident:A=1,native:A=1"
    result = bench(tmp_path, "--in-turn", "--rounds", "3", "--arms", names, "--no-traces")
    assert result.exit_code == 0, result.output
    assert "native faster than resident in 0 of 3 rounds" in result.output
    saved = json.loads((tmp_path / "bench.json").read_text())["in_turn"]
    assert saved["order"][1] == ["native", "resident:A=1", "native:A=1", "resident"]
    assert [one["compared_with"] for one in saved["arms"]] == ["resident", "resident", "resident", "resident:A=1"]
    assert saved["arms"][3]["added_seconds"] == pytest.approx(0.1)
    assert parsed(*trained_in_turn["native"]).steps == in_turn.WARM_UP_STEPS + 3 * 5

    ran(tmp_path, "--in-turn --arms resident,half --half-budget-gib 20")
    assert parsed(*trained_in_turn["half"]).gpu_memory_budget_gib == 20


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
