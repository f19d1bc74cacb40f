"""A 64-bit sum over the bytes of GPU memory: tells whether what a host copy was made of has changed since."""

from collections.abc import Sequence
from functools import cache

import torch

from bridge_fgo.memory.strided_sums import StridedSum, compile_sum

CHUNK_WORDS = 2**22  # words of 8 bytes that operators sum at once: 32 MiB, which an H200's L2 cache of 50 MB holds

_FACTORS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9)  # odd 64-bit constants with well-mixed bits
_FIRST, _SECOND = (factor - 2**64 for factor in _FACTORS)  # the same as Python's integers of a signed word

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


@cache
def digest_kernel(device: torch.device) -> StridedSum | None:
    """Return the kernel; None if there is none for the device. To compile it takes the host half a second, once."""
    return compile_sum(SOURCE, "digest", arrays=1, device=device)


def byte_sums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a sum over the bytes of each tensor, at least one: int64 [tensors], on the current stream, without a wait.

    They are uint8, one-dimensional and contiguous, on one device. Each word is mixed with its place: a change of one
    word always changes the sum. Changes of several cancel each other with a probability of 2**-64, unless somebody who
    knows the factors makes them. If there is no kernel, or a tensor does not begin and end at a word, PyTorch's
    operators take the same sum.
    """
    kernel = digest_kernel(tensors[0].device)
    sums = torch.zeros(len(tensors), dtype=torch.int64, device=tensors[0].device)
    for place, tensor in enumerate(tensors):
        if kernel is not None and tensor.numel() % 8 == tensor.data_ptr() % 8 == 0:
            kernel.add(sums, place, tensor.numel() // 8, tensor.data_ptr())
        else:
            sums[place] = _by_operators(tensor)
    return sums


def _by_operators(data: torch.Tensor) -> torch.Tensor:
    # Padded by zeros it is another sum than that of zeros.
    total = torch.full((), data.numel() % 8, dtype=torch.int64, device=data.device)
    first = 0
    for chunk in data.split(8 * CHUNK_WORDS):
        words = _words(chunk)
        places = torch.arange(first, first + words.numel(), dtype=torch.int64, device=data.device)
        first += words.numel()
        mixed = places.mul_(_FIRST).add_(words)
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
    """Return bytes as words, int64; a copy, padded by zeros, if they do not begin or end at a word."""
    if chunk.storage_offset() % 8 or chunk.numel() % 8:
        chunk = torch.nn.functional.pad(chunk, (0, -chunk.numel() % 8))
    if chunk.storage_offset() % 8:  # nothing was padded
        chunk = chunk.clone()
    return chunk.view(torch.int64)
