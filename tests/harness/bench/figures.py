"""The bench's figures, by pure arithmetic on the arms' events: steps that count, a row an arm, rounds; their tables.

A step counts that is warm, and in which nothing is saved. A step with a save does not count, nor does the one after it:
Bridge empties the allocator's cache for a save, and the background writer is waited for between the two, in no step's
time, so that copies do not run on. Of arms that train in turn the first turn does not count, and of the others not the
first step: it begins on a GPU at rest, and allocates anew what was given back for the others.

Arms of one round train within seconds of each other. So the figure of two arms is the median, over rounds, of the
difference or the ratio within a round: a host that slows down for some rounds slows both.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from bridge_fgo.tools.plan.systems import floor_seconds
from harness.arms.runner import FIRST_COUNTED_STEP, ArmRun, Event, compare
from harness.arms.turns import WARM_UP

RAW = ("step_seconds", "between_seconds", "save_steps")
"""Fields of an arm's result that tell which steps count and what a save adds. They are the whole step's seconds, those
from the end of `train_step()` to the next step, and which steps end with a save."""


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


def _column(heading: str, tells: str, show: str | Callable[[Any], str] = "{:.2f}") -> Any:
    """Return a field that is a column of the whole table: its heading, and what it tells, for the legend.

    `show` is the format of the field's value, or what makes the cell from the row.
    """
    return field(metadata={"heading": heading, "tells": tells, "show": show})


def _gb(name: str) -> Callable[[Row], str]:
    return lambda row: f"{getattr(row, name) / 1e9:.2f}"


def _range(middle: float, least: float, most: float, digits: int) -> str:
    return f"{middle:.{digits}f} ({least:.{digits}f}-{most:.{digits}f})"


def _step(row: Row) -> str:
    return _range(row.step_seconds, row.step_seconds_min, row.step_seconds_max, 3)


def _equal(row: Row) -> str:
    return {True: "yes", False: "NO", None: "-"}[row.bitwise_equal]


@dataclass(frozen=True, kw_only=True)
class Row:
    """The measured figures of one arm; None for what is not known or not asked.

    Seconds and bytes are rank 0's, S is its optimizer state in bytes. Step times, added time and E are of the steps
    that count; phases and the floor are medians over all steps from the seventh on.
    """

    arm: str = _column("arm", "what was trained; see the bench's README", "{}")
    engine: str | None
    step_seconds: float = _column("step, s", "median (min-max) seconds of the steps that count", _step)
    step_seconds_min: float
    step_seconds_max: float
    added_seconds: float = _column("added, s", "by how much the step is longer than the resident arm's", "{:.3f}")
    e: float | None = _column("E", "added time over the time in which S, the optimizer state, crosses the link once")
    floor_e: float | None = _column(
        "floor E", "the least E that this step and this link allow for the bytes that were copied"
    )
    forward_seconds: float | None = _column("forward, s", "a microbatch's forward, without the step's first", "{:.3f}")
    rest_seconds: float | None = _column(
        "rest, s", "from the end of a step's last forward to the next step's first", "{:.3f}"
    )
    peak_allocated_bytes: int = _column("allocated, GB", "peak of allocated GPU memory", _gb("peak_allocated_bytes"))
    peak_reserved_bytes: int = _column(
        "reserved, GB", "peak of GPU memory that PyTorch reserved", _gb("peak_reserved_bytes")
    )
    saved_allocated: float = _column("saved / S", "share of S by which the allocated peak is smaller", "{:.3f}")
    saved_reserved: float = _column("saved reserved / S", "share of S by which the reserved peak is smaller", "{:.3f}")
    pinned_bytes: int = _column("pinned, GB", "page-locked host memory", _gb("pinned_bytes"))
    pin_seconds: float | None = _column("pin, s", "time to page-lock it, before the first step")
    first_two_steps_added_seconds: float = _column(
        "steps 1-2 added, s", "by how much the first two steps together are longer"
    )
    enqueue_share: float | None = _column(
        "enqueue",
        "host time to enqueue copies as a share of the step, with the host's waits while the driver's queue is full; "
        "without copies it would wait elsewhere",
        "{:.1%}",
    )
    bitwise_equal: bool | None = _column(
        "bitwise equal", "losses, gradient norms and final state are the resident arm's; - is not asked", _equal
    )
    save_stall_seconds: float | None = _column(
        "save stall, s", "time that a background save adds to the step in which it starts"
    )
    rounds: tuple[dict[str, Any]]  # the raw values: a list with one value a step for each field of `RAW`


COLUMNS = [each for each in fields(Row) if each.metadata]


def _cell(row: Row, column: Any) -> str:
    show: str | Callable[[Row], str] = column.metadata["show"]
    if not isinstance(show, str):
        return show(row)
    value = getattr(row, column.name)
    return "-" if value is None else show.format(value)


def table_of(rows: list[Row]) -> list[list[str]]:
    """Return the cells of the whole table, its head first."""
    head = [column.metadata["heading"] for column in COLUMNS]
    return [head, *([_cell(row, column) for column in COLUMNS] for row in rows)]


def legend() -> list[str]:
    """Return a line for each heading that says what it tells."""
    return [f"{column.metadata['heading']}: {column.metadata['tells']}" for column in COLUMNS]


def summary_of(rows: list[Row], state_bytes: int) -> list[list[str]]:
    """Return the cells of the table that most users want, its head first; state_bytes: S."""
    table = [["arm", "step, s", "slower", "E", "saved, GB", "bitwise equal"]]
    for row in rows:
        slower = e = saved = "-"
        if row.e is not None:
            slower = f"{row.added_seconds / (row.step_seconds - row.added_seconds):+.1%}"
            e, saved = f"{row.e:.2f}", f"{row.saved_allocated * state_bytes / 1e9:.2f}"
        table.append([row.arm, f"{row.step_seconds:.3f}", slower, e, saved, _equal(row)])
    return table


def make_row(resident: ArmRun, run: ArmRun, link: dict[str, float], bitwise: bool) -> Row:
    """Return an arm's row, beside the resident one."""
    base, mine = resident.result, run.result
    is_resident = run is resident
    e_of_a_second = min(link["d2h"], link["h2d"]) / base["state_bytes"]

    def as_e(seconds: float | None) -> float | None:
        return None if seconds is None else seconds * e_of_a_second

    def saved(kind: str) -> float:
        return (base[f"peak_{kind}_bytes"] - mine[f"peak_{kind}_bytes"]) / base["state_bytes"]

    seconds = [step["seconds"] for step in warm_steps(run)]
    median = statistics.median(seconds)
    added = median - statistics.median(step["seconds"] for step in warm_steps(resident))
    first_two = [sum(event["seconds"] for event in each.steps[:2]) for each in (run, resident)]
    return Row(
        arm=run.name,
        engine=mine["engine"],
        step_seconds=median,
        step_seconds_min=min(seconds),
        step_seconds_max=max(seconds),
        added_seconds=added,
        e=None if is_resident else as_e(added),
        floor_e=as_e(least_added(base, mine, link)) if mine["released_bytes"] else None,
        forward_seconds=mine["phase_seconds"].get("forward"),
        rest_seconds=mine["phase_seconds"].get("rest"),
        peak_allocated_bytes=mine["peak_allocated_bytes"],
        peak_reserved_bytes=mine["peak_reserved_bytes"],
        saved_allocated=saved("allocated"),
        saved_reserved=saved("reserved"),
        pinned_bytes=mine["pinned_bytes"],
        pin_seconds=mine["pin_seconds"] or None,
        first_two_steps_added_seconds=first_two[0] - first_two[1],
        enqueue_share=share(mine["enqueue_seconds"], median),
        bitwise_equal=compare(resident, run).bitwise_equal if bitwise and not is_resident else None,
        save_stall_seconds=save_stall_seconds(run, median),
        rounds=({name: mine[name] for name in RAW if name in mine},),
    )


