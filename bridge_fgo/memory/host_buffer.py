"""Host memory of a slab: exactly its bytes, page-locked once; and such memory that another process reads as it is.

`torch.multiprocessing` hands a storage over by an open file of its own, for which the process that gets it connects to
the one that sends it: some 0.5 ms each, as training waits. A lent storage goes as a place in its buffer, and with the
first of them that is pickled the buffer's one file.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import resource
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from multiprocessing.reduction import DupFd, ForkingPickler
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, override

import torch
from torch.multiprocessing.reductions import reduce_storage

from bridge_fgo.memory.cuda_driver import PageLock
from bridge_fgo.memory.host_memory import available_bytes, local_cpus
from bridge_fgo.memory.layout import aligned

PINNING_THREADS = 16
"""Measured on an H200 host of 16 cores, 8.6 GB in 256 MiB buffers, touching and registering: 3.8 GB/s with one
thread, 5.7 with 4, 9.5 with 8, 14.7 with 16. Transparent huge pages changed none of it by more than 7%, and
registering pages that nobody touched before ran at 2.1 GB/s."""


def at_once() -> bool:
    """Say that a copy is over: one between tensors of the host."""
    return True


class HostBuffer:
    """`nbytes` (above 0) of host memory as one uint8 tensor, which `page_lock` locks; RuntimeError where there is none.

    Its classes differ in where the bytes are: in this process, in a file on a disk (`FileBuffer`, and `DiskBuffer` in
    `memory.slab_file`), in memory that a process that saves reads too (`SharedHostBuffer`), or in memory that outlives
    this process (`KeptBuffer` in `engines.kept_steps`). Whoever writes one first calls `before_write`, and then asks
    whether it `is_taken`.

    PyTorch's own pinned allocator rounds every block up to a power of two (pytorch#95823, pytorch#150517), which can
    double the host memory of a job; here a mapping of the exact size is registered instead.
    """

    is_taken = False  # whether its bytes have to stay as they are, because somebody else reads them
    is_lent = False  # whether somebody in this process has a tensor of it that was lent
    untouched_bytes = 0  # that `lock` takes from the host; 0 once it has
    in_file = False  # whether it has memory for copies only while one uses it, and a file otherwise
    is_ready = True  # whether a copy in need not wait for a disk
    has_room = True  # whether a copy out need not wait for a disk

    def __init__(self, nbytes: int) -> None:
        try:
            self.tensor = self._map(nbytes)
        except OSError as error:
            raise RuntimeError(
                f"bridge_fgo could not map {nbytes} bytes of host memory for optimizer state ({error}): lower "
                "OffloadConfig.fraction, or run on a host with more memory"
            ) from error
        self.address = self.tensor.data_ptr()
        self.pinned_bytes, self.untouched_bytes = 0, nbytes
        self.is_to_lock = True  # whether `page_lock` is still to lock it, unless the settings have it unlocked

    def _map(self, nbytes: int) -> torch.Tensor:
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)

    def before_write(self) -> None:
        """Do what has to be done before the buffer is written."""

    def before_update(self) -> None:
        """Do what has to be done before the states are updated whose bytes may be on their way to the buffer."""

    def to_fill(self) -> torch.Tensor:
        """Return the memory for a copy out, uint8; once it is enqueued, `filled` says so."""
        return self.tensor

    def filled(self, nbytes: int, has_happened: Callable[[], bool] = at_once) -> None:
        """Note a copy out of `nbytes`, which is over once `has_happened` says so."""

    def to_empty(self) -> torch.Tensor:
        """Return the memory for a copy in, uint8; once it is enqueued, `emptied` says so."""
        return self.tensor

    def emptied(self, has_happened: Callable[[], bool] = at_once) -> None:
        """Note a copy in, which is over once `has_happened` says so."""

    def read_ahead(self) -> None:
        """Begin what a copy in would wait for."""

    def for_host(self) -> torch.Tensor:
        """Return the bytes for the host to read or, after `before_write`, to write; no copy is under way."""
        return self.tensor

    def to_lend(self) -> SharedHostBuffer:
        """Return a buffer of the same size that takes turns with it, so that either may be lent."""
        return SharedHostBuffer(self.tensor.numel())

    def lock(self) -> None:
        """Touch every page and page-lock the buffer; RuntimeError where CUDA refuses."""
        nbytes, address = self.tensor.numel(), self.address
        if self.untouched_bytes:  # without the GIL; registering touches pages too, many times slower
            ctypes.memset(address, 0, nbytes)
            self.untouched_bytes = 0
        self._unlock = weakref.finalize(self, _unlock, PageLock(address, nbytes), torch.cuda.current_device())
        # At interpreter exit the CUDA context may be gone already, and the driver unlocks the pages itself.
        self._unlock.atexit = False
        self.pinned_bytes, self.is_to_lock = nbytes, False

    def close(self) -> None:
        """Unlock the pages; the memory goes with the last reference to the tensor."""
        if self.pinned_bytes:
            self._unlock()
            self.pinned_bytes = 0


class FileBuffer(HostBuffer):
    """Host memory that is a file without a name in a folder, and is not page-locked.

    The kernel writes its pages to the disk, and takes them back where memory is short. ValueError where there is no
    such folder, no space, or no disk.
    """

    def __init__(self, nbytes: int, folder: Path) -> None:
        self._folder = folder
        super().__init__(nbytes)
        self.is_to_lock = False

    @override
    def _map(self, nbytes: int) -> torch.Tensor:
        setting = f"Residency(frozen_folder={str(self._folder)!r})"
        file = unnamed_file(self._folder, nbytes, setting, "the frozen parameters of every rank of the node")
        return torch.frombuffer(MemoryFile(nbytes, file).memory, dtype=torch.uint8)


def unnamed_file(folder: Path, nbytes: int, setting: str, holds: str) -> int:
    """Return the descriptor of a new file without a name, so that no crash leaves one, with disk space for `nbytes`.

    ValueError, which names the `setting`, where there is no such folder, no space for what it `holds`, or no disk.
    """
    try:
        with TemporaryFile(dir=folder) as file:
            if (kind := file_system(os.fstat(file.fileno()).st_dev)) in ("tmpfs", "ramfs"):
                raise ValueError(
                    f"{setting}: a {kind} is memory of the host, which the files are to save: name a folder on a disk "
                    "of the node, or leave it out"
                )
            os.posix_fallocate(file.fileno(), 0, nbytes)  # to write where the disk is full would end the process
            return os.dup(file.fileno())
    except OSError as error:
        raise ValueError(
            f"{setting}: a file of {nbytes} bytes could not be made there ({error}): name a folder that has room for "
            f"{holds}"
        ) from error


def file_system(device: int) -> str:
    """Return the type of the mounted file system that has a device number, "" where none has it by itself (btrfs)."""
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = (line.partition(" - ") for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return next((rest.split()[0] for fields, _, rest in mounts if fields.split()[2] == number), "")


def page_lock(buffers: Sequence[HostBuffer]) -> None:
    """Page-lock the buffers with CUDA, from several threads, on the CPUs of the GPU's NUMA node where these are known.

    So their pages, which go to the node of whoever touches them first, are near the GPU. ValueError where the host has
    no memory left for one, as others take it: Linux would kill whoever touches it. RuntimeError where CUDA refuses one.
    """
    device = torch.cuda.current_device()
    cpus = local_cpus(torch.device("cuda", device))

    def begin() -> None:
        torch.cuda.set_device(device)  # a thread's own setting
        torch.cuda.mem_get_info(device)  # the runtime makes its context the thread's, for the driver
        if cpus:
            os.sched_setaffinity(0, cpus)  # 0 is the calling thread

    with ThreadPoolExecutor(PINNING_THREADS, initializer=begin) as pool:
        list(pool.map(_Room(sum(buffer.untouched_bytes for buffer in buffers)).lock, buffers))  # raises the first error


class _Room:
    """Asks before each buffer, of `total` bytes together, is touched whether the host has the memory for it."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._locked = self._touched = 0
        self._changes = threading.Condition()

    def lock(self, buffer: HostBuffer) -> None:
        nbytes = buffer.untouched_bytes
        with self._changes:
            # Of what other threads are touching the host may have counted a part: it is asked again when they are done.
            while self._touched + nbytes > (free := available_bytes()):
                if not self._touched:
                    raise ValueError(
                        f"the host has {free} bytes of memory left after {self._locked} of {self._total} bytes were "
                        "page-locked for this rank's optimizer state: lower OffloadConfig.fraction, set moments=False "
                        "or master_weights=False, or give the job more host memory"
                    )
                self._changes.wait()
            self._touched += nbytes
        try:
            buffer.lock()
        except RuntimeError as error:
            raise RuntimeError(f"{_what_helps()}: {error}, of {self._total} bytes for optimizer state") from error
        finally:
            with self._changes:
                self._touched -= nbytes
                self._locked += nbytes
                self._changes.notify_all()


