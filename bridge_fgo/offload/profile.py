"""What a pass needed beside the slabs, point by point: measured, and compared with a pass that runs."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bridge_fgo.memory.meters import Ledger, PeakMeter


class Mark(NamedTuple):
    """What passes a point: a layer that begins its forward, or has ended its backward."""

    layer: int  # its number, or `~number` if its backward has ended
    nbytes: int  # of the tensors that go into it
    live: int  # bytes that went into layers whose backward has not ended, this one's included until its own has

    def bounds(self, other: Mark) -> bool:
        """Return whether the other is of the same layer, which gets no more there, and no more is live."""
        return self.layer == other.layer and self.nbytes >= other.nbytes and self.live >= other.live


@dataclass(eq=False)
class MemoryProfile:
    """Peaks of what is on the GPU beside the slabs in one pass and the step after it, in bytes."""

    intervals: list[int] = field(default_factory=list)  # one for each point of the pass
    step: int = 0  # from the end of the last backward to the end of the optimizer step
    marks: list[Mark] = field(default_factory=list)  # what passed each point but the first, point 0
    kind: object = None  # what the pass has in common with others of its kind: the number of microbatches
    beyond: int = 0  # by which later passes went above what they were planned for; they hold as much less

    @property
    def peak(self) -> int:
        """The peak of a run whose states are released throughout."""
        return max([*self.intervals, self.step])

    def can_merge(self, other: MemoryProfile) -> bool:
        """Return whether the same layers passed in the same order, and at each point one pass was the larger one."""
        if self.kind != other.kind or len(self.marks) != len(other.marks):
            return False
        return all(a.bounds(b) or b.bounds(a) for a, b in zip(self.marks, other.marks, strict=True))

    def merged(self, other: MemoryProfile) -> MemoryProfile:
        """Return the maximum of two profiles that can merge: at each point the mark of the larger pass."""
        return MemoryProfile(
            [max(pair) for pair in zip(self.intervals, other.intervals, strict=True)],
            max(self.step, other.step),
            [a if a.bounds(b) else b for a, b in zip(self.marks, other.marks, strict=True)],
            self.kind,
            max(self.beyond, other.beyond),
        )


@dataclass(frozen=True)
class HoldPlan:
    """The most bytes of state that the GPU may hold."""

    leave: tuple[int, ...]  # in the interval of each point; whatever is above has to leave at the point
    come: tuple[int, ...]  # from each point to the end of the step; up to that much may come back there, and stay
    step: int  # while the optimizer steps
    profile: MemoryProfile  # the pass that it was made from


class PassMatcher:
    """Compares one pass with the measured ones of its kind, by their `plans`.

    A plan holds as long as every mark is bounded by that of the measured pass: then the pass needs no more memory up to
    the next point than was measured. Of several plans that hold, the one whose pass needed least is followed.
    """

    def __init__(self, plans: Sequence[HoldPlan] = ()) -> None:
        self.marks: list[Mark] = []  # what has passed each point
        self._fitting = sorted(plans, key=lambda plan: sum(plan.profile.intervals))

    @property
    def plan(self) -> HoldPlan | None:
        """The plan to follow; None if none holds, or no more."""
        return self._fitting[0] if self._fitting else None

    def point(self, mark: Mark) -> HoldPlan | None:
        """Pass a point; return the plan that was followed up to it, if another one, or none, is from now on."""
        place, fitting = len(self.marks), self._fitting
        self.marks.append(mark)
        self._fitting = [
            plan for plan in fitting if place < len(plan.profile.marks) and plan.profile.marks[place].bounds(mark)
        ]
        return None if self._fitting[:1] == fitting[:1] else fitting[0]

    @property
    def is_shorter(self) -> bool:
        """Whether every plan that holds is of a pass with more points than have been passed."""
        return bool(self._fitting) and all(len(plan.profile.marks) > len(self.marks) for plan in self._fitting)

    def known(self, plan: HoldPlan, points: int, newest: int) -> MemoryProfile:
        """Return what is known of this pass from a plan that held for its first `points` points, point 0 included.

        `newest` is a bound in bytes for the last of these intervals: in the measured pass that may have ended earlier,
        at another layer.
        """
        intervals = plan.profile.intervals[:points]
        intervals[-1] = max(intervals[-1], newest)
        return MemoryProfile(intervals, plan.profile.step, [*self.marks], plan.profile.kind)


class PeakRecorder:
    """Fills the profile of a pass, point by point, while slabs come and go; without a GPU nothing is ever measured.

    Each reading of the peaks takes the host some 100 microseconds, so that few passes are measured.
    """

    def __init__(self, meter: PeakMeter, ledger: Ledger) -> None:
        self.meter, self._ledger = meter, ledger
        ledger.observer = weakref.WeakMethod(self._memory_changes)
        self.profile: MemoryProfile | None = None  # of the pass that is measured; None if none is
        self.in_step = False  # whether the pass is over, and the optimizer steps
        self._pass_peak = 0  # of all that was allocated in a pass that is not measured, as far as it was read

    def begin_pass(self) -> None:
        """Forget what was before: an evaluation, or the same pass that is run again."""
        self.profile, self.in_step = None, False

    def release(self) -> None:
        """Pass point 0; peaks count from here."""
        if self.meter.works:
            self.meter.end_interval()
            self._pass_peak = 0

    def record(self, profile: MemoryProfile) -> None:
        """Measure from now on, into the last interval of a profile and those that follow."""
        if self.meter.works:
            self.meter.end_interval()  # what came before belongs to no interval
            self.profile = profile

    def point(self, mark: Mark) -> None:
        """Pass a point."""
        self.measure()
        if self.profile is not None:
            self.profile.intervals.append(0)
            self.profile.marks.append(mark)

    def end_pass(self) -> None:
        """End the pass: what follows is the optimizer step."""
        self.measure()
        self.in_step = True

    def measure(self) -> None:
        """Note the peak since the last reading."""
        if self.profile is None:
            return
        others = self.meter.end_interval() - self._ledger.nbytes
        if self.in_step:
            self.profile.step = max(others, self.profile.step)
        else:
            self.profile.intervals[-1] = max(others, self.profile.intervals[-1])

    def _memory_changes(self, before: bool) -> None:
        """Measure what was there until slabs take or give back memory, and leave out the change itself."""
        if before:
            self.measure()
        elif self.profile is not None:
            self.meter.end_interval()

    def newest_others(self) -> int:
        """Return a bound in bytes for what was beside the slabs since the newest point of a pass that is not measured.

        Since then slabs have held what they hold now, so that this is in the peak; unless a reader, a checkpoint in the
        midst of a pass say, has had some brought back.
        """
        return self.peak() - self._ledger.nbytes

    def peak(self) -> int:
        """Return the peak of all that was allocated so far in a pass that is not measured, or in its step."""
        self._pass_peak = max(self._pass_peak, self.meter.end_interval())
        return self._pass_peak
