"""How many bytes of state the GPU may hold at each point of a training step: pure arithmetic on measured peaks.

A **point** is a moment of the forward-backward pass that the model's hooks report: a layer begins its forward,
or ends its backward. Point 0 is the release before the first forward. The interval of a point lasts until the
next one; the optimizer step is an interval of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class MemoryProfile:
    """Peaks of what is on the GPU beside the slabs, measured in one step, in bytes."""

    intervals: list[int] = field(default_factory=list)
    """One for each point of the pass."""
    step: int = 0
    """From the end of the last backward to the end of the optimizer step."""

    @property
    def peak(self) -> int:
        """The peak of a run whose states are released throughout."""
        return max([*self.intervals, self.step])


@dataclass(frozen=True)
class HoldPlan:
    """The most bytes of state that the GPU may hold.

    leave[i]: in the interval of point i. Whatever is above has to leave at the point.
    come[i]: from point i to the end of the optimizer step. Up to that much may come back at the point, and stay.
    step: while the optimizer steps.
    """

    leave: tuple[int, ...]
    come: tuple[int, ...]
    step: int


def plan_holding(
    profile: MemoryProfile, limit: int, staying: int, part_bytes: Sequence[int], masters_held: int = 0
) -> HoldPlan:
    """Return what may be held so that the peak of everything stays at or below `limit` bytes where it can.

    Args:
        profile: what there is beside the slabs.
        limit: in bytes.
        staying: bytes of slabs that stay for good, and are held in any case.
        part_bytes: sizes of all parts; two of them are held in the optimizer step in any case.
        masters_held: bytes of masters that are held to the end of the optimizer step in any case.
    """
    leave = [max(staying, limit - peak) for peak in profile.intervals]
    step = max(staying + masters_held + 2 * max(part_bytes, default=0), limit - profile.step)
    come = [*leave, step]
    for i in range(len(leave) - 1, -1, -1):
        come[i] = min(come[i], come[i + 1])
    come.pop()
    return HoldPlan(tuple(leave), tuple(come), step)


def choose_staying(part_bytes: Sequence[int], room: int) -> set[int]:
    """Return the positions of parts that fit into `room` bytes together and need never leave, from the last on."""
    staying = set()
    for position in range(len(part_bytes) - 1, -1, -1):
        if part_bytes[position] <= room:
            room -= part_bytes[position]
            staying.add(position)
    return staying


def least_budget(profile: MemoryProfile, part_bytes: Sequence[int], masters_held: int = 0) -> int:
    """Return the least peak in bytes that any choice can reach: everything leaves, two parts step in turn."""
    return max(profile.peak, profile.step + masters_held + 2 * max(part_bytes, default=0))


def budget_refusal(budget: int, least: int, about: str = "") -> str:
    """Return why a budget (bytes) below the least possible one is refused, with one that will do: rounded up."""
    enough = math.ceil(least / 2**30 * 100) / 100
    return (
        f"OffloadConfig.gpu_memory_budget_gib={round(budget / 2**30, 6):g} cannot be met: with all of the optimizer "
        f"state offloaded the fullest rank needs {about}{enough:.2f} GiB; set it to at least that, or make the rest of "
        "the step smaller (micro batch, recompute, parallelism)"
    )
