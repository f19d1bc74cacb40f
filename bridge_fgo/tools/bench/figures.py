"""The rows of the bench's table, by pure arithmetic on the events of the arms."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from bridge_fgo.tools.arms.comparator import compare
from bridge_fgo.tools.arms.phase_clock import FIRST_COUNTED_STEP
from bridge_fgo.tools.arms.runner import ArmRun
from bridge_fgo.tools.bench.floor import floor_seconds
from bridge_fgo.tools.bench.steps import counted_steps, save_stall_seconds, warm_steps
from bridge_fgo.tools.bench.trace import Trace, length, merge, overlap

RAW = ("step_seconds", "between_seconds", "host_loop_seconds_of_ranks", "save_steps")
"""Fields of an arm's result that tell which steps count and what a save adds. They are the whole step's seconds, those
from the end of `train_step()` to the next step, a loop time of each rank, and which steps end with a save."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The measured figures of one arm. Seconds and bytes are rank 0's; S is its optimizer state in bytes.

    Step times, added time and E are of the steps that count (`tools.bench.steps`); phases, and with them E of
    copies and the floor, are medians over all steps from the seventh on.
    """

    arm: str
    engine: str | None
    step_seconds: float
    step_seconds_min: float
    step_seconds_max: float
    added_seconds: float
    e: float | None
    """Added time over S / link."""
    floor_e: float | None
    """The least E that this step and this link allow for the bytes that were copied."""
    e_of_copies: float | None = None
    """E of the phases in which copies run: what the first forward took beyond the others, and `rest`. Other forwards
    differ from the resident arm's only by how fast the host launched kernels, which a busy one does up to twice as
    slowly, and unevenly. Of several ranks, that of the one which waits least for others."""
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    saved_allocated: float
    """Share of S that the peak of allocated memory fell by."""
    saved_reserved: float
    pinned_bytes: int
    pin_seconds: float | None
    first_two_steps_added_seconds: float
    enqueue_share: float | None
    """Host time to enqueue copies, by itself, as a share of the step; None where nobody counts it."""
    enqueue_by_the_clock_share: float | None
    """The same, with the host's waits for the GPU while the driver's queue is full. Without copies, the host would wait
    elsewhere instead."""
    bitwise_equal: bool | None
    forward_seconds: float | None = None
    """Median of a microbatch's forward, without a step's first: no copy runs beside it, so it should be as long as the
    resident arm's. Where it is not, the host launches kernels at another speed, and E differs with it."""
    rest_seconds: float | None = None
    """From the end of a step's last forward to the begin of the next step's first one."""
    rest_seconds_of_ranks: tuple[float, ...] = ()
    """`rest_seconds` of each rank. Where they differ, so do links or hosts, and the others wait for the slowest."""
    copies_in_first_of_ranks: tuple[bool | None, ...] = ()
    """Whether copies in go before copies out in the optimizer step, of each rank; None where it has not tried both."""
    copy_wait_seconds_of_ranks: tuple[tuple[float, float] | None, ...] = ()
    """Seconds that training waited for copies in a step, of each rank: where they went as they came, and where copies
    in went first. None where a rank has not tried both."""
    hidden: float | None = None
    """Time in which copies ran without making the step longer, over what the floor leaves to hide. How much longer the
    step got is as `e_of_copies` has it, where that is known."""
    overlaps_kernels: float | None = None
    """Share of the time in which copies ran that kernels ran too."""
    collector_seconds: float = 0.0
    """Most time of Python's garbage collector in one step: a full collection makes a step the longest by far."""
    longest_waits_seconds: tuple[float, ...] = ()
    """The longest waits of the host for the GPU in the traced step."""
    steps_counted: str = ""
    """How many steps count of how many, and whether all do because the host was too uneven; see `CountedSteps`."""
    host_loop_seconds: float | None = None
    """Median time of the host's loop on each step's slowest rank, over all steps from the seventh on. None where the
    arm's package does not time it."""
    host_loop_seconds_range: tuple[float, ...] = ()
    """The least and the most; () where there are none."""
    save_stall_seconds: float | None = None
    """Seconds that a background save adds to the step in which it starts; see `bridge_fgo.tools.bench.steps`."""
    rounds: tuple[dict[str, Any], ...] = ()
    """The raw values of each round, a list with one value a step for each field of `RAW`."""

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON takes it."""
        return asdict(self)


def phase(runs: list[ArmRun], name: str) -> float | None:
    """Return the median over all rounds of an arm of one of `PhaseClock`'s phases, in seconds."""
    times = [run.result["phase_seconds"].get(name) for run in runs]
    return None if None in times else statistics.median(times)


def rest_of_ranks(runs: list[ArmRun]) -> tuple[float, ...]:
    """Return the median of `rest` over all rounds of an arm, of each rank; () where there is none."""
    of_runs = [[phases.get("rest") for phases in run.result["phase_seconds_of_ranks"]] for run in runs]
    return tuple(statistics.median(times) for times in zip(*of_runs, strict=True) if None not in times)


def beside_copies(runs: list[ArmRun]) -> float | None:
    """Return how long the phases of a step are in which copies run, less one forward, in seconds.

    Of the rank for which that is shortest: in these phases the others wait for the slowest's gradients and weights.
    """
    names = ("first_forward", "forward", "rest")
    of_runs: list[float] = []
    for run in runs:
        of_ranks = [[phases.get(name) for name in names] for phases in run.result["phase_seconds_of_ranks"]]
        if any(None in times for times in of_ranks):  # of a pipeline
            return None
        of_runs.append(min(first - other + rest for first, other, rest in of_ranks))
    return statistics.median(of_runs)


