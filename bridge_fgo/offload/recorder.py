"""Measures what one pass, and the optimizer step after it, need beside the slabs."""

from __future__ import annotations

import weakref

from bridge_fgo.memory.meters import Ledger, PeakMeter
from bridge_fgo.offload.profile import MemoryProfile


class PeakRecorder:
    """Fills the profile of a pass, point by point, while slabs come and go.

    Each reading of the peaks takes the host some 100 microseconds, so that few passes are measured.

    Args:
        meter: the allocator's peaks; where it does not work (no GPU), nothing is ever measured.
        ledger: the bytes that slabs hold.
    """

    def __init__(self, meter: PeakMeter, ledger: Ledger) -> None:
        self._meter, self._ledger = meter, ledger
        self.profile: MemoryProfile | None = None
        """Of the pass that is measured; None where none is."""
        self.in_step = False
        """Whether the pass is over, and the optimizer steps."""
        self._pass_peak = 0
        """Of a pass that is not measured: the peak of all that was allocated, as far as it was read."""

    @property
    def expands(self) -> bool:
        """Whether the allocator's segments can grow."""
        return self._meter.expands

    def begin_pass(self) -> None:
        """Forget what was before: an evaluation, or the same pass that is run again."""
        self.drop()
        self.in_step = False

    def release(self) -> None:
        """Pass point 0; peaks count from here."""
        if self._meter.works:
            self._meter.end_interval()
            self._pass_peak = 0

    def record(self, profile: MemoryProfile) -> None:
        """Measure from now on, into the last interval of a profile and those that follow."""
        if self._meter.works:
            self._meter.end_interval()  # what came before belongs to no interval
            self.profile = profile
            self._ledger.observer = weakref.WeakMethod(self._memory_changes)

    def drop(self) -> None:
        """Measure no more."""
        self.profile = self._ledger.observer = None

    def point(self) -> None:
        """Pass a point."""
        self.measure()
        if self.profile is not None:
            self.profile.intervals.append(0)

    def end_pass(self) -> None:
        """End the pass: what follows is the optimizer step."""
        self.measure()
        self.in_step = True

    def measure(self) -> None:
        """Note the peak since the last reading."""
        if self.profile is None:
            return
        others = self._meter.end_interval() - self._ledger.nbytes
        if self.in_step:
            self.profile.step = max(others, self.profile.step)
        else:
            self.profile.intervals[-1] = max(others, self.profile.intervals[-1])

    def _memory_changes(self, before: bool) -> None:
        """Measure what was there until slabs take or give back memory, and leave out the change itself."""
        if before:
            self.measure()
        elif self.profile is not None:
            self._meter.end_interval()

    def newest_others(self) -> int:
        """Return a bound in bytes for what was beside the slabs since the newest point of a pass that is not measured.

        Since then slabs have held what they hold now, so that this is in the peak; unless a reader, a checkpoint in the
        midst of a pass say, has had some brought back.
        """
        self._pass_peak = max(self._pass_peak, self._meter.end_interval())
        return self._pass_peak - self._ledger.nbytes

    def peak(self) -> int:
        """Return the peak of all that was allocated in a pass that was not measured, and in its step."""
        return max(self._pass_peak, self._meter.end_interval())
