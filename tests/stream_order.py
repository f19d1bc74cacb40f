"""Which work on made-up CUDA streams comes before which, by vector clocks; memory that two of them meet in is a race.

Streams do their work at once here. What is checked is that a GPU would have to keep to that order: an event carries the
clock of the stream that it was recorded on, and a stream that waits for it has seen all that the clock says.
"""

import ctypes
import itertools
from contextlib import contextmanager
from types import SimpleNamespace

import debug_transfers as debug
import torch
from spies import before

from bridge_fgo.memory import transfers
from bridge_fgo.memory.gradient_bucket import BucketState, GradientBucket
from bridge_fgo.memory.remainders import Remainders
from bridge_fgo.memory.slab import Slab, SlabState
from bridge_fgo.offload import snapshot

TRAINING, SIDE, HOST = 1000, 2000, 3000


class Race(Exception):
    """Two accesses to the same memory of which none is ordered before the other."""


class StreamOrder:
    """The streams, and the accesses to each slab's GPU memory, staging memory and host buffer. See `install`."""

    def __init__(self):
        self.current = TRAINING
        self.clocks = {}
        self.writes, self.reads, self.pools = {}, {}, {}
        self.cached = {}  # by memory that the allocator has, and nobody else: what has used it
        self.slabs = []

    def clock(self, stream):
        return self.clocks.setdefault(stream, {})

    def wait(self, stream, clock):
        mine = self.clock(stream)
        for other, time in clock.items():
            mine[other] = max(time, mine.get(other, 0))

    def finish_all(self, device=None):
        """The host waits for all streams."""
        for clock in list(self.clocks.values()):
            self.wait(HOST, clock)

    def _work(self, stream):
        self.enqueue(stream)
        clock = self.clock(stream)
        clock[stream] = clock.get(stream, 0) + 1
        return {stream: clock[stream]}

    def enqueue(self, stream):
        """What a stream gets now comes after all that the host has waited for."""
        self.wait(stream, self.clock(HOST))

    def _require(self, stream, earlier, what, memory):
        self.enqueue(stream)
        clock = self.clock(stream)
        if any(clock.get(other, 0) < time for other, time in earlier.items()):
            raise Race(f"{what} of {memory} on stream {stream} may come before {earlier}")

    def read(self, memory, stream=None):
        stream = self.current if stream is None else stream
        self._require(stream, self.writes.get(memory, {}), "a read", memory)
        self.reads.setdefault(memory, []).append(self._work(stream))

    def read_by_the_host(self, tensor):
        """The host reads a tensor of a slab, on the GPU (by a copy that it waits for) or in the slab's host buffer."""
        for slab in self.slabs:
            if _is_in(tensor, slab.host.tensor):
                self.read(("host", slab), HOST)
            elif slab.gpu is not None and _is_in(tensor, slab.gpu):
                self.read(("whole", slab))
                self.wait(HOST, self.clock(self.current))

    def write(self, memory, stream=None):
        stream = self.current if stream is None else stream
        self._require(stream, self.writes.get(memory, {}), "a write", memory)
        for read in self.reads.pop(memory, []):
            if not self._is_of_no_use(memory, read):
                self._require(stream, read, "a write", memory)
        self.writes[memory] = self._work(stream)

    def _is_of_no_use(self, memory, read):
        """Whether it is the read of a copy out that was given up: what it has copied is never used."""
        kind, slab = memory
        return kind == "whole" and TRAINING not in read and slab.state in (SlabState.RESIDENT, BucketState.HERE)

    def take(self, memory):
        """The allocator hands memory out that work on the current stream may have used until now."""
        self.pools[memory] = self.current
        self.writes[memory] = dict(self.clock(self.current))
        self.cached.pop(memory, None)

    def give_back(self, memory):
        """Memory goes back to the stream that it was taken on, and whatever that gets next may have it."""
        for earlier in self.let_go(memory):
            self._require(self.pools.get(memory, TRAINING), earlier, "the next use", memory)

    def let_go(self, memory):
        """Memory goes back, to be taken only once its stream has waited for what has used it, which is returned."""
        self.cached[memory] = [self.writes.pop(memory, {}), *self.reads.pop(memory, [])]
        return self.cached[memory]

    def return_to_driver(self):
        """The driver gets what the allocator has, and anybody's stream, or another process, may have it."""
        for memory, used in self.cached.items():
            for earlier in used:
                self._require(HOST, earlier, "the driver's use", memory)
        self.cached.clear()

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def aside(self):
        """A reader's stream, which waits for the current one before, and which that waits for afterwards."""
        before = self.current
        self.wait(SIDE, self.clock(before))
        try:
            with self.on(SIDE):
                yield
        finally:
            self.wait(before, self.clock(SIDE))


def _is_in(tensor, memory):
    return memory.untyped_storage()._cdata == tensor.untyped_storage()._cdata


