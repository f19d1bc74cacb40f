"""The optimizers of a rank in what Megatron builds (chains, nested chains, MIMO), and the source that each is."""

from collections.abc import Iterator
from typing import Any

from bridge_fgo.states.distributed import McoreSource, MegatronSource
from bridge_fgo.states.float16 import Float16Source
from bridge_fgo.states.fsdp import FsdpSource, is_fsdp


def source_of(leaf: Any) -> McoreSource:
    """Return a DistributedOptimizer, or a Float16OptimizerWithFloat16Params, as a source of states."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if not isinstance(leaf, DistributedOptimizer):
        return Float16Source(leaf)
    return FsdpSource(leaf) if is_fsdp(leaf) else MegatronSource(leaf)


def leaves(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizers that step parameters, through chains of any depth and MIMO's active ones."""
    if optimizer is None:
        return
    children = vars(optimizer).get("chained_optimizers", vars(optimizer).get("_active_optimizers"))
    if children is None:
        yield optimizer
        return
    for child in children:
        yield from leaves(child)
