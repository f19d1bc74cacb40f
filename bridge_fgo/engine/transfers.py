"""Copies between a slab's GPU memory and its host buffer: streams, pieces and events."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from bridge_fgo.engine.driver import Copier, Event, current_stream
from bridge_fgo.engine.plan import pieces
from bridge_fgo.engine.slab import Slab
from bridge_fgo.engine.waits import WaitMeter

_SAME_STREAM = nullcontext()


class Transfers(Protocol):
    """Moves slabs. One object a device, shared by every optimizer of the rank."""

    @property
    def waits(self) -> WaitMeter | None:
        """What times the training stream's waits for copies; None where the host does them, and waits for all."""
        ...

    def begin_pass(self) -> None:
        """Remember the current stream as the one that forward and backward run on.

        It is the training stream until the next pass begins: whatever else reads or writes states meanwhile, on
        another stream, is to have that one wait for it. Where a pass is on another stream than the one before, that
        waits for what the one before holds; a former training stream that goes on to compute something of its own
        has to wait for the new one, as with any memory of PyTorch's that another stream uses.
        """

    def on_compute_stream(self) -> AbstractContextManager[object]:
        """Be on that stream inside the block: a model's hooks may run on side streams of its own."""
        ...

    def computing(self) -> AbstractContextManager[object]:
        """Be on that stream inside the block, after what the current stream holds and before what it gets next."""
        ...

    def back_to_back(self) -> AbstractContextManager[object]:
        """Be where nothing is enqueued but copies in one direction, and what they say they need before them."""
        ...

    def capturing(self) -> bool:
        """Return whether the current stream is being captured into a CUDA graph, where nothing may move."""
        ...

    def copy_out(self, slab: Slab, written: bool = True) -> None:
        """Start the copy of a slab to its host buffer, after what the current stream holds.

        written: whether something that writes the slab was enqueued since the last copy of the same `back_to_back`.
        """

    def release(self, slab: Slab) -> None:
        """Free the slab's GPU memory; nothing may reuse it before the copy out has read it."""

    def copy_in(self, slab: Slab) -> None:
        """Allocate the slab's GPU memory on the current stream and start the copy from its host buffer."""

    def wait_in(self, slab: Slab) -> None:
        """Make the current stream wait for the copy in."""

    def finish_out(self) -> None:
        """Return when every copy out that was started is over, so that the host may read the buffers."""

    def finish_in(self) -> None:
        """Return when every copy in that was started is over."""

    def has_landed(self, slab: Slab) -> bool:
        """Return whether the newest copy in is over; the host does not wait for it."""
        ...

    def wait_out(self, slab: Slab) -> None:
        """Make the current stream wait for the newest copy out, if there was one."""


class Lane:
    """Copies in one direction, one after another, in pieces that let other copies pass between them.

    A GPU has one copy engine a direction, and it serves a stream for as long as that has copies ready: a copy
    of a few bytes by the training loop (`.item()`, a NaN check) would wait for all of them. So the copies go to
    two streams in turn, `piece_bytes` at most to each at a time, and that waits for the other by an event. Measured on
    an H200 with 2 GiB queued in pieces of 64 MiB: the longest `.item()` took 38 ms with one stream and 0.7 ms with two,
    at 53.8 GB/s both. Two events between the pieces of one stream do not do it (38 ms).
    """

    def __init__(self, device: torch.device, piece_bytes: int, copier: Copier) -> None:
        self._piece_bytes = piece_bytes
        self._copier = copier
        self._streams = (torch.cuda.Stream(device), torch.cuda.Stream(device))
        self._handles = tuple(ctypes.c_void_p(stream.cuda_stream) for stream in self._streams)
        self._ends = (Event(), Event())
        self._turn = 0
        self._run = 0
        """Bytes of the copies that the stream whose turn it is has got one after another."""
        self._last = self._ends[0]
        self._is_open = False
        """Whether that stream has got something since `_last`: a piece that is not its copy's last, or one whose event
        an error has prevented."""
        self._copies = 0
        self.awaited = 0
        """Place of the latest copy that the training stream waits for: and so for all before."""

    def copy(self, target: int, source: int, nbytes: int, done: Event, after: Iterable[Event] = ()) -> None:
        """Enqueue the copy of `nbytes` between two addresses, after some events, and record `done` after it."""
        for start, end in pieces(nbytes, self._piece_bytes):
            if self._run + end - start > self._piece_bytes:
                self._take_turns()
            self._run += end - start
            stream = self._handles[self._turn]
            for event in after:
                event.hold(stream)
            after = ()
            self._is_open = True
            self._copier.copy(target + start, source + start, end - start, stream)
        self._end_with(done)
        self._copies = done.place = self._copies + 1

    def delay(self, cycles: int) -> None:
        """Have the next copy, and so every later one, begin that many GPU cycles later."""
        with torch.cuda.stream(self._streams[self._turn]):
            torch.cuda._sleep(cycles)
        self._is_open = True

    def _take_turns(self) -> None:
        if self._is_open:
            self._end_with(self._ends[self._turn])
        turn = 1 - self._turn
        # Race: the copies of a lane are one sequence; whoever waits for the last has waited for all.
        self._last.hold(self._handles[turn])
        self._turn, self._run = turn, 0

    def _end_with(self, event: Event) -> None:
        event.record(self._handles[self._turn])
        self._last, self._is_open = event, False

    def synchronize(self) -> None:
        """Wait on the host until every piece is done."""
        for stream in self._streams:
            stream.synchronize()


