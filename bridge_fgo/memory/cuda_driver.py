"""Copies, events and streams by the CUDA driver itself, because a step enqueues some hundreds of copies.

Measured on an H200 host: enqueuing a piece by slicing two tensors, entering a stream and `copy_` took 30 to 45
microseconds, by these functions some 5. They take the handles of PyTorch's streams, and run in PyTorch's context.
What ctypes makes of a Python integer it would make anew in every call: so what stays the same is a ctypes object.
What the driver refuses is a RuntimeError, with its CUresult.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

EVENT_DEFAULT, EVENT_DISABLE_TIMING = 0, 2
STREAM_NON_BLOCKING = 1
NOT_READY = 600  # CUDA_ERROR_NOT_READY


@cache
def _library() -> Any:
    library = ctypes.CDLL("libcuda.so.1")  # the one that PyTorch has loaded
    address, handle = ctypes.c_uint64, ctypes.c_void_p
    copies = (address, address, ctypes.c_size_t, handle)
    library.cuMemcpyDtoHAsync_v2.argtypes = library.cuMemcpyHtoDAsync_v2.argtypes = copies
    library.cuEventCreate.argtypes = (ctypes.POINTER(handle), ctypes.c_uint)
    library.cuEventDestroy_v2.argtypes = (handle,)
    library.cuEventRecord.argtypes = (handle, handle)
    library.cuEventQuery.argtypes = (handle,)
    library.cuEventElapsedTime.argtypes = (ctypes.POINTER(ctypes.c_float), handle, handle)
    library.cuStreamWaitEvent.argtypes = (handle, handle, ctypes.c_uint)
    library.cuStreamCreate.argtypes = (ctypes.POINTER(handle), ctypes.c_uint)
    library.cuStreamDestroy_v2.argtypes = (handle,)
    library.cuMemHostRegister_v2.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
    library.cuMemHostUnregister.argtypes = (ctypes.c_void_p,)
    library.cuModuleLoadData.argtypes = (ctypes.POINTER(handle), ctypes.c_char_p)
    library.cuModuleGetFunction.argtypes = (ctypes.POINTER(handle), handle, ctypes.c_char_p)
    library.cuLaunchKernel.argtypes = (handle, *7 * (ctypes.c_uint,), handle, ctypes.c_void_p, ctypes.c_void_p)
    return library


def current_stream(device_index: int) -> int:
    """Return the handle of the current stream; `torch.cuda.current_stream` makes an object around it."""
    return torch._C._cuda_getCurrentRawStream(device_index)


Handle = int | ctypes.c_void_p  # a `cudaStream_t`
Grid = tuple[ctypes.c_uint, ctypes.c_uint]  # how many blocks a launch has, in two dimensions; see `make_grid`

_NO_FLAGS = ctypes.c_uint(0)
_NULL = ctypes.c_void_p()


class Event:
    """A CUDA event, as `torch.cuda.Event`; `is_timed`: it can tell when it happened."""

    def __init__(self, is_timed: bool = False) -> None:
        self._library = library = _library()
        self._handle = ctypes.c_void_p()
        flags = EVENT_DEFAULT if is_timed else EVENT_DISABLE_TIMING
        _check(library.cuEventCreate(ctypes.byref(self._handle), flags), "make an event")
        self._record, self._wait = library.cuEventRecord, library.cuStreamWaitEvent
        self.place = 0  # among the copies of a lane, of the one that it was last recorded after

    def record(self, stream: Handle) -> None:
        """Record the event on a `cudaStream_t`."""
        if error := self._record(self._handle, stream):
            _check(error, "record an event")

    def block(self, stream: Handle) -> None:
        """Make a `cudaStream_t` wait for what the event was last recorded after."""
        if error := self._wait(stream, self._handle, _NO_FLAGS):
            _check(error, "wait for an event")

    def has_happened(self) -> bool:
        """Return whether everything that the event was last recorded after is over."""
        error = self._library.cuEventQuery(self._handle)
        if error not in (0, NOT_READY):
            _check(error, "query an event")
        return error == 0

    def seconds_after(self, earlier: Event) -> float | None:
        """Return the seconds from another event to this one, negative if it came first; None until both happened.

        Both are timed, and were recorded.
        """
        milliseconds = ctypes.c_float()
        error = self._library.cuEventElapsedTime(ctypes.byref(milliseconds), earlier._handle, self._handle)
        if error == NOT_READY:
            return None
        _check(error, "time an event")
        return milliseconds.value / 1e3

    def __del__(self) -> None:
        # Destroyed when it has happened. At exit the context may be gone, and its events with it: no error then.
        self._library.cuEventDestroy_v2(self._handle)


class Stream:
    """A CUDA stream that nobody else has, in the current context, of the priority that PyTorch's have by default.

    PyTorch hands the 32 of a device's pool out again and again. Another user of the same one would queue behind our
    copies, and they behind its work.
    """

    def __init__(self) -> None:
        library = _library()
        self.handle = ctypes.c_void_p()
        # A blocking one and the legacy default stream, on which training may run, would wait for each other.
        _check(library.cuStreamCreate(ctypes.byref(self.handle), STREAM_NON_BLOCKING), "make a stream")
        # The driver lets work that is left end first. At exit the context may be gone, and the stream with it.
        weakref.finalize(self, library.cuStreamDestroy_v2, self.handle).atexit = False


class PageLock:
    """Pages of host memory that CUDA has locked, until `close` or until this is collected.

    By the driver, since an error of the runtime's function would stay, and come out of the next kernel's launch.
    """

    def __init__(self, address: int, nbytes: int) -> None:
        library = _library()
        _check(library.cuMemHostRegister_v2(address, nbytes, 0), f"page-lock {nbytes} bytes of host memory")
        self.close = weakref.finalize(self, library.cuMemHostUnregister, address)
        """Unlock the pages, which no copy may be under way from or to."""
        self.close.atexit = False  # the context may be gone, and the lock with it


class Module:
    """Machine code for the current context's GPU, loaded for the rest of the process."""

    def __init__(self, code: bytes) -> None:
        handle = ctypes.c_void_p()
        _check(_library().cuModuleLoadData(ctypes.byref(handle), code), "load kernels")
        self.handle = handle.value


