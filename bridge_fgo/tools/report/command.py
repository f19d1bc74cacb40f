"""Makes the report: loads the runs, compares them, draws, and writes one page. Nothing here imports torch."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import typer

from bridge_fgo.tools import page
from bridge_fgo.tools.arms.comparator import Parity
from bridge_fgo.tools.bench.plots import gantt, memory_timeline
from bridge_fgo.tools.bench.trace import read_trace
from bridge_fgo.tools.demo import readable_bytes, readable_number
from bridge_fgo.tools.report import pictures
from bridge_fgo.tools.report.difference import NO_SPEED, is_good, rows_of_differences, step_seconds, verdict
from bridge_fgo.tools.report.parity import compare_runs
from bridge_fgo.tools.report.runs import NO_PACKAGE, OURS, TOTALS, Run, load

NOT_EQUAL = 1


def run(paths: list[Path], output: Path, beside: list[Path] | None = None) -> int:
    """Write the page; return 1 where the runs are not all shown to be bitwise equal to the first, else 0.

    Args:
        paths: the runs.
        output: the page.
        beside: runs that are shown as the others are, but need not be equal: a recomputed one, or one with another
            optimizer.

    Raises:
        ValueError: a path holds no run, or a package is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"drawing {NO_PACKAGE.format('matplotlib')}")
    found = [(path, run) for path in paths for run in load(path)]
    for path in beside or ():
        found += [(path, replace(run, is_beside=True)) for run in load(path)]
    runs = _named_apart(found)
    others = [(run, compare_runs(runs[0], run)) for run in runs[1:]]
    with TemporaryDirectory() as folder:
        parts = [page.verdict(verdict(runs[0], run, parity), is_good(run, parity)) for run, parity in others]
        parts += [page.paragraph(run.note) for run in runs if run.note]
        parts += _sections(runs, others, Path(folder))
        page.write_page(output, "bridge-fgo report: " + ", ".join(run.name for run in runs), parts)
    for other, parity in others:
        typer.echo(verdict(runs[0], other, parity))
    for run in runs:
        if run.note:
            typer.echo(run.note)
    typer.echo(f"wrote {output}")
    return 0 if all(is_good(other, parity) for other, parity in others) else NOT_EQUAL


def _named_apart(found: list[tuple[Path, Run]]) -> list[Run]:
    """Return the runs; two of one name are called by what their paths do not have in common."""
    names = [run.name for _, run in found]
    alike = [(path, run) for path, run in found if names.count(run.name) > 1]
    short = short_paths([path for path, _ in alike])
    for path, run in alike:
        run.name = f"{short[path]}: {run.name}" if run.name != path.name else short[path]
    if len({run.name for _, run in found}) < len(found):
        raise ValueError(f"the same run was given twice: {', '.join(str(path) for path, _ in found)}")
    return [run for _, run in found]


def short_paths(paths: list[Path]) -> dict[Path, str]:
    """Return each path without the folders that all of them begin and end with; something is left of each."""
    parts = {path: path.resolve().parts for path in paths}
    distinct = set(parts.values())
    shortest = min(map(len, distinct), default=1)
    begin = 0
    while begin < shortest - 1 and len({names[begin] for names in distinct}) == 1:
        begin += 1
    end = 0
    while begin + end < shortest - 1 and len({names[-1 - end] for names in distinct}) == 1:
        end += 1
    return {path: str(Path(*names[begin : len(names) - end])) for path, names in parts.items()}


def _sections(runs: list[Run], others: list[tuple[Run, list[Parity]]], folder: Path) -> list[str]:
    def drawn(name: str, picture: str, *, nothing: str) -> str:
        path = folder / f"{name}.png"
        return page.picture(path) if getattr(pictures, picture)(runs, path) else page.paragraph(nothing)

    parts = [page.table(_overview(runs, others)), page.heading("Loss")]
    if others:
        parts.append(page.table(_parity_table(others)))
    no_figures = f"No {OURS}* figures in these runs: they come from bridge_fgo, with the offload on."
    no_seconds = (
        "No time of a step after the third was logged; Bridge logs it with logger.log_timers_to_tensorboard=True."
    )
    if all(run.on_cpu for run in runs):
        no_seconds = f"{NO_SPEED}. Copies are stand-ins there, so the seconds of a step tell nothing."
    parts.append(drawn("loss", "losses", nothing="No loss was logged."))
    if any(run.iteration for run in runs):
        parts += [
            page.heading("Reward"),
            drawn("reward", "rewards", nothing="No reward was logged."),
            page.heading("Memory of an iteration"),
            drawn("iteration", "iteration", nothing="None of these runs slept."),
        ]
    parts += [
        page.heading("Step time"),
        drawn("seconds", "step_seconds", nothing=no_seconds),
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


def _overview(runs: list[Run], others: list[tuple[Run, list[Parity]]]) -> list[list[str]]:
    """Return the cells of the table of figures, a run a column: its head first, then what differs."""
    rows = [["", *(run.name for run in runs)], *rows_of_differences(runs, others)]
    if any(run.where for run in runs):
        rows.append(["where", *(run.where or "-" for run in runs)])
    rows.append(["steps logged", *(str(max(map(len, run.scalars.values()), default=0)) for run in runs)])
    rows.append(["step, median (min-max), from the fourth on", *map(_seconds, runs)])
    for name, (label, _) in TOTALS.items():
        if any(run.totals.get(name) for run in runs):
            rows.append([label, *(readable_bytes(run.totals.get(name)) for run in runs)])
    return rows


def _seconds(run: Run) -> str:
    if run.on_cpu:
        return NO_SPEED
    figures = step_seconds(run)
    return "-" if figures is None else "{:.3f} s ({:.3f}-{:.3f})".format(*figures)


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
