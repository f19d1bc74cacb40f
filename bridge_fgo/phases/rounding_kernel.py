"""The kernel that compares masters with bf16 weights, a launch for a master.

By PyTorch's operators it takes five launches for each, with temporaries: the host's time for 1.6 billion parameters was
11 to 14 ms on an H100, in which nothing moved.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from bridge_fgo.core.driver import Kernel, current_stream, make_grid
from bridge_fgo.core.nvrtc import compile_for

THREADS = 256
MOST_BLOCKS = 1024
"""Each goes on at its stride. An H200 has 132 multiprocessors of 2048 threads."""
EACH = 4
"""Masters that a thread has under way at once."""

SOURCE = f"""
#define EACH {EACH}
"""
SOURCE += r"""
typedef unsigned long long u64;
typedef unsigned short u16;

// Rounds to nearest, ties to even, as mcore's copy does. A NaN counts as another one than the weight's, which has the
// weight copied.
__device__ bool differs(unsigned master, u16 weight) {
    if ((master & 0x7FFFFFFFu) > 0x7F800000u) return true;
    return (master + 0x7FFFu + (master >> 16 & 1u)) >> 16 != weight;
}

extern "C" __global__ void differing(const unsigned *masters, const u16 *weights, u64 count, u64 *found) {
    const u64 stride = (u64)gridDim.x * blockDim.x;
    u64 total = 0;
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + (EACH - 1) * stride < count; i += EACH * stride) {
        unsigned master[EACH];
        u16 weight[EACH];
        #pragma unroll
        for (int k = 0; k < EACH; ++k) master[k] = masters[i + k * stride], weight[k] = weights[i + k * stride];
        #pragma unroll
        for (int k = 0; k < EACH; ++k) total += differs(master[k], weight[k]);
    }
    for (; i < count; i += stride) total += differs(masters[i], weights[i]);
    for (int distance = 16; distance; distance /= 2) total += __shfl_down_sync(~0u, total, distance);
    if (threadIdx.x % 32 == 0 && total) atomicAdd(found, total);
}
"""


def kernel_for(device: torch.device) -> Kernel | None:
    """Return the kernel, compiled once in a process; None where there is no GPU, or no NVRTC that compiles for it."""
    module = compile_for(SOURCE, device) if device.type == "cuda" else None
    return None if module is None else Kernel(module, "differing", (1, 1, 1, 1), THREADS)


def differing(kernel: Kernel, pairs: Iterable[tuple[torch.Tensor, int, int]], device: torch.device) -> torch.Tensor:
    """Return how many weights are not what their masters are rounded to, on the current stream.

    Args:
        kernel: of the device.
        pairs: each master, fp32 and contiguous, with the address of the first of its weights, which are bf16, and
            their number.
        device: theirs.

    Returns:
        int64 scalar on the device.
    """
    found = torch.zeros((), dtype=torch.int64, device=device)
    target, stream = found.data_ptr(), current_stream(found.get_device())
    for master, weights, numel in pairs:
        assert master.dtype is torch.float32 and master.is_contiguous() and master.numel() == numel
        if numel:
            grid = make_grid(min(MOST_BLOCKS, -(-numel // (EACH * THREADS))), 1)
            kernel.launch(grid, stream, master.data_ptr(), weights, numel, target)
    return found
