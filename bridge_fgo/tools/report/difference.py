"""What a run costs and saves against the first: GPU memory, step time, and whether the bits are the same."""

from __future__ import annotations

import statistics

from bridge_fgo.tools.arms.comparator import Parity
from bridge_fgo.tools.demo import readable_bytes
from bridge_fgo.tools.report.parity import is_bitwise_equal
from bridge_fgo.tools.report.runs import LOSS, SECONDS, Run

NO_SPEED = "CPU: no speed"
"""Said in place of step times where a run was on a CPU: its copies are stand-ins, so its seconds mean nothing."""

COMPARED_PEAKS = {
    "peak_allocated_bytes": "GPU memory",
    "peak_reserved_bytes": "reserved GPU memory",
    "peak_forward_backward_bytes": "GPU memory in forward and backward",
}
"""Peaks that tell what was saved, and of what; the first that both runs have is taken."""

ON_CPU = "peak_forward_backward_bytes"
"""The only peak that tells anything of two runs on a CPU: of the bytes of state that live in forward and backward."""

FUSED_LOSS = (
    " Two runs alike may differ, too: the fused cross-entropy, compiled by torch, ends in one of two results. To "
    "compare bits set model.cross_entropy_loss_fusion=False in both, or TORCH_COMPILE_DISABLE=1 in their environment."
)
"""What to know of two jobs that differ; the arms of a bench and of `demo` are set so. Measured on H200: without it two
runs of one arm differed from the gradients of step 1 on, with either of the two settings none did."""


def verdict(first: Run, second: Run, parity: list[Parity]) -> str:
    """Say in a sentence what `second` saves, how much slower its steps are, and whether it is bitwise equal."""
    return f"{second.name} against {first.name}: {_memory(first, second)}; {_speed(first, second)}; " + _equality(
        first, second, parity
    )


def is_good(run: Run, parity: list[Parity]) -> bool:
    """Return whether a run is as it should be: equal to the first, where it is meant to."""
    return run.may_differ or is_bitwise_equal(parity)


def step_seconds(run: Run) -> tuple[float, float, float] | None:
    """Return median, least and most seconds of the steps that count; None where they tell nothing of speed."""
    if run.on_cpu:
        return None
    if seconds := counted_seconds(run).values():
        return statistics.median(seconds), min(seconds), max(seconds)
    if run.row:
        return run.row["step_seconds"], run.row["step_seconds_min"], run.row["step_seconds_max"]
    return None


def counted_seconds(run: Run) -> dict[int, float]:
    """Return the seconds of a run's steps from the fourth on: the first ones allocate, compile and measure."""
    seconds = run.scalars.get(SECONDS, {})
    return {step: value for step, value in seconds.items() if step >= min(seconds) + 3}


def saved_bytes(first: Run, second: Run) -> float | None:
    """Return the bytes by which the peak of `second` is smaller; None where the two have no peak in common."""
    name = _common_peak(first, second)
    return None if name is None else first.totals[name] - second.totals[name]


def slower(first: Run, second: Run) -> float | None:
    """Return by which share the median step of `second` is longer; None where that is not known of both."""
    before, after = step_seconds(first), step_seconds(second)
    return None if before is None or after is None else after[0] / before[0] - 1


def rows_of_differences(runs: list[Run], others: list[tuple[Run, list[Parity]]]) -> list[list[str]]:
    """Return the rows of the overview that compare each run with the first, a run a column; none for one run."""
    if not others:
        return []
    first = runs[0]
    rows = [[f"saved against {first.name}", "-"], ["steps slower", "-"], ["bitwise equal", "-"]]
    for run, parity in others:
        rows[0].append(readable_bytes(saved_bytes(first, run)))
        share = slower(first, run)
        unknown = NO_SPEED if first.on_cpu or run.on_cpu else "-"
        rows[1].append(unknown if share is None else f"{share:+.1%}")
        different = any(not part.equal for part in parity)
        rows[2].append("yes" if is_bitwise_equal(parity) else "NO" if different else "-")
    return rows


def _common_peak(first: Run, second: Run) -> str | None:
    names = [ON_CPU] if first.on_cpu or second.on_cpu else COMPARED_PEAKS
    return next((name for name in names if name in first.totals and name in second.totals), None)


def _memory(first: Run, second: Run) -> str:
    name = _common_peak(first, second)
    saved = saved_bytes(first, second)
    if name is None or saved is None:
        return "no peak of memory that both logged"
    # A CPU has no allocator to ask: there the arms sample the bytes of live state.
    what = "optimizer state in forward and backward" if first.on_cpu or second.on_cpu else COMPARED_PEAKS[name]
    before, after = first.totals[name], second.totals[name]
    share = f"{abs(saved) / before:.0%}, " if before else ""
    peaks = f"({share}{readable_bytes(before)} to {readable_bytes(after)})"
    return f"{readable_bytes(abs(saved))} {'more' if saved < 0 else 'less'} {what} {peaks}"


def _speed(first: Run, second: Run) -> str:
    if first.on_cpu or second.on_cpu:
        return NO_SPEED
    before, after = step_seconds(first), step_seconds(second)
    share = slower(first, second)
    if before is None or after is None or share is None:
        return "no step time that both logged"
    return f"steps {abs(share):.1%} {'faster' if share < 0 else 'slower'} ({before[0]:.3f} to {after[0]:.3f} s)"


def _equality(first: Run, second: Run, parity: list[Parity]) -> str:
    different = [part for part in parity if not part.equal]
    if second.may_differ:
        return "not meant to be bitwise equal."
    if is_bitwise_equal(parity):
        steps = [part.steps for part in parity if part.steps is not None]
        over = f" over {min(steps)} steps" if steps else ""
        logged = [len(run.scalars.get(LOSS, ())) for run in (first, second)]
        if steps and len(set(logged)) > 1:
            over += f" (they logged {logged[0]} and {logged[1]})"
        return f"bitwise equal{over}: {', '.join(part.part for part in parity)}."
    if not different:
        return "not shown to be equal, as there is no step of which both logged a loss."
    steps_of = [(part.first_different, part.part) for part in different if part.first_different is not None]
    hint = FUSED_LOSS if first.is_fp32 or second.is_fp32 else ""
    if not steps_of:
        return f"NOT bitwise equal in {', '.join(part.part for part in different)}.{hint}"
    step, part = min(steps_of)
    return f"NOT bitwise equal, first at step {step} in {part}.{hint}"
