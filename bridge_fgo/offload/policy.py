"""How much state the GPU may hold at each point of a training step, and which parts never leave: pure arithmetic.

A **point** is a moment of the forward-backward pass that the model's hooks report: a layer begins its forward,
or ends its backward. Point 0 is the release before the first forward. The interval of a point lasts until the
next one; the optimizer step is an interval of its own. All sizes are in bytes.
"""

import math
from collections.abc import Callable, Container, Sequence
from itertools import accumulate

from bridge_fgo.config import readable
from bridge_fgo.memory.auto_budget import AutoBudget
from bridge_fgo.memory.layout import PartBytes
from bridge_fgo.offload.profile import HoldPlan, MemoryProfile

MOST_PROFILES = 8
"""Profiles that are kept, of passes that cannot merge: they are of several kinds, or several layers ran in them. Each
point of a pass is compared with one of each."""

MOST_LOST = 32  # passes that lost their plan midway that are measured; of those that follow each 32nd is

MARGIN_SHARE = 1 / 12
"""Share of the bytes that activations take and give back to stay below. On H200, 15.4 GB of them: with a margin of 0.6
GB 0.6 to 0.75 GB more was reserved than allocated (9.8 GB of states); with 1.3 GB 0.5 to 0.8 GB, and 0.2 to 1.2 GB
(19.7 GB). A margin that grew by what was reserved above, up to three times, left it at 0.65 GB (9.8 GB)."""


def plan_holding(
    profile: MemoryProfile, limit: int, staying: int, part_bytes: Sequence[int], masters_held: int = 0
) -> HoldPlan:
    """Return what may be held so that the peak of everything stays at or below `limit` bytes if it can.

    `profile` is what there is beside the slabs. In any case are held: `staying` bytes of slabs that stay for good, two
    parts in the optimizer step, and `masters_held` bytes to its end.
    """
    leave = [max(staying, limit - peak) for peak in profile.intervals]
    step = max(staying + masters_held + 2 * max(part_bytes, default=0), limit - profile.step)
    least_until = list(accumulate([step, *reversed(leave)], min))  # from the end on
    return HoldPlan(tuple(leave), tuple(least_until[:0:-1]), step, profile)


def choose_staying(part_bytes: Sequence[int], room: int, in_files: Container[int] = ()) -> set[int]:
    """Return the positions of parts that fit into `room` bytes together and need never leave, from the last on.

    So if parts are updated in order, the updates of these hide the last copies out. Those at `in_files` are
    chosen first: a disk takes the longest.
    """
    staying = set()
    for position in sorted(reversed(range(len(part_bytes))), key=lambda position: position not in in_files):
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


