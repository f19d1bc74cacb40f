"""Slabs without host memory of their own: a file on a local disk, and a few pinned buffers that copies go through.

A copy out fills a buffer, which is written to the file and is free again. A copy in waits until a buffer has been read,
and gives it back once it has landed. The file has no name, is allocated before training, and is read and written by
`O_DIRECT`, straight from and to the buffers. `os.preadv` and `os.pwritev` in threads release the GIL.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, override

import torch

from bridge_fgo.config import OffloadConfig, readable
from bridge_fgo.memory.host_buffer import HostBuffer, file_system, mapped, unnamed_file
from bridge_fgo.memory.meters import Traffic

BUFFERS = 5
MOST_AHEAD = 3  # buffers that hold what no copy in has asked for yet: copies out have the others
REQUEST_BYTES = 8 * 2**20  # of a read or a write
REQUESTS = 8  # under way at once, in each direction
BLOCK_BYTES = 4096  # to which `O_DIRECT` aligns memory, places and lengths
POLL_SECONDS = 5e-4  # between two looks whether a copy is over
PROBE_SECONDS = 0.4  # in each direction
NETWORK = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "9p", "virtiofs", "afs", "fuse")
"""How the types of file systems begin whose disks are not this node's."""


def blocks(nbytes: int) -> int:
    """Return the bytes of the whole blocks that hold so many."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def buffer_bytes(sizes: Sequence[int]) -> int:
    """Return the bytes of host memory that the buffers take, for slabs of these sizes."""
    return BUFFERS * blocks(max(sizes))


def parts_in_file(parts: Sequence[Sequence[int]], host_bytes: float, config: OffloadConfig) -> set[int]:
    """Return the positions of the parts whose slabs are in a file, as `host_bytes` of host memory hold the rest.

    They are spread, so that the disk is busy through the update: for the parts between two of them the link needs less
    time than the disk for one. `parts` have the bytes of each slab of a part. ValueError if not even the buffers fit.
    """
    sizes = list(map(sum, parts))
    if sum(sizes) <= host_bytes:
        return set()
    if (buffers := buffer_bytes([nbytes for part in parts for nbytes in part])) > host_bytes:
        raise ValueError(
            f"OffloadConfig.host_memory_gib={config.host_memory_gib!r} with nvme_folder={config.nvme_folder!r}: a rank "
            f"has {readable(host_bytes)} of it, and the buffers for copies from and to the file take "
            f"{readable(buffers)}; use more, or a smaller OffloadConfig.slab_bytes"
        )
    share = (sum(sizes) + buffers - host_bytes) / sum(sizes)
    chosen = set[int]()
    seen = filed = 0
    for position, nbytes in enumerate(sizes):
        seen += nbytes
        if filed < share * seen:
            chosen.add(position)
            filed += nbytes
    return chosen


def direct_file(folder: str, nbytes: int) -> int:
    """Return the descriptor of such a file; ValueError, which names the setting, where it cannot be made."""
    setting = f"OffloadConfig.nvme_folder={folder!r}"
    file = unnamed_file(Path(folder), nbytes, setting, "the states of every rank of the node that the host has not")
    kind = file_system(os.fstat(file).st_dev)
    try:
        if kind.startswith(NETWORK):
            raise ValueError(f"{setting}: {kind} is no disk of this node: name a folder on one, or set it to None")
        try:
            fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
        except OSError as error:
            raise ValueError(
                f"{setting}: its file system ({kind}) has no O_DIRECT ({error}): name a folder on ext4 or XFS, or set "
                "it to None"
            ) from error
    except ValueError:
        os.close(file)
        raise
    return file


class SlabFile:
    """The file of a rank, its buffers and its threads; `sizes` are those of the slabs, in bytes.

    Buffers that no thread will give back hold what was read ahead. Whoever lacks one takes the newest of these, so
    nobody waits forever.
    """

    def __init__(self, folder: str, sizes: Sequence[int], traffic: Traffic) -> None:
        self.folder, self._traffic = folder, traffic
        self.nbytes = sum(map(blocks, sizes))
        self.file = direct_file(folder, self.nbytes)
        weakref.finalize(self, os.close, self.file).atexit = False
        self.memory = [HostBuffer(blocks(max(sizes))) for _ in range(BUFFERS)]
        self.changes = threading.Condition()  # held for all that follows
        self._free = list(self.memory)
        self._busy = 0  # buffers that a thread gives back, or makes ready
        self._ready: dict[DiskBuffer, None] = {}  # that have been read, the newest last
        self._ahead: set[DiskBuffer] = set()  # that have been read ahead, or are being
        self._wanted: dict[DiskBuffer, None] = {}  # to be read ahead, in order
        self.error: Exception | None = None  # of a write
        self.rates: tuple[float, float] | None = None  # bytes per second of reads and writes, as `probe` found them
        self._next = 0
        self._copies = SimpleQueue[Any]()
        self._requests = SimpleQueue[Any](), SimpleQueue[Any]()  # reads and writes
        begin = partial(_use_device, torch.cuda.current_device()) if torch.cuda.is_initialized() else lambda: None
        loops = [(_watch, (begin, self._copies)), *((_serve, (q,)) for q in self._requests for _ in range(REQUESTS))]
        for loop, arguments in loops:
            threading.Thread(target=loop, args=arguments, daemon=True, name="bridge_fgo slab file").start()
        weakref.finalize(self, _stop, self._copies, *self._requests).atexit = False

    def buffer(self, nbytes: int) -> DiskBuffer:
        """Return the host buffer of the next slab."""
        start, self._next = self._next, self._next + blocks(nbytes)
        return DiskBuffer(self, start, nbytes)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of host memory that the buffers take."""
        return sum(each.tensor.numel() for each in self.memory)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of these that are page-locked."""
        return sum(each.pinned_bytes for each in self.memory)

    @property
    def has_room(self) -> bool:
        """Whether a buffer is free."""
        return bool(self._free)

    def raise_error(self) -> None:
        """Raise RuntimeError if a write has failed; the buffer still has its bytes, so that no state is lost."""
        if self.error is not None:
            raise self.failure("written", self.error)

    def failure(self, done: str, error: Exception) -> RuntimeError:
        """Return the error of what could not be `done`."""
        return RuntimeError(
            f"optimizer state could not be {done} in the file in OffloadConfig.nvme_folder={self.folder!r} ({error}): "
            "resume from the last checkpoint, on a disk that works"
        )

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context in which the training thread may wait for the disk; the time counts as that, and not as a move's."""
        started = time.perf_counter()
        try:
            with self.changes:
                yield
        finally:
            waited = time.perf_counter() - started
            self._traffic.file_seconds += waited
            self._traffic.seconds -= waited

    def take(self) -> HostBuffer:
        """Return a buffer, once one is free; raise the error of writes if these have failed for all."""
        while not self._free:
            if self._busy:
                self.changes.wait()
            elif self._ready:
                next(reversed(self._ready)).drop()
            else:
                self.raise_error()
                raise RuntimeError("no buffer of a slab file is free, nor will be")
        self._busy += 1
        return self._free.pop()

    def give_back(self, memory: HostBuffer, was_busy: bool = True) -> None:
        """Take a buffer that nothing uses any more, and read ahead."""
        self._busy -= was_busy
        self._free.append(memory)
        self.start_wanted()
        self.changes.notify_all()

    def forget(self, of: DiskBuffer) -> None:
        """Forget that a slab's bytes were, or were to be, read ahead."""
        self._wanted.pop(of, None)
        self._ready.pop(of, None)
        self._ahead.discard(of)

    def want(self, of: DiskBuffer) -> None:
        """Read a slab's bytes ahead, after those that were wanted before."""
        self._wanted[of] = None
        self.start_wanted()

    def start_wanted(self) -> None:
        """Begin to read what is wanted, as far as there are buffers for it."""
        while self._wanted and self._free and len(self._ahead) < MOST_AHEAD:
            of = next(iter(self._wanted))
            if of.is_moving:
                return  # it is read once it is written
            del self._wanted[of]
            if of.memory is None and of.error is None:
                self._ahead.add(of)
                of.memory = self.take()
                self.start(of, is_write=False)

    def after(self, has_happened: Callable[[], bool] | None, then: Callable[[], None]) -> None:
        """Call `then` once a copy is over."""
        if has_happened is None:
            then()
        else:
            self._copies.put((has_happened, then))

    def start(self, of: DiskBuffer, is_write: bool) -> None:
        """Begin to read or write a slab's bytes, which counts as a move until all requests have ended."""
        assert of.moved_bytes, "a slab is read that was never written"
        of.is_moving = True
        starts = range(0, of.moved_bytes, REQUEST_BYTES)
        of.requests = len(starts)
        for start in starts:
            self._requests[is_write].put(partial(self._request, of, start, is_write))

    def _request(self, of: DiskBuffer, start: int, is_write: bool) -> None:
        error = None
        try:
            of.request(start, is_write)
        except Exception as caught:  # it is raised in the training thread
            error = caught
        with self.changes:
            of.error = of.error or error
            of.requests -= 1
            if not of.requests:
                self._end(of, is_write)

    def _end(self, of: DiskBuffer, is_write: bool) -> None:
        of.is_moving = False
        memory = of.memory
        assert memory is not None
        self._busy -= 1
        if is_write:
            self._traffic.to_file += of.moved_bytes
            self.error = self.error or of.error
        else:
            self._traffic.from_file += of.moved_bytes
        if is_write == (of.error is None):
            of.memory = None
            self.give_back(memory, was_busy=False)
        elif not is_write:
            self._ready[of] = None
        self.start_wanted()
        self.changes.notify_all()

    def move(self, memory: HostBuffer, begin: int, end: int, start: int, is_write: bool) -> None:
        """Read or write the bytes from `begin` to `end` of a buffer, at `start` in the file; raise OSError."""
        view = memoryview(memory.tensor.numpy())
        while begin < end:
            call = os.pwritev if is_write else os.preadv
            # One that was cut short goes on at a whole block, as O_DIRECT demands.
            count = call(self.file, [view[begin:end]], start) // BLOCK_BYTES * BLOCK_BYTES
            if count <= 0:
                raise OSError(f"{end - begin} bytes at {start} were cut short")
            begin, start = begin + count, start + count

    def probe(self) -> None:
        """Measure the rates of the disk, for less than a second, before it has any state; ValueError if it fails."""
        written, rate = self._measure(self.nbytes, is_write=True)
        self.rates = self._measure(written, is_write=False)[1], rate  # reads of what was never written cost nothing

    def _measure(self, most: int, is_write: bool) -> tuple[int, float]:
        """Return how many bytes were read or written from the begin of the file on, and at which rate."""
        memory, started = self.memory[0], time.perf_counter()
        size = min(REQUEST_BYTES, memory.tensor.numel())
        starts = iter(range(0, most - size + 1, size))

        def work(_: int) -> int:
            moved = 0
            for start in starts:
                self.move(memory, 0, size, start, is_write)
                moved += size
                if time.perf_counter() - started > PROBE_SECONDS:
                    break
            return moved

        try:
            with ThreadPoolExecutor(REQUESTS) as pool:
                moved = sum(pool.map(work, range(REQUESTS)))
        except OSError as error:
            raise ValueError(str(self.failure("written" if is_write else "read", error))) from error
        return moved, moved / (time.perf_counter() - started)

    def close(self) -> None:
        """End the use of the buffers."""
        with self.changes:
            # Race: pages would be unlocked that the disk still reads or writes.
            self.changes.wait_for(lambda: not self._busy)
        for memory in self.memory:
            memory.close()


