"""CUDA kernels that add up a term for each place of an array: the part of them that is the same, and their launch."""

import torch

from bridge_fgo.memory.cuda_driver import Kernel, compile_for, current_stream, make_grid

THREADS = 256
MOST_BLOCKS = 1024  # For one array; each goes on at its stride. An H200 has 132 multiprocessors of 2048 threads.
EACH = 4  # places that a thread of `add_up` has under way at once

TYPES = r"""
typedef unsigned long long u64;
typedef unsigned short u16;

__device__ u64 over_warp(u64 value) {
    for (int distance = 16; distance; distance /= 2) value += __shfl_down_sync(~0u, value, distance);
    return value;
}
"""
SOURCE = f"""{TYPES}
#define EACH {EACH}
"""
SOURCE += r"""
template <typename Term> __device__ void add_up(const Term &term, u64 count, u64 *sum) {
    const u64 stride = (u64)gridDim.x * blockDim.x;
    u64 total = 0;
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + (EACH - 1) * stride < count; i += EACH * stride) {
        #pragma unroll
        for (int k = 0; k < EACH; ++k) total += term(i + k * stride);
    }
    for (; i < count; i += stride) total += term(i);
    total = over_warp(total);
    if (threadIdx.x % 32 == 0 && total) atomicAdd(sum, total);
}
"""


def blocks_over(count: int, each: int) -> int:
    """Return how many blocks go over `count` places; a thread takes `each` at once."""
    return min(MOST_BLOCKS, -(-count // (each * THREADS)))


class StridedSum:
    """A kernel of (address, ..., count, address of the u64 sum) that adds to the sum by `add_up`."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def add(self, sums: torch.Tensor, place: int, count: int, *addresses: int) -> None:
        """Enqueue it on the current stream: the sum over `count` places of arrays is added to `sums[place]` (int64)."""
        if count:
            stream = current_stream(sums.get_device())
            self._kernel.launch(
                make_grid(blocks_over(count, EACH), 1), stream, *addresses, count, sums.data_ptr() + 8 * place
            )


def compile_sum(source: str, name: str, arrays: int, device: torch.device) -> StridedSum | None:
    """Return the kernel `name` in `source`, which follows `SOURCE`; None without a GPU, or an NVRTC that compiles."""
    module = compile_for(SOURCE + source, device) if device.type == "cuda" else None
    return None if module is None else StridedSum(Kernel(module, name, (1,) * (arrays + 2), THREADS))
