"""Walking the optimizers that Megatron builds: chains, nested chains, MIMO."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def leaves(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizers that step parameters, through chains of any depth and MIMO's active optimizers.

    mcore's own loop looks at direct children only and misses nested chains (LayerWise among them).
    """
    if optimizer is None:
        return
    children = vars(optimizer).get("chained_optimizers", vars(optimizer).get("_active_optimizers"))
    if children is None:
        yield optimizer
        return
    for child in children:
        yield from leaves(child)
