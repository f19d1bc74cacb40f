"""The blocks that PyTorch's allocator takes for allocations, which count in place of what was asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

MIB_BITS = 20
LEAST_DIVISION = 512
"""Smaller divisions are not made."""
MOST_UNSPLIT = 20 * 2**20
"""By which a block that must not be split may be larger than what was asked for."""


def block_rounding(device: torch.device) -> Callable[[int], int]:
    """Return what gives the bytes of the block for an allocation, at most, by the allocator's settings.

    `roundup_power2_divisions` has the divisions between one power of two and the next, from 1 MiB on. Of a block that
    `max_split_size_mb` forbids to split up to 20 MiB more are taken, where segments cannot expand. 1 MiB a block, which
    may be left over otherwise, is not counted: the margins below a limit are for that.
    """
    divisions: list[int] = []
    splits_below = -1
    if device.type == "cuda" and torch.cuda.get_allocator_backend() == "native":
        snapshot: Any = torch.cuda.memory._snapshot()
        settings = snapshot["allocator_settings"].get("roundup_power2_divisions", {})
        divisions = [settings[size] for size in sorted(settings, key=int)]
        if not snapshot["allocator_settings"].get("expandable_segments", False):
            splits_below = snapshot["allocator_settings"].get("max_split_size", -1)

    def rounded(nbytes: int) -> int:
        power = nbytes.bit_length() - 1
        count = divisions[min(max(0, power - MIB_BITS), len(divisions) - 1)] if divisions else 0
        if count > 1 and nbytes > LEAST_DIVISION * count:
            division = (1 << power) // count
            nbytes = -(-nbytes // division) * division
        return nbytes + MOST_UNSPLIT if 0 < splits_below <= nbytes else nbytes

    return rounded
