"""Whether masters are packed before they are copied: arithmetic on how long training waits for copies.

Masters that are packed cannot be brought back where something but the optimizer has changed their weights meanwhile:
training ends. So that this does not depend on how long a machine waits, the weights are watched before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from bridge_fgo.memory.meters import WaitMeter

PACKING_SECONDS_A_BYTE = 1.6e-12
"""GPU seconds per byte of masters to pack and unpack them. Measured on an H200: 10.3 ms for 6.6 GB."""

IN_A_ROW = 2
"""Steps of a kind in which training waits longer than that before masters are packed: one alone may follow a load."""

MOST_TIMED = 8
"""Timed steps per kind; a kind that has not waited by then is no longer timed."""

MOST_UNPLANNED = 6
"""Steps in a row without a plan, in which every copy is waited for, before masters are packed."""

WATCHED_STEPS = 4
"""Steps in a row over which the weights are seen unchanged before masters are packed: enough for what writes weights in
each step or in every fourth. As many as pass anyway, on a GPU, before two steps that waited are known."""


class PackingPolicy:
    """Decides whether masters are packed: only where training waits longer for copies than packing takes.

    Until that is known they are copied whole, and so they are for good where weights changed while they were watched.
    Each rank decides for itself; no bit depends on it.

    Args:
        waits: times the waits; None where every copy is waited for, so that packing pays from the start.
        announce: gets a line when masters begin to be packed.
        warn: gets a line when they never will be, because weights have changed.
    """

    def __init__(
        self, waits: WaitMeter | None, announce: Callable[[str], None], warn: Callable[[str], None] = lambda text: None
    ) -> None:
        self.packs = False
        """Whether masters that leave from now on are packed."""
        self.packable_bytes = 0
        """Bytes of masters that are packed if this says so; without any nothing is timed or watched."""
        self.checks_weights = False
        """Whether the weights are to be watched in the present step, because masters may be packed soon."""
        self._waits = waits
        self._announce, self._warn = announce, warn
        self._why = "training waits for every copy" if waits is None else ""
        """Why packing pays; empty where that is not known."""
        self._is_off = False
        self._watched = 0
        """Steps in a row at whose end the weights' sums were taken."""
        self._kind: object = None
        """Kind of the newest step that was timed."""
        self._timed: Counter[object] = Counter()
        self._over: Counter[object] = Counter()
        self._unplanned = 0

    @property
    def is_settled(self) -> bool:
        """Whether masters are packed for good, or will never be: nothing is timed or watched any more."""
        return self.packs or self._is_off or not self.packable_bytes

    @property
    def pays(self) -> bool:
        """Whether training is known to wait longer than packing takes."""
        return bool(self._why)

    @property
    def can_decide(self) -> bool:
        """Whether packing pays, and the weights were watched for as long as it takes to `decide`."""
        return self.pays and not self.is_settled and self._watched > WATCHED_STEPS

    def begin_pass(self, kind: object, by_plan: bool) -> None:
        """Judge by the newest step that was timed; time this one.

        Args:
            kind: what passes have in common whose waits are alike.
            by_plan: whether states leave late and come early in this pass, as in the ones that follow.
        """
        if not self.is_settled and not self.pays:
            self._time(kind, by_plan)
        may_follow = self.pays or not by_plan or self._timed[kind] < MOST_TIMED
        self.checks_weights = may_follow and not self.is_settled

    def _time(self, kind: object, by_plan: bool) -> None:
        if self._waits is None:
            return
        self._waits.drop()  # of a step that an error has ended
        seconds = self._waits.take()
        if seconds is not None:
            self._timed[self._kind] += 1
            over = seconds > PACKING_SECONDS_A_BYTE * self.packable_bytes
            self._over[self._kind] = self._over[self._kind] + 1 if over else 0
            if self._over[self._kind] == IN_A_ROW:
                self._why = f"training waited {seconds * 1e3:.1f} ms for copies in a step"
                return
        if by_plan and self._timed[kind] < MOST_TIMED:
            self._waits.begin()
            if self._waits.is_timing:  # else the newest figures, which are not here yet, are of another kind
                self._kind = kind

    def end_step(self, updated: bool, by_plan: bool) -> None:
        """End the step's timing; packing pays where steps go without a plan.

        Args:
            updated: whether the optimizer stepped.
            by_plan: whether the plan held to the end.
        """
        if self.is_settled:
            return
        if updated:
            self._watched = self._watched + 1 if self.checks_weights else 0
        if self._waits is None or self.pays:
            return
        if updated and by_plan:
            self._waits.end()
        else:
            self._waits.drop()
        if updated:
            self._unplanned = 0 if by_plan else self._unplanned + 1
        if updated and self._unplanned == MOST_UNPLANNED:
            self._why = f"the peaks of {MOST_UNPLANNED} steps gave no plan for the next, and training waits for copies"

    def decide(self, have_changed: bool) -> None:
        """Have masters packed from now on, or never, because weights have changed in a step that was watched."""
        self.checks_weights = False
        if have_changed:
            self._is_off = True
            self._warn(
                "something but the optimizer changed weights of the model between optimizer steps, or let go of their "
                "memory: masters go on being copied whole (OffloadConfig.master_remainders; with False nothing is "
                "watched)"
            )
        else:
            self.packs = True
            self._announce(f"{self._why}: from now on masters are copied in part (OffloadConfig.master_remainders)")
