"""The parameter groups of Megatron-FSDP, and the part of each that a rank has, by arithmetic on sizes.

Megatron-FSDP (mcore 0.19, version 1) puts parameters of one kind and one layer together. Each group has one buffer for
weights, one for masters and one for gradients, all laid out alike. A test holds it against mcore's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bridge_fgo.bridge.refusals import STRATEGIES
from bridge_fgo.tools.job.parallel import Parallel
from bridge_fgo.tools.job.tensors import Chunk, Tensor


@dataclass(frozen=True)
class Group:
    """One parameter group: its tensors in the order of its buffers, where each starts, and where the last ends.

    places: of each tensor, in the order of the model chunk's parameters.
    row: elements of which a rank's part of a buffer is a multiple, so that no row is cut; is_padded: whether a buffer
    is filled up for that.
    """

    tensors: list[Tensor]
    places: list[int]
    starts: list[int]
    end: int
    row: int
    expert: bool
    is_padded: bool

    @property
    def kind(self) -> Tensor:
        """A tensor of the group: in dtype, quantization, layer and whether they train all are alike."""
        return self.tensors[0]

    def numel(self, ranks: int) -> int:
        """Return the elements of a whole buffer that is spread over so many ranks, with padding."""
        return _up(self.end, ranks * self.row) if self.is_padded else self.end

    def part(self, index: int, ranks: int) -> Iterator[tuple[Tensor, int, int]]:
        """Yield the tensors that part `index` has elements of: where these start in the part, and how many they are."""
        size = self.numel(ranks) // ranks
        for tensor, start in zip(self.tensors, self.starts, strict=True):
            first = max(start, index * size)
            numel = min(start + tensor.numel, (index + 1) * size) - first
            if numel > 0:
                yield tensor, first - index * size, numel


@dataclass(frozen=True)
class Sharding:
    """Which of states, gradients and weights are spread over ranks (`ddp.data_parallel_sharding_strategy`).

    instances: those between which states are spread too (`ddp.outer_dp_sharding_strategy="optim"`), else 1.
    """

    states: bool
    gradients: bool
    weights: bool
    instances: int

    def ranks(self, parallel: Parallel, expert: bool) -> int:
        """Return the number of ranks that share a group's masters; their product with a row is what buffers pad to."""
        return parallel.shards(expert) * self.instances

    def index(self, parallel: Parallel, stage_rank: int, expert: bool) -> int:
        """Return which of the parts a rank of a stage has: first spread within an instance, then between them."""
        within = parallel.shard_index(stage_rank, expert)
        if self.instances == 1:
            return within
        model_ranks = parallel.expert * parallel.expert_tensor if expert else parallel.tensor
        instance = stage_rank // model_ranks // parallel.shards(expert)
        return within * self.instances + instance


def sharding_of(ddp: Any, parallel: Parallel) -> Sharding:
    """Return what a job's DistributedDataParallelConfig spreads over ranks.

    Raises:
        ValueError: there is no such strategy.
    """
    strategy = getattr(ddp, "data_parallel_sharding_strategy", "no_shard")
    if strategy not in STRATEGIES:
        raise ValueError(f"ddp.data_parallel_sharding_strategy={strategy!r}: use one of {', '.join(STRATEGIES)}")
    level = STRATEGIES.index(strategy)
    outer = getattr(ddp, "outer_dp_sharding_strategy", "no_shard") != "no_shard"
    return Sharding(level >= 1, level >= 2, level >= 3, parallel.optimizer_instances if outer else 1)


