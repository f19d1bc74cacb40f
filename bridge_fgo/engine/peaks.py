"""Peaks of allocated GPU memory, taken interval by interval without losing the peak of the run."""

from __future__ import annotations

import torch

ALLOCATED = "allocated_bytes.all.peak"
RESERVED = "reserved_bytes.all.peak"


class PeakMeter:
    """Reads and resets the allocator's peak counters. Without a GPU there is nothing to read.

    Everybody in this package who wants the peak of an interval asks the one meter of the rank, because a reset
    by one would rob the others: the figures of a phase, the schedule's record, and Bridge's own report.
    """

    def __init__(self) -> None:
        self.run_peaks: dict[str, int] = {}
        """Highest value so far of each `*.all.peak` key of `torch.cuda.memory_stats`; resetting the counters
        must not lower what Bridge reports."""
        self.reserved_bytes = 0
        """Highest reservation since this was last set to 0, in bytes."""
        self._phase = 0
        self._interval = 0

    @property
    def works(self) -> bool:
        """Whether there are counters to read: CUDA is up in this process."""
        return torch.cuda.is_available() and torch.cuda.is_initialized()

    @property
    def expands(self) -> bool:
        """Whether the allocator's segments can grow (`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`)."""
        if not self.works or torch.cuda.get_allocator_backend() != "native":
            return False  # PyTorch raises for a snapshot of another allocator
        return any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())

    def end_phase(self) -> int | None:
        """Return the peak of allocated bytes since the last call of this method; None without a GPU."""
        if not self.works:
            return None
        self._read()
        peak, self._phase = self._phase, 0
        return peak

    def end_interval(self) -> int:
        """Return the peak of allocated bytes since the last call of this method."""
        self._read()
        peak, self._interval = self._interval, 0
        return peak

    def _read(self) -> None:
        stats = torch.cuda.memory_stats()
        for key, value in stats.items():
            if key.endswith(".all.peak"):
                self.run_peaks[key] = max(value, self.run_peaks.get(key, 0))
        torch.cuda.reset_peak_memory_stats()
        self.reserved_bytes = max(stats.get(RESERVED, 0), self.reserved_bytes)
        peak = int(stats.get(ALLOCATED, 0))
        self._phase, self._interval = max(peak, self._phase), max(peak, self._interval)