def _what_helps() -> str:
    if "microsoft" in platform.release().lower():
        return "set OffloadConfig.pin_memory=False (slower), as WSL page-locks little memory"
    return "raise `ulimit -l`, lower OffloadConfig.fraction, or set OffloadConfig.pin_memory=False (slower)"


def _unlock(lock: PageLock, device: int) -> None:
    # Race: a copy may be under way from or to pages that are being unlocked. Python may collect a buffer in any thread.
    torch.cuda.synchronize(device)
    lock.close()


OTHER_FILES = 256  # open files that a process has beside those of memory that it shares, and some to spare


def hands_out_descriptors() -> bool:
    """Return whether `torch.multiprocessing` hands memory to another process by an open file, and not by a name."""
    return torch.multiprocessing.get_sharing_strategy() == "file_descriptor"


def has_files_for_buffers(slabs: int) -> bool:
    """Return whether so many slabs may have two shared buffers: a file for each, and another as it is handed over."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 3 * slabs + OTHER_FILES


def shared_storage(nbytes: int) -> torch.UntypedStorage:
    """Return shared memory that `torch.multiprocessing` hands to another process without copying it, or raise OSError.

    Handed over as an open file it is in no file system: /dev/shm, which containers keep small, does not limit it.
    """
    if not hands_out_descriptors():
        return torch.UntypedStorage._new_shared(nbytes)
    file = _memory_file(nbytes)
    try:
        return torch.UntypedStorage._new_shared_fd_cpu(file, nbytes)  # pyright: ignore[reportAttributeAccessIssue]
    finally:
        os.close(file)


def tensor_of(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """Return the host tensor that a storage holds, of the shape and dtype of `like`."""
    return torch.empty(0, dtype=like.dtype, device="cpu").set_(storage, 0, like.shape)  # pyright: ignore[reportArgumentType, reportCallIssue]


def shared_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor in such memory, or raise OSError."""
    return tensor_of(shared_storage(tensor.nbytes), tensor).copy_(tensor.detach())


