"""Counts the temporary buckets of Megatron-FSDP: weights gathered for layers, and gradients until they are reduced.

Steps through one forward and backward of a model chunk, and takes and frees buckets by the rules of mcore 0.19's
pipelines. Tests hold the most against the bytes in mcore's allocators: equal, but for the first of these bounds.

- Where buckets end within layers (`optim_grads`), all gradients of a layer are taken to come at once, because their
  order is not known. A bucket that is full before the layer ends counts to its end.
- The caller adds the most buckets to the most activations, though they may come at different moments.
- The caller sums the model chunks of a pipeline stage, though one works at a time.

Not counted: the rowwise weights of a layer that is recomputed, beside the columnwise ones of its backward in MXFP8.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from bridge_fgo.tools.job.parallel import Parallel
from bridge_fgo.tools.job.tensors import Tensor
from bridge_fgo.tools.plan.fsdp_layout import Group, gradients_dtype, itemsize, sharding_of

LEAST_UNIT = 1_000_000_000
"""Elements that may wait for their reduction at a time, and twice what is gathered ahead, where layers are smaller."""

POOL_BUFFERS = 2
"""Buffers of each size in a pool of double buffers."""


@dataclass(frozen=True)
class Gathered:
    """Bytes of temporary buckets: the most at a time, and those of them that stay in the optimizer step."""

    most: int
    kept: int


def gathered_of(groups: list[Group], ddp: Any, parallel: Parallel) -> Gathered:
    """Return the bytes of the temporary buckets of a model chunk on a rank.

    Args:
        groups: its parameter groups, in the order of mcore's.
        ddp: Bridge's DistributedDataParallelConfig.
        parallel: how many ranks share what.
    """
    chunk = _Chunk(groups, ddp, parallel)
    weights = _Buckets(chunk, [chunk.weight_bytes(group) for group in groups])
    gradients = _Buckets(chunk, [chunk.gradient_bytes(group) for group in groups])
    kept = weights.kept + gradients.kept + weights.outside
    in_forward = max((weights.bytes_of(chunk.at_work(unit, 1)) for unit in chunk.units), default=0)
    return Gathered(kept + max(in_forward, _most_in_backward(chunk, weights, gradients)), kept)


class _Chunk:
    """The groups of a model chunk, by their places in the list, and what governs when mcore takes and frees buckets."""

    def __init__(self, groups: list[Group], ddp: Any, parallel: Parallel) -> None:
        self.groups, self.ddp, self.parallel = groups, ddp, parallel
        self.sharding = sharding_of(ddp, parallel)
        self.numel = [
            group.numel(self.sharding.ranks(parallel, group.expert) if self.sharding.states else 1) for group in groups
        ]
        self.unit_of = [group.kind.unit for group in groups]
        self.units: dict[int, list[int]] = {}
        """The groups of each layer."""
        for i, unit in enumerate(self.unit_of):
            if unit is not None:
                self.units.setdefault(unit, []).append(i)
        self.doubled = bool(self.units) and bool(
            getattr(ddp, "fsdp_double_buffer", False)
            or getattr(ddp, "megatron_fsdp_max_pool_double_buffer", False)
            or getattr(ddp, "nccl_ub", False)
        )
        self.pooled = self._pooled() if self.doubled else frozenset()

    def _pooled(self) -> frozenset[int]:
        """Return the layers whose buckets lie in pools: all, or the first of the largest sets of layers alike."""
        if getattr(self.ddp, "megatron_fsdp_max_pool_double_buffer", False):
            return frozenset(self.units)
        alike: dict[Any, list[int]] = {}
        for unit, members in self.units.items():
            sizes = [(self.groups[i].kind.dtype, sum(t.numel for t in self.groups[i].tensors)) for i in members]
            alike.setdefault((tuple(sizes), tuple(self.groups[i].kind.quantized for i in members)), []).append(unit)
        return frozenset(max(alike.values(), key=len))

    @cached_property
    def communication_unit(self) -> int:
        """Elements that may wait for their reduction, and twice what is gathered ahead."""
        given = getattr(self.ddp, "suggested_communication_unit_size", None)
        if given is not None:
            return given
        own = getattr(self.ddp, "bucket_size", None) or 0
        if self.sharding.weights:
            numel = sum(t.numel for members in self.units.values() for i in members for t in self.groups[i].tensors)
            own = numel // max(1, len(self.units)) * 2
        return max(LEAST_UNIT, own)

    def together(self, i: int) -> list[int]:
        """Return the groups that are gathered and reduced with one: the dense ones of a layer, or its experts'."""
        unit = self.unit_of[i]
        if unit is None:
            return [i]
        return [j for j in self.units[unit] if self.groups[j].expert == self.groups[i].expert]

    def at_work(self, unit: int, direction: int) -> set[int]:
        """Return the groups that are there while a layer works: its own and what is gathered ahead.

        direction: 1 in forward, -1 in backward.
        """
        taken, ahead = set(self.units[unit]), 0
        doubled = {unit} & self.pooled
        while True:
            at = min(taken) if direction == 1 else max(taken)
            while at in taken:
                at += direction
            if not 0 <= at < len(self.groups) or ahead >= self.communication_unit // 2:
                return taken
            doubled = doubled | {self.unit_of[at]}
            if self.doubled and len(doubled) > POOL_BUFFERS:
                return taken
            new = set(self.together(at)) - taken
            ahead += sum(self.numel[i] for i in new)
            taken |= new

    def _is_spread(self, group: Group) -> bool:
        return self.parallel.shards(group.expert) > 1

    def is_from_the_first(self, i: int) -> bool:
        """Return whether a group's gradients come into a bucket one by one, and not all when they are reduced."""
        return self.sharding.gradients and self._is_spread(self.groups[i])

    def weight_bytes(self, group: Group) -> int:
        """Return the bytes of the bucket in which a group's weights are gathered."""
        if not self.sharding.weights or not self._is_spread(group):
            return 0
        return group.numel(self.sharding.ranks(self.parallel, group.expert)) * itemsize(group.kind)

    def gradient_bytes(self, group: Group) -> int:
        """Return the bytes of the buckets of a group's gradients, until they are reduced.

        A buffer of whole gradients has them itself, unless it is reduced in backward and in another dtype
        (`ddp.megatron_fsdp_grad_comm_dtype`). With several instances the reduction among them has one more bucket then.
        """
        if not group.kind.trainable:
            return 0
        own, sharding = gradients_dtype(group, self.ddp), self.sharding
        communicated: torch.dtype = getattr(self.ddp, "megatron_fsdp_grad_comm_dtype", None) or own
        numel = group.numel(sharding.ranks(self.parallel, group.expert) if sharding.states else 1)
        is_spread = sharding.gradients and self._is_spread(group)
        is_cast = communicated != own and (sharding.gradients or self.ddp.overlap_grad_reduce)
        found = numel if is_spread or is_cast else 0
        if is_cast and self.parallel.optimizer_instances > 1:
            found += numel // (self.parallel.shards(group.expert) if is_spread else 1)
        return found * communicated.itemsize


