"""Copies of slabs between GPU memory and host buffers: the verbs, done at once on a host, and how CUDA does them."""

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, override

import torch

from bridge_fgo.memory.cuda_driver import Copier, Event, Stream, current_stream
from bridge_fgo.memory.host_buffer import HostBuffer
from bridge_fgo.memory.host_memory import ranks_of_this_node
from bridge_fgo.memory.layout import pieces

PATIENCE = 5.0  # seconds to wait for the GPU after an error; what is queued in a training step takes less


class Movable(Protocol):
    """Memory that `Transfers` copies: that of a `Slab` or of a `GradientBucket`."""

    @property
    def host(self) -> HostBuffer:
        """Its host memory."""
        ...

    @property
    def moving(self) -> torch.Tensor:
        """GPU memory that is copied, uint8."""
        ...

    def allocate(self) -> None:
        """Take GPU memory, of undefined content."""

    def free(self) -> None:
        """Give the GPU memory back."""


def wait_for_a_while(wait: Callable[[], object]) -> None:
    """Wait for what may not end: another rank may have failed before a collective of it.

    Raises:
        TimeoutError: it has not ended.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            wait()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    if thread.is_alive():
        raise TimeoutError(f"work on the GPU, a collective perhaps, has not ended in {PATIENCE:g} seconds")
    if errors:
        raise errors[0]


class Transfers:
    """Moves slabs. One object a device, shared by every source of the rank.

    This class is for states in host memory: copies are done when it returns, and there is nothing to wait for. It shows
    that moves are right, not how fast.
    """

    keeps_host_copies = True  # whether a slab's host buffer still has its states when they are back on the GPU
    shares_link = False  # whether GPUs of several ranks share the host's bandwidth
    timing: Callable[[], AbstractContextManager[object]] = nullcontext  # of the training stream's waits for copies

    def begin_pass(self) -> None:
        """Remember the current stream, of forward and backward, as the training stream until the next pass.

        Whatever else reads or writes states meanwhile, on another stream, is to have that one wait for it. If a pass
        is on another stream than the one before, that waits for what the one before holds; a former training stream
        that goes on to compute something of its own has to wait for the new one, as with any memory of PyTorch's that
        another stream uses.
        """

    def on_compute_stream(self) -> AbstractContextManager[object]:
        """Context on that stream: a model's hooks may run on side streams of their own."""
        return nullcontext()

    def computing(self) -> AbstractContextManager[object]:
        """Context on that stream, ordered after what the current stream holds and before what it gets next."""
        return nullcontext()

    def join(self, streams: set[int]) -> None:
        """Add the current stream to some; one that is new there waits for what the training stream holds now."""

    def wait_for(self, streams: Iterable[int]) -> None:
        """Have the training stream wait for what these hold now."""

    def back_to_back(self) -> AbstractContextManager[object]:
        """Context for a run of copies in one direction: waits are recorded once, for the first."""
        return nullcontext()

    def capturing(self) -> bool:
        """Return whether the current stream is being captured into a CUDA graph, where nothing may move."""
        return False

    def copy_out(self, slab: Movable, written: bool = True) -> None:
        """Start the copy of a slab to its host buffer, after what the current stream holds.

        `written` says whether something that writes it was enqueued since the last copy of the same `back_to_back`.
        """
        nbytes = slab.moving.numel()
        slab.host.to_fill()[:nbytes].copy_(slab.moving)
        slab.host.filled(nbytes)

    def release(self, slab: Movable) -> None:
        """Free the slab's GPU memory, which nothing may reuse before the copy out has read it."""
        self.wait_out(slab)
        slab.free()

    def copy_in(self, slab: Movable) -> None:
        """Allocate the slab's GPU memory on the current stream and start the copy from its host buffer."""
        memory = slab.host.to_empty()  # first: if the disk fails, the slab is still released
        slab.allocate()
        slab.moving.copy_(memory[: slab.moving.numel()])
        slab.host.emptied()

    def wait_in(self, slab: Movable) -> None:
        """Make the current stream wait for the copy in."""

    def finish_out(self) -> None:
        """Return when every copy out that was started is over, so that the host may read the buffers."""

    def finish_in(self) -> None:
        """Return when every copy in that was started is over, so that the host may write the buffers."""

    def finish_all(self) -> None:
        """Return when all work on the device is over, whatever stream it is on."""

    def await_released(self) -> None:
        """Return when nothing uses the memory of slabs that were released, so that the driver may have it."""

    def limit_pieces(self, piece_bytes: int) -> None:
        """Cut later copies into pieces of at most that many bytes."""

    def forget(self, host_address: int) -> None:
        """Let go of a host buffer that no slab uses any more; return when the copies from and to it are over."""

    def has_landed(self, slab: Movable) -> bool:
        """Return whether the newest copy in is over; the host does not wait for it."""
        return True

    def has_left(self, slab: Movable) -> bool:
        """Return whether the newest copy out is over; the host does not wait for it."""
        return True

    def mark_out(self, is_end: bool) -> None:
        """Note when the newest copy out is over: the begin of a run of copies to be timed, or its end."""

    def seconds_out(self) -> float | None:
        """Return the seconds between the two marks of `mark_out`; None while nobody knows."""
        return None

    def begin_update(self) -> None:
        """Note when the training stream begins to update states."""

    def landed_in_update(self, slab: Movable) -> bool | None:
        """Return whether the newest copy in was over only after the newest update began; None while nobody knows."""
        return None

    def wait_out(self, slab: Movable) -> None:
        """Make the current stream wait for the newest copy out, if there was one."""


