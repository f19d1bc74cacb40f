"""The report of `bridge-fgo demo --rl`: rewards, seconds and bytes of each move, and whether both arms are equal."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import cached_property

from rich.console import Console

from bridge_fgo.tools.arms.comparator import Comparison, compare
from bridge_fgo.tools.arms.runner import ArmRun, Event
from bridge_fgo.tools.show import print_parts, print_table, readable_bytes

MOVES = {
    "asleep": "sleep: offload everything",
    "params wake": "wake: reload the weights",
    "awake": "wake: reload the rest",
    "reference wakes": "reload the reference model",
    "reference sleeps": "offload the reference model",
}
"""Phases of an iteration in which something moves, and what to call that."""
FIGURES = ("seconds", "copied", "freed", "returned")
ENDS = 10
"""Iterations at either end whose mean reward is shown: that of one is noisy."""


@dataclass(frozen=True)
class RlRuns:
    """The two arms, which have ended."""

    resident: ArmRun
    sleeping: ArmRun

    @cached_property
    def same(self) -> Comparison:
        """The comparison of losses, gradient norms, and digests of the final state."""
        return compare(self.resident, self.sleeping)

    @property
    def parts(self) -> dict[str, bool]:
        """Every part that was compared, by name."""
        rewards = [arm.values("reward") for arm in (self.resident, self.sleeping)]
        return {"rewards": rewards[0] == rewards[1], **self.same.parts}

    @property
    def bitwise_equal(self) -> bool:
        """Whether all parts are equal."""
        return all(self.parts.values())

    @property
    def on_cpu(self) -> bool:
        """Whether there was no GPU."""
        return self.sleeping.start.get("device") == "cpu"

    def rewards(self, arm: ArmRun) -> tuple[float, float]:
        """Return the mean reward of an arm's first and of its last iterations, `ENDS` of each."""
        found = [float(reward or 0.0) for reward in arm.values("reward")]
        return statistics.fmean(found[:ENDS]), statistics.fmean(found[-ENDS:])

    def moves(self) -> dict[str, dict[str, float]]:
        """Return the medians of what each move took, over iterations but the first, which takes tensors into slabs."""
        steps = self.sleeping.steps[1:] or self.sleeping.steps
        found = {}
        for name in MOVES:
            events = [phase for step in steps for phase in step["phases"] if phase["phase"] == name]
            if events:
                found[name] = {figure: statistics.median(event[figure] for event in events) for figure in FIGURES}
        return found

    @property
    def held(self) -> int:
        """The fewest bytes that the second process held in a sleep but the first; 0 where there was none.

        Before the first update there are no moments.
        """
        return min(step["held"] for step in self.sleeping.steps[1:] or self.sleeping.steps)

    def as_json(self) -> Event:
        """Return the object that `--json` prints."""
        start, result = self.sleeping.start, self.sleeping.result
        return {
            **{name: start.get(name) for name in ("device", "bridge", "mcore")},
            "steps": len(self.sleeping.steps),
            "rewards": self.sleeping.values("reward"),
            "reward": dict(zip(("first", "last"), self.rewards(self.sleeping), strict=True)),
            "bitwise_equal": self.bitwise_equal,
            "equal": self.parts,
            "moves": self.moves(),
            "held_bytes": self.held,
            "pinned_bytes": result.get("pinned_bytes"),
            "bytes": result.get("bytes_by_kind"),
            "seconds": {arm.name: self._seconds(arm) for arm in (self.resident, self.sleeping)},
            "iteration": self.sleeping.steps[-1]["phases"],
        }

    @staticmethod
    def _seconds(arm: ArmRun) -> float:
        seconds = [event["seconds"] for event in arm.steps]
        return statistics.median(seconds[1:] or seconds)

    def print(self, console: Console) -> None:
        """Print rewards, moves, and whether the arms are bitwise equal."""
        ends = min(ENDS, len(self.sleeping.steps))
        rewards = [["", f"reward, first {ends}", f"last {ends}", "an iteration"]]
        for arm in (self.resident, self.sleeping):
            first, last = self.rewards(arm)
            rewards.append([arm.name, f"{first:.3f}", f"{last:.3f}", f"{self._seconds(arm):.3f} s"])
        print_table(console, rewards)
        moves = [["of an iteration", *FIGURES]]
        for name, move in self.moves().items():
            copied, freed, returned = (readable_bytes(move[figure]) for figure in ("copied", "freed", "returned"))
            moves.append([MOVES[name], f"{move['seconds']:.4f}", copied, freed, "-" if self.on_cpu else returned])
        print_table(console, moves)
        second = f"A second process took and filled {readable_bytes(self.held)} in each sleep."
        if self.on_cpu:
            second = "On the CPU there is no driver to give memory back to, and no second process that takes it."
        console.print(second, markup=False)
        print_parts(console, self.parts, ", asleep between updates or not")
        if self.on_cpu:
            console.print("This ran on the CPU: it shows correctness and bytes, not speed.")
