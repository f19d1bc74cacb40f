"""How long the training stream waits for copies, and whether it is worth while to copy less."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

PACKING_SECONDS_A_BYTE = 1.6e-12
"""Of masters: what it takes the GPU to pack and unpack them. Measured on an H200: 10.3 ms for 6.6 GB."""

IN_A_ROW = 2
"""Steps of a kind in which training waits longer than that before masters are packed: one alone may follow a load."""

MOST_TIMED = 8
"""Steps of a kind that are timed. What waits then it shows by then; later nothing changes, and nothing costs time."""

MOST_UNPLANNED = 6
"""Steps in a row without a plan, in which every copy is waited for, before masters are packed."""

LEAST_SECONDS = 50e-6
"""Shorter ones are no waits, but the time that two events take."""


class WaitMeter:
    """Times the training stream's waits for copies in one training step after another. The host waits for nothing.

    The figures of a step come when the GPU is done with it, and the step that is timed next begins after that.

    Args:
        make_event: makes an event with timing.
    """

    def __init__(
        self, make_event: Callable[[], torch.cuda.Event] = lambda: torch.cuda.Event(enable_timing=True)
    ) -> None:
        self._make_event = make_event
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] | None = None
        self._ended: list[tuple[torch.cuda.Event, torch.cuda.Event]] | None = None

    @property
    def is_timing(self) -> bool:
        """Whether waits are timed now."""
        return self._waits is not None

    def begin(self) -> None:
        """Time the waits from here on, if the figures of the step before have been taken."""
        self._waits = [] if self._ended is None else None

    def end(self) -> None:
        """The step is over."""
        if self._waits is not None:
            self._ended, self._waits = self._waits, None

    def drop(self) -> None:
        """The step was none that says anything."""
        self._waits = None

    def around(self, wait: Callable[[], None], stream: torch.cuda.Stream) -> None:
        """Have the training stream wait, by `wait`, and time it."""
        assert self._waits is not None
        events = self._make_event(), self._make_event()
        events[0].record(stream)
        wait()
        events[1].record(stream)
        self._waits.append(events)

    def take(self) -> float | None:
        """Return the seconds that the training stream has waited in the newest timed step, once; None before."""
        if self._ended is None or (self._ended and not self._ended[-1][1].query()):
            return None
        waits = [begin.elapsed_time(end) / 1e3 for begin, end in self._ended]
        self._ended = None
        return sum(seconds for seconds in waits if seconds > LEAST_SECONDS)


class PackingChoice:
    """Whether masters are packed before they are copied: only where training waits longer for copies than that takes.

    Until that is known they are copied whole. Each rank chooses for itself; no bit depends on it.

    Args:
        waits: times the waits; None where every copy is waited for, so that masters are packed from the start.
        announce: says it.
    """

    def __init__(self, waits: WaitMeter | None, announce: Callable[[str], None]) -> None:
        self.packs = waits is None
        """Whether masters that leave from now on are packed."""
        self.packable_bytes = 0
        """Of masters that are packed if this says so; without any nothing is timed."""
        self._waits = waits
        self._announce = announce
        self._kind: object = None
        self._timed: Counter[object] = Counter()
        self._over: Counter[object] = Counter()
        self._unplanned = 0

    @property
    def _is_settled(self) -> bool:
        return self.packs or not self.packable_bytes

    def begin_pass(self, kind: object, by_plan: bool) -> None:
        """Choose by the newest step that was timed; time this one.

        Args:
            kind: what passes have in common whose waits are alike.
            by_plan: whether states leave late and come early in it, as in the ones that follow.
        """
        if self._waits is None or self._is_settled:
            return
        self._waits.drop()  # of a step that an error has ended
        seconds = self._waits.take()
        if seconds is not None:
            kind_then = self._kind
            self._timed[kind_then] += 1
            over = seconds > PACKING_SECONDS_A_BYTE * self.packable_bytes
            self._over[kind_then] = self._over[kind_then] + 1 if over else 0
            if self._over[kind_then] == IN_A_ROW:
                self._pack(f"training waited {seconds * 1e3:.1f} ms for copies in a step")
                return
        if by_plan and self._timed[kind] < MOST_TIMED:
            self._waits.begin()
            if self._waits.is_timing:  # else the newest figures, which are not here yet, are of another kind
                self._kind = kind

    def end_step(self, updated: bool, by_plan: bool) -> None:
        """The step is over.

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
            if self._unplanned == MOST_UNPLANNED:
                self._pack(
                    f"the peaks of {MOST_UNPLANNED} steps gave no plan for the next, and training waits for copies"
                )

    def _pack(self, why: str) -> None:
        self.packs = True
        self._announce(f"{why}: from now on masters are copied in part (OffloadConfig.master_remainders)")