class _Buckets:
    """The buckets of one purpose: those in pools are there from first to last, the others as they are taken.

    kept: bytes of pools, and of buckets that take their place where a layer does not fit in. outside: of those in no
    layer that are taken, which weights are once and for all.
    """

    def __init__(self, chunk: _Chunk, sizes: list[int]) -> None:
        self._unit_of = chunk.unit_of
        self.kept = _pool_bytes(chunk, sizes)
        self._taken = [0 if unit in chunk.pooled else size for unit, size in zip(chunk.unit_of, sizes, strict=True)]
        if chunk.doubled and getattr(chunk.ddp, "fsdp_db_use_persist_buf_on_alloc_fail", False):
            self.kept += sum(self._taken)
            self._taken = [0] * len(sizes)
        self.outside = sum(self[i] for i, unit in enumerate(chunk.unit_of) if unit is None)

    def __getitem__(self, i: int) -> int:
        """Return the bytes that are allocated when a group's bucket is taken, and freed with it."""
        return self._taken[i]

    def bytes_of(self, groups: Iterable[int]) -> int:
        """Return the bytes that are taken with the layers of these groups."""
        return sum(self[i] for i in groups if self._unit_of[i] is not None)


def _pool_bytes(chunk: _Chunk, sizes: list[int]) -> int:
    """Return the bytes of the pool.

    Of each dtype it has the largest bucket of any layer, the largest second one, and so on.
    """
    largest: dict[Any, list[int]] = {}
    for unit in chunk.pooled:
        kinds: dict[Any, list[int]] = {}
        for i in chunk.units[unit]:
            kinds.setdefault((chunk.groups[i].kind.dtype, chunk.groups[i].kind.quantized), []).append(sizes[i])
        for kind, of_unit in kinds.items():
            pool = largest.setdefault(kind, [])
            pool += [0] * (len(of_unit) - len(pool))
            for place, size in enumerate(sorted(of_unit, reverse=True)):
                pool[place] = max(pool[place], size)
    return min(POOL_BUFFERS, len(chunk.pooled)) * sum(map(sum, largest.values()))


