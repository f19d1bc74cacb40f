"""How the bytes of a slab cross the link: whole, or encoded to fewer by what else is on the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

Move = tuple[Any, torch.Tensor, torch.Tensor]
"""A slab's codec, its memory and its staging memory, uint8 both."""


class CodecFamily(Protocol):
    """Encodes and decodes several slabs of one kind by one launch; their codecs share it."""

    def locate(self) -> None:
        """Find where what encoding reads is now, before a pass first encodes or decodes.

        Raises:
            RuntimeError: it has no memory, and is needed.
        """

    def encode(self, moves: Sequence[Move]) -> None:
        """Write the staging memory of slabs from their states, on the current stream."""

    def decode(self, moves: Sequence[Move]) -> None:
        """Write the states of slabs from their staging memory, on the current stream."""

    def verify(self, codecs: Sequence[Codec]) -> None:
        """Have the host wait, and raise RuntimeError, which says why, where slabs that are away cannot be decoded."""

    def verified(self, codecs: Sequence[Codec]) -> AbstractContextManager[None]:
        """Take these slabs, inside the block, as checked already, or as about to be overwritten."""
        ...


class Codec:
    """How one slab is copied, by `link_bytes` over the link: as it is, unless a subclass encodes it."""

    family: CodecFamily | None = None
    """Encodes and decodes the slab; None where it is copied as it is."""
    staging_bytes = 0
    """Size of the encoded form, which needs GPU memory beside the slab while it is on its way."""
    encodes = False
    """Whether a slab that leaves now is to be encoded."""
    is_exact = False
    """Whether the slab was brought in line just now with what encodes it, so that the next encoding needs no check."""

    def __init__(self, link_bytes: int) -> None:
        self.link_bytes = link_bytes

    def loses(self) -> bool:
        """Return whether the newest encoding of this slab cannot be undone. The host waits for it."""
        return False
