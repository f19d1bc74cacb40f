"""The kernel that compares masters with bf16 weights, a launch for a master.

By PyTorch's operators it takes five launches for each, with temporaries: the host's time for 1.6 billion parameters was
11 to 14 ms on an H100, in which nothing moved.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from bridge_fgo.memory.strided_sums import StridedSum, compile_sum

SOURCE = r"""
// Rounds to nearest, ties to even, as mcore's copy does. A NaN counts as another one than the weight's, which has the
// weight copied.
struct Differs {
    const unsigned *masters;
    const u16 *weights;
    __device__ u64 operator()(u64 place) const {
        const unsigned master = masters[place];
        if ((master & 0x7FFFFFFFu) > 0x7F800000u) return 1;
        return (master + 0x7FFFu + (master >> 16 & 1u)) >> 16 != weights[place];
    }
};

extern "C" __global__ void differing(const unsigned *masters, const u16 *weights, u64 count, u64 *found) {
    add_up(Differs{masters, weights}, count, found);
}
"""


def kernel_for(device: torch.device) -> StridedSum | None:
    """Return the kernel, compiled once in a process; None where there is none for the device."""
    return compile_sum(SOURCE, "differing", arrays=2, device=device)


def differing(kernel: StridedSum, pairs: Iterable[tuple[torch.Tensor, int, int]], device: torch.device) -> torch.Tensor:
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
    for master, weights, numel in pairs:
        assert master.dtype is torch.float32 and master.is_contiguous() and master.numel() == numel
        kernel.add(found, 0, numel, master.data_ptr(), weights)
    return found
