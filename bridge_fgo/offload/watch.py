"""Compares a pass in which nothing moves with the measured ones, by its forwards alone."""

from __future__ import annotations

from collections.abc import Sequence

from bridge_fgo.offload.policy import HoldPlan
from bridge_fgo.offload.profile import Mark


class Watch:
    """Compares what goes into each layer with measured passes of the same kind, where every state stays.

    A plan holds as long as the same layers begin their forwards in the same order as in the plan's pass, and none gets
    more. In all passes of a kind a backward comes at the same place among the forwards, so no more is live at any time
    either: backwards tell nothing more. To watch takes the host a third of what it takes to report all points.

    Args:
        plans: those of the pass's kind, one at least.
    """

    def __init__(self, plans: Sequence[HoldPlan]) -> None:
        self._plans = plans
        self._seen: list[tuple[int, int]] = []
        self.plan: HoldPlan | None = plans[0]
        """One that holds so far; None where none does."""

    def forward(self, layer: int, nbytes: int) -> bool:
        """Note that a layer's forward begins; return whether from it on no plan holds any more.

        Args:
            layer: its number, as in `Mark`.
            nbytes: of the tensors that go into it.
        """
        if self.plan is None:
            return False
        measured, index = self.plan.profile.forwards, len(self._seen)
        self._seen.append((layer, nbytes))
        if index >= len(measured) or not _is_within(layer, nbytes, measured[index]):
            self.plan = next((plan for plan in self._plans if self._holds(plan)), None)
        return self.plan is None

    def _holds(self, plan: HoldPlan) -> bool:
        measured = plan.profile.forwards
        pairs = zip(self._seen, measured, strict=False)
        return len(self._seen) <= len(measured) and all(_is_within(*seen, mark) for seen, mark in pairs)


def _is_within(layer: int, nbytes: int, measured: Mark) -> bool:
    return layer == measured.layer and nbytes <= measured.nbytes
