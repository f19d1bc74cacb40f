"""Host memory of a slab: exactly its bytes, page-aligned, page-locked once."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from bridge_fgo.memory.driver import PageLock
from bridge_fgo.memory.host_memory import available_bytes

PINNING_THREADS = 16
"""Measured on an H200 host of 16 cores, 8.6 GB in 256 MiB buffers, touching and registering: 3.8 GB/s with one
thread, 5.7 with 4, 9.5 with 8, 14.7 with 16. Transparent huge pages changed none of it by more than 7%, and
registering pages that nobody touched before ran at 2.1 GB/s."""


class HostBuffer:
    """`nbytes` (above 0) of host memory as one uint8 tensor, which `page_lock` locks.

    PyTorch's own pinned allocator rounds every block up to a power of two (pytorch#95823, pytorch#150517),
    which can double the host memory of a job; here a mapping of the exact size is registered instead.

    Raises:
        RuntimeError: the memory could not be mapped; says how much was asked for.
    """

    def __init__(self, nbytes: int) -> None:
        try:
            self.tensor = self._map(nbytes)
        except OSError as error:
            raise RuntimeError(
                f"bridge_fgo could not map {nbytes} bytes of host memory for optimizer state ({error}): lower "
                "OffloadConfig.fraction, or run on a host with more memory"
            ) from error
        self.address = self.tensor.data_ptr()
        self.pinned_bytes = 0

    def _map(self, nbytes: int) -> torch.Tensor:
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)

    def lock(self) -> None:
        """Touch every page and page-lock the buffer.

        Raises:
            RuntimeError: CUDA refuses; says with which error.
        """
        nbytes, address = self.tensor.numel(), self.address
        ctypes.memset(address, 0, nbytes)  # without the GIL; registering touches pages too, many times slower
        self._unlock = weakref.finalize(self, _unlock, PageLock(address, nbytes), torch.cuda.current_device())
        # At interpreter exit the CUDA context may be gone already, and the driver unlocks the pages itself.
        self._unlock.atexit = False
        self.pinned_bytes = nbytes

    def close(self) -> None:
        """Unlock the pages; the memory goes with the last reference to the tensor."""
        if self.pinned_bytes:
            self._unlock()
            self.pinned_bytes = 0


def page_lock(buffers: Sequence[HostBuffer], local_cpus: set[int] | None = None) -> None:
    """Page-lock the buffers with CUDA, from several threads.

    Args:
        buffers: what to lock.
        local_cpus: CPUs of the GPU's NUMA node. The threads run there, so that the pages, which go to the node
            of whoever touches them first, are near the GPU. None leaves the threads where the process may run.

    Raises:
        ValueError: the host has no memory left for one, as where other ranks and jobs take it meanwhile: Linux would
            kill whoever touches it.
        RuntimeError: CUDA refused one; says how much was asked for and what to change.
    """
    device = torch.cuda.current_device()

    def begin() -> None:
        torch.cuda.set_device(device)  # a thread's own setting
        torch.cuda.mem_get_info(device)  # the runtime makes its context the thread's, for the driver
        if local_cpus:
            os.sched_setaffinity(0, local_cpus)  # 0 is the calling thread

    with ThreadPoolExecutor(PINNING_THREADS, initializer=begin) as pool:
        list(pool.map(_Room(sum(buffer.tensor.numel() for buffer in buffers)).lock, buffers))  # raises the first error


class _Room:
    """Asks before each buffer, of `total` bytes together, is touched whether the host has the memory for it."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._locked = self._touched = 0
        self._changes = threading.Condition()

    def lock(self, buffer: HostBuffer) -> None:
        """Lock a buffer; raise as `page_lock`."""
        nbytes = buffer.tensor.numel()
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
