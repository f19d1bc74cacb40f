"""Host memory of a slab: exactly its bytes, page-aligned, page-locked once."""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import torch


class HostBuffer:
    """`nbytes` of host memory as one uint8 tensor, page-locked with CUDA when `pin` is set.

    PyTorch's own pinned allocator rounds every block up to a power of two (pytorch#95823, pytorch#150517),
    which can double the host memory of a job; here a mapping of the exact size is registered instead.

    Args:
        nbytes: size in bytes, positive.
        pin: page-lock the memory; needs a CUDA device.

    Raises:
        RuntimeError: the memory could not be mapped or page-locked; says how much was asked for.
    """

    def __init__(self, nbytes: int, pin: bool) -> None:
        try:
            mapping = mmap.mmap(-1, nbytes)
        except OSError as error:
            raise RuntimeError(
                f"bridge_fgo could not map {nbytes} bytes of host memory for optimizer state ({error}): lower "
                "OffloadConfig.fraction, or run on a host with more memory"
            ) from error
        self.tensor: torch.Tensor = torch.frombuffer(mapping, dtype=torch.uint8)
        self.pinned_bytes = 0
        if pin:
            self.tensor.zero_()  # touches every page from several threads; registering alone uses one
            self._register(nbytes)

    def _register(self, nbytes: int) -> None:
        address = self.tensor.data_ptr()
        error = _runtime().cudaHostRegister(address, nbytes, 0)
        if int(error) != 0:
            raise RuntimeError(
                f"bridge_fgo could not page-lock {nbytes} bytes of host memory for optimizer state (CUDA error "
                f"{int(error)}): raise `ulimit -l`, lower OffloadConfig.fraction, or set "
                "OffloadConfig.pin_memory=False (slower)"
            )
        self.pinned_bytes = nbytes
        self._unregister = weakref.finalize(self, _unregister, address)
        # At interpreter exit the CUDA context may be gone already, and the driver unlocks the pages itself.
        self._unregister.atexit = False

    def close(self) -> None:
        """Unlock the pages; the memory goes with the last reference to the tensor."""
        if self.pinned_bytes:
            self._unregister()
            self.pinned_bytes = 0


def _unregister(address: int) -> None:
    torch.cuda.synchronize()  # race: a copy may be under way from or to pages that are being unlocked
    _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    runtime = torch.cuda.cudart()
    assert runtime is not None, "this PyTorch was built without CUDA"
    return runtime
