"""Pictures of one step of each arm: allocated memory over time, and what the GPU and its copy engines did."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BIG_COPY_BYTES = 2**20  # copies above this are taken for the offload's; the training loop's own are smaller
GAP_SECONDS = 2e-4  # kernels less apart than this are drawn as one bar
ROWS = (("kernels", "tab:blue"), ("d2h", "tab:orange"), ("h2d", "tab:green"))

Interval = tuple[float, float]


@dataclass(frozen=True)
class Trace:
    """One step of one arm, in seconds from its begin and bytes."""

    seconds: float
    kernels: list[Interval]
    d2h: list[Interval]
    h2d: list[Interval]
    memory: list[tuple[float, int]]  # (time, allocated bytes)


def read_trace(path: Path) -> Trace:
    """Read the trace that `harness.arms.gpu_recorder` wrote."""
    with gzip.open(path, "rt") as file:
        raw = json.load(file)

    def of(kind: str, least: int = 0) -> list[Interval]:
        return merge((start, start + took) for k, start, took, nbytes in raw["gpu"] if k == kind and nbytes >= least)

    memory = [(time, nbytes) for time, nbytes in raw["memory"]]
    return Trace(raw["step"][1], of("kernel"), of("d2h", BIG_COPY_BYTES), of("h2d", BIG_COPY_BYTES), memory)


def merge(intervals: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """Return the union of intervals, in order; those less than `gap` apart become one."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1] + gap:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def draw_step(paths: Mapping[str, Path], folder: Path) -> None:
    """Draw `memory.png` and `gantt.png` into a folder, from the trace of each arm."""
    traces = {name: read_trace(path) for name, path in paths.items()}
    import matplotlib

    matplotlib.use("Agg")  # which draws to files and needs no display
    from matplotlib import pyplot

    for name, draw in (("memory.png", _memory_timeline), ("gantt.png", _gantt)):
        figure = draw(traces, pyplot)
        figure.savefig(folder / name, dpi=120)
        pyplot.close(figure)


def _memory_timeline(traces: Mapping[str, Trace], pyplot: Any) -> Any:
    figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    for name, trace in traces.items():
        times = [time for time, _ in trace.memory]
        axes.step(times, [nbytes / 1e9 for _, nbytes in trace.memory], where="post", label=name, linewidth=1)
    axes.set(xlabel="seconds from the begin of the step", ylabel="allocated, GB", ylim=(0, None), xlim=(0, None))
    axes.set_title("GPU memory in one step, as the host allocates it")
    axes.legend(loc="lower right")
    return figure


def _gantt(traces: Mapping[str, Trace], pyplot: Any) -> Any:
    figure, all_axes = pyplot.subplots(
        len(traces), 1, figsize=(9, 1.6 * len(traces) + 0.6), layout="constrained", sharex=True, squeeze=False
    )
    for axes, (name, trace) in zip(all_axes[:, 0], traces.items(), strict=True):
        for row, (kind, colour) in enumerate(ROWS):
            bars = [(start, end - start) for start, end in merge(getattr(trace, kind), GAP_SECONDS)]
            axes.broken_barh(bars, (2.1 - row, 0.8), facecolors=colour)
        axes.axvline(trace.seconds, color="black", linewidth=0.8)
        axes.set_yticks([2.5, 1.5, 0.5], ["kernels", "D2H", "H2D"])
        axes.set_ylim(0, 3)
        axes.set_title(name, loc="left", fontsize=9)
    all_axes[-1, 0].set_xlabel("seconds from the begin of the step (profiled, so slower than measured)")
    ends = [intervals[-1][1] for t in traces.values() for intervals in (t.kernels, t.d2h, t.h2d) if intervals]
    all_axes[-1, 0].set_xlim(0, max(ends, default=1.0))
    return figure
