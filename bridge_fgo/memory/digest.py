"""A 64-bit sum over the bytes of GPU memory: tells whether what a host copy was made of has changed since."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from bridge_fgo.memory.strided_sums import StridedSum, compile_sum

CHUNK_WORDS = 2**22
"""Words of 8 bytes that PyTorch's operators sum at once: 32 MiB, which an H200's L2 cache of 50 MB holds from one
operator to the next."""

_FACTORS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9)
"""Odd 64-bit constants with well-mixed bits."""
_FIRST, _SECOND = (factor - 2**64 for factor in _FACTORS)
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
        x ^= x >> 32;
        x *= FIRST_FACTOR;
        return x ^ x >> 32;
    }
};

extern "C" __global__ void digest(const u64 *words, u64 count, u64 *sum) { add_up(Mixed{words}, count, sum); }
"""


def digest_kernel(device: torch.device) -> StridedSum | None:
    """Return the kernel; None where there is none for the device. To compile it takes the host half a second, once."""
    return compile_sum(SOURCE, "digest", arrays=1, device=device)


class Digester:
    """Sums over bytes, each word mixed with its place.

    A change of one word always changes the sum. Changes of several cancel each other with a probability of 2**-64,
    unless somebody who knows the factors makes them. Where there is no kernel, or a tensor does not begin and end at a
    word, PyTorch's operators take the same sum, and hold 32 MiB on the device as long as this lives, less where no
    tensor has `most_bytes` as large.
    """

    def __init__(self, device: torch.device, most_bytes: int) -> None:
        self._device = device
        self._most_bytes = most_bytes
        self._kernel = digest_kernel(device)

    @cached_property
    def _places(self) -> torch.Tensor:
        words = min(CHUNK_WORDS, -(-self._most_bytes // 8))
        return torch.arange(words, dtype=torch.int64, device=self._device).mul_(_FIRST)

    def of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of the bytes of each tensor, int64 [tensors], on the current stream, without a wait.

        They are uint8, one-dimensional and contiguous.
        """
        sums = torch.zeros(len(tensors), dtype=torch.int64, device=self._device)
        for place, tensor in enumerate(tensors):
            if self._kernel is not None and tensor.numel() % 8 == tensor.data_ptr() % 8 == 0:
                self._kernel.add(sums, place, tensor.numel() // 8, tensor.data_ptr())
            else:
                sums[place] = self._one(tensor)
        return sums

    def _one(self, data: torch.Tensor) -> torch.Tensor:
        # Padded by zeros it is another sum than that of zeros.
        total = torch.full((), data.numel() % 8, dtype=torch.int64, device=data.device)
        for number, chunk in enumerate(data.split(8 * CHUNK_WORDS)):
            words = _words(chunk)
            mixed = words.add(self._places[: words.numel()])
            if number:
                first = number * CHUNK_WORDS * _FIRST
                mixed.add_((first + 2**63) % 2**64 - 2**63)  # what a word of 64 bits holds of it
            _shift_into(mixed).mul_(_SECOND)
            _shift_into(mixed).mul_(_FIRST)
            total = total.add_(_shift_into(mixed).sum())
        return total


def _shift_into(words: torch.Tensor) -> torch.Tensor:
    """Do the kernel's `x ^= x >> 32`, of words without a sign: PyTorch's shift would copy the sign, and lose words."""
    low, high = words.view(torch.int32).view(-1, 2).unbind(1)
    low.bitwise_xor_(high)
    return words


def _words(chunk: torch.Tensor) -> torch.Tensor:
    """Return bytes as words, int64; a copy, padded by zeros, where they do not begin or end at a word."""
    if chunk.storage_offset() % 8 or chunk.numel() % 8:
        chunk = torch.nn.functional.pad(chunk, (0, -chunk.numel() % 8))
    if chunk.storage_offset() % 8:  # nothing was padded
        chunk = chunk.clone()
    return chunk.view(torch.int64)
