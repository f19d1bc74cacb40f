"""Compares a pass with the measured ones as it runs: says by which of their plans it may go on."""

from __future__ import annotations

from collections.abc import Sequence

from bridge_fgo.offload.policy import HoldPlan
from bridge_fgo.offload.profile import Mark, MemoryProfile


class PassMatcher:
    """Compares one pass with the measured ones of its kind.

    A plan holds as long as its profile covers every point that was passed: then the pass needs no more memory up to the
    next point than was measured. Of several plans that hold, the one whose pass needed least is followed.

    Args:
        plans: those of the pass's kind; () where none was measured.
        checks_inputs_only: whether every state stays in this pass, so that `forward` is called in place of `point`. It
            takes the host a third of the time.
    """

    def __init__(self, plans: Sequence[HoldPlan] = (), checks_inputs_only: bool = False) -> None:
        self.checks_inputs_only = checks_inputs_only
        self.marks: list[Mark] = []
        """What has passed each point."""
        self._forwards = 0
        """How many forwards have begun, where these alone are compared."""
        self._fitting = sorted(plans, key=lambda plan: sum(plan.profile.intervals))

    @property
    def plan(self) -> HoldPlan | None:
        """The plan to follow; None where none holds, or no more."""
        return self._fitting[0] if self._fitting else None

    def point(self, mark: Mark) -> HoldPlan | None:
        """Pass a point; return the plan that was followed up to it, where another one, or none, is from now on."""
        self.marks.append(mark)
        before, index = self.plan, len(self.marks)
        self._fitting = [plan for plan in self._fitting if plan.profile.covers(index, mark)]
        return None if self.plan is before else before

    def forward(self, layer: int, nbytes: int) -> bool:
        """Note that a layer's forward begins; return whether no plan holds any more from it on.

        Args:
            layer: its number, as in `Mark`.
            nbytes: of the tensors that go into it.
        """
        if not self._fitting:
            return False
        index, self._forwards = self._forwards, self._forwards + 1
        self._fitting = [plan for plan in self._fitting if plan.profile.covers_forward(index, layer, nbytes)]
        return not self._fitting

    @property
    def is_shorter(self) -> bool:
        """Whether every plan that holds is of a pass with more points than have been passed; only points tell."""
        if self.checks_inputs_only:
            return False
        return bool(self._fitting) and all(len(plan.leave) > len(self.marks) + 1 for plan in self._fitting)

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