_SAME_STREAM = nullcontext()


class Lane:
    """Copies in one direction, one after another, in pieces that let other copies pass between them.

    A GPU has one copy engine a direction, and it serves a stream for as long as that has copies ready: a copy of a few
    bytes by the training loop (`.item()`, a NaN check) would wait for all of them. So the copies go to two streams in
    turn, `piece_bytes` at most to each at a time, and that waits for the other by an event. Measured on an H200 with 2
    GiB queued in pieces of 64 MiB: the longest `.item()` took 38 ms with one stream and 0.7 ms with two, at 53.8 GB/s
    both. Two events between the pieces of one stream do not do it (38 ms). In training, 2.4 ms: the piece under way and
    one of the other stream; 1.2 ms in pieces of 32 MiB, 0.6 ms of 16 MiB. A piece takes the host 3 to 7 microseconds.
    """

    def __init__(self, device: torch.device, piece_bytes: int, copier: Copier) -> None:
        self.piece_bytes = piece_bytes
        self._copier = copier
        self._owned = Stream(), Stream()
        self._handles = tuple(stream.handle for stream in self._owned)
        # By PyTorch a thread without a CUDA context can wait for them too: Python may collect a lane in it.
        self._streams = tuple(torch.cuda.ExternalStream(handle.value, device) for handle in self._handles)
        self._ends = (Event(), Event())
        self._turn = 0
        self._run = 0  # bytes of the copies that the stream whose turn it is has got one after another
        self._last = self._ends[0]
        self._is_open = False  # whether that stream has got something since `_last`, and no event after it
        self._copies = 0
        self.awaited = 0  # place of the latest copy that the training stream waits for: and so for all before

    def copy(self, target: int, source: int, nbytes: int, done: Event, after: Iterable[Event] = ()) -> None:
        """Enqueue the copy of `nbytes` between two addresses, after some events, and record `done` after it."""
        for start, end in pieces(nbytes, self.piece_bytes):
            if self._run + end - start > self.piece_bytes:
                self._take_turns()
            self._run += end - start
            stream = self._handles[self._turn]
            for event in after:
                event.block(stream)
            after = ()
            self._is_open = True
            self._copier.copy(target + start, source + start, end - start, stream)
        self._end_with(done)
        self._copies = done.place = self._copies + 1

    def record(self, event: Event) -> None:
        """Record an event after the newest copy."""
        event.record(self._handles[self._turn])

    def _take_turns(self) -> None:
        if self._is_open:
            self._end_with(self._ends[self._turn])
        turn = 1 - self._turn
        # Race: the copies of a lane are one sequence: a wait for the last is one for all.
        self._last.block(self._handles[turn])
        self._turn, self._run = turn, 0

    def _end_with(self, event: Event) -> None:
        event.record(self._handles[self._turn])
        self._last, self._is_open = event, False

    def synchronize(self) -> None:
        """Wait on the host until every piece is done."""
        for stream in self._streams:
            stream.synchronize()


