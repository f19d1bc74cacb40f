"""Moving a slab between GPU memory and its host buffer: the verbs, and copies within host memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, override

import torch

from bridge_fgo.memory.host_buffer import HostBuffer
from bridge_fgo.memory.layout import pieces
from bridge_fgo.memory.meters import WaitMeter


class Movable(Protocol):
    """What the copies of a `Slab` need to know of it, and have it do."""

    gpu: torch.Tensor | None
    staging: torch.Tensor | None
    host: HostBuffer

    @property
    def moving(self) -> torch.Tensor:
        """GPU memory that is copied, uint8."""
        ...

    @property
    def is_lent(self) -> bool:
        """Whether a checkpoint's writer may still read the host buffer."""
        ...

    def allocate(self) -> None:
        """Take GPU memory, of undefined content."""

    def free(self) -> None:
        """Give the GPU memory back."""


class Transfers(ABC):
    """Moves slabs. One object a device, shared by every source of the rank.

    What is not abstract does what there is to do where a copy has ended when it returns.
    """

    keeps_host_copies = True
    """Whether a slab's host buffer still has its states when they are back on the GPU."""
    waits: WaitMeter | None = None
    """What times the training stream's waits for copies; None where the host does them, and waits for all."""

    def begin_pass(self) -> None:  # noqa: B027
        """Remember the current stream as the one that forward and backward run on.

        It is the training stream until the next pass begins: whatever else reads or writes states meanwhile, on
        another stream, is to have that one wait for it. Where a pass is on another stream than the one before, that
        waits for what the one before holds; a former training stream that goes on to compute something of its own
        has to wait for the new one, as with any memory of PyTorch's that another stream uses.
        """

    def on_compute_stream(self) -> AbstractContextManager[object]:
        """Context on that stream: a model's hooks may run on side streams of its own."""
        return nullcontext()

    def computing(self) -> AbstractContextManager[object]:
        """Context on that stream, ordered after what the current stream holds and before what it gets next."""
        return nullcontext()

    def back_to_back(self) -> AbstractContextManager[object]:
        """Context for a run of copies in one direction: waits are recorded once, for the first."""
        return nullcontext()

    def yielding(self) -> AbstractContextManager[object]:
        """Context for copies out that begin when all copies in that were started are over."""
        return nullcontext()

    def capturing(self) -> bool:
        """Return whether the current stream is being captured into a CUDA graph, where nothing may move."""
        return False

    @abstractmethod
    def copy_out(self, slab: Movable, written: bool = True) -> None:
        """Start the copy of a slab to its host buffer, after what the current stream holds.

        Args:
            slab: whose bytes to copy.
            written: whether something that writes it was enqueued since the last copy of the same `back_to_back`.
        """

    def release(self, slab: Movable) -> None:
        """Free the slab's GPU memory, which nothing may reuse before the copy out has read it."""
        self.wait_out(slab)
        slab.free()

    @abstractmethod
    def copy_in(self, slab: Movable) -> None:
        """Allocate the slab's GPU memory on the current stream and start the copy from its host buffer."""

    def wait_in(self, slab: Movable) -> None:  # noqa: B027
        """Make the current stream wait for the copy in."""

    def finish_out(self) -> None:  # noqa: B027
        """Return when every copy out that was started is over, so that the host may read the buffers."""

    def await_released(self) -> None:  # noqa: B027
        """Return when nothing uses the memory of slabs that were released, so that the driver may have it."""

    def forget(self, host_address: int) -> None:  # noqa: B027
        """Let go of a host buffer that no slab uses any more; return when the copies from and to it are over."""

    def has_landed(self, slab: Movable) -> bool:
        """Return whether the newest copy in is over; the host does not wait for it."""
        return True

    def wait_out(self, slab: Movable) -> None:  # noqa: B027
        """Make the current stream wait for the newest copy out, if there was one."""


class HostTransfers(Transfers):
    """The same copies, done at once, where states live in host memory: shows that moves are right, not how fast."""

    def __init__(self, piece_bytes: int) -> None:
        self._piece_bytes = piece_bytes

    @override
    def copy_out(self, slab: Movable, written: bool = True) -> None:
        moving = slab.moving
        for start, end in pieces(moving.numel(), self._piece_bytes):
            slab.host.tensor[start:end].copy_(moving[start:end])

    @override
    def copy_in(self, slab: Movable) -> None:
        slab.allocate()
        moving = slab.moving
        for start, end in pieces(moving.numel(), self._piece_bytes):
            moving[start:end].copy_(slab.host.tensor[start:end])