class Kernel:
    """A kernel of a module, for one thread at a time; `words` are the sizes of its arguments, in words of 8 bytes."""

    def __init__(self, module: Module, name: str, words: Sequence[int], threads: int) -> None:
        self._library = _library()
        self._handle = ctypes.c_void_p()
        error = self._library.cuModuleGetFunction(ctypes.byref(self._handle), module.handle, name.encode())
        _check(error, f"find {name}")
        # The driver copies what they hold in the call.
        self._values = (ctypes.c_uint64 * sum(words))()
        first = ctypes.addressof(self._values)
        starts = [first + 8 * sum(words[:i]) for i in range(len(words))]
        self._pointers = (ctypes.c_void_p * len(words))(*starts)
        self._arguments = ctypes.c_void_p(ctypes.addressof(self._pointers))
        one = ctypes.c_uint(1)
        self._block = one, ctypes.c_uint(threads), one, one, ctypes.c_uint(0)  # grid z, block, shared bytes

    def launch(self, grid: Grid, stream: Handle, *words: int) -> None:
        """Enqueue the kernel on a `cudaStream_t`; `words` that it does not look at may be missing at the end."""
        self._values[: len(words)] = words
        if error := self._library.cuLaunchKernel(self._handle, *grid, *self._block, stream, self._arguments, _NULL):
            _check(error, "launch a kernel")


def make_grid(x: int, y: int) -> Grid:
    """Return the grid of a launch of `x` times `y` blocks."""
    return ctypes.c_uint(x), ctypes.c_uint(y)


class Copier:
    """Enqueues copies in one direction, for one thread at a time."""

    def __init__(self, to_gpu: bool) -> None:
        library = _library()
        self._copy = library.cuMemcpyHtoDAsync_v2 if to_gpu else library.cuMemcpyDtoHAsync_v2
        self._what = f"copy optimizer state to the {'GPU' if to_gpu else 'host'}"
        self._target, self._source, self._nbytes = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_size_t()

    def copy(self, target: int, source: int, nbytes: int, stream: Handle) -> None:
        """Enqueue a copy of `nbytes` from one address to another on a `cudaStream_t`."""
        self._target.value, self._source.value, self._nbytes.value = target, source, nbytes
        if error := self._copy(self._target, self._source, self._nbytes, stream):
            _check(error, self._what)


def _check(error: int, what: str) -> None:
    if error:
        raise RuntimeError(f"the CUDA driver refused to {what} (CUresult {error})")


logger = logging.getLogger(__name__)


@cache
def compile_for(source: str, device: torch.device) -> Module | None:
    """Return the source's kernels, compiled for a GPU and loaded; None, said in the log, if no NVRTC does it."""
    major, minor = torch.cuda.get_device_capability(device)
    troubles = []
    for path in _candidates():
        try:
            return Module(compile_source(ctypes.CDLL(path), source, f"sm_{major}{minor}"))
        except (OSError, RuntimeError) as error:  # not there, or older than the GPU: the next may do
            troubles.append(f"{path}: {error}")
    logger.warning(
        "bridge_fgo: no NVRTC compiles for this GPU, PyTorch's operators take its kernels' place, and more time: %s",
        "; ".join(troubles),
    )
    return None


def compile_source(library: Any, source: str, architecture: str) -> bytes:
    """Return the machine code of CUDA source for an architecture ("sm_90"); RuntimeError, with NVRTC's log."""
    program = ctypes.c_void_p()
    _check_nvrtc(
        library, library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None)
    )
    try:
        options = (ctypes.c_char_p * 1)(f"--gpu-architecture={architecture}".encode())
        if error := library.nvrtcCompileProgram(program, 1, options):
            size = ctypes.c_size_t()
            library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"NVRTC does not compile bridge_fgo's kernels ({error}): {log.value.decode()}")
        size = ctypes.c_size_t()
        _check_nvrtc(library, library.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        code = ctypes.create_string_buffer(size.value)
        _check_nvrtc(library, library.nvrtcGetCUBIN(program, code))
        return code.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _candidates() -> list[str]:
    """Return where NVRTC may be: in PyTorch's own wheels, of the system, of the toolkit."""
    name = "libnvrtc.so." + (torch.version.cuda or "0").split(".")[0]
    return [*map(str, sorted(Path(torch.__file__).parents[1].glob(f"nvidia/*/lib/{name}"))), name]


def _check_nvrtc(library: Any, error: int) -> None:
    if error:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"NVRTC failed: {library.nvrtcGetErrorString(error).decode()}")
