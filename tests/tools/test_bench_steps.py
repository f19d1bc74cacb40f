"""Which steps of an arm the bench counts, on made-up events."""

import json
from dataclasses import asdict

import pytest
from test_bench import GB, LINK, arm

from bridge_fgo.tools.bench import figures
from bridge_fgo.tools.bench.steps import save_stall_seconds

COLD = [1.0] * 6
QUIET, BUSY = 0.5e-3, 1e-3


def run(name, seconds, *loops_of_ranks, released=0):
    """An arm with these seconds from the seventh step on, and these loop times on each rank."""
    made_up = arm(name, [*COLD, *seconds], 40 * GB, released)
    if loops_of_ranks:
        # Steps before the seventh do not count.
        made_up.result["host_loop_seconds_of_ranks"] = [[1e-9] * len(COLD) + list(loops) for loops in loops_of_ranks]
    made_up.result["step_seconds"] = [*COLD, *seconds]
    return made_up


def test_the_table_shows_the_loop_and_the_json_keeps_what_was_measured():
    mine = run("native", [0.5, 0.6, 0.7, 0.8], [QUIET, BUSY, BUSY, BUSY])
    row = figures.make_row(mine, mine, LINK, True)
    shown = dict(zip(*figures.table_of([row]), strict=True))
    assert shown["host loop, ms"] == "1.00 (0.50-1.00)"
    other = figures.make_row(run("mcore", [0.7, 1.1]), mine, LINK, True)
    assert other.added_seconds == pytest.approx(0.65 - 0.9), "the medians of the steps from the seventh on"
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
    assert (row.step_seconds, row.step_seconds_max) == (0.6, 0.6)
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
