"""The layout of parameters in mcore's DDP buffers, and the part of them that each data-parallel rank updates.

The arithmetic of `DistributedOptimizer.compute_full_param_layout` (mcore 0.19) on sizes alone; a test holds it
against mcore's own. Padding belongs to the buffers of parameters and gradients, never to the optimizer's states.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from bridge_fgo.tools.job.parallel import Parallel
from bridge_fgo.tools.job.tensors import Chunk, Tensor

PARAM_ALIGNMENT = 64
"""Elements to a multiple of which each parameter's start is rounded up (mcore's `pad_param_start`)."""
BUCKET_ALIGNMENT = 128
"""Elements that a bucket's size is a multiple of, beside the number of shards (mcore's `bucket_end_divisor`)."""
BUSBW_ALIGNMENT = 2**16
"""`BUCKET_ALIGNMENT` with `ddp.pad_buckets_for_high_nccl_busbw`."""


@dataclass
class Buffer:
    """One buffer of parameters or gradients of one model chunk.

    dtype: of the parameters, uint8 where they are kept in FP8; gradient: dtype of the gradients; expert: belongs to
    experts; shards: ranks over which it is spread; buckets: (start, end) in elements, padded; places: of each
    tensor its start, end and bucket.
    """

    dtype: torch.dtype
    gradient: torch.dtype
    expert: bool
    shards: int
    buckets: list[tuple[int, int]] = field(default_factory=list)
    places: list[tuple[Tensor, int, int, int]] = field(default_factory=list)

    @property
    def numel(self) -> int:
        """Elements, with padding."""
        return self.buckets[-1][1]

    def shard(self, index: int) -> Iterator[tuple[Tensor, int]]:
        """Yield the tensors that shard `index` updates a part of, and how many elements of each."""
        for tensor, start, end, bucket in self.places:
            first, last = self.buckets[bucket]
            size = (last - first) // self.shards
            numel = min(end, first + (index + 1) * size) - max(start, first + index * size)
            if numel > 0:
                yield tensor, numel


def buffers_of(chunk: Chunk, first_of_stage_0: bool, ddp: Any, parallel: Parallel, others: int = 0) -> list[Buffer]:
    """Return the buffers of a model chunk.

    Args:
        chunk: its tensors, in the model's order.
        first_of_stage_0: whether it is the first chunk of the first pipeline stage, the one that has buckets.
        ddp: Bridge's DistributedDataParallelConfig.
        parallel: how many ranks share what.
        others: elements of the rank's other chunks, which `ddp.num_buckets` counts too (Megatron's `_ddp_wrap`).
    """
    groups: dict[tuple[torch.dtype, torch.dtype, bool], list[Tensor]] = {}
    for tensor in chunk:
        if tensor.trainable:
            kept = torch.uint8 if tensor.quantized else tensor.dtype
            gradient = torch.float32 if ddp.grad_reduce_in_fp32 else tensor.dtype
            groups.setdefault((kept, gradient, tensor.expert), []).append(tensor)
    bucket_size = (
        bucket_size_of(sum(tensor.numel for tensor in chunk) + others, ddp, parallel) if first_of_stage_0 else None
    )
    align_far = getattr(ddp, "pad_buckets_for_high_nccl_busbw", False)
    found = []
    for (dtype, gradient, expert), tensors in groups.items():
        buffer = Buffer(dtype, gradient, expert, parallel.shards(expert))
        divisor = math.lcm(buffer.shards, BUCKET_ALIGNMENT, BUSBW_ALIGNMENT if align_far else 1)
        _lay_out(buffer, tensors, bucket_size, divisor)
        found.append(buffer)
    return found


def bucket_size_of(numel: int, ddp: Any, parallel: Parallel) -> int | None:
    """Return the elements at which a bucket of a rank's first chunk ends, of `numel` in all; None for no such end."""
    if not ddp.overlap_grad_reduce:
        return None
    if getattr(ddp, "num_buckets", None) is not None:
        return numel // ddp.num_buckets
    return ddp.bucket_size or max(40_000_000, 1_000_000 * parallel.data * parallel.context)


def _lay_out(buffer: Buffer, tensors: list[Tensor], bucket_size: int | None, divisor: int) -> None:
    """Place the tensors from the last to the first, as their gradients become ready."""
    bucket_start = end = 0
    is_open = False

    def close() -> None:
        nonlocal bucket_start, end, is_open
        end = _up(end, divisor)
        buffer.buckets.append((bucket_start, end))
        bucket_start, is_open = end, False

    for tensor in reversed(tensors):
        end = _up(end, PARAM_ALIGNMENT)
        if tensor.own_bucket and is_open:
            close()
        start, end = end, end + tensor.numel
        buffer.places.append((tensor, start, end, len(buffer.buckets)))
        is_open = True
        if tensor.own_bucket or (bucket_size is not None and end - bucket_start >= bucket_size):
            close()
    if is_open:
        close()


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
