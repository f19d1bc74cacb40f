"""Makes the report: loads the runs, compares each with the first, and writes one page. Nothing here imports torch."""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from bridge_fgo.tools import show
from bridge_fgo.tools.arms.comparator import Parity, compare_digests, compare_scalar
from bridge_fgo.tools.bench.plots import draw_step
from bridge_fgo.tools.iteration_picture import draw_iteration
from bridge_fgo.tools.report.runs import GRAD_NORM, LOSS, OURS, SECONDS, TOTALS, Run, load
from bridge_fgo.tools.settings import in_a_folder, option
from bridge_fgo.tools.show import readable_bytes, readable_number

NOT_EQUAL = 1
BY_THE_BENCH = "all that the bench compared"

NO_SPEED = "CPU: no speed"
"""Said in place of step times where a run was on a CPU: its copies are stand-ins, so its seconds mean nothing."""

COMPARED_PEAKS = {
    "peak_allocated_bytes": "GPU memory",
    "peak_reserved_bytes": "reserved GPU memory",
    "peak_forward_backward_bytes": "GPU memory in forward and backward",
}
"""Peaks that tell what was saved, and of what; the first that both runs have is taken."""

ON_CPU = {"peak_forward_backward_bytes": "optimizer state in forward and backward"}
"""The same of two runs on a CPU, which has no allocator to ask: there arms sample the bytes of live state."""

FUSED_LOSS = (
    " Two runs alike may differ, too: the fused cross-entropy, compiled by torch, ends in one of two results. To "
    "compare bits set model.cross_entropy_loss_fusion=False in both, or TORCH_COMPILE_DISABLE=1 in their environment."
)
"""What to know of two jobs that differ; the arms of a bench and of `demo` are set so. Measured on H200: without it two
runs of one arm differed from the gradients of step 1 on, with either of the two settings none did."""


@dataclass(frozen=True)
class Settings:
    """Which runs to compare, and the page."""

    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN [RUN]...",
            help="TensorBoard log, wandb:ENTITY/PROJECT/RUN, or a folder of bench or of demo --keep.",
            show_default=False,
        ),
    ]
    output: Annotated[Path, option("The page to write.", metavar="FILE", callback=in_a_folder)] = Path("report.html")
    beside: Annotated[
        list[str] | None,
        option("A run that need not be equal, as with another optimizer; may be repeated.", metavar="RUN"),
    ] = None


def run(settings: Settings) -> int:
    """Compare runs bit by bit, in one page that opens from disk with no network. TensorBoard and W&B draw their curves.

    The first run is the one that the others are compared with. Exit status: 0, 1 where another
    run's losses are not bitwise equal to its, 2 where a RUN cannot be read.
    """
    found = [(path, run) for path in settings.runs for run in load(path)]
    for path in settings.beside or ():
        found += [(path, replace(run, is_beside=True)) for run in load(path)]
    runs = _named_apart(found)
    others = [(run, compare_runs(runs[0], run)) for run in runs[1:]]
    notes = [run.note for run in runs if run.note]
    verdicts = [(verdict(runs[0], run, parity), is_good(run, parity)) for run, parity in others]
    parts = [show.verdict(*told) for told in verdicts] + [show.paragraph(note) for note in notes]
    parts.append(show.table(_overview(runs, others)))
    if any(parity for _, parity in others):
        parts.append(show.table(_parity_table(others)))
    parts += _pictures(runs)
    show.write_page(settings.output, "bridge-fgo report: " + ", ".join(run.name for run in runs), parts)
    for line in [*(text for text, _ in verdicts), *notes, f"wrote {settings.output}"]:
        typer.echo(line)
    return 0 if all(good for _, good in verdicts) else NOT_EQUAL


