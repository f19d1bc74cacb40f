"""What the GPU may hold of the states, and which parts stay under a budget: decided once the peaks are measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bridge_fgo.engine.holding import (
    HoldPlan,
    MemoryProfile,
    budget_refusal,
    choose_staying,
    least_budget,
    plan_holding,
)
from bridge_fgo.engine.part import StepPart

MARGIN_SHARE = 1 / 12
"""Of the bytes that activations take and give back. Measured on H200, 15.4 GB of activations: with a margin of 0.6 GB
0.6 to 0.75 GB more was reserved than allocated (9.8 GB of states); with 1.3 GB 0.5 to 0.8 GB, and 0.2 to 1.2 GB (19.7
GB). A margin that grew by what was reserved above, up to three times, left it at 0.65 GB (9.8 GB)."""

Agree = Callable[[int, int], tuple[int, int]]
"""Takes this rank's bytes that may stay and its least possible budget; returns what all ranks can keep to."""


def staying_bytes(parts: Sequence[StepPart]) -> int:
    """Return the bytes of the parts that stay on the GPU for good."""
    return sum(part.nbytes for part in parts if part.stays)


class HoldPlanner:
    """The plans of one rank, one for each kind of pass that was measured.

    Args:
        budget_bytes: peak of allocated bytes to stay under while offloading as little as possible; None
            to offload everything.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.margin_bytes = 0
        """See `_margin`: the least, a few parts."""
        self.masters_held_bytes = 0
        """Masters that cannot leave before the optimizer step is over, because they are copied to the model at once."""
        self.agree: Agree = lambda room, least: (room, least)
        self.announce: Callable[[str], None] = lambda text: None
        self.warn: Callable[[str], None] = lambda text: None
        """As `announce`, of what concerns this rank alone."""
        self.plans: dict[object, HoldPlan] = {}
        """By what the passes of a kind have in common; see `Schedule.signature`."""
        self._profiles: dict[object, MemoryProfile] = {}
        self._chosen = False

    def forget(self, signature: object) -> None:
        """Let a kind of pass be measured anew."""
        del self.plans[signature], self._profiles[signature]

    def add(self, signature: object, profile: MemoryProfile, parts: Sequence[StepPart], expands: bool) -> None:
        """Plan anew, with the profile of a kind of pass that was measured now; choose the parts that stay.

        Args:
            signature: of the kind of pass.
            profile: the peaks of it.
            parts: of all optimizers of the rank.
            expands: whether the allocator's segments can grow.

        Raises:
            ValueError: the budget cannot be met; gives the least one that can.
        """
        self._profiles[signature] = profile
        sizes = [part.transit_bytes for part in parts]
        worst = MemoryProfile(
            [max(max(profile.intervals) for profile in self._profiles.values())],
            max(profile.step for profile in self._profiles.values()),
        )
        least = least_budget(worst, sizes, self.masters_held_bytes)
        limit = least
        if self.budget_bytes is not None:
            limit = self.budget_bytes
            self._choose(parts, min(limit - worst.intervals[0], limit - least), least)
        for kind, of_kind in self._profiles.items():
            below = limit - self._margin(of_kind, expands)
            self.plans[kind] = plan_holding(of_kind, below, staying_bytes(parts), sizes, self.masters_held_bytes)
        whole = sum(part.nbytes for part in parts)
        away = whole - staying_bytes(parts)
        gib = 2**30
        self.announce(
            f"measured {worst.peak / gib:.2f} GiB beside the states; {away / gib:.2f} of {whole / gib:.2f} GiB "
            f"leave the GPU, and the peak stays under {limit / gib:.2f} GiB"
        )

    def _margin(self, profile: MemoryProfile, expands: bool) -> int:
        """Return how far below the limit to stay, in bytes, while slabs come and go.

        Slabs and activations that share memory leave holes between them, which the allocator has reserved all the
        same: the more, the larger either are. Three times as much where its segments cannot expand.
        """
        activations = max(profile.intervals) - min(profile.intervals)
        margin = max(self.margin_bytes, int(MARGIN_SHARE * activations))
        return margin if expands else 3 * margin

    def _choose(self, parts: Sequence[StepPart], room: int, least: int) -> None:
        """Choose the parts that stay under the budget.

        The ranks agree when the first choice is made. Later, when another kind of pass has been measured, each
        rank looks after itself: it lets fewer parts stay, or says that the budget does not hold.
        """
        assert self.budget_bytes is not None
        if not self._chosen:
            room, least = self.agree(room, least)
            if least > self.budget_bytes:
                raise ValueError(budget_refusal(self.budget_bytes, least))
            self._chosen = True
        else:
            room = min(room, staying_bytes(parts))
            if least > self.budget_bytes:
                self.warn(
                    f"OffloadConfig.gpu_memory_budget_gib={self.budget_bytes / 2**30:g} holds no more: this kind "
                    f"of step needs {least / 2**30:.2f} GiB with everything offloaded"
                )
        staying = choose_staying([part.nbytes for part in parts], room)
        for index, part in enumerate(parts):
            part.stays = index in staying
