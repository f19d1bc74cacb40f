"""The cells of the bench's table."""

from __future__ import annotations

from collections.abc import Sequence

from bridge_fgo.tools.bench.figures import Row

LEGEND = {
    "arm": "what was trained; see the bench's README",
    "step, s": "median seconds of the steps that count",
    "min-max": "the shortest and the longest of them",
    "steps counted": "how many of how many steps count: those in which the host was equally fast",
    "host loop, ms": "how long a short loop of Python took before each step: the host's speed",
    "host loop min-max": "its shortest and its longest",
    "GC, most, s": "most time of Python's garbage collector in one step",
    "added, s": "by how much the step is longer than the resident arm's",
    "E": "added time over the time in which S, the optimizer state, crosses the link once",
    "E of copies": "E without the forwards that no copy runs beside, as they tell the host's speed only",
    "floor E": "the E that is held for the least possible",
    "forward, s": "a microbatch's forward, without the step's first",
    "rest, s": "from the end of a step's last forward to the next step's first",
    "of ranks": "the least and the most `rest` of the ranks",
    "ins first": "on how many ranks copies in go before copies out in the optimizer step; - none has tried both ways",
    "allocated, GB": "peak of allocated GPU memory",
    "reserved, GB": "peak of GPU memory that PyTorch reserved",
    "saved / S": "share of S by which the allocated peak is smaller",
    "saved reserved / S": "share of S by which the reserved peak is smaller",
    "pinned, GB": "page-locked host memory",
    "pin, s": "time to page-lock it, before the first step",
    "steps 1-2 added, s": "by how much the first two steps together are longer",
    "enqueue": "host time to enqueue copies, measured by itself, as a share of the step",
    "by the clock": "the same with the host's waits while the driver's queue is full",
    "hidden / floor": "time of copies that made no step longer, over what the floor leaves to hide",
    "bitwise equal": "losses, gradient norms and final state are the resident arm's; - is not asked",
    "save stall, s": "time that a background save adds to the step in which it starts",
}
"""What each column of the whole table tells, by its heading."""


def equal_or_not(row: Row) -> str:
    """Return whether an arm was found bitwise equal, as a cell; "-" where that was not asked."""
    return {True: "yes", False: "NO", None: "-"}[row.bitwise_equal]


def summary_of(rows: list[Row], state_bytes: int) -> list[list[str]]:
    """Return the cells of the table that most users want, its head first.

    Args:
        rows: of all arms.
        state_bytes: S, of which the rows have the saved share.
    """
    table = [["arm", "step, s", "slower", "saved, GB", "bitwise equal"]]
    for row in rows:
        is_resident = row.e is None
        slower = row.added_seconds / (row.step_seconds - row.added_seconds)
        saved = row.saved_allocated * state_bytes / 1e9
        table.append(
            [
                row.arm,
                f"{row.step_seconds:.3f}",
                "-" if is_resident else f"{slower:+.1%}",
                "-" if is_resident else f"{saved:.2f}",
                equal_or_not(row),
            ]
        )
    return table


def legend_of(headings: list[str]) -> list[str]:
    """Return a line for each heading that says what it tells."""
    return [f"{heading}: {LEGEND[heading]}" for heading in headings]


def table_of(rows: list[Row], saves: bool = False) -> list[list[str]]:
    """Return the cells of the table, its head first; with `saves` the stall of a save is the last of each row."""

    def number(value: float | None, digits: int = 2) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    def extent(seconds: Sequence[float]) -> str:
        return f"{min(seconds):.3f}-{max(seconds):.3f}" if len(seconds) > 1 else "-"

    def percent(share: float | None) -> str:
        return "-" if share is None else f"{share:.1%}"

    def how_many(ranks: Sequence[bool | None]) -> str:
        known = [each for each in ranks if each is not None]
        return f"{sum(known)} of {len(known)}" if known else "-"

    table = [
        [
            "arm", "step, s", "min-max", "steps counted", "host loop, ms", "host loop min-max", "GC, most, s",
            "added, s", "E", "E of copies", "floor E",
            "forward, s", "rest, s", "of ranks", "ins first",
            "allocated, GB", "reserved, GB", "saved / S",
            "saved reserved / S", "pinned, GB", "pin, s", "steps 1-2 added, s", "enqueue", "by the clock",
            "hidden / floor",
            "bitwise equal", *(["save stall, s"] if saves else []),
        ]
    ]  # fmt: skip
    for row in rows:
        table.append(
            [
                row.arm, number(row.step_seconds, 3), extent([row.step_seconds_min, row.step_seconds_max]),
                row.steps_counted, number(None if row.host_loop_seconds is None else 1e3 * row.host_loop_seconds),
                extent([1e3 * seconds for seconds in row.host_loop_seconds_range]),
                number(row.collector_seconds),
                number(row.added_seconds, 3), number(row.e), number(row.e_of_copies), number(row.floor_e),
                number(row.forward_seconds, 3), number(row.rest_seconds, 3), extent(row.rest_seconds_of_ranks),
                how_many(row.copies_in_first_of_ranks),
                number(row.peak_allocated_bytes / 1e9), number(row.peak_reserved_bytes / 1e9),
                number(row.saved_allocated, 3), number(row.saved_reserved, 3), number(row.pinned_bytes / 1e9),
                number(row.pin_seconds), number(row.first_two_steps_added_seconds),
                percent(row.enqueue_share), percent(row.enqueue_by_the_clock_share), number(row.hidden),
                equal_or_not(row),
                *([number(row.save_stall_seconds)] if saves else []),
            ]
        )  # fmt: skip
    return table
