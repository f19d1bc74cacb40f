"""How much of a GPU's memory PyTorch may allocate: what `gpu_memory_budget_gib="auto"` stands for."""

from __future__ import annotations

from bridge_fgo.memory.meters import PeakMeter

LEAST_MARGIN = 32
"""The margin is a 32nd of the GPU's memory at least (4.4 of 140 GiB): the first steps show few of the holes to come."""

MOST_HOLES = 16
"""Of the holes of the first steps no more than a 16th of the memory counts: what a load has reserved is
used again."""

GROWTH = 1.25
"""Factor by which the margin grows, at least, each time that it was too small."""


class DeviceRoom:
    """All memory of a GPU that PyTorch may have, but what others have, and a margin.

    Others are the CUDA context, NCCL, libraries' workspaces and other processes. The margin is for holes: memory that
    PyTorch's allocator has reserved and that fits nothing. Where it was too small, the allocator has to give back what
    it caches, which takes time, or training would run out of memory.

    Args:
        meter: the allocator's peaks, of a GPU.
    """

    def __init__(self, meter: PeakMeter) -> None:
        self._meter = meter
        self._margin = 0
        self._retries = 0

    def budget_bytes(self) -> int:
        """Return the most bytes that PyTorch may have allocated, by what is known now."""
        memory = self._meter.device_memory()
        if not self._margin:
            holes = min(self._meter.holes, memory.whole // MOST_HOLES)
            self._margin = max(memory.whole // LEAST_MARGIN, holes)
            self._retries = self._meter.retries
        others = memory.whole - memory.free - memory.reserved
        return min(memory.whole - others, memory.allowed) - self._margin

    def runs_short(self) -> bool:
        """Return whether the allocator had to give back what it caches since the last call; then the margin grows."""
        before, self._retries = self._retries, self._meter.retries
        if self._retries == before:
            return False
        self._margin = max(int(GROWTH * self._margin), self._meter.holes)
        return True
