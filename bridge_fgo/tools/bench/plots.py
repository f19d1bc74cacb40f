"""Pictures of one step of each arm: allocated memory over time, and what the GPU and its copy engines did."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bridge_fgo.tools.bench.trace import Trace, merge

GAP_SECONDS = 2e-4
"""Kernels less apart than this are drawn as one bar."""
ROWS = (("kernels", "tab:blue"), ("d2h", "tab:orange"), ("h2d", "tab:green"))


def memory_timeline(traces: Mapping[str, Trace], path: Path) -> None:
    """Draw the allocated bytes of one step of each arm into a picture."""

    def draw(pyplot: Any) -> Any:
        figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
        for name, trace in traces.items():
            times = [time for time, _ in trace.memory]
            axes.step(times, [nbytes / 1e9 for _, nbytes in trace.memory], where="post", label=name, linewidth=1)
        axes.set(xlabel="seconds from the begin of the step", ylabel="allocated, GB", ylim=(0, None), xlim=(0, None))
        axes.set_title("GPU memory in one step, as the host allocates it")
        axes.legend(loc="lower right")
        return figure

    save_picture(path, draw)


def gantt(traces: Mapping[str, Trace], path: Path) -> None:
    """Draw kernels, copies to the host and copies to the GPU of one step of each arm into a picture."""

    def draw(pyplot: Any) -> Any:
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

    save_picture(path, draw)


def save_picture(path: Path, make: Callable[[Any], Any]) -> None:
    """Write the figure that `make` returns, given pyplot, to a file; its name says in which format.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        pyplot = agg_pyplot()
    except ImportError:
        raise ValueError(f"{path.name}: pictures need matplotlib: pip install 'bridge-fgo[bench]'") from None
    figure = make(pyplot)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def agg_pyplot() -> Any:
    """Return matplotlib's pyplot, which draws to files and needs no display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
