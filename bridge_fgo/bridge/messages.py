"""Lines that a job prints of the offload."""

from __future__ import annotations

import torch


def say(text: str) -> None:
    """Print a line on rank 0."""
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print(f"bridge_fgo: {text}", flush=True)


def warn(text: str) -> None:
    """Print a line on the rank that it concerns, whichever that is."""
    several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    print(f"bridge_fgo: {f'rank {torch.distributed.get_rank()}: ' if several else ''}{text}", flush=True)
