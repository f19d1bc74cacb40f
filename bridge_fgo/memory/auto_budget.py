"""The budget of `gpu_memory_budget_gib="auto"`: a GPU's memory, less a margin for fragmentation."""

from bridge_fgo.memory.meters import PeakMeter

LEAST_MARGIN = 32  # the margin is a 32nd of the GPU's memory at least: the first steps show few of the holes to come
MOST_HOLES = 16  # no more than a 16th of the memory counts as holes: what a load has reserved is used again
GROWTH = 1.25  # factor by which the margin grows, at least, each time that it was too small


class AutoBudget:
    """All memory of a GPU that PyTorch may have, but what others have, and a margin: `gpu_memory_budget_gib="auto"`.

    Others are the CUDA context, NCCL, libraries' workspaces and other processes. The margin is for holes: memory that
    PyTorch's allocator has reserved and that fits nothing. If it was too small, the allocator has to give back what
    it caches, which takes time, or training would run out of memory.
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
