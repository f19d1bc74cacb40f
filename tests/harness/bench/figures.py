"""The bench's figures, by pure arithmetic on the arms' events: steps that count, a row an arm, the table.

A step counts that is warm, and in which nothing is saved. A step with a save does not count, nor does the one after it:
Bridge empties the allocator's cache for a save, and the background writer is waited for between the two, in no step's
time, so that copies do not run on. Of arms that train in turn the first turn does not count, and of the others not the
first step: it begins on a GPU at rest, and allocates anew what was given back for the others.

Arms of one round train within seconds of each other. So what one adds to the step of another is the median, over
rounds, of the difference within a round: a host that slows down for some rounds slows both.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass
from typing import Any

from bridge_fgo.tools.plan.systems import floor_seconds
from harness.arms.runner import FIRST_COUNTED_STEP, ArmRun, Event, compare
from harness.arms.turns import WARM_UP


def warm_steps(run: ArmRun) -> list[Event]:
    """Return the events of an arm's steps that are neither cold nor disturbed by a save."""
    found = []
    saves = run.result.get("save_steps", [])
    for before, event in itertools.pairwise(run.steps):
        is_cold = event["step"] < FIRST_COUNTED_STEP or not event.get("turn") == before.get("turn") != WARM_UP
        if not is_cold and event["step"] not in saves and event["step"] - 1 not in saves:
            found.append(event)
    return found


def save_stall_seconds(run: ArmRun, step_seconds: float) -> float | None:
    """Return the median seconds by which a step with a background save is longer; None where there is no such save.

    The first save does not count: it also plans the files, and may wait for the writer's process to start. A step lasts
    until the next begins, so only the end of the writing is missed, which is waited for outside of all steps.
    """
    saves = run.result.get("save_steps", [])[1:]
    stalls = [event["seconds"] - step_seconds for event in run.steps if event["step"] in saves]
    return statistics.median(stalls) if stalls else None


@dataclass(frozen=True, kw_only=True)
class Row:
    """The measured figures of one arm; None for what is not known or not asked.

    Seconds and bytes are rank 0's, S is its optimizer state in bytes, and steps are those that count.
    """

    arm: str
    compared_with: str
    engine: str | None
    step_seconds: float  # median
    step_seconds_min: float
    step_seconds_max: float
    round_seconds: list[float]  # median of each round
    added_seconds: float  # by how much the step is longer than the resident arm's, the median over rounds
    e: float | None  # that over the time in which S crosses the link once
    floor_e: float | None  # the least E that this step and this link allow for the bytes that were copied
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    saved_allocated: float  # share of S by which the peak is smaller
    saved_reserved: float
    pinned_bytes: int
    bitwise_equal: bool | None  # losses, gradient norms and final state are the resident arm's
    save_stall_seconds: float | None  # that a background save adds to the step in which it starts


def summary_of(rows: list[Row], state_bytes: int) -> list[list[str]]:
    """Return the cells of the table, its head first; state_bytes: S."""
    table = [["arm", "step, s", "slower", "E", "floor", "saved, GB", "save stall, s", "bitwise equal"]]
    for row in rows:
        slower = saved = "-"
        if row.e is not None:
            slower = f"{row.added_seconds / (row.step_seconds - row.added_seconds):+.1%}"
            saved = f"{row.saved_allocated * state_bytes / 1e9:.2f}"
        e, floor, stall = ("-" if n is None else f"{n:.2f}" for n in (row.e, row.floor_e, row.save_stall_seconds))
        equal = {True: "yes", False: "NO", None: "-"}[row.bitwise_equal]
        table.append([row.arm, f"{row.step_seconds:.3f}", slower, e, floor, saved, stall, equal])
    return table


def round_seconds(run: ArmRun) -> list[float]:
    """Return the median seconds of a step in each round, in order; one if the arms did not train in turn."""
    rounds = itertools.groupby(warm_steps(run), lambda step: step.get("turn"))
    return [statistics.median(step["seconds"] for step in of_round) for _, of_round in rounds]


def make_row(resident: ArmRun, run: ArmRun, link: dict[str, float], bitwise: bool) -> Row:
    """Return an arm's row, beside the resident one."""
    base, mine = resident.result, run.result
    is_resident = run is resident
    e_of_a_second = min(link["d2h"], link["h2d"]) / base["state_bytes"]

    def saved(kind: str) -> float:
        return (base[f"peak_{kind}_bytes"] - mine[f"peak_{kind}_bytes"]) / base["state_bytes"]

    seconds = [step["seconds"] for step in warm_steps(run)]
    median = statistics.median(seconds)
    rounds = round_seconds(run)
    added = statistics.median(mine - other for mine, other in zip(rounds, round_seconds(resident), strict=True))
    floor = least_added(base, mine, link) if mine["released_bytes"] else None
    return Row(
        arm=run.name,
        compared_with=resident.name,
        engine=mine["engine"],
        step_seconds=median,
        step_seconds_min=min(seconds),
        step_seconds_max=max(seconds),
        round_seconds=rounds,
        added_seconds=added,
        e=None if is_resident else added * e_of_a_second,
        floor_e=None if floor is None else floor * e_of_a_second,
        peak_allocated_bytes=mine["peak_allocated_bytes"],
        peak_reserved_bytes=mine["peak_reserved_bytes"],
        saved_allocated=saved("allocated"),
        saved_reserved=saved("reserved"),
        pinned_bytes=mine["pinned_bytes"],
        bitwise_equal=compare(resident, run).bitwise_equal if bitwise and not is_resident else None,
        save_stall_seconds=save_stall_seconds(run, median),
    )


def least_added(resident: dict[str, Any], mine: dict[str, Any], link: dict[str, float]) -> float | None:
    """Return the floor of the added seconds, from the resident arm's phases; None where those are not known."""
    phases = resident["phase_seconds"]
    if any(phases.get(name) is None for name in ("backward", "first_forward", "rest")):
        return None
    return floor_seconds(
        nbytes=mine["copied_bytes"],
        d2h=link["d2h"],
        h2d=link["h2d"],
        duplex=link["duplex"],
        backward=phases["backward"],
        first_forward=phases["first_forward"],
        between=max(0.0, phases["rest"] - phases["backward"]),
        room=resident["peak_allocated_bytes"] - resident["base_bytes"],
    )
