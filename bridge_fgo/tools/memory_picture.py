"""The picture of `bridge-fgo demo --rl`: what memory holds by kind, in the phases of an iteration."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, NamedTuple

from bridge_fgo.tools.arms.runner import ArmRun
from bridge_fgo.tools.bench.plots import save_picture
from bridge_fgo.tools.show import readable_bytes

KINDS = {
    "params": ("parameters", "tab:blue"),
    "grads": ("gradients", "tab:cyan"),
    "optimizer": ("masters and moments", "tab:orange"),
    "reference": ("reference model", "tab:purple"),
    "others": ("activations and the rest", "tab:green"),
}
"""Kinds of memory: what to call them, and their colours."""
NAMES = {
    "begins": "trained",
    "asleep": "asleep",
    "params wake": "weights alone:\nrollouts",
    "reference wakes": "reference:\nlog-probs",
    "awake": "awake:\ntraining",
}
"""Phases that are drawn, and what they are called."""


class State(NamedTuple):
    """A bar: a phase of an iteration."""

    name: str
    bytes: dict[str, int]  # on the device, by kind; see `KINDS`
    seconds: float | None = None  # of the move that leads to it; None where nothing moves
    copied: int | None = None  # bytes of that move


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


def draw_memory(states: list[State], path: Path) -> None:
    """Draw a bar a state, under it what its move took, in a format by the file's name; raise as `save_picture`."""

    def draw(pyplot: Any) -> Any:
        figure, axes = pyplot.subplots(figsize=(9.0, 4.5), layout="constrained")
        bottoms = [0.0] * len(states)
        for kind, (name, colour) in KINDS.items():
            heights = [state.bytes.get(kind, 0) / 1e9 for state in states]
            axes.bar(range(len(states)), heights, 0.7, bottom=bottoms, color=colour, label=name)
            bottoms = [sum(pair) for pair in zip(bottoms, heights, strict=True)]
        for place, top in enumerate(bottoms):
            axes.text(place, top, readable_bytes(1e9 * top), ha="center", va="bottom", fontsize=8)
        axes.set_xticks(range(len(states)), [_label(state) for state in states], fontsize=8)
        axes.set_ylabel("GB")
        axes.margins(y=0.1)
        axes.set_title("One iteration, as it was measured", fontsize=10)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        return figure

    save_picture(path, draw)


def _label(state: State) -> str:
    copies = [] if state.copied is None else [f"copies {readable_bytes(state.copied)}"]
    return "\n".join([state.name, *copies, *([] if state.seconds is None else [f"{state.seconds:.3f} s"])])
