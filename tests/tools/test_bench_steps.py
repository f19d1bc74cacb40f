"""Which steps of an arm the bench counts, on made-up events."""

import json
from dataclasses import asdict

import pytest
from test_bench import GB, LINK, arm

from bridge_fgo.tools.bench import figures
from bridge_fgo.tools.bench.steps import counted_steps, reference_loop, save_stall_seconds, warm_steps

COLD = [1.0] * 6
QUIET, BUSY = 0.5e-3, 1e-3


def run(name, seconds, *loops_of_ranks, released=0):
    """An arm with these seconds from the seventh step on, and these loop times on each rank."""
    made_up = arm(name, [*COLD, *seconds], 40 * GB, released)
    if loops_of_ranks:
        # What comes before the seventh step is no reference.
        made_up.result["host_loop_seconds_of_ranks"] = [[1e-9] * len(COLD) + list(loops) for loops in loops_of_ranks]
    made_up.result["step_seconds"] = [*COLD, *seconds]
    return made_up


def test_only_steps_at_the_host_speed_of_the_fastest_quartile_count():
    resident = run("resident", [0.5, 0.9, 0.5, 0.6], [QUIET, BUSY, QUIET, QUIET * 1.25])
    mine = run("native", [0.9, 0.7, 1.2, 0.7], [QUIET * 1.2, QUIET, BUSY, QUIET], released=10 * GB)
    reference = reference_loop([resident, mine])
    assert reference == QUIET
    row = figures.make_row(resident, mine, LINK, True, reference)
    assert (row.step_seconds, row.step_seconds_min, row.step_seconds_max) == (0.7, 0.7, 0.9)
    assert row.added_seconds == pytest.approx(0.7 - 0.5)
    assert row.e == pytest.approx(0.2 * 50 / 10)
    assert row.steps_counted == "3 of 4"
    assert row.host_loop_seconds == pytest.approx((QUIET * 1.1, QUIET, BUSY))
    first = figures.make_row(resident, resident, LINK, True, reference)
    assert (first.step_seconds, first.steps_counted) == (0.5, "3 of 4")


def test_one_slow_rank_makes_a_step_slow_and_one_that_is_slow_throughout_leaves_all_steps():
    one = run("resident", [0.5, 0.9, 0.7, 0.5], [QUIET, QUIET, BUSY, QUIET], [QUIET, BUSY, QUIET, QUIET])
    reference = reference_loop([one])
    assert counted_steps(warm_steps(one), reference)[0] == [0.5, 0.5]
    one = run("resident", [0.5, 0.6, 0.7, 0.8], [QUIET] * 4, [BUSY] * 4)
    assert counted_steps(warm_steps(one), reference_loop([one]))[1] == "4 of 4"


@pytest.mark.parametrize(
    ("loops", "seconds", "told"),
    [([QUIET, QUIET, BUSY, BUSY], [0.1, 0.2], "2 of 4"), ([QUIET, BUSY, BUSY, BUSY], None, "4 of 4, uneven host")],
    ids=["half of the steps are left", "fewer than half are left"],
)
def test_all_steps_count_where_fewer_than_half_would_and_the_table_says_so(loops, seconds, told):
    every = [0.1, 0.2, 0.3, 0.4]
    counted = counted_steps(warm_steps(run("native", every, loops)), QUIET)
    assert counted == (seconds or every, told)


def test_an_arm_that_times_no_loop_has_all_its_steps_counted_beside_one_that_does():
    resident = run("resident", [0.5, 0.9], [QUIET, BUSY])
    mine = run("mcore", [0.7, 1.1], released=10 * GB)
    row = figures.make_row(resident, mine, LINK, True, reference_loop([resident, mine]))
    assert (row.step_seconds, row.added_seconds) == (pytest.approx(0.9), pytest.approx(0.9 - 0.5))
    shown = dict(zip(*figures.table_of([row]), strict=True))
    assert (shown["steps counted"], shown["host loop, ms"]) == ("2 of 2", "-")
    assert reference_loop([mine]) is None
    row = figures.make_row(mine, mine, LINK, True, None)
    assert row.step_seconds == pytest.approx(0.9)


def test_the_table_shows_the_loop_and_the_json_keeps_what_was_measured():
    mine = run("native", [0.5, 0.6, 0.7, 0.8], [QUIET, BUSY, BUSY, BUSY])
    row = figures.make_row(mine, mine, LINK, True, QUIET)
    shown = dict(zip(*figures.table_of([row]), strict=True))
    assert shown["steps counted"] == "4 of 4, uneven host"
    assert shown["host loop, ms"] == "1.00 (0.50-1.00)"
    (kept,) = json.loads(json.dumps(asdict(row)))["rounds"]
    assert kept["step_seconds"] == [*COLD, 0.5, 0.6, 0.7, 0.8]
    assert kept["host_loop_seconds_of_ranks"] == mine.result["host_loop_seconds_of_ranks"]


SAVING = [0.5, 2.5, 0.1, 0.6, 0.6, 0.6, 1.5, 0.1]
"""Steps 7 to 14: 8 and 13 with a save, and each followed by a step into which no copies ran on."""


def test_the_stall_of_a_save_is_what_its_step_takes_beyond_those_without_and_the_median_over_saves_but_the_first():
    one = run("native", SAVING, released=10 * GB)
    one.result.update(save_steps=[8, 13], between_seconds=[0.1] * 14)
    row = figures.make_row(one, one, LINK, True)
    assert row.save_stall_seconds == pytest.approx(1.5 - 0.6)
    assert (row.step_seconds, row.step_seconds_max, row.steps_counted) == (0.6, 0.6, "4 of 4")
    (kept,) = row.rounds
    assert (kept["save_steps"], kept["between_seconds"]) == ([8, 13], [0.1] * 14)
    one = run("native", [0.9, 3.5, 1.0])
    one.result["save_steps"] = [4, 7, 8, 9]
    assert save_stall_seconds(one, 0.5) == 0.5


@pytest.mark.parametrize("saves", [None, [], [8]], ids=["an older arm", "none", "the first alone"])
def test_without_a_second_save_there_is_no_stall(saves):
    one = run("native", SAVING)
    if saves is not None:
        one.result["save_steps"] = saves
    assert figures.make_row(one, one, LINK, True).save_stall_seconds is None