def share(seconds: list[float], of: float) -> float | None:
    """Return the median of `seconds` as a share of `of`; None where nothing was counted."""
    return statistics.median(seconds) / of if any(seconds) else None


def make_row(
    resident: list[ArmRun],
    runs: list[ArmRun],
    link: dict[str, float],
    trace: Trace | None,
    bitwise: bool,
    reference: float | None = None,
) -> Row:
    """Return the row of one arm.

    Args:
        resident: the rounds of the resident arm.
        runs: the rounds of this arm, as many.
        link: see `bridge_fgo.tools.bench.probe`.
        trace: of one step of this arm.
        bitwise: whether to compare with the resident arm; only the first rounds are.
        reference: see `bridge_fgo.tools.bench.steps.reference_loop`; None has every step count.
    """
    base, mine = resident[0].result, runs[0].result
    state = base["state_bytes"]
    one_way = min(link["d2h"], link["h2d"])
    steps = warm_steps(runs)
    counted, resident_counted = counted_steps(steps, reference), counted_steps(warm_steps(resident), reference)
    times = counted.seconds
    median = statistics.median(times)
    added = median - statistics.median(resident_counted.seconds)
    is_resident = runs is resident
    offloads = bool(mine["released_bytes"])
    floor = least_added(base, mine, link) if offloads else None
    copies, resident_copies = beside_copies(runs), beside_copies(resident)
    by_copies = None if is_resident or copies is None or resident_copies is None else copies - resident_copies
    row = {
        "arm": runs[0].name,
        "engine": mine["engine"],
        "step_seconds": median,
        "step_seconds_min": min(times),
        "step_seconds_max": max(times),
        "steps_counted": str(counted),
        "save_stall_seconds": save_stall_seconds(runs, median),
        "rounds": tuple({name: run.result[name] for name in RAW if name in run.result} for run in runs),
        "added_seconds": added,
        "e": None if is_resident else added * one_way / state,
        "floor_e": None if floor is None else floor * one_way / state,
        "e_of_copies": None if by_copies is None else by_copies * one_way / state,
        "peak_allocated_bytes": max(run.result["peak_allocated_bytes"] for run in runs),
        "peak_reserved_bytes": max(run.result["peak_reserved_bytes"] for run in runs),
        "pinned_bytes": mine["pinned_bytes"],
        "pin_seconds": mine["pin_seconds"] or None,
        "forward_seconds": phase(runs, "forward"),
        "rest_seconds": phase(runs, "rest"),
        "rest_seconds_of_ranks": rest_of_ranks(runs),
        "copies_in_first_of_ranks": tuple(mine.get("copies_in_first_of_ranks", ())),
        "copy_wait_seconds_of_ranks": tuple(mine.get("copy_wait_seconds_of_ranks", ())),
        "collector_seconds": max(
            max(run.result["collector_seconds"][FIRST_COUNTED_STEP - 1 :], default=0.0) for run in runs
        ),
        "first_two_steps_added_seconds": statistics.median(
            sum(event["seconds"] for event in run.steps[:2]) - sum(event["seconds"] for event in other.steps[:2])
            for run, other in zip(runs, resident, strict=True)
        ),
        "enqueue_share": share(mine["enqueue_alone_seconds"], median),
        "enqueue_by_the_clock_share": share(mine["enqueue_seconds"], median),
        "bitwise_equal": all(compare(a, b).bitwise_equal for a, b in zip(resident, runs, strict=True))
        if bitwise and not is_resident
        else None,
    }
    if loops := [step.host_loop for step in steps if step.host_loop is not None]:
        row["host_loop_seconds"], row["host_loop_seconds_range"] = statistics.median(loops), (min(loops), max(loops))
    for kind in ("allocated", "reserved"):
        before = max(run.result[f"peak_{kind}_bytes"] for run in resident)
        row[f"saved_{kind}"] = (before - row[f"peak_{kind}_bytes"]) / state
    if trace is not None:
        copies = merge([*trace.d2h, *trace.h2d])
        row["longest_waits_seconds"] = tuple(wait for wait, _, _ in trace.waits[:3])
        if copies:
            row["overlaps_kernels"] = overlap(copies, trace.kernels) / length(copies)
            if floor is not None and length(copies) > floor:
                longer = added if by_copies is None else by_copies
                row["hidden"] = (length(copies) - max(longer, floor)) / (length(copies) - floor)
    return Row(**row)


def least_added(resident: dict[str, Any], mine: dict[str, Any], link: dict[str, float]) -> float | None:
    """Return the floor of the added seconds, from the resident arm's phases; None where those are not known."""
    phases = resident["phase_seconds"]
    if any(phases.get(name) is None for name in ("backward", "first_forward", "rest")):
        return None
    return floor_seconds(
        nbytes=mine["copied_bytes"],
        link=min(link["d2h"], link["h2d"]),
        duplex=link["duplex"],
        backward=phases["backward"],
        first_forward=phases["first_forward"],
        between=max(0.0, phases["rest"] - phases["backward"]),
        room=resident["peak_allocated_bytes"] - resident["base_bytes"],
    )
