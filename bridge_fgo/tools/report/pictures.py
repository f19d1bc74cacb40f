"""The pictures of the report: scalars over the steps of the runs, and peaks of memory by phase."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from bridge_fgo.tools.bench.plots import agg_pyplot
from bridge_fgo.tools.iteration_picture import draw_iteration
from bridge_fgo.tools.report.difference import counted_seconds
from bridge_fgo.tools.report.runs import LOSS, OURS, REWARD, SECONDS, TOTALS, Run

STYLES = ("-", "--", ":", "-.")
"""Line styles of the runs, in turn, so that one that lies on another is still seen."""

PEAKS = ("peak_forward_backward_bytes", "peak_step_bytes", "peak_allocated_bytes", "peak_reserved_bytes")
ON_HOST = ("pinned_bytes", "released_bytes")
DIFFERENCE = "difference"
UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def losses(runs: list[Run], path: Path) -> bool:
    """Draw the loss of the runs into a PNG, and how far the others are from the first where one is not equal.

    Returns:
        Whether there was anything to draw.
    """
    first = runs[0].scalars.get(LOSS, {})
    apart = [
        replace(run, scalars={**run.scalars, DIFFERENCE: _apart(first, run.scalars.get(LOSS, {}))}) for run in runs
    ]
    panels = [(LOSS, "loss", 1.0)]
    if any(any(run.scalars[DIFFERENCE].values()) for run in apart):
        panels.append((DIFFERENCE, f"difference\nfrom {runs[0].name}", 1.0))
    return _lines(apart, panels, path)


def _apart(first: dict[int, float], second: dict[int, float]) -> dict[int, float]:
    return {step: second[step] - first[step] for step in first.keys() & second.keys()}


def step_seconds(runs: list[Run], path: Path) -> bool:
    """Draw the seconds of the steps that count; see `losses`. Runs on a CPU are left out.

    Without the first steps, which take longer, the axis is as long as the others differ.
    """
    counted = [
        replace(run, scalars={SECONDS: seconds}) for run in runs if not run.on_cpu and (seconds := counted_seconds(run))
    ]
    return _lines(counted, [(SECONDS, "seconds a step,\nfrom the fourth on", 1.0)], path)


def rewards(runs: list[Run], path: Path) -> bool:
    """Draw the reward of runs of reinforcement learning; see `losses`."""
    return _lines(runs, [(REWARD, "reward", 1.0)], path, bottom=0.0)


def iteration(runs: list[Run], path: Path) -> bool:
    """Draw what memory holds in the phases of an iteration, of the first run that slept; see `losses`."""
    slept = [run for run in runs if any(state.copied for state in run.iteration)]
    if slept:
        draw_iteration(slept[0].iteration, path, f"One iteration, {slept[0].name}")
    return bool(slept)


def memory(runs: list[Run], path: Path) -> bool:
    """Draw the memory of each step over the steps: its peaks by phase, and what was released; see `losses`."""
    panels = [
        (f"{OURS}peak_forward_backward_bytes", "peak in forward\nand backward, GB", 1e9),
        (f"{OURS}peak_step_bytes", "peak in the rest\nof the step, GB", 1e9),
        (f"{OURS}released_bytes", "released, GB", 1e9),
    ]
    return _lines(runs, panels, path)


def copies(runs: list[Run], path: Path) -> bool:
    """Draw the bytes that each step copied to the host and back; see `losses`."""
    panels = [
        (f"{OURS}bytes_offloaded", "to the host\nin a step, GB", 1e9),
        (f"{OURS}bytes_reloaded", "to the GPU\nin a step, GB", 1e9),
    ]
    return _lines(runs, panels, path, bottom=0.0)


def _lines(
    runs: list[Run],
    panels: list[tuple[str, str, float]],
    path: Path,
    bottom: float | None = None,
) -> bool:
    """Draw each panel's scalar (name, label, unit) over the steps, a line a run; panels without data are left out."""
    panels = [panel for panel in panels if any(panel[0] in run.scalars for run in runs)]
    if not panels:
        return False
    pyplot = agg_pyplot()
    height = 3.2 if len(panels) == 1 else 1.6 * len(panels) + 0.6
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(9, height), layout="constrained", sharex=True, squeeze=False
    )
    for panel, (name, label, unit) in zip(axes[:, 0], panels, strict=True):
        for number, run in enumerate(runs):
            if name in run.scalars:
                _line(panel, run, name, unit, number)
        panel.set(ylabel=label)
        panel.set_ylim(bottom=bottom)
        panel.ticklabel_format(axis="y", useOffset=False)  # whole figures, however short the axis
        panel.grid(alpha=0.3)
    axes[0, 0].legend(loc="best")
    axes[-1, 0].set_xlabel("step")
    axes[-1, 0].xaxis.get_major_locator().set_params(integer=True)
    _save(figure, path)
    return True


def _line(panel: Any, run: Run, name: str, unit: float, number: int) -> None:
    points = sorted(run.scalars[name].items())
    panel.plot(
        [step for step, _ in points],
        [value / unit for _, value in points],
        STYLES[number % len(STYLES)],
        color=f"C{number}",
        label=run.name,
        marker="." if len(points) < 50 else None,
    )


def peaks(runs: list[Run], path: Path) -> bool:
    """Draw the largest peaks of the runs by phase, as bars; see `losses`."""
    return _bars(runs, PEAKS, path)


def host_bytes(runs: list[Run], path: Path) -> bool:
    """Draw what the runs pinned on the host, and what they released on the GPU, as bars; see `losses`."""
    return _bars(runs, ON_HOST, path)


def _bars(runs: list[Run], names: tuple[str, ...], path: Path) -> bool:
    names = tuple(name for name in names if any(run.totals.get(name) for run in runs))
    if not names:
        return False
    pyplot = agg_pyplot()
    figure, axes = pyplot.subplots(figsize=(9, 0.3 * len(names) * (len(runs) + 1) + 1.0), layout="constrained")
    height = 0.8 / len(runs)
    unit, unit_bytes = _unit(max(run.totals.get(name, 0.0) for run in runs for name in names))
    for number, run in enumerate(runs):
        known = [(row, name) for row, name in enumerate(names) if name in run.totals]
        if not known:
            continue  # and no entry of the legend without a bar
        bars = axes.barh(
            [row + (number - (len(runs) - 1) / 2) * height for row, _ in known],
            [run.totals[name] / unit_bytes for _, name in known],
            height=0.9 * height,
            label=run.name,
            color=f"C{number}",
        )
        labels = [_labelled(run, runs[0], name, unit_bytes) for _, name in known]
        axes.bar_label(bars, labels, padding=3, fontsize=8)
    axes.set_yticks(range(len(names)), [TOTALS[name][0] for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel(unit)
    axes.margins(x=0.15)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _save(figure, path)
    return True


def _unit(largest: float) -> tuple[str, float]:
    """Return the largest unit of bytes in which `largest` has a digit before the point, and its bytes."""
    return next(((name, size) for name, size in UNITS if largest >= size), UNITS[-1])


def _labelled(run: Run, first: Run, name: str, unit_bytes: float) -> str:
    """Return a bar's figure in units, and by how much it is more or less than the first run's."""
    label = f"{run.totals[name] / unit_bytes:.2f}"
    if run is first or not first.totals.get(name):
        return label
    return f"{label} ({(run.totals[name] - first.totals[name]) / unit_bytes:+.2f})"


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=120)
    agg_pyplot().close(figure)
