"""Settles how many hardware queues CUDA gives to copies, before the first use of the GPU.

The offload's copies go to streams of their own, so that the training loop's small ones (`.item()`, a NaN check) pass
between them. Streams that share a hardware queue take turns as they were enqueued: then a small copy waits for every
one of the offload's before it. `CUDA_DEVICE_MAX_CONNECTIONS=1`, which Megatron wants before Blackwell so that kernels
start in the order of their launches, gives one queue to kernels and one to copies. On GPUs from Ampere on
`CUDA_DEVICE_MAX_COPY_CONNECTIONS` counts those of copies apart (CUDA programming guide 13, "CUDA Environment
Variables"), and kernels keep their order.

Measured on H200s (1.64B parameters, 19.7 GB of states, 4 microbatches of 2 x 2048 tokens): with 32 queues and with
one the offload added 0.256 and 0.321 s to a step, 0.69 and 0.89 of the time in which the states cross the link once.
With one for kernels and eight for copies it was 0.82, with 32 in the same run 0.79. In the trace of a step, the copy
of 4 bytes behind the update waited 1 ms with 32 queues, and 86 ms with one, until the copies out were over.
"""

import ctypes
import os

OF_COPIES = "CUDA_DEVICE_MAX_COPY_CONNECTIONS"
OF_ALL = "CUDA_DEVICE_MAX_CONNECTIONS"
NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED
DEFAULT = 8  # queues that CUDA gives to kernels, and as many to copies, if neither variable is set


def keep_enough() -> bool:
    """Set `CUDA_DEVICE_MAX_COPY_CONNECTIONS` as `CUDA_DEVICE_MAX_CONNECTIONS`, at least to 8; return if that was done.

    Leaves it alone if it is set, or if CUDA has read it by now: seen on an H200, a `torch.cuda.is_available()`
    before is enough for that.
    """
    if OF_COPIES in os.environ or driver_has_begun():
        return False
    os.environ[OF_COPIES] = str(max(DEFAULT, _number(OF_ALL)))
    return True


def driver_has_begun() -> bool:
    """Return whether anything in this process has had the CUDA driver begin (`cuInit`), without having it begin."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # there is none, and no GPU
        return False
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != NOT_INITIALIZED


def take_back() -> None:
    """Undo a `keep_enough` that returned True; CUDA keeps its queues if it is in use by now."""
    os.environ.pop(OF_COPIES, None)


def shortage() -> str | None:
    """Return a sentence on what a shortage of queues costs and what to do, or None if there are enough."""
    name = OF_COPIES if OF_COPIES in os.environ else OF_ALL
    number = _number(name)
    if number >= DEFAULT:
        return None
    return (
        f"{name}={number} leaves copies {number} hardware queue{'s' * (number > 1)}, in which small copies of the "
        f"training loop wait for the offload's; export {OF_COPIES}={DEFAULT} before the job starts, which leaves the "
        "order of kernels as it is"
    )


def _number(name: str) -> int:
    """Return what the environment asks for; like CUDA, its default if that is no number of queues."""
    try:
        number = int(os.environ[name])
    except (KeyError, ValueError):
        return DEFAULT
    return number if number > 0 else DEFAULT
