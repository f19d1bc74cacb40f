"""Whether masters are packed before they are copied: arithmetic on how long training waits for copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from bridge_fgo.core.meters import WaitMeter

PACKING_SECONDS_A_BYTE = 1.6e-12
"""GPU seconds per byte of masters to pack and unpack them. Measured on an H200: 10.3 ms for 6.6 GB."""

IN_A_ROW = 2
"""Steps of a kind in which training waits longer than that before masters are packed: one alone may follow a load."""

MOST_TIMED = 8
"""Timed steps per kind; a kind that has not waited by then is no longer timed."""

MOST_UNPLANNED = 6
"""Steps in a row without a plan, in which every copy is waited for, before masters are packed."""


class PackingPolicy:
    """Decides whether masters are packed: only where training waits longer for copies than packing takes.

    Until that is known they are copied whole. Each rank decides for itself; no bit depends on it.

    Args:
        waits: times the waits; None where every copy is waited for, so that masters are packed from the start.
        announce: gets a line when masters begin to be packed.
    """

    def __init__(self, waits: WaitMeter | None, announce: Callable[[str], None]) -> None:
        self.packs = waits is None
        """Whether masters that leave from now on are packed."""
        self.packable_bytes = 0
        """Bytes of masters that are packed if this says so; without any nothing is timed."""
        self._waits = waits
        self._announce = announce
        self._kind: object = None
        """Kind of the newest step that was timed."""
        self._timed: Counter[object] = Counter()
        self._over: Counter[object] = Counter()
        self._unplanned = 0

    @property
    def _is_settled(self) -> bool:
        return self.packs or not self.packable_bytes

    def begin_pass(self, kind: object, by_plan: bool) -> None:
        """Decide by the newest step that was timed; time this one.

        Args:
            kind: what passes have in common whose waits are alike.
            by_plan: whether states leave late and come early in this pass, as in the ones that follow.
        """
        if self._waits is None or self._is_settled:
            return
        self._waits.drop()  # of a step that an error has ended
        seconds = self._waits.take()
        if seconds is not None:
            self._timed[self._kind] += 1
            over = seconds > PACKING_SECONDS_A_BYTE * self.packable_bytes
            self._over[self._kind] = self._over[self._kind] + 1 if over else 0
            if self._over[self._kind] == IN_A_ROW:
                self._pack(f"training waited {seconds * 1e3:.1f} ms for copies in a step")
                return
        if by_plan and self._timed[kind] < MOST_TIMED:
            self._waits.begin()
            if self._waits.is_timing:  # else the newest figures, which are not here yet, are of another kind
                self._kind = kind

    def end_step(self, updated: bool, by_plan: bool) -> None:
        """End the step's timing; masters are packed where steps go without a plan.

        Args:
            updated: whether the optimizer stepped.
            by_plan: whether the plan held to the end.
        """
        if self._waits is None or self._is_settled:
            return
        if updated and by_plan:
            self._waits.end()
        else:
            self._waits.drop()
        if updated:
            self._unplanned = 0 if by_plan else self._unplanned + 1
        if updated and self._unplanned == MOST_UNPLANNED:
            self._pack(f"the peaks of {MOST_UNPLANNED} steps gave no plan for the next, and training waits for copies")

    def _pack(self, why: str) -> None:
        self.packs = True
        self._announce(f"{why}: from now on masters are copied in part (OffloadConfig.master_remainders)")