def _named_apart(found: list[tuple[str, Run]]) -> list[Run]:
    """Return the runs; those of one name are called by their paths from the folder that these have in common."""
    names = [run.name for _, run in found]
    alike = [(os.path.abspath(path), run) for path, run in found if names.count(run.name) > 1]
    common = os.path.commonpath([os.path.dirname(path) for path, _ in alike]) if alike else ""
    for path, run in alike:
        short = os.path.relpath(path, common)
        run.name = short if run.name == os.path.basename(path) else f"{short}: {run.name}"
    if len({run.name for _, run in found}) < len(found):
        raise ValueError(f"the same run was given twice: {', '.join(path for path, _ in found)}")
    return [run for _, run in found]


def compare_runs(first: Run, second: Run) -> list[Parity]:
    """Compare every loss and the gradient norm of two runs, and the digests of arms.

    Where only the table of a bench is there, what the bench found is returned.
    """
    names = [name for name in first.scalars if name in second.scalars and _is_compared(name)]
    # TensorBoard keeps 32 bits of a number, so that is what can be compared. Bridge's losses have no more.
    as_fp32 = first.is_fp32 or second.is_fp32
    parts = [compare_scalar(name, first.scalars[name], second.scalars[name], as_fp32) for name in names]
    if first.digests and second.digests:
        digests = compare_digests(first.digests, second.digests)
        parts += [Parity(part=f"final {name}", equal=equal) for name, equal in digests.items()]
    if not parts and second.row.get("bitwise_equal") is not None:
        parts.append(Parity(part=BY_THE_BENCH, equal=second.row["bitwise_equal"]))
    return parts


def _is_compared(name: str) -> bool:
    return name in (LOSS, GRAD_NORM) or (name.endswith("loss") and "validation" not in name)


def is_bitwise_equal(parts: list[Parity]) -> bool:
    """Return whether equality was shown: all parts are equal, and a loss of at least one step is among them."""
    shown = any((part.part == LOSS and part.steps) or part.part == BY_THE_BENCH for part in parts)
    return shown and all(part.equal for part in parts)


def is_good(run: Run, parity: list[Parity]) -> bool:
    """Return whether a run is as it should be: equal to the first, where it is meant to."""
    return run.may_differ or is_bitwise_equal(parity)


def step_seconds(run: Run) -> tuple[float, float, float] | None:
    """Return median, least and most seconds of the steps that count; None where they tell nothing of speed.

    Steps count from the fourth on: the first ones allocate, compile and measure.
    """
    if run.on_cpu:
        return None
    logged = run.scalars.get(SECONDS, {})
    if seconds := [value for step, value in logged.items() if step >= min(logged) + 3]:
        return statistics.median(seconds), min(seconds), max(seconds)
    if run.row:
        return run.row["step_seconds"], run.row["step_seconds_min"], run.row["step_seconds_max"]
    return None


def verdict(first: Run, second: Run, parity: list[Parity]) -> str:
    """Say in a sentence what `second` saves, how much slower its steps are, and whether it is bitwise equal."""
    told = (_memory(first, second), _speed(first, second), _equality(first, second, parity))
    return f"{second.name} against {first.name}: {'; '.join(told)}"


def _saved(first: Run, second: Run) -> tuple[str, float, float] | None:
    """Return which memory two runs have a peak of in common, and both peaks in bytes; None where they have none."""
    names = ON_CPU if first.on_cpu or second.on_cpu else COMPARED_PEAKS
    common = next((name for name in names if name in first.totals and name in second.totals), None)
    return None if common is None else (names[common], first.totals[common], second.totals[common])


def _slower(first: Run, second: Run) -> float | None:
    """Return by which share the median step of `second` is longer; None where that is not known of both."""
    before, after = step_seconds(first), step_seconds(second)
    return None if before is None or after is None else after[0] / before[0] - 1


def _memory(first: Run, second: Run) -> str:
    saved = _saved(first, second)
    if saved is None:
        return "no peak of memory that both logged"
    what, before, after = saved
    share = f"{abs(before - after) / before:.0%}, " if before else ""
    more = "more" if after > before else "less"
    peaks = f"({share}{readable_bytes(before)} to {readable_bytes(after)})"
    return f"{readable_bytes(abs(before - after))} {more} {what} {peaks}"


