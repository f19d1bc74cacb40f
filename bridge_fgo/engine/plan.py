"""Which tensors go, and how they are laid out in slabs: pure arithmetic on sizes in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

ALIGNMENT = 256
"""Every tensor of a slab starts at a multiple of this many bytes: what cudaMalloc guarantees, so kernels
take the same vectorised paths as on a tensor with an allocation of its own."""


@dataclass(frozen=True)
class SlabLayout:
    """Layout of one slab, the same in GPU memory and on the host.

    members: positions in the list of sizes that was packed; offsets: where each starts, in bytes;
    nbytes: size of the slab in bytes.
    """

    members: tuple[int, ...]
    offsets: tuple[int, ...]
    nbytes: int


def select(bundle_bytes: Sequence[int], fraction: float) -> list[int]:
    """Return the positions of the bundles to offload, in order.

    A bundle is what belongs to one parameter (its master weight and moments). Bundles are taken in order
    until their bytes reach `fraction` of all bytes, so at least that share goes, and less than one bundle
    more. Bundles of no bytes are never taken.
    """
    wanted = fraction * sum(bundle_bytes)
    taken: list[int] = []
    so_far = 0
    for position, nbytes in enumerate(bundle_bytes):
        if so_far >= wanted:
            break
        if nbytes > 0:
            taken.append(position)
            so_far += nbytes
    return taken


def pack(sizes: Sequence[int], slab_bytes: int) -> list[SlabLayout]:
    """Pack tensors of the given sizes (bytes, all positive) in order into slabs of about `slab_bytes`.

    A tensor is never split: one that is larger than `slab_bytes` gets a slab of its own size.
    """
    layouts: list[SlabLayout] = []
    members: list[int] = []
    offsets: list[int] = []
    end = 0
    for position, nbytes in enumerate(sizes):
        assert nbytes > 0, f"tensor {position} has no bytes"
        start = -(-end // ALIGNMENT) * ALIGNMENT
        if members and start + nbytes > slab_bytes:
            layouts.append(SlabLayout(tuple(members), tuple(offsets), end))
            members, offsets, start = [], [], 0
        members.append(position)
        offsets.append(start)
        end = start + nbytes
    if members:
        layouts.append(SlabLayout(tuple(members), tuple(offsets), end))
    return layouts


@lru_cache(maxsize=1024)  # slabs have few sizes, and each is asked for twice a step
def pieces(nbytes: int, piece_bytes: int) -> tuple[tuple[int, int], ...]:
    """Return the (start, end) byte ranges of the copies that move `nbytes`, none above `piece_bytes`."""
    return tuple((start, min(start + piece_bytes, nbytes)) for start in range(0, nbytes, piece_bytes))
