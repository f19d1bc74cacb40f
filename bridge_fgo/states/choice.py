"""Which source an optimizer of mcore's is."""

from __future__ import annotations

from typing import Any

from bridge_fgo.states.float16 import Float16Source
from bridge_fgo.states.fsdp import FsdpSource, is_fsdp
from bridge_fgo.states.megatron import McoreSource, MegatronSource


def source_of(leaf: Any) -> McoreSource:
    """Return a DistributedOptimizer, or a Float16OptimizerWithFloat16Params, as a source of states."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if not isinstance(leaf, DistributedOptimizer):
        return Float16Source(leaf)
    return FsdpSource(leaf) if is_fsdp(leaf) else MegatronSource(leaf)