class CudaTransfers:
    """Asynchronous copies, a lane a direction, in pieces of at most `piece_bytes`."""

    def __init__(self, device: torch.device, piece_bytes: int) -> None:
        self._device = device
        self._compute = torch.cuda.current_stream(device)
        self._index = self._compute.device_index
        self._is_back_to_back = self._is_ordered = False
        """Inside `back_to_back`; and whether the lane waits already for what the training stream holds."""
        self._out = Lane(device, piece_bytes, Copier(to_gpu=False))
        self._in = Lane(device, piece_bytes, Copier(to_gpu=True))
        self._here = Event(), Event()
        """Recorded anew for each wait: on the training stream, or on a reader's and on that."""
        self.begin_pass()
        self.waits = WaitMeter()
        self._done: dict[Slab, tuple[Event, Event]] = {}
        self._memory: dict[int, tuple[torch.Tensor, ...]] = {}
        """What the newest copy of each slab reads and writes, by the address of its host buffer; the GPU's as long as
        the training stream does not wait for the copy."""
        # Race: an optimizer that is dropped in mid-copy would free memory that a copy still reads or writes. The
        # dictionary holds it until the copies are done; it must hold nothing but memory, because what Python's registry
        # of finalizers leads to is never dropped. At exit the driver waits by itself.
        weakref.finalize(self, _drain, self._out, self._in, self._memory).atexit = False

    def begin_pass(self) -> None:
        """See `Transfers.begin_pass`."""
        before, compute = self._compute.cuda_stream, torch.cuda.current_stream(self._device)
        if before != compute.cuda_stream:
            # Race: what only the stream before has waited for (a copy out between steps) may still be under way.
            self._order(before, compute.cuda_stream)  # first: a pass that is tried again where this fails needs it too
        self._compute, self._handle = compute, compute.cuda_stream
        self._alone = (self._handle,)
        self._out.awaited = self._in.awaited = 0  # it may be another stream now

    def on_compute_stream(self) -> AbstractContextManager[object]:
        """See `Transfers.on_compute_stream`."""
        if current_stream(self._index) == self._handle:
            return _SAME_STREAM
        return torch.cuda.stream(self._compute)

    def computing(self) -> AbstractContextManager[object]:
        """See `Transfers.computing`."""
        current = current_stream(self._index)
        return _SAME_STREAM if current == self._handle else self._ordered(current, self._handle)

    @contextmanager
    def _ordered(self, current: int, compute: int) -> Iterator[None]:
        # Race: a reader's side stream may have work queued that writes the states.
        self._order(current, compute)
        try:
            with torch.cuda.stream(self._compute):
                yield
        finally:
            # Race: the reader would see masters that are not unpacked yet, or, after an error, states that have come
            # back inside the block and count as readable.
            self._order(compute, current)

    def _order(self, first: int, then: int) -> None:
        """Have a stream wait for what another holds now."""
        self._here[0].record(first)
        self._here[0].hold(then)

    def back_to_back(self) -> AbstractContextManager[object]:
        """See `Transfers.back_to_back`."""
        return self

    def __enter__(self) -> None:
        self._is_back_to_back = True

    def __exit__(self, *exception: object) -> None:
        self._is_back_to_back = self._is_ordered = False

    def capturing(self) -> bool:
        """See `Transfers.capturing`."""
        return torch.cuda.is_current_stream_capturing()

    def copy_out(self, slab: Slab, written: bool = True) -> None:
        """See `Transfers.copy_out`."""
        after: tuple[Event, ...] = ()
        if written or not self._is_ordered:
            # Race: optimizer.step() or the adoption, queued on the streams, still writes the states.
            after = self._now(self._streams())
            self._is_ordered = self._is_back_to_back
        moving = slab.moving
        self._memory[slab.host_address] = moving, slab.host.tensor
        self._out.copy(slab.host_address, moving.data_ptr(), moving.numel(), self._events(slab)[0], after)

    def release(self, slab: Slab) -> None:
        """See `Transfers.release`.

        The wait is on the training stream, whose memory it is, so that this is free for it at once; `record_stream`
        would keep the block from everybody until the allocator sees the copy end, and reserve new memory meanwhile.
        """
        self._is_ordered = False
        for stream in self._streams():
            # Race: forward's activations would be written into the memory while the copy out still reads it.
            self._hold(self._out, self._events(slab)[0], stream)
        self._memory[slab.host_address] = (slab.host.tensor,)
        slab.free()

    def copy_in(self, slab: Slab) -> None:
        """See `Transfers.copy_in`."""
        with self.on_compute_stream():  # whose memory it is: a reader's side stream would get the block back from it
            slab.allocate()
        after: tuple[Event, ...] = ()
        if not self._is_ordered:
            # Race: the allocator handed out memory whose last user may still run on the stream. And the copy out may
            # still be writing the host buffer that this copy reads: the stream has waited for it since the release.
            after = self._now(self._alone)
            self._is_ordered = self._is_back_to_back
        moving = slab.moving
        self._memory[slab.host_address] = moving, slab.host.tensor
        self._in.copy(moving.data_ptr(), slab.host_address, moving.numel(), self._events(slab)[1], after)

    def wait_in(self, slab: Slab) -> None:
        """See `Transfers.wait_in`."""
        self._is_ordered = False
        for stream in self._streams():
            # Race: optimizer.step(), a save or a second offload would use states that have not all landed.
            self._hold(self._in, self._events(slab)[1], stream)

    def finish_out(self) -> None:
        """See `Transfers.finish_out`."""
        self._out.synchronize()

    def finish_in(self) -> None:
        """See `Transfers.finish_in`."""
        self._in.synchronize()

    def delay(self, out: bool, cycles: int) -> None:
        """Have copies in one direction begin that many GPU cycles later; for `bridge_fgo.engine.debug`."""
        (self._out if out else self._in).delay(cycles)

    def has_landed(self, slab: Slab) -> bool:
        """See `Transfers.has_landed`."""
        return self._events(slab)[1].has_happened()

    def wait_out(self, slab: Slab) -> None:
        """See `Transfers.wait_out`."""
        self._is_ordered = False
        for stream in self._streams():
            # Race: GPU memory that is let go of while a copy out, given up since, still reads it.
            self._hold(self._out, self._events(slab)[0], stream)
        self._memory[slab.host_address] = (slab.host.tensor,)

    def _hold(self, lane: Lane, copied: Event, stream: int) -> None:
        if stream != self._handle:
            copied.hold(stream)
        elif copied.place > lane.awaited:
            if self.waits.is_timing:
                self.waits.around(lambda: copied.hold(stream), self._compute)
            else:
                copied.hold(stream)
            lane.awaited = copied.place

    def _now(self, streams: tuple[int, ...]) -> tuple[Event, ...]:
        """Return events that happen when what the streams hold now is over."""
        here = self._here[: len(streams)]
        for event, stream in zip(here, streams, strict=True):
            event.record(stream)
        return here

    def _streams(self) -> tuple[int, ...]:
        """Return the current stream and the training stream; the same, but for a reader on a side stream.

        What such a reader waits for, the training stream has to wait for too: to it the slab counts as readable, or
        its memory as free, from then on.
        """
        current = current_stream(self._index)
        return self._alone if current == self._handle else (current, self._handle)

    def _events(self, slab: Slab) -> tuple[Event, Event]:
        events = self._done.get(slab)
        if events is None:
            events = self._done[slab] = (Event(), Event())
        return events


