"""The course of one pass: which of the plans that were made from measured passes hold for it, point by point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bridge_fgo.offload.policy import HoldPlan
from bridge_fgo.offload.profile import Mark, MemoryProfile

LOOSE = 0.9
"""A pass with less than that share of a measured one's bytes at a point is worth a profile of its own."""


class _Fitting(NamedTuple):
    """A plan that has held so far; the least one is followed.

    excess: bytes by which its pass was larger, over all points so far.
    total: of the peaks of its pass, in bytes.
    place: tells plans apart that are alike.
    """

    excess: int
    total: int
    place: int
    plan: HoldPlan


class Course:
    """Compares a pass with the measured ones as it runs.

    A plan holds as long as its profile covers every point that was passed: then what the pass needs up to the next
    point is no more than was measured. Of several the one is followed whose pass was most like it so far.

    Args:
        plans: those of the pass's kind; () where none was measured.
    """

    def __init__(self, plans: Sequence[HoldPlan] = ()) -> None:
        self.marks: list[Mark] = []
        """What has passed each point."""
        self._fitting = [_Fitting(0, sum(plan.profile.intervals), i, plan) for i, plan in enumerate(plans)]
        self.plan = min(self._fitting).plan if plans else None
        """The plan to follow; None where none holds, or no more."""

    def point(self, mark: Mark) -> HoldPlan | None:
        """Pass a point, and return the plan that was followed up to it where another one is from now on, or none."""
        self.marks.append(mark)
        before, index = self.plan, len(self.marks)
        if before is None or (len(self._fitting) == 1 and before.profile.covers(index, mark)):
            return None
        self._fitting = [
            _Fitting(excess + plan.profile.marks[index - 1].nbytes - mark.nbytes, total, place, plan)
            for excess, total, place, plan in self._fitting
            if plan.profile.covers(index, mark)
        ]
        self.plan = min(self._fitting).plan if self._fitting else None
        return None if self.plan is before else before

    @property
    def is_loose(self) -> bool:
        """Whether the pass whose plan is followed was much larger at this point."""
        index = len(self.marks) - 1
        return self.plan is not None and self.marks[index].nbytes < LOOSE * self.plan.profile.marks[index].nbytes

    @property
    def is_shorter(self) -> bool:
        """Whether every plan that holds is of a pass with more points than have been passed."""
        return bool(self._fitting) and all(len(one.plan.leave) > len(self.marks) + 1 for one in self._fitting)

    def known(self, plan: HoldPlan, points: int, newest: int) -> MemoryProfile:
        """Return what is known of this pass from a plan that held for its first `points` points, point 0 included.

        Args:
            plan: the one that held.
            points: for how many.
            newest: a bound in bytes for the last of these intervals. In the measured pass it may have ended earlier, at
                another layer.
        """
        intervals = plan.profile.intervals[:points]
        intervals[-1] = max(intervals[-1], newest)
        return MemoryProfile(intervals, plan.profile.step, self.marks, plan.profile.kind)
