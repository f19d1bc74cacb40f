"""Causal attention with context parallelism that needs no fused kernel: every rank gathers all keys and values.

For the GPU lane alone. Transformer Engine has context parallelism in its fused and flash kernels only, which not every
machine can run; this one is slow, deterministic, and runs wherever torch.distributed does.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core import parallel_state


def own_chunks(whole: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """Return what this rank has of a sequence (n * s, ...): (s, ...).

    Megatron gives rank r of n the chunks r and 2 n - 1 - r of 2 n, so that causal attention costs all ranks alike
    (`megatron.core.utils.get_batch_on_this_cp_rank`).
    """
    chunks, rank = whole.chunk(2 * group.size()), group.rank()
    return torch.cat([chunks[rank], chunks[-1 - rank]])


class GatheredSequence(torch.autograd.Function):
    """The ranks' chunks of a sequence, in the sequence's order; backward sums each rank's share of the gradient."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
        """Return (n * s, ...) from this rank's (s, ...)."""
        ctx.group = group
        gathered = [torch.empty_like(mine) for _ in range(group.size())]
        torch.distributed.all_gather(gathered, mine.contiguous(), group=group)
        halves = [part.chunk(2) for part in gathered]
        return torch.cat([half[0] for half in halves] + [half[1] for half in reversed(halves)])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return this rank's (s, ...) of the sum over ranks of (n * s, ...)."""
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=ctx.group)
        return own_chunks(total, ctx.group), None


class GatheredAttention(torch.nn.Module):
    """A `core_attention` of Megatron-Core, without parameters and without dropout."""

    def __init__(self, config: Any, *_: Any, pg_collection: Any = None, softmax_scale: Any = None, **__: Any) -> None:
        super().__init__()
        self._group: Any = parallel_state.get_context_parallel_group() if pg_collection is None else pg_collection.cp
        self._scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Return (s, b, heads * d) from a query (s, b, heads, d) and keys and values (s, b, groups, d)."""
        tokens, batch, heads, _width = query.shape
        key, value = (GatheredSequence.apply(part, self._group) for part in (key, value))
        key, value = (part.repeat_interleave(heads // part.shape[2], dim=2) for part in (key, value))
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * self._scale
        places = torch.arange(key.shape[0], device=query.device)
        later = places > own_chunks(places, self._group)[:, None]
        weights = scores.float().masked_fill(later, float("-inf")).softmax(dim=-1).to(value.dtype)
        return torch.einsum("bhqk,kbhd->qbhd", weights, value).reshape(tokens, batch, -1)


def gathered_attention_spec(config: Any) -> Any:
    """Return Bridge's own layers, with an attention that knows context parallelism without cuDNN."""
    from megatron.bridge.models.gpt_provider import default_layer_spec

    spec: Any = default_layer_spec(config)
    spec.submodules.self_attention.submodules.core_attention = GatheredAttention
    return spec