class MemoryFile:
    """A file of `nbytes` that is nothing but memory, open and mapped as long as anything refers to it, or OSError.

    By default a new one; `file` is the descriptor of one that there is.
    """

    def __init__(self, nbytes: int, file: int | None = None) -> None:
        self.file = _memory_file(nbytes) if file is None else file
        weakref.finalize(self, os.close, self.file)
        self.memory = mapped(self.file, nbytes)


class Loan:
    """Lives as long as anything in this process refers to memory that a buffer has lent.

    mcore does so until its writer is done on all ranks (`AsyncCallsQueue.maybe_finalize_async_calls`).
    """

    def __init__(self, file: MemoryFile) -> None:
        self.file = file

    def lend(self, like: torch.Tensor, offset: int) -> torch.Tensor:
        """Return the tensor at `offset` (bytes) in the file, of the shape and dtype of `like`."""
        storage: Any = _part(self.file.memory, offset, like.nbytes)
        # torch makes a storage over memory that is there of its own class only. It keeps this object, and so the loan,
        # as long as any tensor has the storage.
        storage.__class__ = LentStorage
        storage.loan, storage.offset = self, offset
        return tensor_of(storage, like)


class CopyFile(Loan):
    """Copies of tensors in a file without a name, whose pages the kernel writes to the disk where memory is short.

    Each is one that another process gets as it is. `sizes`: their bytes, at most. ValueError as `unnamed_file`.
    """

    def __init__(self, folder: str, sizes: Sequence[int]) -> None:
        nbytes = sum(map(aligned, sizes))
        file = unnamed_file(Path(folder), nbytes, f"OffloadConfig.nvme_folder={folder!r}", "the copies for a save")
        super().__init__(MemoryFile(nbytes, file))
        self._end = 0

    def copy(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a copy of a tensor; None where there is no place for it."""
        start, self._end = self._end, self._end + aligned(tensor.nbytes)
        is_there = 0 < tensor.nbytes <= len(self.file.memory) - start
        return self.lend(tensor, start).copy_(tensor.detach()) if is_there else None


class LentStorage(torch.UntypedStorage):
    """Memory of one tensor in a `SharedHostBuffer`, which another process gets as it is. Made by `lend` alone."""

    loan: Loan | None = None  # None of a storage that torch has made from one of these, with memory of its own
    offset: int  # in the file, in bytes

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.UntypedStorage:
        """Return a copy in ordinary memory: torch refuses to copy a storage to one that is of no class of its own."""
        return torch.UntypedStorage(self.nbytes()).copy_(self)


class SharedHostBuffer(HostBuffer):
    """A slab's host buffer of which single tensors are lent, each as a storage that is no larger than the tensor.

    mcore copies a tensor that is a part of its storage before it saves it, and torch copies one that is in no shared
    memory before it hands it to the process that saves. These tensors both take as they are.
    """

    _start = 0  # where it begins in the file

    def __init__(self, nbytes: int) -> None:
        self._loan: Callable[[], Loan | None] = lambda: None
        super().__init__(nbytes)

    @override
    def _map(self, nbytes: int) -> torch.Tensor:
        self._file = MemoryFile(nbytes)
        return torch.frombuffer(self._file.memory, dtype=torch.uint8)

    def lend(self, like: torch.Tensor, offset: int) -> torch.Tensor:
        """Return the tensor at `offset` (bytes), of the shape and dtype of `like`, and lend the buffer meanwhile."""
        loan = self._loan() or Loan(self._file)
        self._loan = weakref.ref(loan)
        return loan.lend(like, self._start + offset)

    @property
    def is_lent(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether somebody in this process has a tensor that was lent."""
        return self._loan() is not None

    @property
    def is_taken(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether it is lent: for minutes a checkpoint's writer reads it, and would save what is written there."""
        return self.is_lent


def _reduce_storage(storage: LentStorage) -> tuple[Any, ...]:
    """Return how another process makes the storage: pickled once, all storages of a file share it there."""
    if storage.loan is None:
        return reduce_storage(storage)
    return _part, (storage.loan.file, storage.offset, storage.nbytes())


def _reduce_file(file: MemoryFile) -> tuple[Any, ...]:
    return _received, (DupFd(file.file), len(file.memory))


def _received(handle: Any, nbytes: int) -> Any:
    """Return the memory of a file of another process, as long as anything refers to it."""
    file = handle.detach()
    try:
        return mapped(file, nbytes)
    finally:
        os.close(file)


def _part(memory: Any, offset: int, nbytes: int) -> torch.UntypedStorage:
    return torch.frombuffer(memory, dtype=torch.uint8, offset=offset, count=nbytes).untyped_storage()


ForkingPickler.register(LentStorage, _reduce_storage)
ForkingPickler.register(MemoryFile, _reduce_file)


def mapped(file: int, nbytes: int, start: int = 0) -> Any:
    """Return a file's memory as bytes. Python's own mapping would keep another descriptor of it."""
    base = _libc().mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, start)
    if base == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    memory = (ctypes.c_uint8 * nbytes).from_address(base)
    # With the last reference to the memory; at exit copies may be under way from and to it.
    weakref.finalize(memory, _libc().munmap, base, nbytes).atexit = False
    return memory


def _memory_file(nbytes: int) -> int:
    file = os.memfd_create("bridge_fgo")
    try:
        os.ftruncate(file, nbytes)
    except OSError:
        os.close(file)
        raise
    return file


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * (ctypes.c_int,), ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc
