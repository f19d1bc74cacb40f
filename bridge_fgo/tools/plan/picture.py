"""The picture of an estimate: each stage's memory by component, resident and offloaded, against the GPU's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bridge_fgo.tools.bench.plots import save_picture
from bridge_fgo.tools.plan.estimate import Estimate, StageEstimate
from bridge_fgo.tools.plan.systems import SYSTEMS
from bridge_fgo.tools.plan.verdict import Verdict, verdicts

COLOURS = {
    "parameters": "tab:blue",
    "gradients": "tab:cyan",
    "masters": "tab:red",
    "moments": "tab:orange",
    "activations": "tab:green",
    "workspaces": "tab:gray",
}
ON_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
"""Behind text, so that a line which crosses it does not make it hard to read."""
FAR_ABOVE = 4
"""Times the highest bar from which the line of a GPU's memory would leave the bars too small to read."""
LEAST_SHARE = 0.005
"""Share of the highest bar below which a component is too thin to be seen, and has no entry in the legend."""


def draw(estimate: Estimate, path: Path) -> None:
    """Draw the components of each stage, resident and offloaded, into a picture (its format by the file's name).

    Raises:
        ValueError: matplotlib is not installed.
    """
    save_picture(path, partial(figure_of, estimate))


def figure_of(estimate: Estimate, pyplot: Any) -> Any:
    """Return the figure: a pair of bars a stage, what lies between them, and the memory of the GPUs asked for."""
    stages = estimate.stages
    figure, axes = pyplot.subplots(figsize=(max(7.0, 0.9 * len(stages) + 3), 4.5), layout="constrained")
    pairs = [_pair(stage) for stage in stages]
    highest = max(sum(parts.values()) for pair in pairs for parts in pair)
    seen = [name for name in COLOURS if any(parts[name] >= LEAST_SHARE * highest for pair in pairs for parts in pair)]
    for place, pair in enumerate(pairs):
        before = 0.0
        for at, parts in zip((place - 0.21, place + 0.21), pair, strict=True):
            bottom = 0.0
            for name, colour in COLOURS.items():
                axes.bar(at, parts[name] / 1e9, 0.38, bottom=bottom, color=colour)
                bottom += parts[name] / 1e9
            away = before - bottom
            text = f"{_figure(bottom)}\n(\N{MINUS SIGN}{_figure(away)})" if away > 0 else _figure(bottom)
            axes.text(at, bottom, text, ha="center", va="bottom", fontsize=8, linespacing=0.95, bbox=ON_WHITE)
            before = bottom
    _draw_memory(axes, estimate, highest)
    axes.set_xticks(range(len(stages)), [f"stage {stage.stage}" for stage in stages])
    axes.set_ylabel("GB on the fullest rank")
    axes.margins(y=0.08)
    known, unknown = "at the peak of forward and backward", "activations, which are not known, left out"
    what = known if estimate.knows_activations else unknown
    axes.set_title(f"Resident (left) and offloaded (right), {what}", fontsize=10)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLOURS[name]) for name in seen]
    axes.legend(handles, seen, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _pair(stage: StageEstimate) -> tuple[dict[str, int], dict[str, int]]:
    """Return a stage's bytes by component: resident, and with the offload, which takes moments before masters."""
    resident = {name: value or 0 for name, value in stage.components.items()}
    of_moments = min(stage.away, resident["moments"])
    masters = resident["masters"] - (stage.away - of_moments)
    away = {"moments": resident["moments"] - of_moments, "masters": masters}
    return resident, resident | away | {"gradients": resident["gradients"] - stage.spared}


def _figure(gigabytes: float) -> str:
    return f"{gigabytes:.1f}" if gigabytes >= 1 else f"{gigabytes:.2g}"


def _draw_memory(axes: Any, estimate: Estimate, highest: float) -> None:
    """Draw each GPU's memory as a dashed line, and the room of it that the verdict uses as a dotted one."""
    for name, nbytes, room in _memory_lines(verdicts(estimate), highest):
        label = f"{name}: {nbytes / 1e9:.0f} GB"
        if nbytes > FAR_ABOVE * highest:
            place = {"xy": (0.992, 0.97), "xycoords": "axes fraction", "va": "center"}
            axes.annotate(f"{label}, far above", ha="right", fontsize=8, bbox=ON_WHITE, **place)
            continue
        # Above the one line and below the other, so that the two texts of a GPU never meet.
        for at, text, style, va in ((nbytes, label, "--", "bottom"), (room, f"room {room / 1e9:.0f} GB", ":", "top")):
            axes.axhline(at / 1e9, color="black", linewidth=1, linestyle=style)
            place = {"xy": (0.992, at / 1e9), "xycoords": ("axes fraction", "data"), "va": va}
            axes.annotate(text, ha="right", fontsize=8, bbox=ON_WHITE, **place)


def _memory_lines(found: list[Verdict], highest: float) -> Iterator[tuple[str, int, int]]:
    """Yield names, bytes and room of the GPUs to draw: one that was asked for; of many those next to the highest bar.

    Next to it by their room, as the verdict is: the first of them is too small, the second fits.
    """
    sizes_of = {verdict.system: SYSTEMS[verdict.system].gpu_bytes for verdict in found}
    rooms = {sizes_of[verdict.system]: verdict.room for verdict in found}
    sizes = sorted(rooms)
    if len(found) > 1:
        below = [size for size in sizes if rooms[size] < highest][-1:]
        sizes = below + [size for size in sizes if rooms[size] >= highest][:1]
    for size in sizes:
        yield ", ".join(name for name, its_size in sizes_of.items() if its_size == size), size, rooms[size]
