"""The picture of an estimate: each stage's memory by component, resident and offloaded, against the GPU's."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from bridge_fgo.tools.bench.plots import save_picture
from bridge_fgo.tools.iteration_picture import add_legend, draw_bar
from bridge_fgo.tools.plan.estimate import Estimate, StageEstimate
from bridge_fgo.tools.plan.systems import SYSTEMS
from bridge_fgo.tools.plan.verdict import verdicts

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


def draw(estimate: Estimate, path: Path) -> None:
    """Draw the components of each stage, resident and offloaded, into a picture (its format by the file's name).

    Raises:
        ValueError: matplotlib is not installed.
    """
    save_picture(path, partial(figure_of, estimate))


def figure_of(estimate: Estimate, pyplot: Any) -> Any:
    """Return the figure: a pair of bars a stage, what lies between them, and the memory of a GPU that was asked for."""
    stages = estimate.stages
    figure, axes = pyplot.subplots(figsize=(max(7.0, 0.9 * len(stages) + 3), 4.5), layout="constrained")
    pairs = [_pair(stage) for stage in stages]
    for place, (resident, offloaded) in enumerate(pairs):
        before, after = (
            draw_bar(axes, at, parts, COLOURS, 0.38, 1e9)
            for at, parts in ((place - 0.21, resident), (place + 0.21, offloaded))
        )
        less = f"\n(\N{MINUS SIGN}{_figure(before - after)})" if before > after else ""
        for at, top, text in ((place - 0.21, before, ""), (place + 0.21, after, less)):
            axes.text(
                at, top, _figure(top) + text, ha="center", va="bottom", fontsize=8, linespacing=0.95, bbox=ON_WHITE
            )
    axes.set_xticks(range(len(stages)), [f"stage {stage.stage}" for stage in stages])
    axes.set_ylabel("GB on the fullest rank")
    axes.margins(y=0.08)
    known, unknown = "at the peak of forward and backward", "activations, which are not known, left out"
    title = f"Resident (left) and offloaded (right), {known if estimate.knows_activations else unknown}"
    found = verdicts(estimate)
    if len(found) == 1:
        memory, room = SYSTEMS[found[0].system].gpu_bytes / 1e9, found[0].room / 1e9
        title += f"\n{found[0].system}: {memory:.0f} GB (dashed), of which a job has room in {room:.0f} GB (dotted)"
        if memory <= FAR_ABOVE * max(sum(parts.values()) for pair in pairs for parts in pair) / 1e9:
            axes.axhline(memory, color="black", linewidth=1, linestyle="--")
            axes.axhline(room, color="black", linewidth=1, linestyle=":")
    axes.set_title(title, fontsize=10)
    add_legend(
        axes, pyplot, [parts for pair in pairs for parts in pair], {name: (name, COLOURS[name]) for name in COLOURS}
    )
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
