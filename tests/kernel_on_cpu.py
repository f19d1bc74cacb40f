"""CUDA kernels of this package, compiled for the CPU by g++: one thread a block, block after block."""

import ctypes
import shutil
import subprocess

import pytest

from bridge_fgo.memory import strided_sums

# The sum over a warp is that of its first thread, as there is no other.
PRELUDE = """
struct { unsigned x; } gridDim, blockDim, blockIdx, threadIdx;
#define __device__ inline
#define __global__
static unsigned long long __shfl_down_sync(unsigned, unsigned long long, int) { return 0; }
static void atomicAdd(unsigned long long *sum, unsigned long long value) { *sum += value; }
"""
RUN = """
extern "C" void run(unsigned blocks, PARAMETERS) {
    gridDim.x = blocks, blockDim.x = 1, threadIdx.x = 0;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) CALL;
}
"""


def compiled(folder, source, parameters, call):
    """Compile what comes after the common source of kernels; return the function of (blocks, *parameters).

    Without g++ the test is skipped.

    parameters, call: of the kernel, as C++.
    """
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    code, library = folder / "kernel.cpp", folder / "kernel.so"
    code.write_text(
        PRELUDE + strided_sums.SOURCE + source + RUN.replace("PARAMETERS", parameters).replace("CALL", call)
    )
    subprocess.run(["g++", "-O1", "-w", "-shared", "-fPIC", "-o", str(library), str(code)], check=True)
    return ctypes.CDLL(str(library)).run


def address(array):
    """Return where a numpy array begins."""
    return ctypes.c_void_p(array.ctypes.data)