def install(monkeypatch):
    """Put made-up streams in the place of CUDA's, and have slabs tell what they do. Returns the `StreamOrder`."""
    order = StreamOrder()
    names = itertools.count(1)

    def handle(stream):
        return stream.value if isinstance(stream, ctypes.c_void_p) else stream

    class Stream:
        device_index = 0

        def __init__(self, stream, device=None):
            self.cuda_stream = stream

        def synchronize(self):
            order.wait(HOST, order.clock(self.cuda_stream))

    class OwnStream:
        def __init__(self):
            self.handle = ctypes.c_void_p(next(names))

    class Event:
        clock = {}  # noqa: RUF012 - of one that was not recorded
        place = 0

        def __init__(self, is_timed=False):
            self.is_timed = is_timed

        def record(self, stream):
            order.enqueue(handle(stream))
            self.clock = dict(order.clock(handle(stream)))

        def block(self, stream):
            order.wait(handle(stream), self.clock)

        def has_happened(self):
            return True

        def seconds_after(self, earlier):
            assert self.is_timed and earlier.is_timed
            return self.place % 3 - 1.0  # some landed before, others after

    class Copier:
        def __init__(self, to_gpu):
            self.to_gpu = to_gpu

        def copy(self, target, source, nbytes, stream):
            ctypes.memmove(target, source, nbytes)
            host = source if self.to_gpu else target
            slab = next(s for s in order.slabs if s.host.address <= host < s.host.address + s.nbytes)
            is_encoded = getattr(slab, "is_encoded", False)  # a bucket of gradients never is
            gpu, on_host = ("staging" if is_encoded else "whole", slab), ("host", slab)
            read, written = (on_host, gpu) if self.to_gpu else (gpu, on_host)
            order.read(read, handle(stream))
            order.write(written, handle(stream))

    for name, made_up in (("Event", Event), ("Copier", Copier), ("Stream", OwnStream)):
        monkeypatch.setattr(transfers, name, made_up)
    monkeypatch.setattr(transfers, "current_stream", lambda index: order.current)
    monkeypatch.setattr(torch.cuda, "ExternalStream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream(order.current))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: order.on(stream.cuda_stream))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", order.finish_all)
    monkeypatch.setattr(torch.cuda, "empty_cache", order.return_to_driver)
    _watch_slabs(monkeypatch, order)
    _watch_gradient_buckets(monkeypatch, order)
    _watch_poison(monkeypatch, order)
    before(monkeypatch, snapshot, "host_copy", order.read_by_the_host)
    return order


def _watch_slabs(monkeypatch, order):
    names = ("adopt", "allocate", "_take_staging", "_empty_staging", "free")
    real = SimpleNamespace(**{name: getattr(Slab, name) for name in names})
    encode, decode = Remainders.encode, Remainders.decode

    def of(codec):
        return next(slab for slab in order.slabs if slab.codec is codec)

    def adopt(slab):
        if slab.gpu is None:
            order.slabs.append(slab)
            order.take(("whole", slab))
        moved = real.adopt(slab)
        if moved:
            order.write(("whole", slab))
        return moved

    def allocate(slab):
        if not slab.gpu.untyped_storage().nbytes():
            order.take(("whole", slab))
        real.allocate(slab)

    def take_staging(slab):
        real._take_staging(slab)
        order.take(("staging", slab))

    def empty_staging(slab):
        if slab.staging is not None:
            order.give_back(("staging", slab))
        real._empty_staging(slab)

    def free(slab):
        order.give_back(("whole", slab))
        real.free(slab)

    def encodes(family, moves):
        for codec, *_ in moves:
            order.read(("whole", of(codec)))
            order.write(("staging", of(codec)))
        encode(family, moves)

    def decodes(family, moves):
        for codec, *_ in moves:
            order.read(("staging", of(codec)))
            order.write(("whole", of(codec)))
        decode(family, moves)

    staged = {"_take_staging": take_staging, "_empty_staging": empty_staging}
    for name, watch in {"adopt": adopt, "allocate": allocate, "free": free, **staged}.items():
        monkeypatch.setattr(Slab, name, watch)
    monkeypatch.setattr(Remainders, "encode", encodes)
    monkeypatch.setattr(Remainders, "decode", decodes)


def _watch_gradient_buckets(monkeypatch, order):
    real = SimpleNamespace(**{n: getattr(GradientBucket, n) for n in ("map_host", "allocate", "free", "close")})

    def map_host(bucket):
        order.slabs.append(bucket)
        return real.map_host(bucket)

    def allocate(bucket):
        is_new = bucket.gpu is None
        real.allocate(bucket)
        if is_new:
            order.take(("whole", bucket))
            if bucket.state is BucketState.ABSENT:
                order.write(("whole", bucket))  # it is zeroed, on the same stream

    def free(bucket):
        if bucket.gpu is not None and bucket in order.slabs:
            order.give_back(("whole", bucket))
        real.free(bucket)

    def close(bucket, data):
        order.read(("whole", bucket))  # its gradients were copied
        real.close(bucket, data)
        if bucket in order.slabs:
            order.slabs.remove(bucket)
        memory = ("host", bucket)
        for earlier in (order.writes.get(memory, {}), *order.reads.get(memory, [])):
            order._require(HOST, earlier, "the end", memory)

    for name, watch in {"map_host": map_host, "allocate": allocate, "free": free, "close": close}.items():
        monkeypatch.setattr(GradientBucket, name, watch)


def _watch_poison(monkeypatch, order):
    poison, poison_stale = debug._poison, debug.DebugTransfers._poison_stale

    def poisons(slab):
        for kind, memory in (("whole", slab.gpu), ("staging", getattr(slab, "staging", None))):
            if memory is not None:
                order.write((kind, slab))
        poison(slab)

    def poisons_stale(transfers):
        stale = list(transfers._stale)
        poison_stale(transfers)
        for slab in stale:
            order.write(("host", slab), HOST)

    monkeypatch.setattr(debug, "_poison", poisons)
    monkeypatch.setattr(debug.DebugTransfers, "_poison_stale", poisons_stale)
