"""Keeps slabs in a file on a local disk; copies go through a few pinned buffers.

A copy out fills a buffer, which is written to the file and is free again. A copy in waits until a buffer has been read,
and gives it back once it has landed. The file has no name, is allocated before training, and is read and written by
`O_DIRECT`, straight from and to the buffers, which are shared mappings, as a fork beside direct reads demands.
`os.preadv` and `os.pwritev` in threads release the GIL.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, override

import torch

from bridge_fgo.config import OffloadConfig, readable
from bridge_fgo.memory.host_buffer import HostBuffer, at_once, file_system, mapped, unnamed_file
from bridge_fgo.memory.meters import Traffic

BUFFERS = 5
MOST_AHEAD = 3  # buffers that hold what no copy in has asked for yet: copies out have the others
REQUEST_BYTES = 8 * 2**20  # of a read or a write
REQUESTS = 8  # under way at once, in each direction; more than buffers, each of which may have a thread wait for a copy
BLOCK_BYTES = mmap.PAGESIZE  # a multiple of the blocks to which `O_DIRECT` aligns memory, places and lengths
POLL_SECONDS = 5e-4  # between two looks whether a copy is over
PROBE_SECONDS, PROBE_BYTES = 0.4, 2**34  # in each direction
NETWORK = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "9p", "virtiofs", "afs", "fuse")
"""Prefixes of the types of file systems whose disks are not this node's."""


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
    why = f"{kind} is no disk of this node" if kind.startswith(NETWORK) else ""
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError as error:
        why = why or f"its file system ({kind}) has no O_DIRECT ({error})"
    if why:
        os.close(file)
        raise ValueError(f"{setting}: {why}: name a folder on a local disk with ext4 or XFS, or set it to None")
    return file


