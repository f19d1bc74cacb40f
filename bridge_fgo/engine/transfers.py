"""Copies between a slab's GPU memory and its host buffer: streams, pieces and events."""

from __future__ import annotations

from typing import Protocol

import torch

from bridge_fgo.engine.plan import pieces
from bridge_fgo.engine.slab import Slab


class Transfers(Protocol):
    """Moves slabs. One object a device, shared by every optimizer of the rank."""

    bytes_out: int
    """Bytes copied to the host so far."""

    bytes_in: int
    """Bytes copied from the host so far."""

    def copy_out(self, slab: Slab) -> None:
        """Start the copy of a slab to its host buffer, after what the current stream holds."""

    def release(self, slab: Slab) -> None:
        """Free the slab's GPU memory; nothing may reuse it before the copy out has read it."""

    def copy_in(self, slab: Slab) -> None:
        """Allocate the slab's GPU memory on the current stream and start the copy from its host buffer."""

    def wait_in(self, slab: Slab) -> None:
        """Make the current stream wait for the copy in."""


class CudaTransfers:
    """Asynchronous copies on one stream a direction, in pieces of at most `piece_bytes`."""

    def __init__(self, device: torch.device, piece_bytes: int) -> None:
        self.bytes_out = 0
        self.bytes_in = 0
        self._piece_bytes = piece_bytes
        self._out = torch.cuda.Stream(device)
        self._in = torch.cuda.Stream(device)
        self._out_done: dict[Slab, torch.cuda.Event] = {}
        self._in_done: dict[Slab, torch.cuda.Event] = {}

    def copy_out(self, slab: Slab) -> None:
        """See `Transfers.copy_out`."""
        assert slab.gpu is not None
        # Race: optimizer.step() or the adoption, queued on the current stream, still writes the states.
        self._out.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._out):
            for start, end in pieces(slab.nbytes, self._piece_bytes):
                slab.host.tensor[start:end].copy_(slab.gpu[start:end], non_blocking=True)
            self._event(self._out_done, slab).record(self._out)
        self.bytes_out += slab.nbytes

    def release(self, slab: Slab) -> None:
        """See `Transfers.release`."""
        assert slab.gpu is not None
        # Race: forward's activations would be written into the memory while the copy out still reads it.
        # The allocator holds the block back until the copy stream has passed this point, and waits for it
        # itself where memory runs short.
        slab.gpu.record_stream(self._out)
        slab.free()

    def copy_in(self, slab: Slab) -> None:
        """See `Transfers.copy_in`."""
        slab.allocate()
        assert slab.gpu is not None
        # Race: the allocator handed out memory whose last user may still run on the current stream.
        self._in.wait_stream(torch.cuda.current_stream())
        # Race: the copy out may still be writing the host buffer that this copy reads.
        self._in.wait_event(self._out_done[slab])
        with torch.cuda.stream(self._in):
            for start, end in pieces(slab.nbytes, self._piece_bytes):
                slab.gpu[start:end].copy_(slab.host.tensor[start:end], non_blocking=True)
            self._event(self._in_done, slab).record(self._in)
        # Race: an optimizer that is dropped in mid-reload frees the slab while the copy still writes it.
        slab.gpu.record_stream(self._in)
        self.bytes_in += slab.nbytes

    def wait_in(self, slab: Slab) -> None:
        """See `Transfers.wait_in`."""
        # Race: optimizer.step(), a save or a second offload would use states that have not all landed.
        torch.cuda.current_stream().wait_event(self._in_done[slab])

    @staticmethod
    def _event(events: dict[Slab, torch.cuda.Event], slab: Slab) -> torch.cuda.Event:
        if slab not in events:
            events[slab] = torch.cuda.Event()
        return events[slab]


class HostTransfers:
    """The same copies, done at once, where the states live in host memory (no GPU).

    It shows what moves and that it is right; it says nothing of speed.
    """

    def __init__(self, piece_bytes: int) -> None:
        self.bytes_out = 0
        self.bytes_in = 0
        self._piece_bytes = piece_bytes

    def copy_out(self, slab: Slab) -> None:
        """See `Transfers.copy_out`."""
        assert slab.gpu is not None
        for start, end in pieces(slab.nbytes, self._piece_bytes):
            slab.host.tensor[start:end].copy_(slab.gpu[start:end])
        self.bytes_out += slab.nbytes

    def release(self, slab: Slab) -> None:
        """See `Transfers.release`."""
        slab.free()

    def copy_in(self, slab: Slab) -> None:
        """See `Transfers.copy_in`."""
        slab.allocate()
        assert slab.gpu is not None
        for start, end in pieces(slab.nbytes, self._piece_bytes):
            slab.gpu[start:end].copy_(slab.host.tensor[start:end])
        self.bytes_in += slab.nbytes

    def wait_in(self, slab: Slab) -> None:
        """See `Transfers.wait_in`; the copy in has ended already."""


def make_transfers(device: torch.device, piece_bytes: int) -> Transfers:
    """Return the transfers for states on `device`."""
    return CudaTransfers(device, piece_bytes) if device.type == "cuda" else HostTransfers(piece_bytes)
