"""Makes the report: loads the runs, compares them, draws, and writes one page. Nothing here imports torch."""

from __future__ import annotations

import importlib.util
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory

import typer

from bridge_fgo.cli import page
from bridge_fgo.cli.bench.plots import gantt, memory_timeline
from bridge_fgo.cli.bench.trace import read_trace
from bridge_fgo.cli.demo import readable_bytes, readable_number
from bridge_fgo.cli.report import pictures
from bridge_fgo.cli.report.parity import compare_runs, is_bitwise_equal
from bridge_fgo.cli.report.runs import LOSS, NO_PACKAGE, OURS, TOTALS, Run, load
from bridge_fgo.harness.comparator import Parity

NOT_EQUAL = 1
FUSED_LOSS = (
    " Two runs alike may differ, too: the fused cross-entropy, compiled by torch, ends in one of two results. To "
    "compare bits set model.cross_entropy_loss_fusion=False in both, or TORCH_COMPILE_DISABLE=1 in their environment."
)
"""What to know of two jobs that differ; the arms of a bench and of `demo` are set so. Measured on H200: without it two
runs of one arm differed from the gradients of step 1 on, with either of the two settings none did."""


def run(paths: list[Path], output: Path) -> int:
    """Write the page; return 1 where the runs are not all shown to be bitwise equal to the first, else 0.

    Raises:
        ValueError: a path holds no run, or a package is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"drawing {NO_PACKAGE.format('matplotlib')}")
    runs = _named_apart([(path, run) for path in paths for run in load(path)])
    others = [(run, compare_runs(runs[0], run)) for run in runs[1:]]
    with TemporaryDirectory() as folder:
        parts = [page.paragraph(run.note) for run in runs if run.note]
        parts += [page.verdict(verdict(runs[0], run, parity), is_good(run, parity)) for run, parity in others]
        parts += _sections(runs, others, Path(folder))
        page.write_page(output, "bridge-fgo report: " + ", ".join(run.name for run in runs), parts)
    for run in runs:
        if run.note:
            typer.echo(run.note)
    for other, parity in others:
        typer.echo(verdict(runs[0], other, parity))
    typer.echo(f"wrote {output}")
    return 0 if all(is_good(other, parity) for other, parity in others) else NOT_EQUAL


def _named_apart(found: list[tuple[Path, Run]]) -> list[Run]:
    """Return the runs; two of one name are called by their paths."""
    names = [run.name for _, run in found]
    for path, run in found:
        if names.count(run.name) > 1:
            run.name = f"{path}: {run.name}" if run.name != path.name else str(path)
    if len({run.name for _, run in found}) < len(found):
        raise ValueError(f"the same run was given twice: {', '.join(str(path) for path, _ in found)}")
    return [run for _, run in found]


def is_good(run: Run, parity: list[Parity]) -> bool:
    """Return whether a run is as it should be: equal to the first, where it is meant to."""
    return run.may_differ or is_bitwise_equal(parity)


def verdict(first: Run, second: Run, parity: list[Parity]) -> str:
    """Say in a sentence whether two runs are equal."""
    names = f"{first.name} and {second.name}"
    different = [part for part in parity if not part.equal]
    if second.may_differ:
        return f"{names} are not meant to be bitwise equal: their optimizers are not the same."
    if is_bitwise_equal(parity):
        steps = [part.steps for part in parity if part.steps is not None]
        over = f" over {min(steps)} steps" if steps else ""
        logged = [len(run.scalars.get(LOSS, ())) for run in (first, second)]
        if steps and len(set(logged)) > 1:
            over += f" (they logged {logged[0]} and {logged[1]})"
        return f"{names} are bitwise equal{over}: {', '.join(part.part for part in parity)}."
    if not different:
        return f"{names} have no step in common of which both logged a loss: nothing is shown."
    steps_of = [(part.first_different, part.part) for part in different if part.first_different is not None]
    hint = FUSED_LOSS if first.is_fp32 or second.is_fp32 else ""
    if not steps_of:
        return f"{names} DIFFER in {', '.join(part.part for part in different)}.{hint}"
    step, part = min(steps_of)
    return f"{names} DIFFER, first at step {step} in {part}.{hint}"


def _sections(runs: list[Run], others: list[tuple[Run, list[Parity]]], folder: Path) -> list[str]:
    def drawn(name: str, picture: str, *, nothing: str) -> str:
        path = folder / f"{name}.png"
        return page.picture(path) if getattr(pictures, picture)(runs, path) else page.paragraph(nothing)

    parts = [page.table(_overview(runs)), page.heading("Loss")]
    if others:
        parts.append(page.table(_parity_table(others)))
    no_figures = f"No {OURS}* figures in these runs: they come from bridge_fgo, with the offload on."
    parts += [
        drawn("loss", "losses", nothing="No loss was logged."),
        page.heading("Step time"),
        drawn(
            "seconds",
            "step_seconds",
            nothing="No time of a step was logged; Bridge does with logger.log_timers_to_tensorboard=True.",
        ),
        page.heading("Peaks by phase"),
        drawn("peaks", "peaks", nothing="No peak was logged; Bridge does with logger.log_memory_to_tensorboard=True."),
        page.heading("Host bytes"),
        drawn("host", "host_bytes", nothing=no_figures),
        drawn("copies", "copies", nothing="What each step copied is in TensorBoard logs only."),
        page.heading("Timeline"),
    ]
    traces = {run.name: read_trace(run.trace) for run in runs if run.trace is not None}
    if traces:
        memory_timeline(traces, folder / "memory.png")
        gantt(traces, folder / "gantt.png")
        parts += [page.picture(folder / "memory.png"), page.picture(folder / "gantt.png")]
    else:
        parts.append(drawn("timeline", "memory", nothing=no_figures))
    return parts


def _overview(runs: list[Run]) -> list[list[str]]:
    """Return the cells of the table of figures, a run a column; its head first."""
    rows = [["", *(run.name for run in runs)]]
    if any(run.where for run in runs):
        rows.append(["where", *(run.where or "-" for run in runs)])
    rows.append(["steps logged", *(str(max(map(len, run.scalars.values()), default=0)) for run in runs)])
    rows.append(["step, median (min-max), from the fourth on", *map(_seconds, runs)])
    for name, (label, _) in TOTALS.items():
        if any(run.totals.get(name) for run in runs):
            rows.append([label, *(readable_bytes(run.totals.get(name)) for run in runs)])
    return rows


def _seconds(run: Run) -> str:
    if seconds := pictures.counted_seconds(run):
        figures = statistics.median(seconds), min(seconds), max(seconds)
    elif run.row:
        figures = run.row["step_seconds"], run.row["step_seconds_min"], run.row["step_seconds_max"]
    else:
        return "-"
    return "{:.3f} s ({:.3f}-{:.3f})".format(*figures)


def _parity_table(others: list[tuple[Run, list[Parity]]]) -> list[list[str]]:
    rows = [
        [
            "compared with the first run",
            "part",
            "steps of both",
            "bitwise equal",
            "first different",
            "largest difference",
        ]
    ]
    for run, parity in others:
        for part in parity:
            at = "-"
            if part.first_different is not None and part.values is not None:
                at = f"step {part.first_different}: {' / '.join(map(readable_number, part.values))}"
            steps = "-" if part.steps is None else str(part.steps)
            equal = "yes" if part.equal and part.steps != 0 else "NO" if not part.equal else "-"
            rows.append([run.name, part.part, steps, equal, at, readable_number(part.largest)])
    return rows
