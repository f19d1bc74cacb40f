"""Copies of states for a checkpoint, in ordinary host memory, or in such as a worker process reads as it is."""

from __future__ import annotations

import os
import warnings
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import override

import torch

from bridge_fgo.memory.driver import PageLock
from bridge_fgo.memory.shared_host_buffer import is_in_use, shared_storage, tensor_of

PIECE_BYTES = 8 * 2**20
"""What a thread copies at a time: the tensors of a parameter are cut into so much that all threads have a part."""
MOST_THREADS = 16
"""As many as `PINNING_THREADS`: new pages cost more than the copying, and are made by whoever touches them first."""


class OwnCopies:
    """Copies in ordinary memory, each new."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of `tensor` in host memory, which is complete after `finish`."""
        return self.place(tensor).copy_(tensor.detach())

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return host memory for a copy of `tensor`, which the caller makes."""
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    def finish(self) -> None:
        """Return when all copies are complete."""

    def close(self) -> None:
        """Let go of memory that is kept; what a writer still has goes with the writer."""


class SharedCopies(OwnCopies):
    """Copies in shared memory that is kept from one save to the next.

    `torch.multiprocessing` hands such memory to a checkpoint worker as it is, where it first copies any other into new
    shared memory, by one thread, as training waits. New pages are slow too: on an H200 host one thread fills some 1 to
    2 GB a second of them, and a save of 23 GB stalled training for 22 s. So memory is taken again as soon as nobody in
    this process refers to it.

    Args:
        page_locks: whether memory that is copied to from a GPU is page-locked, which makes the copies as fast as the
            link.
    """

    def __init__(self, page_locks: bool) -> None:
        self._page_locks = page_locks
        self._locks: dict[int, PageLock] = {}  # before what is locked, so that it goes first
        self._storages: defaultdict[int, list[torch.UntypedStorage]] = defaultdict(list)
        self._threads = ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0))))
        self._under_way: list[Future[None]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory that are kept."""
        return sum(nbytes * len(storages) for nbytes, storages in self._storages.items())

    @override
    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach().contiguous()
        out = self.place(tensor)
        to, of = (each.reshape(-1).view(torch.uint8) for each in (out, tensor))
        if tensor.device.type == "cuda":
            self._lock(to)
            to.copy_(of)
        else:
            pieces = zip(to.split(PIECE_BYTES), of.split(PIECE_BYTES), strict=True)
            self._under_way += [self._threads.submit(_fill, *piece) for piece in pieces]
        return out

    @override
    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor_of(self._take(tensor.nbytes), tensor)

    @override
    def finish(self) -> None:
        while self._under_way:  # what an interrupt leaves, a second call waits for
            self._under_way[-1].result()
            self._under_way.pop()

    def _take(self, nbytes: int) -> torch.UntypedStorage:
        """Return shared memory that nobody else refers to."""
        kept = self._storages[nbytes]
        for storage in kept:
            # Race: a writer that is not done would write what a later save copies there.
            if not is_in_use(storage):
                return storage
        kept.append(shared_storage(nbytes))
        return kept[-1]

    def _lock(self, memory: torch.Tensor) -> None:
        """Page-lock a storage, uint8, which no other thread writes; where that is refused the copies are slower."""
        address, nbytes = memory.data_ptr(), memory.numel()
        if not self._page_locks or address in self._locks:
            return
        list(self._threads.map(torch.Tensor.zero_, memory.split(PIECE_BYTES)))  # CUDA makes new pages one by one
        try:
            self._locks[address] = PageLock(address, nbytes)
        except RuntimeError as error:
            self._page_locks = False
            warnings.warn(f"bridge_fgo: saves stall training longer: {error}", stacklevel=2)

    @override
    def close(self) -> None:
        self.finish()
        self._threads.shutdown()
        for lock in self._locks.values():
            lock.close()
        self._locks.clear()
        self._storages.clear()


def _fill(to: torch.Tensor, of: torch.Tensor) -> None:
    to.copy_(of)