def groups_of(chunk: Chunk, is_first: bool, ddp: Any, parallel: Parallel) -> list[Group]:
    """Return the parameter groups of a model chunk, frozen parameters among them.

    Args:
        chunk: its tensors, in the model's order, with `row` and `unit`.
        is_first: whether it is the first of its rank: groups outside of layers end at `ddp.bucket_size` there, if set.
        ddp: Bridge's DistributedDataParallelConfig.
        parallel: how many ranks share what.
    """
    is_padded = sharding_of(ddp, parallel).states
    most = getattr(ddp, "bucket_size", None) if is_first else None
    kinds: dict[Any, list[Placed]] = {}
    for place, tensor in enumerate(chunk):
        kind = (tensor.dtype, tensor.quantized, is_expert(tensor), tensor.trainable, tensor.unit)
        kinds.setdefault(kind, []).append((place, tensor))
    return [
        _laid_out(bucket, is_padded) for alike in kinds.values() for bucket in _buckets(alike, most, alone=is_padded)
    ]


def is_expert(tensor: Tensor) -> bool:
    """Return whether Megatron-FSDP takes a tensor for an expert's: by its name, also where every rank has them all."""
    return ".experts." in tensor.name


Placed = tuple[int, Tensor]
"""A tensor and its place in the model chunk."""


def _buckets(tensors: list[Placed], most: int | None, alone: bool) -> Iterator[list[Placed]]:
    """Yield tensors of one kind as they share buffers.

    Outside of layers these end at `most` elements. A shared embedding is `alone` in one.
    """
    together: list[Placed] = []
    for place, tensor in tensors:
        if alone and tensor.own_bucket:
            if together:
                yield together
            yield [(place, tensor)]
            together = []
            continue
        together.append((place, tensor))
        if most and tensor.unit is None and sum(each.numel for _, each in together) >= most:
            yield together
            together = []
    if together:
        yield together


def _laid_out(placed: list[Placed], is_padded: bool) -> Group:
    placed = sorted(placed, key=lambda each: each[1].row, reverse=True)
    ordered = [tensor for _, tensor in placed]
    row = ordered[0].row
    for tensor in ordered:
        fits = row % tensor.row == 0 and tensor.numel % row == 0
        if not (tensor.row == row or fits or tensor.numel < row):
            row = math.lcm(row, tensor.row)
    starts, end = _places([tensor.numel for tensor in ordered], row)
    return Group(ordered, [place for place, _ in placed], starts, end, row, is_expert(ordered[0]), is_padded)


def _places(sizes: list[int], row: int) -> tuple[list[int], int]:
    """Return where tensors of these sizes start in a buffer, and its end.

    A tensor begins a row. What its last row has left gets the end of a later tensor's, that fits in and begins there
    from the other side, and then small tensors, in order.
    """
    starts = [0] * len(sizes)
    small = [i for i, size in enumerate(sizes) if size < row]
    large = [i for i, size in enumerate(sizes) if size >= row]
    end = 0
    while large:
        at = large.pop(0)
        starts[at], over = end, sizes[at] % row
        gap, end = end + sizes[at], end + sizes[at] - over
        if not over:
            continue
        end, space = end + row, row - over
        other = next((i for i in large if 0 < sizes[i] % row <= space), None)
        if other is not None:
            large.remove(other)
            of_other = sizes[other] % row
            starts[other] = end - of_other
            space -= of_other
            end += sizes[other] - of_other
        for i in [i for i in small if sizes[i] <= space]:
            if sizes[i] > space:
                continue
            starts[i] = gap
            small.remove(i)
            space, gap = space - sizes[i], gap + sizes[i]
    for i in small:
        starts[i] = end
        end += sizes[i]
    return starts, end


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def itemsize(tensor: Tensor) -> int:
    """Return the bytes of an element of a weight in its buffer: one where it is quantized."""
    return torch.uint8.itemsize if tensor.quantized else tensor.dtype.itemsize


def gradients_dtype(group: Group, ddp: Any) -> torch.dtype:
    """Return the dtype of a group's gradients in their buffer."""
    dtype: torch.dtype | None = getattr(ddp, "megatron_fsdp_main_grads_dtype", None)
    if dtype is not None:
        return dtype
    return torch.bfloat16 if group.kind.quantized else group.kind.dtype
