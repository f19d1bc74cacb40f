"""Host memory that another process reads as it is: single storages, and the host buffer of a slab made of them."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any, override

import torch

from bridge_fgo.core.host_buffer import HostBuffer

MAP_FIXED = 0x10
"""A flag of Linux's `mmap` that Python's module has no name for."""

OTHER_FILES = 256
"""Open files that a process has beside those of memory that it shares, and some to spare."""

Span = tuple[int, int]
"""Offset and size in bytes of one tensor in a buffer; the offset is a multiple of the page size."""


def hands_out_descriptors() -> bool:
    """Return whether `torch.multiprocessing` hands memory to another process by an open file, and not by a name."""
    return torch.multiprocessing.get_sharing_strategy() == "file_descriptor"


def has_files_for_buffers(tensors: int) -> bool:
    """Return whether so many tensors may have two shared buffers each: a process keeps a file open for each of them."""
    return hands_out_descriptors() and resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 2 * tensors + OTHER_FILES


def shared_storage(nbytes: int) -> torch.UntypedStorage:
    """Return shared memory that `torch.multiprocessing` hands to another process without copying it.

    Where an open file is handed over, the memory is of no file system: /dev/shm, which containers keep small, does not
    limit it.

    Raises:
        OSError: there are no open files, or no memory, left.
    """
    if not hands_out_descriptors():
        return torch.UntypedStorage._new_shared(nbytes)
    file = _memory_file(nbytes)
    try:
        return _storage_of(file, nbytes)
    finally:
        os.close(file)


def tensor_of(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """Return the host tensor that a storage holds, of the shape and dtype of `like`."""
    return torch.empty(0, dtype=like.dtype).set_(storage, 0, like.shape)  # pyright: ignore[reportArgumentType, reportCallIssue]


def is_in_use(storage: torch.UntypedStorage) -> bool:
    """Return whether anything in this process refers to a storage's memory but `storage` itself.

    mcore refers to what it saves until its writer is done on all ranks (`AsyncCallsQueue.maybe_finalize_async_calls`).
    """
    return torch._C._storage_Use_Count(storage._cdata) > 1


class SharedHostBuffer(HostBuffer):
    """A slab's host buffer of which single tensors have shared memory of their own, and storages that are no more.

    mcore copies a tensor that is a part of its storage before it saves it, and torch copies one that is in no shared
    memory before it hands it to the process that saves. These tensors both take as they are. Their memory is mapped
    a second time, at its place in the buffer, so that for copies to and from the GPU the whole is one.

    Args:
        nbytes: of the buffer.
        spans: of those tensors; no other shares a page with one.

    Raises:
        RuntimeError: the memory could not be mapped; says how much was asked for.
    """

    def __init__(self, nbytes: int, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._storages: dict[int, torch.UntypedStorage] = {}
        """By the tensor's offset."""
        super().__init__(nbytes)

    @override
    def _map(self, nbytes: int) -> torch.Tensor:
        writable = mmap.PROT_READ | mmap.PROT_WRITE
        base = _mmap(None, nbytes, writable, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        memory = (ctypes.c_uint8 * nbytes).from_address(base)
        # With the last reference to the memory; at exit copies may be under way from and to it.
        weakref.finalize(memory, _libc().munmap, base, nbytes).atexit = False
        for offset, size in self._spans:
            assert offset % mmap.PAGESIZE == 0, "a tensor's memory begins with a page"
            file = _memory_file(size)
            try:
                _mmap(base + offset, size, writable, mmap.MAP_SHARED | MAP_FIXED, file)
                self._storages[offset] = _storage_of(file, size)
            finally:
                os.close(file)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def lend(self, like: torch.Tensor, offset: int) -> torch.Tensor | None:
        """Return the tensor at `offset`, of the shape and dtype of `like`, where it has memory of its own, or None.

        As long as it lives, the buffer is lent.
        """
        storage = self._storages.get(offset)
        return None if storage is None else tensor_of(storage, like)

    @property
    def is_lent(self) -> bool:
        """Whether somebody in this process has a tensor that was lent."""
        return any(is_in_use(storage) for storage in self._storages.values())


def _storage_of(file: int, nbytes: int) -> torch.UntypedStorage:
    """Return a storage over an open file, of which it keeps a descriptor of its own."""
    return torch.UntypedStorage._new_shared_fd_cpu(file, nbytes)  # pyright: ignore[reportAttributeAccessIssue]


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


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, file: int) -> int:
    mapped = _libc().mmap(address, nbytes, protection, flags, file, 0)
    if mapped == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return mapped
