"""What more GPU memory would save: one step is timed, and a line says it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from bridge_fgo.memory.meters import DeviceRoom, PeakMeter, StepClock
from bridge_fgo.memory.slab import Slab
from bridge_fgo.memory.transfers import Transfers

TIMED_STEP = 2
"""The step that is timed, of those that follow one with a plan: the first of them is the first that prefetches, and so
the first that leaves copies out to the next pass."""

MORE_GIB = (2, 4, 8)
LEAST_SECONDS = 0.01  # of waiting in a step that are worth a line


class Advice:
    """Times how long training waits for copies in one step, on the GPU and without a wait of the host.

    A byte that stays on the GPU saves its copy out and its copy in. Both directions run at once, so it saves as long as
    one copy takes, until training waits for none.
    """

    def __init__(self, transfers: Transfers, meter: PeakMeter) -> None:
        self._transfers, self._meter = transfers, meter
        self._clock = StepClock(meter)
        self._planned = 0  # steps with a plan so far
        self._sent: Sequence[Slab] = ()  # while their copies out are timed
        self._rate = 0.0  # of these, in bytes a second, until the line is made

    @contextmanager
    def training_step(self, is_planned: bool) -> Iterator[None]:
        """Context of a training step, after one that went by a plan or not."""
        self._planned += is_planned
        if not self._is_timed:
            yield
            return
        self._clock.begin_step()
        self._transfers.timing = self._clock.measure
        try:
            yield
        finally:
            self._transfers.timing = nullcontext

    @property
    def _is_timed(self) -> bool:
        return self._planned == TIMED_STEP

    def sent(self, slabs: Sequence[Slab]) -> None:
        """Note what is copied out, one after another, as a pass begins."""
        self._sent = slabs if self._is_timed else ()

    def line(self, peak: int) -> str:
        """Return the line, once, at the end of a step after the timed one; else nothing.

        `peak` is the planned one, in bytes.
        """
        if len(self._sent) > 1:
            seconds = self._transfers.seconds_between_copies_out(self._sent[0], self._sent[-1])
            self._rate = sum(slab.nbytes for slab in self._sent[1:]) / seconds if seconds else 0.0
            self._sent = ()
        if not self._rate or (waited := self._clock.seconds()) is None:
            return ""
        most, now = DeviceRoom(self._meter).budget_bytes() // 2**30, peak / 2**30
        budgets = [gib for more in MORE_GIB if (gib := math.ceil(now) + more) <= most]
        saved = [min(waited, (gib - now) * 2**30 / self._rate) for gib in budgets]
        self._rate = 0.0
        if waited < LEAST_SECONDS or not budgets:
            return ""
        shorter = ", ".join(f"{gib}: {seconds:.2f} s" for gib, seconds in zip(budgets, saved, strict=True))
        return (
            f"training waits {waited:.2f} s a step for copies; OffloadConfig.gpu_memory_budget_gib would make a step "
            f"shorter, with {shorter}"
        )