def _drain(out: Lane, back: Lane, memory: dict[int, tuple[torch.Tensor, ...]]) -> None:
    out.synchronize()
    back.synchronize()
    memory.clear()


class HostTransfers:
    """The same copies, done at once, where the states live in host memory (no GPU).

    It shows what moves and that it is right; it says nothing of speed.
    """

    waits = None

    def __init__(self, piece_bytes: int) -> None:
        self._piece_bytes = piece_bytes

    def begin_pass(self) -> None:
        """See `Transfers.begin_pass`."""

    def on_compute_stream(self) -> AbstractContextManager[object]:
        """See `Transfers.on_compute_stream`."""
        return nullcontext()

    def computing(self) -> AbstractContextManager[object]:
        """See `Transfers.computing`."""
        return nullcontext()

    def back_to_back(self) -> AbstractContextManager[object]:
        """See `Transfers.back_to_back`."""
        return nullcontext()

    def capturing(self) -> bool:
        """See `Transfers.capturing`."""
        return False

    def copy_out(self, slab: Slab, written: bool = True) -> None:
        """See `Transfers.copy_out`."""
        moving = slab.moving
        for start, end in pieces(moving.numel(), self._piece_bytes):
            slab.host.tensor[start:end].copy_(moving[start:end])

    def release(self, slab: Slab) -> None:
        """See `Transfers.release`."""
        slab.free()

    def copy_in(self, slab: Slab) -> None:
        """See `Transfers.copy_in`."""
        slab.allocate()
        moving = slab.moving
        for start, end in pieces(moving.numel(), self._piece_bytes):
            moving[start:end].copy_(slab.host.tensor[start:end])

    def wait_in(self, slab: Slab) -> None:
        """See `Transfers.wait_in`; the copy in has ended already."""

    def finish_out(self) -> None:
        """See `Transfers.finish_out`."""

    def finish_in(self) -> None:
        """See `Transfers.finish_in`."""

    def has_landed(self, slab: Slab) -> bool:
        """See `Transfers.has_landed`."""
        return True

    def wait_out(self, slab: Slab) -> None:
        """See `Transfers.wait_out`; the copy out has ended already."""


def make_transfers(device: torch.device, piece_bytes: int) -> Transfers:
    """Return the transfers for states on `device`."""
    return CudaTransfers(device, piece_bytes) if device.type == "cuda" else HostTransfers(piece_bytes)