def _speed(first: Run, second: Run) -> str:
    if first.on_cpu or second.on_cpu:
        return NO_SPEED
    before, after = step_seconds(first), step_seconds(second)
    share = _slower(first, second)
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


def _overview(runs: list[Run], others: list[tuple[Run, list[Parity]]]) -> list[list[str]]:
    """Return the cells of the table of figures, a run a column: its head first, then what differs from the first."""
    rows = [["", *(run.name for run in runs)]]
    if others:
        first = runs[0]
        saved, slower, equal = [f"saved against {first.name}", "-"], ["steps slower", "-"], ["bitwise equal", "-"]
        for run, parity in others:
            peaks, share = _saved(first, run), _slower(first, run)
            saved.append("-" if peaks is None else readable_bytes(peaks[1] - peaks[2]))
            unknown = NO_SPEED if first.on_cpu or run.on_cpu else "-"
            slower.append(unknown if share is None else f"{share:+.1%}")
            different = any(not part.equal for part in parity)
            equal.append("yes" if is_bitwise_equal(parity) else "NO" if different else "-")
        rows += [saved, slower, equal]
    if any(run.where for run in runs):
        rows.append(["where", *(run.where or "-" for run in runs)])
    rows.append(["steps logged", *(str(max(map(len, run.scalars.values()), default=0)) for run in runs)])
    seconds = ["step, median (min-max), from the fourth on"]
    for run in runs:
        figures = step_seconds(run)
        unknown = NO_SPEED if run.on_cpu else "-"
        seconds.append(unknown if figures is None else "{:.3f} s ({:.3f}-{:.3f})".format(*figures))
    rows.append(seconds)
    rows.append(["peak after the first steps, planned / measured", *map(_planned_and_measured, runs)])
    for name, (label, _) in TOTALS.items():
        if any(run.totals.get(name) for run in runs):
            rows.append([label, *(readable_bytes(run.totals.get(name)) for run in runs)])
    return [rows[0], *(row for row in rows[1:] if set(row[1:]) - {"-", NO_SPEED})]


def _planned_and_measured(run: Run) -> str:
    """Return the highest peak that the engine planned, and the highest of the steps that had a plan."""
    planned = run.scalars.get(f"{OURS}planned_peak_bytes", {})
    measured = [
        value
        for tag in ("peak_forward_backward_bytes", "peak_step_bytes")
        for step, value in run.scalars.get(f"{OURS}{tag}", {}).items()
        if step in planned
    ]
    return f"{readable_bytes(max(planned.values()))} / {readable_bytes(max(measured))}" if measured else "-"


def _parity_table(others: list[tuple[Run, list[Parity]]]) -> list[list[str]]:
    head = ["compared with the first run", "part", "steps of both", "bitwise equal"]
    rows = [[*head, "first different", "largest difference"]]
    for run, parity in others:
        for part in parity:
            at = "-"
            if part.first_different is not None and part.values is not None:
                at = f"step {part.first_different}: {' / '.join(map(readable_number, part.values))}"
            steps = "-" if part.steps is None else str(part.steps)
            equal = "yes" if part.equal and part.steps != 0 else "NO" if not part.equal else "-"
            rows.append([run.name, part.part, steps, equal, at, readable_number(part.largest)])
    return rows


def _pictures(runs: list[Run]) -> list[str]:
    """Return what only arms leave: the traces of a step, and the memory of an iteration of a run that slept."""
    parts = []
    with TemporaryDirectory() as folder:
        if traces := {run.name: run.trace for run in runs if run.trace is not None}:
            parts += [show.heading("One step"), *map(show.picture, draw_step(traces, Path(folder)))]
        slept = [run for run in runs if any(state.copied for state in run.iteration)]
        if slept:
            iteration = Path(folder) / "iteration.png"
            draw_iteration(slept[0].iteration, iteration, f"One iteration, {slept[0].name}")
            parts += [show.heading("Memory of an iteration"), show.picture(iteration)]
    return parts
