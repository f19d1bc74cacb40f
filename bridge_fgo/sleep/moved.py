"""What one call has moved, and what all moves use: streams, waits, and memory that is taken for all or none."""

import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch

from bridge_fgo.memory.cuda_driver import Stream
from bridge_fgo.memory.host_buffer import HostBuffer
from bridge_fgo.memory.storage_slab import StorageSlab

Kind = Literal["params", "grads", "optimizer"]
KINDS: tuple[Kind, ...] = ("params", "grads", "optimizer")  # what is offloaded and reloaded apart
Kinds = Kind | Literal["all"] | Iterable[Kind]  # what a call is to move: a name, or names; no names are nothing

RETURNED_BYTES = 2**30
"""The driver gets memory back each time that this much is released, while other memory is copied. It takes 290 to 480
GB/s on an H200, and 250 where segments are expandable: five times as many as the link."""

LEAST_KEPT_BYTES = 64 * 2**20
"""Warn if at least this much released memory is still in use; less may be another thread's."""


@dataclass
class Moved:
    """What one call of `Residency` has moved on this rank; `freed` and `returned` are negative after a reload."""

    copied: int = 0
    """Bytes that crossed the link between GPU and host, in either direction."""
    freed: int = 0
    """Bytes of GPU memory of parameters, gradients and states that were released."""
    returned: int = 0
    """Bytes that the driver has free more than before, by `cudaMemGetInfo`; other processes' too. 0 without a GPU."""
    seconds: float = 0.0
    """Host time of the call, at whose end every copy is done."""
    woke: tuple[str, ...] = ()
    """What was reloaded without being asked for: packed masters need the weights that they round to."""
    caches: int = 0
    """Bytes of GPU memory of caches and workspaces that were dropped (`sleep.caches`), beside `freed`."""
    stays: dict[str, int] | None = None
    """Bytes of GPU memory that are still taken after a sleep: by tensors ("allocated"), by PyTorch's allocator beside
    them ("cached"), and by all others ("outside"): the CUDA context, NCCL, libraries, other processes. Of "allocated",
    "unhosted" is what never moves, as the limit of host memory has no room for it."""
    copied_by_kind: dict[str, int] = field(default_factory=dict)
    """`copied` for each of "params", "grads" and "optimizer" that moved."""
    seconds_by_part: dict[str, float] = field(default_factory=dict)
    """Host time of the call's parts, waits for the GPU included: "compare" (masters with weights), "optimizer",
    "params" and "grads" (sums, copies and memory), "wait" (for the last copies), "driver" (memory that it takes back)
    and "caches" (those that are dropped)."""


class Tally:
    """Counts what a call moves in `moved`, and takes the time and the driver's figures around it."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._device = device
        self._free = torch.cuda.mem_get_info(device)[0] if self._is_cuda else 0
        self._allocated = torch.cuda.memory_allocated(device) if self._is_cuda else 0
        self._began = time.perf_counter()
        self.moved = Moved()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time of the block as that of a part."""
        began = time.perf_counter()
        try:
            yield
        finally:
            parts = self.moved.seconds_by_part
            parts[name] = parts.get(name, 0.0) + time.perf_counter() - began

    def copy(self, kind: str, nbytes: int) -> None:
        """Count bytes that crossed the link."""
        kinds = self.moved.copied_by_kind
        kinds[kind] = kinds.get(kind, 0) + nbytes
        self.moved.copied += nbytes

    def note_what_stays(self, unhosted: int = 0) -> None:
        """Take the figures of what is still on the GPU; warn if memory that was released is among it.

        unhosted: bytes for which the limit of host memory has no room.
        """
        if not self._is_cuda:
            return
        moved = self.moved
        free, total = torch.cuda.mem_get_info(self._device)
        allocated, reserved = torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)
        moved.stays = {"allocated": allocated, "cached": reserved - allocated, "outside": total - free - reserved}
        if unhosted:
            moved.stays["unhosted"] = unhosted
        kept = moved.freed + moved.caches - (self._allocated - allocated)
        if kept > LEAST_KEPT_BYTES:
            warnings.warn(
                f"{kept / 1e9:.2f} GB that were sent off the GPU are still taken there: another process has handles of "
                "them, as of a weight sync by CUDA IPC; have it let go of them before the next sleep",
                stacklevel=2,
            )

    def end(self) -> Moved:
        """Take the figures of the end, and return all."""
        self.moved.seconds = time.perf_counter() - self._began
        if self._is_cuda:
            self.moved.returned = torch.cuda.mem_get_info(self._device)[0] - self._free
        return self.moved


class SideStream:
    """A stream for copies beside what the current one computes; nothing without a GPU.

    It is in no pool: PyTorch hands the streams of its pool to others too, who would queue behind these copies.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._owned = Stream()
            self._stream = torch.cuda.ExternalStream(self._owned.handle.value, device)

    def after_current(self) -> AbstractContextManager[object]:
        """Context in which it is the current stream, ordered after what that one holds now."""
        if self._stream is None:
            return nullcontext()
        # Race: an update or an all-gather that is queued may still write what is copied.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return torch.cuda.stream(self._stream)

    def synchronize(self) -> None:
        """Make the host wait for the copies."""
        if self._stream is not None:
            self._stream.synchronize()


def wait_for_gpu(device: torch.device) -> None:
    """Make the host wait for everything on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def return_to_driver(device: torch.device) -> None:
    """Give what the allocator caches back to the driver.

    The host must have waited for all its users: PyTorch waits for nothing here, and for what `cudaFree` waits is not
    documented. On an H200 it did not wait for a copy on another stream.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()


def map_hosts(slabs: Sequence[StorageSlab]) -> list[HostBuffer]:
    """Map the host memory of storages that have none yet; return the buffers, to be page-locked."""
    return [buffer for slab in slabs for buffer in slab.map_host()]
