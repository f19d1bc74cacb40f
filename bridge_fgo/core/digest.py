"""A 64-bit sum over the bytes of GPU memory: tells whether what a host copy was made of has changed since."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from bridge_fgo.core.strided_sums import StridedSum, compiled

CHUNK_WORDS = 2**22
"""Words of 8 bytes that PyTorch's operators sum at once: 32 MiB, which an H200's L2 cache of 50 MB holds from one
operator to the next."""

_FACTORS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9)
"""Odd 64-bit constants with well-mixed bits."""
_SIGNED_FACTORS = tuple(factor - 2**64 for factor in _FACTORS)
"""The same as Python's integers of a signed word."""

SOURCE = f"""
#define FIRST_FACTOR {_FACTORS[0]}ull
#define SECOND_FACTOR {_FACTORS[1]}ull
"""
SOURCE += r"""
// Of one place another word always gives another value.
struct Mixed {
    const u64 *words;
    __device__ u64 operator()(u64 place) const {
        u64 x = words[place] + place * FIRST_FACTOR;
        x ^= x >> 32;
        x *= SECOND_FACTOR;
        x ^= x >> 29;
        x *= FIRST_FACTOR;
        return x ^ x >> 32;
    }
};

extern "C" __global__ void digest(const u64 *words, u64 count, u64 *sum) { add_up(Mixed{words}, count, sum); }
"""


def kernel_for(device: torch.device) -> StridedSum | None:
    """Return the kernel; None where there is none for the device. To compile it takes the host half a second, once."""
    return compiled(SOURCE, "digest", arrays=1, device=device)


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
        self._kernel = kernel_for(device)

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
                self._kernel.add(sums, place, tensor.numel() // 8, tensor.data_ptr())
            else:
                sums[place] = self._one(tensor)
        return sums

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