def share(seconds: list[float], of: float) -> float | None:
    """Return the median of `seconds` as a share of `of`; None where nothing was counted."""
    return statistics.median(seconds) / of if any(seconds) else None


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


@dataclass(frozen=True)
class ArmRounds:
    """One arm, a value a round."""

    arm: str
    seconds: tuple[float, ...]  # median of the steps that count, which are all of a turn but its first
    compared_with: str  # name of the arm that this one is compared with
    ratio: tuple[float, ...]  # `seconds` over those of that arm
    added_seconds: float  # median over rounds of what is added to that arm's
    e: float | None  # that over S / link; None for a resident arm


def medians(run: ArmRun) -> tuple[float, ...]:
    """Return the median seconds of a step in each round, in order."""
    rounds = itertools.groupby(warm_steps(run), lambda step: step.get("turn"))
    return tuple(statistics.median(step["seconds"] for step in of_round) for _, of_round in rounds)


def rounds_of(
    runs: Mapping[str, ArmRun], compared_with: Mapping[str, str], link: Mapping[str, float]
) -> list[ArmRounds]:
    """Return what each arm took in each round, the resident one first; `link` is what the bench's probe measured.

    A resident arm that is compared with itself is compared with the first, to tell what its variables do.
    """
    of_arms = {name: medians(run) for name, run in runs.items()}
    found: list[ArmRounds] = []
    for name, seconds in of_arms.items():
        is_resident = compared_with[name] == name
        other = next(iter(runs)) if is_resident else compared_with[name]
        pairs = list(zip(seconds, of_arms[other], strict=True))
        added = statistics.median(mine - others for mine, others in pairs)
        e = added * min(link["d2h"], link["h2d"]) / runs[other].result["state_bytes"]
        ratio = tuple(mine / others for mine, others in pairs)
        found.append(ArmRounds(name, seconds, other, ratio, added, None if is_resident else e))
    return found


def faster(arms: list[ArmRounds], residents: set[str]) -> list[str]:
    """Say of each two arms in how many rounds the first was faster; resident arms come second."""
    order = sorted(arms, key=lambda arm: arm.arm in residents)
    found = []
    for one, other in itertools.combinations(order, 2):
        count = sum(x < y for x, y in zip(one.seconds, other.seconds, strict=True))
        found.append(f"{one.arm} faster than {other.arm} in {count} of {len(one.seconds)} rounds")
    return found


def table_of_rounds(arms: list[ArmRounds]) -> list[list[str]]:
    """Return the cells, a round a row, an arm a column: seconds of a step and ratio."""
    cells = [["round", *(f"{arm.arm}: s, ratio" for arm in arms)]]
    for number in range(len(arms[0].seconds)):
        cells.append([str(number + 1), *(f"{arm.seconds[number]:.3f}  {arm.ratio[number]:.3f}" for arm in arms)])
    over = [f"{statistics.median(arm.seconds):.3f}  {statistics.median(arm.ratio):.3f}" for arm in arms]
    cells.append(["median", *over])
    cells.append(["E by rounds", *("-" if arm.e is None else f"{arm.e:.2f}" for arm in arms)])
    return cells
