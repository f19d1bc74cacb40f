"""A 64-bit sum over the bytes of GPU memory: tells whether what a host copy was made of has changed since."""

from __future__ import annotations

from collections.abc import Sequence

import torch

CHUNK_WORDS = 2**22
"""Words of 8 bytes that are summed at once: 32 MiB, which an H200's L2 cache of 50 MB holds from one operator to the
next."""

_FACTORS = (0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64)
"""Odd 64-bit constants with well-mixed bits, as Python's integers of a signed word."""


class Digester:
    """Sums over bytes, each word weighted by its place; holds 32 MiB of weights on the device as long as it lives.

    A change of one word always changes the sum. Changes of several cancel each other with a probability of 2**-64,
    unless somebody who knows the weights makes them. Sums are compared with sums of the same process only.

    Args:
        device: of the memory.
        most_bytes: size of the largest tensor that will be summed; smaller ones need fewer weights.
    """

    def __init__(self, device: torch.device, most_bytes: int) -> None:
        words = min(CHUNK_WORDS, -(-most_bytes // 8))
        places = torch.arange(words, dtype=torch.int64, device=device).mul_(_FACTORS[0])
        places.bitwise_xor_(places >> 32).mul_(_FACTORS[1])
        # Odd, so that no bit of a word is lost.
        self._weights = places.bitwise_xor_(places >> 29).bitwise_or_(1)

    def of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of each tensor's bytes, on the current stream; the host waits for nothing.

        Args:
            tensors: uint8, one-dimensional and contiguous.

        Returns:
            int64 [number of tensors], on their device.
        """
        sums = [self._one(tensor) for tensor in tensors]
        return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64)

    def _one(self, data: torch.Tensor) -> torch.Tensor:
        total = torch.full((), data.numel(), dtype=torch.int64, device=data.device)
        for chunk in data.split(8 * CHUNK_WORDS):
            words = _words(chunk)
            # The high bit of a word alone would add 2**63 whatever the weight, and two such changes would cancel.
            mixed = (words >> 31).bitwise_xor_(words)
            total = total.mul(_FACTORS[0]).add_(mixed.mul_(self._weights[: words.numel()]).sum())
        return total


def _words(chunk: torch.Tensor) -> torch.Tensor:
    """Return bytes as words, int64; a copy, padded by zeros, where they do not begin or end at a word."""
    if chunk.storage_offset() % 8 or chunk.numel() % 8:
        chunk = torch.nn.functional.pad(chunk, (0, -chunk.numel() % 8))
    if chunk.storage_offset() % 8:  # nothing was padded
        chunk = chunk.clone()
    return chunk.view(torch.int64)
