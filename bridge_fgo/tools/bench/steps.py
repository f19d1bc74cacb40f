"""Which steps of an arm count: those that are warm, and in which nothing is saved.

A step with a save does not count, nor does the one after it: Bridge empties the allocator's cache for a save, and the
background writer is waited for between the two, in no step's time, so that copies do not run on.

Of arms that train in turn the first turn does not count, and of the others not the first step: it begins on a GPU at
rest, and allocates anew what was given back for the others.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass

from bridge_fgo.tools.arms.clocks import FIRST_COUNTED_STEP
from bridge_fgo.tools.arms.runner import ArmRun
from bridge_fgo.tools.arms.turns import WARM_UP


@dataclass(frozen=True)
class Step:
    """One step. host_loop: seconds of its slowest rank's loop, and turn: its number; None where there is none."""

    seconds: float
    host_loop: float | None
    turn: int | None


def warm_steps(run: ArmRun) -> list[Step]:
    """Return the steps of an arm that are neither cold nor disturbed by a save."""
    found = []
    saves = run.result.get("save_steps", [])
    of_ranks = run.result.get("host_loop_seconds_of_ranks")
    loops = itertools.repeat(None) if of_ranks is None else map(max, zip(*of_ranks, strict=True))
    for (before, _), (event, loop) in itertools.pairwise(zip(run.steps, loops, strict=False)):
        is_cold = event["step"] < FIRST_COUNTED_STEP or not event.get("turn") == before.get("turn") != WARM_UP
        if not is_cold and event["step"] not in saves and event["step"] - 1 not in saves:
            found.append(Step(event["seconds"], loop, event.get("turn")))
    return found


def save_stall_seconds(run: ArmRun, step_seconds: float) -> float | None:
    """Return the median seconds by which a step with a background save is longer; None where there is no such save.

    The first save does not count: it also plans the files, and may wait for the writer's process to start. A step lasts
    until the next begins, so only the end of the writing is missed, which is waited for outside of all steps.
    """
    saves = run.result.get("save_steps", [])[1:]
    stalls = [event["seconds"] - step_seconds for event in run.steps if event["step"] in saves]
    return statistics.median(stalls) if stalls else None