class CudaTransfers(Transfers):
    """Asynchronous copies, a lane a direction, in pieces of at most `piece_bytes`."""

    def __init__(self, device: torch.device, piece_bytes: int) -> None:
        self._device = device
        self._compute = torch.cuda.current_stream(device)
        self._index = self._compute.device_index
        self._is_back_to_back = self._is_ordered = False
        """Inside `back_to_back`; whether the lane waits already for what the training stream holds."""
        self.shares_link = ranks_of_this_node() > 1
        self._out = Lane(device, piece_bytes, Copier(to_gpu=False))
        self._in = Lane(device, piece_bytes, Copier(to_gpu=True))
        # recorded anew for each wait: on the training stream, or on a reader's and on that
        self._here = Event(), Event()
        self.begin_pass()
        self._update = Event(is_timed=True)
        self._run_out = Event(is_timed=True), Event(is_timed=True)
        self._done = defaultdict[int, tuple[Event, Event]](lambda: (Event(is_timed=True), Event(is_timed=True)))
        """Recorded after the newest copy of each slab out, and in; by the address of its host buffer.
        Not by the slab: that knows its transfers, so neither would go before Python looks for cycles."""
        self._memory: dict[int, tuple[torch.Tensor, ...]] = {}
        """What the newest copy of each slab reads and writes, by the address of its host buffer; the GPU's as long as
        the training stream does not wait for the copy."""
        # Race: an optimizer that is dropped in mid-copy would free memory that a copy still reads or writes. The
        # dictionary holds it until the copies are done; it must hold nothing but memory, because what Python's registry
        # of finalizers leads to is never dropped. At exit the driver waits by itself.
        weakref.finalize(self, _drain, self._out, self._in, self._memory).atexit = False

    @override
    def begin_pass(self) -> None:
        before, compute = self._compute.cuda_stream, torch.cuda.current_stream(self._device)
        if before != compute.cuda_stream:
            # Race: what only the stream before has waited for (a copy out between steps) may still be under way.
            self._order(before, compute.cuda_stream)  # first: a pass that is tried again if this fails needs it too
        self._compute, self._handle = compute, compute.cuda_stream
        self._alone = (self._handle,)
        self._out.awaited = self._in.awaited = 0  # it may be another stream now

    @override
    def on_compute_stream(self) -> AbstractContextManager[object]:
        if current_stream(self._index) == self._handle:
            return _SAME_STREAM
        return torch.cuda.stream(self._compute)

    @override
    def computing(self) -> AbstractContextManager[object]:
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

    @override
    def join(self, streams: set[int]) -> None:
        if (current := current_stream(self._index)) not in streams:
            if current != self._handle:
                self._order(self._handle, current)
            streams.add(current)

    @override
    def wait_for(self, streams: Iterable[int]) -> None:
        for stream in streams:
            if stream != self._handle:
                self._order(stream, self._handle)

    def _order(self, first: int, then: int) -> None:
        self._here[0].record(first)
        self._here[0].block(then)

    @override
    def back_to_back(self) -> AbstractContextManager[object]:
        return self

    def __enter__(self) -> None:
        self._is_back_to_back = True

    def __exit__(self, *exception: object) -> None:
        self._is_back_to_back = self._is_ordered = False

    @override
    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    @override
    def copy_out(self, slab: Movable, written: bool = True) -> None:
        # Race: optimizer.step() or the adoption, queued on the streams, still writes the states.
        after = self._now(self._streams()) if written or not self._is_ordered else ()
        host, moving, copied = slab.host, slab.moving, self._events(slab)[0]
        memory = host.to_fill()
        self._memory[host.address] = moving, memory
        self._out.copy(memory.data_ptr(), moving.data_ptr(), moving.numel(), copied, after)
        host.filled(moving.numel(), copied.has_happened)

    @override
    def copy_in(self, slab: Movable) -> None:
        host, copied = slab.host, self._events(slab)[1]
        memory = host.to_empty()
        with self.on_compute_stream():  # whose memory it is: a reader's side stream would get the block back from it
            slab.allocate()
        # Race: the allocator handed out memory whose last user may still run on the stream. And the copy out may
        # still be writing the host buffer that this copy reads: the stream has waited for it since the release.
        after = () if self._is_ordered else self._now(self._alone)
        moving = slab.moving
        self._memory[host.address] = moving, memory
        self._in.copy(moving.data_ptr(), memory.data_ptr(), moving.numel(), copied, after)
        host.emptied(copied.has_happened)

    @override
    def wait_in(self, slab: Movable) -> None:
        # Race: optimizer.step(), a save or a second offload would use states that have not all landed.
        self._wait_for(self._in, self._events(slab)[1])

    @override
    def finish_out(self) -> None:
        self._out.synchronize()

    @override
    def finish_in(self) -> None:
        self._in.synchronize()

    @override
    def finish_all(self) -> None:
        torch.cuda.synchronize(self._index)  # it may be called in a thread, whose device is another

    @override
    def await_released(self) -> None:
        # Race: copies out may still read released slabs, and the two streams may still move tensors into slabs or pack
        # masters. The training stream waits for the copies of released slabs, so that both streams cover all of it.
        for stream in (self._compute, torch.cuda.current_stream(self._device)):
            stream.synchronize()

    @override
    def limit_pieces(self, piece_bytes: int) -> None:
        for lane in (self._out, self._in):
            lane.piece_bytes = min(piece_bytes, lane.piece_bytes)

    @override
    def forget(self, host_address: int) -> None:
        # Race: of a copy that is under way nobody would know any more, neither who waits for it nor `_memory`.
        self._out.synchronize()
        self._in.synchronize()
        self._done.pop(host_address, None)
        self._memory.pop(host_address, None)

    @override
    def has_landed(self, slab: Movable) -> bool:
        return self._events(slab)[1].has_happened()

    @override
    def has_left(self, slab: Movable) -> bool:
        return self._events(slab)[0].has_happened()

    @override
    def mark_out(self, is_end: bool) -> None:
        self._out.record(self._run_out[is_end])

    @override
    def seconds_out(self) -> float | None:
        return self._run_out[1].seconds_after(self._run_out[0])

    @override
    def begin_update(self) -> None:
        self._update.record(self._handle)

    @override
    def landed_in_update(self, slab: Movable) -> bool | None:
        landed = self._events(slab)[1]
        seconds = landed.seconds_after(self._update) if landed.place else 0.0
        return None if seconds is None else seconds > 0.0

    @override
    def wait_out(self, slab: Movable) -> None:
        # Race: forward's activations would be written into the memory, or it would be let go of, while the copy out,
        # perhaps given up since, still reads it. The training stream waits, whose memory it is, so that this is free
        # for it at once; `record_stream` would keep the block from everybody until the allocator sees the copy end,
        # and reserve new memory meanwhile.
        self._wait_for(self._out, self._events(slab)[0])
        self._memory[slab.host.address] = self._memory.get(slab.host.address, ())[-1:]

    def _wait_for(self, lane: Lane, copied: Event) -> None:
        self._is_ordered = False
        for stream in self._streams():
            if stream != self._handle:
                copied.block(stream)
            elif copied.place > lane.awaited:
                with self.on_compute_stream(), self.timing():
                    copied.block(stream)
                lane.awaited = copied.place

    def _now(self, streams: tuple[int, ...]) -> tuple[Event, ...]:
        """Return events that happen when what the streams hold now is over, for a lane to wait for."""
        here = self._here[: len(streams)]
        for event, stream in zip(here, streams, strict=True):
            event.record(stream)
        self._is_ordered = self._is_back_to_back
        return here

    def _streams(self) -> tuple[int, ...]:
        """Return the current stream and the training stream; the same, but for a reader on a side stream.

        The training stream waits for what the reader waits for: to it the slab is readable, or its memory free, then.
        """
        current = current_stream(self._index)
        return self._alone if current == self._handle else (current, self._handle)

    def _events(self, slab: Movable) -> tuple[Event, Event]:
        return self._done[slab.host.address]


def _drain(out: Lane, back: Lane, memory: dict[int, tuple[torch.Tensor, ...]]) -> None:
    out.synchronize()
    back.synchronize()
    memory.clear()
