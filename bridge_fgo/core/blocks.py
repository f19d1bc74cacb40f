"""The blocks that PyTorch's allocator takes for allocations, which count in place of what was asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

MIB_BITS = 20
LEAST_DIVISION = 512
"""Smaller divisions are not made."""


def block_rounding(device: torch.device) -> Callable[[int], int]:
    """Return what gives the bytes of the block for an allocation, by `roundup_power2_divisions`.

    The setting has the divisions between one power of two and the next, from 1 MiB on. Of what else makes blocks
    larger nothing is counted: 1 MiB a block at the most where segments cannot expand, and 20 MiB with
    `max_split_size_mb`, which the margins below a limit are for.
    """
    divisions: list[int] = []
    if device.type == "cuda" and torch.cuda.get_allocator_backend() == "native":
        snapshot: Any = torch.cuda.memory._snapshot()
        settings = snapshot["allocator_settings"].get("roundup_power2_divisions", {})
        divisions = [settings[size] for size in sorted(settings, key=int)]

    def rounded(nbytes: int) -> int:
        power = nbytes.bit_length() - 1
        count = divisions[min(max(0, power - MIB_BITS), len(divisions) - 1)] if divisions else 0
        if count <= 1 or nbytes <= LEAST_DIVISION * count:
            return nbytes
        division = (1 << power) // count
        return -(-nbytes // division) * division

    return rounded
