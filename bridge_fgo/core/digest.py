"""A 64-bit sum over the bytes of GPU memory: tells whether what a host copy was made of has changed since."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from bridge_fgo.core.driver import Kernel, current_stream, make_grid
from bridge_fgo.core.nvrtc import compile_for

CHUNK_WORDS = 2**22
"""Words of 8 bytes that PyTorch's operators sum at once: 32 MiB, which an H200's L2 cache of 50 MB holds from one
operator to the next."""

_FACTORS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9)
"""Odd 64-bit constants with well-mixed bits."""
_SIGNED_FACTORS = tuple(factor - 2**64 for factor in _FACTORS)
"""The same as Python's integers of a signed word."""

THREADS = 256
MOST_BLOCKS = 1024
"""Each goes on at its stride. An H200 has 132 multiprocessors of 2048 threads."""
EACH = 4
"""Words that a thread has under way at once."""

SOURCE = f"""
#define FIRST_FACTOR {_FACTORS[0]}ull
#define SECOND_FACTOR {_FACTORS[1]}ull
#define EACH {EACH}
"""
SOURCE += r"""
typedef unsigned long long u64;

// Of one place another word always gives another value.
__device__ u64 mixed(u64 place, u64 word) {
    u64 x = word + place * FIRST_FACTOR;
    x ^= x >> 32;
    x *= SECOND_FACTOR;
    x ^= x >> 29;
    x *= FIRST_FACTOR;
    return x ^ x >> 32;
}

extern "C" __global__ void digest(const u64 *words, u64 count, u64 *sum) {
    const u64 stride = (u64)gridDim.x * blockDim.x;
    u64 total = 0;
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + (EACH - 1) * stride < count; i += EACH * stride) {
        u64 word[EACH];
        #pragma unroll
        for (int k = 0; k < EACH; ++k) word[k] = words[i + k * stride];
        #pragma unroll
        for (int k = 0; k < EACH; ++k) total += mixed(i + k * stride, word[k]);
    }
    for (; i < count; i += stride) total += mixed(i, words[i]);
    for (int distance = 16; distance; distance /= 2) total += __shfl_down_sync(~0u, total, distance);
    if (threadIdx.x % 32 == 0 && total) atomicAdd(sum, total);
}
"""


def prepare(device: torch.device) -> None:
    """Compile the kernel where it will be needed, once in a process: that takes the host half a second."""
    if device.type == "cuda":
        compile_for(SOURCE, _with_index(device))


def _with_index(device: torch.device) -> torch.device:
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


class Digester:
    """Sums over bytes, each word mixed with its place.

    A change of one word always changes the sum. Changes of several cancel each other with a probability of 2**-64,
    unless somebody who knows the factors makes them. Sums are compared with sums of the same process only: where there
    is no kernel, or a tensor does not begin and end at a word, PyTorch's operators take another sum, and hold 32 MiB of
    weights on the device as long as this lives.

    Args:
        device: of the memory.
        most_bytes: size of the largest tensor that will be summed; smaller ones need fewer weights.
    """

    def __init__(self, device: torch.device, most_bytes: int) -> None:
        self._device = device
        self._most_bytes = most_bytes
        module = compile_for(SOURCE, _with_index(device)) if device.type == "cuda" else None
        self._kernel = None if module is None else Kernel(module, "digest", (1, 1, 1), THREADS)

    @cached_property
    def _weights(self) -> torch.Tensor:
        words = min(CHUNK_WORDS, -(-self._most_bytes // 8))
        places = torch.arange(words, dtype=torch.int64, device=self._device).mul_(_SIGNED_FACTORS[0])
        places.bitwise_xor_(places >> 32).mul_(_SIGNED_FACTORS[1])
        # Odd, so that no bit of a word is lost.
        return places.bitwise_xor_(places >> 29).bitwise_or_(1)

    def of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of each tensor's bytes, on the current stream; the host waits for nothing.

        Args:
            tensors: uint8, one-dimensional and contiguous.

        Returns:
            int64 [number of tensors], on their device.
        """
        sums = torch.zeros(len(tensors), dtype=torch.int64, device=self._device)
        for place, tensor in enumerate(tensors):
            if self._kernel is not None and tensor.numel() % 8 == tensor.data_ptr() % 8 == 0:
                self._launch(self._kernel, tensor, sums.data_ptr() + 8 * place)
            else:
                sums[place] = self._one(tensor)
        return sums

    @staticmethod
    def _launch(kernel: Kernel, data: torch.Tensor, target: int) -> None:
        words = data.numel() // 8
        if words:
            grid = make_grid(min(MOST_BLOCKS, -(-words // (EACH * THREADS))), 1)
            kernel.launch(grid, current_stream(data.get_device()), data.data_ptr(), words, target)

    def _one(self, data: torch.Tensor) -> torch.Tensor:
        total = torch.full((), data.numel(), dtype=torch.int64, device=data.device)
        for chunk in data.split(8 * CHUNK_WORDS):
            words = _words(chunk)
            # The high bit of a word alone would add 2**63 whatever the weight, and two such changes would cancel.
            mixed = (words >> 31).bitwise_xor_(words)
            total = total.mul(_SIGNED_FACTORS[0]).add_(mixed.mul_(self._weights[: words.numel()]).sum())
        return total


def _words(chunk: torch.Tensor) -> torch.Tensor:
    """Return bytes as words, int64; a copy, padded by zeros, where they do not begin or end at a word."""
    if chunk.storage_offset() % 8 or chunk.numel() % 8:
        chunk = torch.nn.functional.pad(chunk, (0, -chunk.numel() % 8))
    if chunk.storage_offset() % 8:  # nothing was padded
        chunk = chunk.clone()
    return chunk.view(torch.int64)
