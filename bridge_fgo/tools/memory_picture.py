"""Pictures of memory: what it holds by kind, in the phases of an iteration or on the stages of a plan."""

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
    "others": ("activations and the rest", "tab:green"),
}
"""Kinds of memory: what to call them, and their colours."""
LEAST_SHARE = 0.005  # of the highest bar; a kind below it is too thin to be seen, and not in the legend
FAR_ABOVE = 4  # times the highest bar, from which the line of the room would leave the bars too small to read
ON_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}  # so that a line across text leaves it readable


@dataclass(frozen=True)
class State:
    """A bar: a phase of an iteration, or a stage of a plan."""

    name: str
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


def draw_memory(states: list[State], path: Path, title: str, room: float | None = None) -> None:
    """Draw states of memory into a picture, its format by the file's name; ValueError without matplotlib."""
    save_picture(path, lambda pyplot: figure_of(states, pyplot, title, room))


def figure_of(states: list[State], pyplot: Any, title: str, room: float | None = None) -> Any:
    """Return the figure: a bar a state, under it what its move took, and a line at the bytes that a job has room in."""
    figure, axes = pyplot.subplots(figsize=(max(9.0, 0.75 * len(states) + 2), 4.5), layout="constrained")
    tops = [sum(state.bytes.values()) for state in states]
    unit, size = unit_of(max(tops))
    bottoms = [0.0] * len(states)
    for kind, (name, colour) in KINDS.items():
        heights = [state.bytes.get(kind, 0) / size for state in states]
        seen = max(heights) >= LEAST_SHARE * max(tops) / size
        axes.bar(range(len(states)), heights, 0.7, bottom=bottoms, color=colour, label=name if seen else None)
        bottoms = [sum(pair) for pair in zip(bottoms, heights, strict=True)]
    for place, top in enumerate(tops):
        label = f"{top / size:.4g} {unit}" if top > 1e-3 * max(tops) else "0"
        axes.text(place, top / size, label, ha="center", va="bottom", fontsize=8, bbox=ON_WHITE)
    if room is not None and room <= FAR_ABOVE * max(tops):
        axes.axhline(room / size, color="black", linewidth=1, linestyle=":", label="room")
    axes.set_xticks(range(len(states)), [_label(state) for state in states], fontsize=8)
    axes.set_ylabel(unit)
    axes.margins(y=0.1)
    axes.set_title(title, fontsize=10)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _label(state: State) -> str:
    lines = [state.name]
    if state.copied is not None:
        unit, size = unit_of(state.copied)
        lines.append(f"copies {state.copied / size:.3g} {unit}")
    if state.seconds is not None:
        lines.append(f"{state.seconds:.3f} s")
    return "\n".join(lines)