class HoldPolicy:
    """The plans of one rank, and the parts that stay under a budget.

    Measured passes of one kind in which the same layers ran are one profile, the maximum of all of them, and one plan.
    Without a budget (peak of allocated bytes) everything is offloaded; with one as little as possible. `room` finds one
    out in training.
    """

    def __init__(self, budget_bytes: int | None = None, room: AutoBudget | None = None) -> None:
        self.budget_bytes = budget_bytes
        self._device_room = room
        self.margin_bytes = 0  # the least margin below the limit, a few parts; see `_margin`
        self.held_through_step = 0  # bytes of masters that are copied at once, and of states that step undivided
        self.agree: Callable[[int, int], tuple[int, int]] = lambda room, least: (room, least)
        """Takes this rank's bytes that may stay and its least possible budget; returns what all ranks can keep to."""
        self.all_can: Callable[[bool], bool] | None = None
        """Takes whether this rank can choose now, and returns whether all of them can; None if nobody else does."""
        self.announce: Callable[[str], None] = lambda text: None
        self.warn: Callable[[str], None] = lambda text: None  # like `announce`, for what concerns this rank alone
        self.gradients_stay: Callable[[int], tuple[int, int]] | None = None
        """Has as many bytes of gradients as fit into so many stay from now on; returns those that stay, and those that
        leave between microbatches. None if none leave, or without a budget."""
        self._gradients_leave = 0
        self.plans: list[HoldPlan] = []
        # the peak that all plans keep under: the budget, or the highest that releasing throughout would reach
        self.limit = 0
        self._profiles: list[MemoryProfile] = []  # the newest used last
        self._lost = 0
        self._chosen = False
        self._said = ""
        self._least_said = 0

    def plans_for(self, kind: object) -> list[HoldPlan]:
        """Return the plans for passes of one kind (`MemoryProfile.kind`)."""
        return [plan for plan in self.plans if plan.profile.kind == kind]

    @property
    def awaits_ranks(self) -> bool:
        """Whether the choice of what stays is still to come, which all ranks make at the end of the same step."""
        has_budget = self.budget_bytes is not None or self._device_room is not None
        return self.all_can is not None and has_budget and not self._chosen

    def forget(self) -> None:
        """Let every kind of pass be measured anew."""
        self.plans, self._profiles = [], []

    def is_worth_measuring(self) -> bool:
        """Return whether a pass that has just lost its plan is to be measured; it counts those that have.

        If each is of a kind of its own, as with images in some microbatches, no number of profiles covers the next,
        and to measure takes the host some 100 microseconds a point: so later on only some are.
        """
        self._lost += 1
        return self._lost <= MOST_LOST or self._lost % MOST_LOST == 0

    def add(self, profile: MemoryProfile) -> None:
        """Keep what was measured of a pass, as the maximum of that and of what passes like it have needed.

        If there are too many profiles that cannot merge, the least recently used goes.
        """
        for one in list(self._profiles):
            if one.can_merge(profile):
                self._profiles.remove(one)
                profile = profile.merged(one)
        self._profiles.append(profile)
        del self._profiles[:-MOST_PROFILES]

    def is_exceeded(self, plan: HoldPlan, peak: int, parts: Sequence[PartBytes]) -> bool:
        """Compare the peak of a step with what its plan keeps under; return whether to plan anew, as it was above.

        More than one part above, that is: so much may be there twice for a moment. From then on such steps hold as much
        less of the states. If that is not enough, memory beside the states has grown (a cache of the first
        evaluation, say), and the profile grows by it, until the states have nothing left to give.
        """
        profile = plan.profile
        self._profiles.remove(profile)
        self._profiles.append(profile)  # the newest used last
        above = peak - self.limit
        if above <= max((part.transit_bytes for part in parts), default=0):
            return False
        if profile.peak > self.limit:  # a budget that does not hold, with everything offloaded
            return False
        if profile.beyond:
            profile.intervals = [nbytes + above for nbytes in profile.intervals]
            profile.step += above
            return True
        self.warn(
            f"a training step allocated {readable(peak)}, though what went through its layers was no larger "
            f"than in a step that was measured, by which it should have stayed under {readable(self.limit)}: "
            f"from now on such steps hold {readable(above)} less of the optimizer state"
        )
        profile.beyond = above
        return True

    def runs_short(self) -> bool:
        """Return whether the budget that was found out has turned out to be too large, and is to be found out anew."""
        if self._device_room is None or not self._device_room.runs_short():
            return False
        self.warn(
            "PyTorch's allocator had to give back memory that it caches, for lack of GPU memory: more of the optimizer "
            "state leaves from now on (OffloadConfig.gpu_memory_budget_gib='auto')"
        )
        return True

    def plan(self, parts: Sequence[PartBytes], expands: bool) -> set[int]:
        """Plan anew for all measured passes; return the positions of the parts that stay on the GPU for good.

        `expands`: whether the allocator's segments can grow. ValueError, with the least budget that does, for one that
        is less.
        """
        profiles = self._profiles
        sizes = [part.transit_bytes for part in parts]
        peak = max(each.peak for each in profiles)
        least = max(least_budget(each, sizes, self.held_through_step) for each in profiles)
        wanted = max(least_budget(each, sizes, self.held_through_step) + each.beyond for each in profiles)
        if self._device_room is not None:
            # A step with everything offloaded has run, so its peak fits.
            self.budget_bytes = max(self._device_room.budget_bytes(), wanted)
        staying = set() if self.budget_bytes is None else self._choose(parts, self.budget_bytes, least, wanted)
        self.limit = least if self.budget_bytes is None else self.budget_bytes
        kept = sum(parts[position].nbytes for position in staying)
        self.plans = [
            plan_holding(
                each, self.limit - each.beyond - self._margin(each, expands), kept, sizes, self.held_through_step
            )
            for each in profiles
        ]
        whole = sum(part.nbytes for part in parts)
        said = (
            f"measured {readable(peak)} beside the states; {readable(whole - kept)} of {readable(whole)} leave the "
            f"GPU, and the peak stays under {readable(self.limit)}"
        )
        if self.gradients_stay is not None:
            said += f"; {readable(self._gradients_leave)} of gradients leave between microbatches"
        if said != self._said:
            self.announce(said)
            self._said = said
        return staying

    def _margin(self, profile: MemoryProfile, expands: bool) -> int:
        """Return how far below the limit to stay, in bytes, while slabs come and go.

        Slabs and activations that share memory leave holes between them, which the allocator has reserved all the
        same: the more, the larger either are. Three times as much if its segments cannot expand.
        """
        activations = max(profile.intervals) - min(profile.intervals)
        margin = max(self.margin_bytes, int(MARGIN_SHARE * activations))
        return margin if expands else 3 * margin

    def _choose(self, parts: Sequence[PartBytes], budget: int, least: int, wanted: int) -> set[int]:
        """Choose the parts that stay under the budget (bytes); the ranks agree when the first choice is made.

        Later, when another kind of pass has been measured, each rank looks after itself: it lets fewer parts stay, or
        says that the budget does not hold. `least` is the least possible budget by what was measured; `wanted` is that
        and what steps went above their plans, which is kept free too.
        """
        if self._chosen:
            room = min(budget - wanted, sum(part.nbytes for part in parts if part.stays))
            if least > max(budget, self._least_said):
                self._least_said = least
                self.warn(
                    f"OffloadConfig.gpu_memory_budget_gib={budget / 2**30:g} holds no more: this kind "
                    f"of step needs {least / 2**30:.2f} GiB with everything offloaded"
                )
        else:
            room, least = self.agree(budget - least, least)
            if least > budget and self._device_room is None:
                raise ValueError(budget_refusal(budget, least))
            self._chosen = True
            if self.gradients_stay is not None:
                # Before any part: a gradient is copied each way in each microbatch but one, a state once a step. With
                # two microbatches they cost the link the same, with more a gradient costs more.
                more, self._gradients_leave = self.gradients_stay(room)
                for profile in self._profiles:  # they were measured without these
                    profile.intervals = [nbytes + more for nbytes in profile.intervals]
                    profile.step += more
                room -= more
        in_files = {position for position, part in enumerate(parts) if part.in_file}
        return choose_staying([part.nbytes for part in parts], room, in_files)