class DiskBuffer(HostBuffer):
    """The bytes of a slab in a `SlabFile`. `tensor` is a mapping of them, which only the host reads and writes."""

    in_file = True

    def __init__(self, file: SlabFile, start: int, nbytes: int) -> None:
        self._file, self._start = file, start
        super().__init__(nbytes)
        self.untouched_bytes, self.is_to_lock = 0, False
        self.memory: HostBuffer | None = None  # the buffer that has its bytes
        self.is_moving = False  # whether they are on their way between that and the file
        self.moved_bytes = 0  # in whole blocks
        self.requests = 0  # of the move that have not ended
        self.error: Exception | None = None  # of the newest move; of a write, `memory` still has the bytes
        self._sums: dict[int, int] = {}  # of what was written, by place

    @override
    def _map(self, nbytes: int) -> torch.Tensor:
        return torch.frombuffer(mapped(self._file.file, nbytes, self._start), dtype=torch.uint8)

    def request(self, start: int, is_write: bool) -> None:
        """Read or write one request's bytes, or raise OSError."""
        assert self.memory is not None
        end = min(start + REQUEST_BYTES, self.moved_bytes)
        if not is_write:
            self._file.move(self.memory, start, end, self._start + start, is_write)
        # Some 4 GB/s a thread: eight keep up with a disk.
        found = zlib.crc32(memoryview(self.memory.tensor.numpy())[start:end])
        if is_write:
            self._sums[start] = found
            self._file.move(self.memory, start, end, self._start + start, is_write)
        elif self._sums.get(start, found) != found:
            raise OSError(f"{end - start} bytes at {self._start + start} are others than were written")

    def _settle(self) -> None:
        while self.is_moving:
            self._file.changes.wait()

    def drop(self) -> None:
        """Forget what was read."""
        self._file.forget(self)
        if self.memory is not None:
            if self.error is not None:  # it could not be written: the buffer has the only copy
                self._file.raise_error()
            memory, self.memory = self.memory, None
            self._file.give_back(memory, was_busy=False)

    @override
    def before_write(self) -> None:
        with self._file.waiting():
            # Race: a write of an offload that was given up would put older bytes into the file.
            self._settle()
            self.drop()
            self._sums.clear()

    @property
    def is_ready(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether its bytes have been read, or could not be."""
        return not self.is_moving and (self.memory is not None or self.error is not None)

    @property
    def has_room(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether a buffer is free for a copy out."""
        return self._file.has_room

    @override
    def to_fill(self) -> torch.Tensor:
        self.before_write()
        with self._file.waiting():
            self.memory = self._file.take()
        return self.memory.tensor

    @override
    def filled(self, nbytes: int, has_happened: Callable[[], bool] | None = None) -> None:
        self.moved_bytes, self.is_moving = blocks(nbytes), True
        # Race: the file would get what the copy out has not written yet.
        self._file.after(has_happened, partial(self._file.start, self, True))

    @override
    def to_empty(self) -> torch.Tensor:
        with self._file.waiting():
            self._file._wanted.pop(self, None)
            self._settle()
            if self.memory is None and self.error is None:
                self.memory = self._file.take()
                self._file.start(self, is_write=False)
                self._settle()
            if self.memory is None:
                error, self.error = self.error, None
                assert error is not None
                self._file.forget(self)
                raise self._file.failure("read", error) from error
            return self.memory.tensor

    @override
    def emptied(self, has_happened: Callable[[], bool] | None = None) -> None:
        with self._file.changes:
            self._file.forget(self)
            if self.error is not None:
                return  # it could not be written: the buffer has the only copy
            memory, self.memory = self.memory, None
            assert memory is not None
            self._file._busy += 1

        def landed() -> None:
            with self._file.changes:
                self._file.give_back(memory)

        # Race: the next read, or copy out, would overwrite what the copy in still reads.
        self._file.after(has_happened, landed)

    @override
    def read_ahead(self) -> None:
        with self._file.changes:
            if self.memory is None and self.error is None:
                self._file.want(self)

    @override
    def for_host(self) -> torch.Tensor:
        with self._file.waiting():
            self._settle()  # Race: the host would read what has not been written yet.
            return self.tensor if self.memory is None or self.error is None else self.memory.tensor


def _use_device(index: int) -> None:
    torch.cuda.set_device(index)  # a thread's own setting
    torch.cuda.mem_get_info(index)  # the runtime makes its context the thread's, for the driver


def _watch(begin: Callable[[], None], copies: SimpleQueue[Any]) -> None:
    """Call what is to follow copies, in a thread: to wait for an event would spin."""
    begin()
    pending: list[Any] = []
    while True:
        with suppress(Empty):
            pending.append(copies.get(timeout=POLL_SECONDS if pending else None))
        if None in pending:
            return
        pending = [task for task in pending if not _follows(*task)]  # which leaves no name of one, that holds the file


def _follows(has_happened: Callable[[], bool], then: Callable[[], None]) -> bool:
    """Call what is to follow a copy, if that is over; return whether it is."""
    try:
        if not has_happened():
            return False
    except RuntimeError:  # the CUDA context is lost, which the training thread finds too
        pass
    then()
    return True


def _serve(requests: SimpleQueue[Any]) -> None:
    while (request := requests.get()) is not None:
        request()
        del request  # it holds the file


def _stop(copies: SimpleQueue[Any], *requests: SimpleQueue[Any]) -> None:
    copies.put(None)
    for queue in requests:
        for _ in range(REQUESTS):
            queue.put(None)
