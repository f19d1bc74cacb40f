"""Meters: peaks and room of GPU memory, the allocator's blocks, and bytes and host time of moves."""

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from bridge_fgo.memory.guard import Touches

ALLOCATED = "allocated_bytes.all.peak"
ACTIVE = "active_bytes.all.peak"
"""Allocated, or freed while a stream that `record_stream` named may still use it: until then nobody else gets it."""
RESERVED = "reserved_bytes.all.peak"


def segments() -> list[dict[str, Any]]:
    """Return the segments of PyTorch's own allocator; none of another one, for a snapshot of which PyTorch raises."""
    return torch.cuda.memory_snapshot() if torch.cuda.get_allocator_backend() == "native" else []


def is_graphs(segment: dict[str, Any]) -> bool:
    """Return whether a segment is in a private pool: that of a CUDA graph, say."""
    return tuple(segment["segment_pool_id"]) != (0, 0)


class DeviceMemory(NamedTuple):
    """A GPU's memory in bytes: the whole, what nobody has, what PyTorch has reserved, and the most that it may."""

    whole: int
    free: int
    reserved: int
    allowed: int


class PeakMeter:
    """Reads and resets the allocator's peak counters. Without a GPU there is nothing to read.

    Everybody in this package who wants the peak of an interval asks the one meter of the rank, because a reset by one
    would rob the others: the figures of a phase, the schedule's record, and Bridge's own report.

    Intervals are measured by the counter `of_intervals`.
    """

    def __init__(self, of_intervals: str = ALLOCATED) -> None:
        self.of_intervals = of_intervals
        self.run_peaks: dict[str, int] = {}  # highest of each `*.all.peak`: resets must not lower what Bridge reports
        self.reserved_bytes = 0  # highest reservation since this was last set to 0
        self.retries = 0  # how often the allocator had to give back what it caches, for lack of memory
        self.kept_by_graphs = 0  # bytes that CUDA graphs keep for their replays, and that nobody has allocated
        self._phase = 0
        self._interval = 0

    @property
    def works(self) -> bool:
        """Whether there are counters to read: CUDA is up in this process."""
        return torch.cuda.is_available() and torch.cuda.is_initialized()

    @property
    def expands(self) -> bool:
        """Whether the allocator's segments can grow (`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`)."""
        return self.works and any(segment["is_expandable"] for segment in segments())

    @property
    def holes(self) -> int:
        """Bytes that were reserved beside all that was allocated (or active), where both were highest."""
        return max(0, self.run_peaks.get(RESERVED, 0) - self.run_peaks.get(self.of_intervals, 0))

    def device_memory(self) -> DeviceMemory:
        """Return the memory of the current GPU as it is now."""
        free, whole = torch.cuda.mem_get_info()
        fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # from PyTorch 2.8 on
        allowed = whole
        if fraction is not None and torch.cuda.get_allocator_backend() == "native":
            allowed = int(whole * fraction())
        return DeviceMemory(whole, free, torch.cuda.memory_reserved(), allowed)

    def end_phase(self) -> int | None:
        """Return the peak of allocated bytes since the last call of this method; None without a GPU."""
        if not self.works:
            return None
        self._read()
        peak, self._phase = self._phase, 0
        return peak

    def end_interval(self) -> int:
        """Return the peak of allocated (or active) bytes since the last call of this method, and what graphs keep."""
        self._read()
        peak, self._interval = self._interval, 0
        return peak + self.kept_by_graphs

    def count_graphs(self) -> None:
        """Find out anew what CUDA graphs keep: their pools are closed to all others as long as the graphs are there."""
        if self.works:
            graphs = filter(is_graphs, segments())
            self.kept_by_graphs = sum(each["total_size"] - each["active_size"] for each in graphs)

    def _read(self) -> None:
        # `memory_stats` takes the host five times as long: it makes some two hundred names of this, and sorts them.
        stats = torch.cuda.memory_stats_as_nested_dict()
        pools = {name: each["all"] for name, each in stats.items() if isinstance(each, dict) and "all" in each}
        peaks = {f"{name}.all.peak": int(all_pools["peak"]) for name, all_pools in pools.items()}
        for key, value in peaks.items():
            self.run_peaks[key] = max(value, self.run_peaks.get(key, 0))
        torch.cuda.reset_peak_memory_stats()
        self.reserved_bytes = max(peaks.get(RESERVED, 0), self.reserved_bytes)
        self.retries = stats.get("num_alloc_retries", 0)
        self._phase = max(peaks.get(ALLOCATED, 0), self._phase)
        self._interval = max(peaks.get(self.of_intervals, 0), self._interval)


