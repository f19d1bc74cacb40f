"""Compiles CUDA source at run time with NVRTC, which every PyTorch for CUDA brings: no compiler has to be installed.

`torch.cuda._compile_kernel` does the same, but is private, and PyTorch 2.6, which this package supports, lacks it.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch

from bridge_fgo.memory.driver import Module

logger = logging.getLogger(__name__)


@cache
def compile_for(source: str, device: torch.device) -> Module | None:
    """Return the source's kernels, compiled for a GPU and loaded; None, said in the log, where no NVRTC does it."""
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
    """Return the machine code of CUDA source for an architecture ("sm_90").

    Raises:
        RuntimeError: it does not compile; with NVRTC's log.
    """
    program = ctypes.c_void_p()
    _check(library, library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None))
    try:
        options = (ctypes.c_char_p * 1)(f"--gpu-architecture={architecture}".encode())
        if error := library.nvrtcCompileProgram(program, 1, options):
            size = ctypes.c_size_t()
            library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"NVRTC does not compile bridge_fgo's kernels ({error}): {log.value.decode()}")
        size = ctypes.c_size_t()
        _check(library, library.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        code = ctypes.create_string_buffer(size.value)
        _check(library, library.nvrtcGetCUBIN(program, code))
        return code.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _candidates() -> list[str]:
    """Return where NVRTC may be: in PyTorch's own wheels, of the system, of the toolkit."""
    name = "libnvrtc.so." + (torch.version.cuda or "0").split(".")[0]
    return [*map(str, sorted(Path(torch.__file__).parents[1].glob(f"nvidia/*/lib/{name}"))), name]


def _check(library: Any, error: int) -> None:
    if error:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"NVRTC failed: {library.nvrtcGetErrorString(error).decode()}")