class SlabFile:
    """The file of a rank, its buffers and its threads; `sizes` are those of the slabs, in bytes.

    A buffer that no thread gives back by itself has been read for a copy in. Whoever lacks one takes the newest of
    these, so that nobody waits forever.
    """

    def __init__(self, folder: str, sizes: Sequence[int], traffic: Traffic) -> None:
        self.folder, self.traffic = folder, traffic
        self.nbytes = sum(map(blocks, sizes))
        self.file = direct_file(folder, self.nbytes)
        weakref.finalize(self, os.close, self.file).atexit = False
        self.memory = [HostBuffer(blocks(max(sizes))) for _ in range(BUFFERS)]
        self.rates = 0.0, 0.0  # bytes per second of reads and writes, as `probe` finds them
        self.error: Exception | None = None  # of a write
        self.changes = threading.Condition()  # held for what follows, and for a slab's own
        self.free = list(self.memory)
        self.busy = 0  # buffers that a thread gives back, or makes ready
        self.read: dict[DiskBuffer, None] = {}  # that have been read, or are being, and wait for a copy in
        self.wanted: dict[DiskBuffer, None] = {}  # to be read ahead, in order
        self.tasks = SimpleQueue[Any](), SimpleQueue[Any]()  # around reads, and writes
        self._next = 0
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        for tasks in self.tasks * REQUESTS:
            threading.Thread(target=_serve, args=(tasks, device), daemon=True, name="bridge_fgo slab file").start()
        weakref.finalize(self, _stop, self.tasks).atexit = False

    def buffer(self, nbytes: int) -> DiskBuffer:
        """Return the host buffer of the next slab."""
        start, self._next = self._next, self._next + blocks(nbytes)
        return DiskBuffer(self, start, nbytes)

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
        """Context in which training may wait for the disk; the time counts as that, and not as a move's."""
        started = time.perf_counter()
        try:
            with self.changes:
                yield
        finally:
            waited = time.perf_counter() - started
            self.traffic.file_seconds += waited
            self.traffic.seconds -= waited

    def take(self) -> HostBuffer:
        """Return a buffer, once one is free; raise the error of writes if these have failed for all."""
        while not self.free:
            if self.busy:
                self.changes.wait()
            elif self.read:
                next(reversed(self.read)).drop()
            else:
                raise self.failure("written", self.error or RuntimeError("no buffer is left"))
        self.busy += 1
        return self.free.pop()

    def start_wanted(self) -> None:
        """Begin to read what is wanted, as far as there are buffers for it; wake who waits."""
        while self.wanted and self.free and len(self.read) < MOST_AHEAD:
            of = next(iter(self.wanted))
            if of.left:
                break  # it is read once it is written
            del self.wanted[of]
            if of.memory is None and of.error is None:
                of.start_read()
        self.changes.notify_all()

    def give_back(self, memory: HostBuffer) -> None:
        """Take a buffer that nothing uses any more."""
        self.free.append(memory)
        self.start_wanted()

    def give_back_after(self, has_happened: Callable[[], bool], memory: HostBuffer) -> None:
        """Take a buffer, in a thread, once a copy in is over."""
        _wait_for(has_happened)
        with self.changes:
            self.busy -= 1
            self.give_back(memory)

    def move(self, view: memoryview, start: int, is_write: bool) -> None:
        """Read or write memory at `start` in the file, or raise OSError."""
        while view:
            call = os.pwritev if is_write else os.preadv
            # One that was cut short goes on at a whole block, as O_DIRECT demands.
            count = call(self.file, [view], start) // BLOCK_BYTES * BLOCK_BYTES
            if count <= 0:
                raise OSError(f"{len(view)} bytes at {start} were cut short")
            view, start = view[count:], start + count

    def probe(self) -> None:
        """Measure the rates of the disk, for less than a second, before it has any state; ValueError if it fails."""
        written, rate = self._measure(min(self.nbytes, PROBE_BYTES), is_write=True)
        self.rates = self._measure(written, is_write=False)[1], rate  # reads of what was never written cost nothing

    def _measure(self, most: int, is_write: bool) -> tuple[int, float]:
        """Return how many bytes were read or written from the begin of the file on, and at which rate."""
        view, started = memoryview(self.memory[0].tensor.numpy())[:REQUEST_BYTES], time.perf_counter()

        def work(start: int) -> int:
            if start and time.perf_counter() - started > PROBE_SECONDS:
                return 0  # the first is measured whatever the machine is busy with
            self.move(view, start, is_write)
            return len(view)

        try:
            with ThreadPoolExecutor(REQUESTS) as pool:
                moved = sum(pool.map(work, range(0, most - len(view) + 1, len(view))))
        except OSError as error:
            raise ValueError(str(self.failure("written" if is_write else "read", error))) from error
        return moved, moved / (time.perf_counter() - started)

    def close(self) -> None:
        """End the use of the buffers."""
        with self.changes:
            # Race: pages would be unlocked that the disk still reads or writes.
            self.changes.wait_for(lambda: not self.busy)
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
        self.left = 0  # requests that have not ended, of the move between that and the file
        self.error: Exception | None = None  # of the newest move; of a write, `memory` still has the bytes
        self._moved_bytes = 0  # in whole blocks
        self._sums: dict[int, int] = {}  # of what was written, by place

    @override
    def _map(self, nbytes: int) -> torch.Tensor:
        return torch.frombuffer(mapped(self._file.file, nbytes, self._start), dtype=torch.uint8)

    # The thread that trains.

    @override
    def before_write(self) -> None:
        with self._file.waiting():
            self._settle()  # of a write whose offload was given up, too
            self.drop()
            self._sums.clear()

    def _settle(self) -> None:
        while self.left:
            self._file.changes.wait()

    def drop(self) -> None:
        """Forget what was, or was to be, read."""
        self._forget()
        if self.memory is not None:
            if self.error is not None:  # it could not be written: the buffer has the only copy
                self._file.raise_error()
            memory, self.memory = self.memory, None
            self._file.give_back(memory)

    def _forget(self) -> None:
        self._file.wanted.pop(self, None)
        self._file.read.pop(self, None)

    @property
    def is_ready(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether its bytes have been read, or could not be."""
        return not self.left and (self.memory is not None or self.error is not None)

    @property
    def has_room(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether a buffer is free for a copy out."""
        return bool(self._file.free)

    @override
    def to_fill(self) -> torch.Tensor:
        self.before_write()
        with self._file.waiting():
            self.memory = self._file.take()
        return self.memory.tensor

    @override
    def filled(self, nbytes: int, has_happened: Callable[[], bool] = at_once) -> None:
        self._moved_bytes = blocks(nbytes)
        # Race: the file would get what the copy out has not written yet.
        self._start_move(is_write=True, has_happened=has_happened)

    @override
    def read_ahead(self) -> None:
        with self._file.changes:
            if self.memory is None and self.error is None:
                self._file.wanted[self] = None
                self._file.start_wanted()

    @override
    def to_empty(self) -> torch.Tensor:
        with self._file.waiting():
            self._file.wanted.pop(self, None)
            self._settle()
            if self.memory is None and self.error is None:
                self.start_read()
                self._settle()
            if self.memory is None:
                self._forget()
                error, self.error = self.error, None
                assert error is not None
                raise self._file.failure("read", error) from error
            return self.memory.tensor

    @override
    def emptied(self, has_happened: Callable[[], bool] = at_once) -> None:
        with self._file.changes:
            self._forget()
            if self.error is None:  # else it could not be written: the buffer has the only copy
                memory, self.memory = self.memory, None
                assert memory is not None
                self._file.busy += 1
                # Race: the next read, or copy out, would overwrite what the copy in still reads.
                self._file.tasks[False].put(partial(self._file.give_back_after, has_happened, memory))

    @override
    def for_host(self) -> torch.Tensor:
        with self._file.waiting():
            self._settle()  # Race: the host would read what has not been written yet.
            return self.tensor if self.memory is None or self.error is None else self.memory.tensor

    # Reads and writes.

    def start_read(self) -> None:
        """Begin to read the bytes into a buffer."""
        self.memory = self._file.take()
        self._file.read[self] = None
        self._start_move(is_write=False)

    def _start_move(self, is_write: bool, has_happened: Callable[[], bool] = at_once) -> None:
        starts = range(0, self._moved_bytes, REQUEST_BYTES)
        self.left = len(starts)
        for start in starts:
            self._file.tasks[is_write].put(partial(self._run, start, is_write, has_happened))

    def _run(self, start: int, is_write: bool, has_happened: Callable[[], bool]) -> None:
        """Do one request, in a thread, once a copy out is over; if it was the last, note that the move has ended."""
        error, file = None, self._file
        assert self.memory is not None
        view = memoryview(self.memory.tensor.numpy())[start : min(start + REQUEST_BYTES, self._moved_bytes)]
        try:
            _wait_for(has_happened)
            if is_write:
                self._sums[start] = zlib.crc32(view)  # some 4 GB/s a thread: eight keep up with a disk
            file.move(view, self._start + start, is_write)
            if not is_write and self._sums.get(start) not in (None, zlib.crc32(view)):
                raise OSError(f"{len(view)} bytes at {self._start + start} are others than were written")
        except Exception as caught:  # it is raised in the training thread
            error = caught
        with file.changes:
            self.error = self.error or error
            self.left -= 1
            if self.left:
                return
            file.busy -= 1
            if is_write:
                file.traffic.to_file += self._moved_bytes
                file.error = file.error or self.error
            else:
                file.traffic.from_file += self._moved_bytes
            if is_write == (self.error is None):  # a write that failed leaves the bytes in the buffer
                memory, self.memory = self.memory, None
                assert memory is not None
                file.give_back(memory)
            file.start_wanted()


def _wait_for(has_happened: Callable[[], bool]) -> None:
    """Wait for a copy; the driver's own wait would spin."""
    with suppress(RuntimeError):  # the CUDA context is lost, which the training thread finds too
        while not has_happened():
            time.sleep(POLL_SECONDS)


def _serve(tasks: SimpleQueue[Any], device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)  # a thread's own setting
        torch.cuda.mem_get_info(device)  # the runtime makes its context the thread's, for the driver
    while (task := tasks.get()) is not None:
        task()
        del task  # it holds the file


def _stop(queues: Iterable[SimpleQueue[Any]]) -> None:
    for tasks in queues:
        for _ in range(REQUESTS):
            tasks.put(None)