class StepClock:
    """Measures on the GPU how long some work of a training step takes, without a host synchronisation."""

    def __init__(self, meter: PeakMeter) -> None:
        self._meter = meter
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._used = 0

    def begin_step(self) -> None:
        """Forget the last step."""
        self._used = 0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure the work that is enqueued inside the block."""
        if not self._meter.works:
            yield
            return
        if self._used == len(self._pairs):
            self._pairs.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        start, end = self._pairs[self._used]
        start.record()
        yield
        end.record()
        self._used += 1

    def seconds(self) -> float | None:
        """Return the sum of what was measured in the step; None if nothing was or the GPU is not past it yet."""
        pairs = self._pairs[: self._used]
        if not pairs or not pairs[-1][1].query():
            return None
        return sum(start.elapsed_time(end) for start, end in pairs) / 1e3


class Ledger:
    """Counts the bytes of GPU memory that all slabs of the rank hold now."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.block_bytes: Callable[[int], int] = lambda nbytes: nbytes  # what one takes; see `block_rounding`
        self.observer: weakref.WeakMethod[Callable[[bool], None]] | None = None
        """Called with True before slabs take or give back memory, and with False after, when `nbytes` is up to date.
        Weak: a slab that a copy keeps alive must not keep its observer alive."""

    def change[T](self, difference: int, action: Callable[..., T], *args: Any) -> T:
        """Call what takes (or, negative, gives back) that many bytes; they count if it succeeds."""
        told = None if self.observer is None else self.observer()
        if told is not None:
            told(True)
        result = action(*args)
        self.nbytes += difference
        if told is not None:
            told(False)
        return result


class Traffic:
    """Counts what a rank has moved, in bytes, and what it cost the host: the host time inside its blocks."""

    def __init__(self) -> None:
        self.out = 0
        self.back = 0
        self.released = self.most_released = 0  # off the GPU now, and at most since the newest pass began
        self.seconds = 0.0  # host time spent on the moves
        self.to_file = self.from_file = 0  # bytes that a disk wrote and read
        self.file_seconds = 0.0  # for which the training thread waited for the disk; they do not count in `seconds`
        self.touches = Touches()  # counts states that came back because code used them

    def __enter__(self) -> None:
        self.seconds -= time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self.seconds += time.perf_counter()

    def release(self, nbytes: int) -> None:
        """Count bytes of state whose GPU memory went."""
        self.released += nbytes
        self.most_released = max(self.most_released, self.released)


MIB_BITS = 20
LEAST_DIVISION = 512  # smaller divisions are not made
MOST_UNSPLIT = 20 * 2**20  # by which a block that must not be split may be larger than what was asked for


def block_rounding(device: torch.device) -> Callable[[int], int]:
    """Return what gives the bytes of the block for an allocation, at most, by the allocator's settings.

    `roundup_power2_divisions` has the divisions between one power of two and the next, from 1 MiB on. Of a block that
    `max_split_size_mb` forbids to split up to 20 MiB more are taken, if segments cannot expand. 1 MiB a block, which
    may be left over otherwise, is not counted: the margins below a limit are for that.
    """
    divisions: list[int] = []
    splits_below = -1
    if device.type == "cuda" and torch.cuda.get_allocator_backend() == "native":
        snapshot: Any = torch.cuda.memory._snapshot()
        settings = snapshot["allocator_settings"].get("roundup_power2_divisions", {})
        divisions = [settings[size] for size in sorted(settings, key=int)]
        if not snapshot["allocator_settings"].get("expandable_segments", False):
            splits_below = snapshot["allocator_settings"].get("max_split_size", -1)

    def rounded(nbytes: int) -> int:
        power = nbytes.bit_length() - 1
        count = divisions[min(max(0, power - MIB_BITS), len(divisions) - 1)] if divisions else 0
        if count > 1 and nbytes > LEAST_DIVISION * count:
            division = (1 << power) // count
            nbytes = -(-nbytes // division) * division
        return nbytes + MOST_UNSPLIT if 0 < splits_below <= nbytes else nbytes

    return rounded