def _most_in_backward(chunk: _Chunk, weights: _Buckets, gradients: _Buckets) -> int:
    """Return the most bytes of buckets that are taken at a time in a backward, without weights in no layer."""
    to_come = [len(group.tensors) if group.kind.trainable else 0 for group in chunk.groups]
    queue: list[int] = []
    opened: set[int] = set()
    of_weights: dict[int | None, int] = {unit: weights.bytes_of(chunk.at_work(unit, -1)) for unit in chunk.units}
    most = max(of_weights.values(), default=0)
    held = 0  # bytes of gradients that wait for others of their bucket, or for their reduction
    for at_once in _backward_order(chunk.groups):
        for i in at_once:
            if i not in opened and chunk.is_from_the_first(i):
                held -= _limit_pools(chunk, gradients, queue, [i])
                opened.add(i)
                held += gradients[i]
            most = max(most, held + of_weights.get(chunk.unit_of[i], 0))
        for i in at_once:
            to_come[i] -= 1
            together = [j for j in chunk.together(i) if chunk.groups[j].kind.trainable]
            if any(to_come[j] for j in together):
                continue
            waiting = sum(chunk.numel[j] for j in queue)
            while waiting > chunk.communication_unit:
                waiting -= chunk.numel[queue[0]]
                held -= gradients[queue.pop(0)]
            held -= _limit_pools(chunk, gradients, queue, together)
            held += sum(gradients[j] for j in together if j not in opened)
            most = max(most, held + of_weights.get(chunk.unit_of[i], 0))
            queue += together
    return most


def _backward_order(groups: list[Group]) -> Iterator[list[int]]:
    """Yield the groups of the tensors whose gradients come together, from the model's last to its first.

    Those are the tensors of a layer that Megatron-FSDP does not know as one, because buckets end within it.
    """
    order = [
        (place, tensor, i)
        for i, group in enumerate(groups)
        if group.kind.trainable
        for place, tensor in zip(group.places, group.tensors, strict=True)
    ]
    order.sort(key=lambda each: each[0], reverse=True)
    for _, together in itertools.groupby(order, key=lambda each: _layer_of(each[1]) or each[0]):
        yield [i for _, _, i in together]


def _layer_of(tensor: Tensor) -> str | None:
    found = re.match(r".*?layers\.\d+\.", tensor.name)
    return found[0] if found and tensor.unit is None else None


def _limit_pools(chunk: _Chunk, gradients: _Buckets, queue: list[int], new: list[int]) -> int:
    """Wait, where there are pools, until those that wait and the new ones are of two layers; return the bytes freed."""
    if not chunk.doubled:
        return 0
    units = {chunk.unit_of[i] for i in new} & chunk.pooled
    keep = len(queue)
    for i in reversed(queue):
        units = units | {chunk.unit_of[i]}
        keep -= len(units) > POOL_BUFFERS
    freed = sum(gradients[i] for i in queue[: len(queue) - keep])
    del queue[: len(queue) - keep]
    return freed
