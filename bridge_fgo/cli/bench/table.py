"""The cells of the bench's table."""

from __future__ import annotations

from collections.abc import Sequence

from bridge_fgo.cli.bench.figures import Row


def table_of(rows: list[Row], saves: bool = False) -> list[list[str]]:
    """Return the cells of the table, its head first; with `saves` the stall of a save is the last of each row."""

    def number(value: float | None, digits: int = 2) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    def extent(seconds: Sequence[float]) -> str:
        return f"{min(seconds):.3f}-{max(seconds):.3f}" if len(seconds) > 1 else "-"

    def percent(share: float | None) -> str:
        return "-" if share is None else f"{share:.1%}"

    table = [
        [
            "arm", "step, s", "min-max", "steps counted", "host loop, ms", "host loop min-max", "GC, most, s",
            "added, s", "E", "E of copies", "floor E",
            "forward, s", "rest, s", "of ranks",
            "allocated, GB", "reserved, GB", "saved / S",
            "saved reserved / S", "pinned, GB", "pin, s", "steps 1-2 added, s", "enqueue", "by the clock",
            "hidden / floor",
            "bitwise equal", *(["save stall, s"] if saves else []),
        ]
    ]  # fmt: skip
    for row in rows:
        equal = {True: "yes", False: "NO", None: "-"}[row.bitwise_equal]
        table.append(
            [
                row.arm, number(row.step_seconds, 3), extent([row.step_seconds_min, row.step_seconds_max]),
                row.steps_counted, number(None if row.host_loop_seconds is None else 1e3 * row.host_loop_seconds),
                extent([1e3 * seconds for seconds in row.host_loop_seconds_range]),
                number(row.collector_seconds),
                number(row.added_seconds, 3), number(row.e), number(row.e_of_copies), number(row.floor_e),
                number(row.forward_seconds, 3), number(row.rest_seconds, 3), extent(row.rest_seconds_of_ranks),
                number(row.peak_allocated_bytes / 1e9), number(row.peak_reserved_bytes / 1e9),
                number(row.saved_allocated, 3), number(row.saved_reserved, 3), number(row.pinned_bytes / 1e9),
                number(row.pin_seconds), number(row.first_two_steps_added_seconds),
                percent(row.enqueue_share), percent(row.enqueue_by_the_clock_share), number(row.hidden), equal,
                *([number(row.save_stall_seconds)] if saves else []),
            ]
        )  # fmt: skip
    return table
