"""Which steps of an arm count: those in which nothing is saved and the host was as fast as in every other arm's.

A host that others use, too, changes its speed by a factor of two within seconds, and with it the time of a step. So
each arm times a fixed loop of Python before each step, on every rank (`tools.arms.clocks`), of which that of the
slowest counts. The first quartile of all arms' loop times is the reference; a step counts if its loop took at most
`SLOWER` times that. Where fewer than half of an arm's steps would be left, all count, and the table says so.

A step with a save does not count, nor does the one after it: Bridge empties the allocator's cache for a save, and the
background writer is waited for between the two, in no step's time, so that copies do not run on.

Of arms that train in turn the first turn does not count, and of the others not the first step: it begins on a GPU at
rest, and allocates anew what was given back for the others.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from bridge_fgo.tools.arms.clocks import FIRST_COUNTED_STEP
from bridge_fgo.tools.arms.runner import ArmRun
from bridge_fgo.tools.arms.turns import WARM_UP

SLOWER = 1.25  # a choice: well above what a quiet host's loop varies by, well below a busy one's factor of two


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


def reference_loop(runs: Iterable[ArmRun]) -> float | None:
    """Return the first quartile of the loop times of all arms; None where no loop was timed."""
    loops = sorted(step.host_loop for run in runs for step in warm_steps(run) if step.host_loop is not None)
    return loops[(len(loops) - 1) // 4] if loops else None


def counted_steps(steps: list[Step], reference: float | None) -> tuple[list[float], str]:
    """Return the seconds of an arm's steps that count, by the rule on top of this file, and how many of how many."""
    every = [step.seconds for step in steps]
    if reference is None or any(step.host_loop is None for step in steps):
        return every, f"{len(steps)} of {len(steps)}"
    fast = [step.seconds for step in steps if (step.host_loop or 0.0) <= SLOWER * reference]
    if 2 * len(fast) < len(steps):
        return every, f"{len(steps)} of {len(steps)}, uneven host"
    return fast, f"{len(fast)} of {len(steps)}"
