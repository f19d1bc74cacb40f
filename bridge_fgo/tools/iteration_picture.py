"""The picture of an iteration of reinforcement learning: what memory holds in each of its phases, by kind."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge_fgo.tools.arms.runner import ArmRun
from bridge_fgo.tools.bench.plots import save_picture
from bridge_fgo.tools.show import unit_of

KINDS = {
    "params": ("parameters", "tab:blue"),
    "grads": ("gradients", "tab:cyan"),
    "optimizer": ("masters and moments", "tab:orange"),
    "reference": ("reference model", "tab:purple"),
    "others": ("activations, caches", "tab:green"),
}
"""Kinds of memory: what to call them, and their colours."""
LEAST_SHARE = 0.005  # of the highest bar; a kind below it is too thin to be seen, and not in the legend


@dataclass(frozen=True)
class State:
    """A phase of an iteration."""

    name: str  # what happens in it
    bytes: dict[str, int]  # on the device, by kind; see `KINDS`
    seconds: float | None = None  # of the move that leads to it; None where nothing moves
    copied: int | None = None  # bytes of that move


NAMES = {
    "begins": "trained",
    "asleep": "asleep",
    "params wake": "weights alone:\nrollouts",
    "reference wakes": "reference:\nlog-probs",
    "awake": "awake:\ntraining",
}
"""Phases of a run that are drawn, and what they are called."""


def states_of_run(arm: ArmRun) -> list[State]:
    """Return the phases of a run's iterations: medians over all but the first."""
    steps = [step["phases"] for step in arm.steps[1:] or arm.steps]
    on_cpu = arm.start.get("device") == "cpu"  # whose seconds tell nothing
    found = []
    for place, event in enumerate(steps[-1]):
        if event["phase"] not in NAMES:
            continue
        of_all = [step[place] for step in steps]
        memory = dict(event["memory"])
        # The next phase begins by noting the peak of this one, and so the memory that was taken only for a while.
        after = steps[-1][place + 1]["memory"] if place + 1 < len(steps[-1]) else memory
        kinds = {kind: nbytes for kind, nbytes in memory.items() if kind in KINDS}
        if "peak" in after and event["phase"] != "begins":
            kinds["others"] = max(0, after["peak"] - sum(kinds.values()))
        seconds = copied = None
        if "seconds" in event:
            copied = int(statistics.median(one["copied"] for one in of_all))
            seconds = None if on_cpu else statistics.median(one["seconds"] for one in of_all)
        found.append(State(NAMES[event["phase"]], kinds, seconds, copied))
    return found


def draw_iteration(states: list[State], path: Path, title: str) -> None:
    """Draw the phases of an iteration into a picture, its format by the file's name; ValueError without matplotlib."""
    save_picture(path, lambda pyplot: figure_of(states, pyplot, title))


def figure_of(states: list[State], pyplot: Any, title: str) -> Any:
    """Return the figure: a bar a phase, and under it what its move took."""
    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    unit, size = unit_of(max(sum(state.bytes.values()) for state in states))
    colours = {kind: colour for kind, (_, colour) in KINDS.items()}
    tops = [draw_bar(axes, place, state.bytes, colours, 0.7, size) for place, state in enumerate(states)]
    for place, top in enumerate(tops):
        label = f"{top:.3g} {unit}" if top > 1e-3 * max(tops) else "0"
        axes.text(place, top, label, ha="center", va="bottom", fontsize=9)
    axes.set_xticks(range(len(states)), [_label(state) for state in states], fontsize=8)
    axes.set_ylabel(unit)
    axes.set_ylim(0, 1.1 * max(tops))
    axes.set_title(title, fontsize=10)
    add_legend(axes, pyplot, [state.bytes for state in states], KINDS)
    return figure


def draw_bar(axes: Any, at: float, parts: dict[str, int], colours: dict[str, str], width: float, size: float) -> float:
    """Draw bytes by kind as a bar, in units of `size` and in the order of the colours; return where it ends."""
    bottom = 0.0
    for kind, colour in colours.items():
        height = parts.get(kind, 0) / size
        axes.bar(at, height, width, bottom=bottom, color=colour)
        bottom += height
    return bottom


def add_legend(axes: Any, pyplot: Any, bars: list[dict[str, int]], kinds: dict[str, tuple[str, str]]) -> None:
    """Name the kinds that can be seen in the bars, beside the axes; kinds: what to call them, and their colours."""
    highest = max(sum(parts.values()) for parts in bars)
    seen = [kinds[kind] for kind in kinds if any(parts.get(kind, 0) >= LEAST_SHARE * highest for parts in bars)]
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for _, colour in seen]
    axes.legend(handles, [name for name, _ in seen], loc="center left", bbox_to_anchor=(1.0, 0.5))


def _label(state: State) -> str:
    lines = [state.name]
    if state.copied is not None:
        unit, size = unit_of(state.copied)
        lines.append(f"copies {state.copied / size:.3g} {unit}")
    if state.seconds is not None:
        lines.append(f"{state.seconds:.3f} s")
    return "\n".join(lines)
