"""What the ranks of a stage hold under Megatron-FSDP, by its own parameter groups, on torch's meta device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass
from itertools import zip_longest
from math import ceil
from typing import Any
from unittest import mock

from bridge_fgo.bridge.compat import FLAG
from bridge_fgo.states.fsdp import BUFFER
from bridge_fgo.tools.job.held import Held
from bridge_fgo.tools.job.layout import states_of_leaves
from bridge_fgo.tools.job.parallel import Parallel

POOL_BUFFERS = 2
"""Buffers of each size in a pool of double buffers."""


def held_in_fsdp(config: Any, chunks: list[Any], groups: Any, parallel: Parallel) -> Held:
    """Return what the ranks of a pipeline stage hold; see `bridge_fgo.tools.job.layout.held_in_ddp`.

    Every rank is taken to hold what the first one does. It has no less than others: padding ends a buffer.
    """
    from megatron.bridge.models.model_provider import _ddp_wrap
    from megatron.bridge.training.optim import setup_optimizer
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer
    from megatron.core.utils import get_model_config

    for chunk in chunks:
        get_model_config(chunk).init_model_with_meta_device = False  # its parameters have no values to be initialized
    ddp, settings = copy(config.ddp), copy(config.optimizer)  # both are changed
    setattr(settings, FLAG, False)
    with ExitStack() as stack:
        for name in ("validate_uneven_dtensor", "update_uneven_dtensor_chunk_metadata"):
            # They ask all ranks, for checkpoints, and take most of the time.
            stack.enter_context(mock.patch.object(param_and_grad_buffer, name, lambda dtensor: None))
        # It asks the GPU's random number generator, with tensor parallelism.
        adapter: Any = mcore_fsdp_adapter.FullyShardedDataParallel
        stack.enter_context(mock.patch.object(adapter, "sync_rng_states_across_tp_group", lambda self: None))
        wrapped = _ddp_wrap(chunks, False, ddp, False, use_megatron_fsdp=True, pg_collection=groups)
    optimizer, _ = setup_optimizer(settings, config.scheduler, wrapped)
    states = list(states_of_leaves(optimizer))
    parameters = gradients = gathered = in_step = 0
    for chunk in wrapped:
        buckets = list(buckets_of(chunk, ddp, parallel))
        temporary = Temporary.of(buckets, chunk.module, ddp)
        gathered += temporary.most
        in_step += temporary.kept + (0 if settings.use_precision_aware_optimizer else sum(b.cast for b in buckets))
        parameters += sum(bucket.parameters for bucket in buckets)
        gradients += sum(bucket.gradients for bucket in buckets)
    return Held(parameters, gradients, gathered, in_step, [], states, [[*range(len(states))]] * parallel.stage_ranks)


@dataclass(frozen=True)
class Bucket:
    """The bytes that a rank has of one parameter group.

    unit: number of the layer that is gathered with it, None outside of layers. parameters, gradients: of its part, or
    of all where that is not spread. weights, reduced: of the temporary buckets in which weights are gathered, and
    gradients wait to be reduced. cast: of the step's gradients in the masters' dtype, where that is another. numel: the
    group's elements.
    """

    unit: int | None
    numel: int
    parameters: int
    gradients: int
    weights: int
    reduced: int
    cast: int


def buckets_of(chunk: Any, ddp: Any, parallel: Parallel) -> Iterator[Bucket]:
    """Yield what a rank has of each parameter group of a model chunk."""
    for group in getattr(chunk, BUFFER).parameter_groups:
        weights, masters = group.model_weight_buffer, group.main_weight_buffer
        grads = group.main_grad_buffer
        communicated = ddp.megatron_fsdp_grad_comm_dtype
        reduced = 0
        if grads is not None:
            is_cast = communicated is not None and communicated != grads.dtype
            if grads.is_data_distributed or is_cast:
                itemsize = (communicated or grads.dtype).itemsize
                reduced = grads.bucket_index.size * itemsize * (2 if parallel.optimizer_instances > 1 else 1)
        yield Bucket(
            group.fsdp_unit_id,
            sum(param.numel() for param in group.params),
            _parameter_bytes(group),
            0 if grads is None else _held(group, "hfsdp_helper_gbuf", "main_grad_buffer"),
            weights.bucket_index.size * weights.dtype.itemsize if weights and weights.is_data_distributed else 0,
            reduced,
            masters.data.nbytes if masters and grads is not None and masters.dtype != grads.dtype else 0,
        )


def _parameter_bytes(group: Any) -> int:
    weights = group.model_weight_buffer
    if weights is None:  # no_shard leaves the model's own parameters alone
        return sum(param.nbytes for param in group.params)
    found = _held(group, "hfsdp_helper_wbuf", "model_weight_buffer")
    columns = group.transpose_weight_buffer
    if columns is not None:
        found += columns.data.nbytes
        found += 2 * weights.bucket_index.size // 32  # scales, which are not spread
    return found


def _held(group: Any, helper: str, name: str) -> int:
    """Return the bytes of the buffer that has the memory; the other, where there are both, is a view of it."""
    return (getattr(group, helper, None) or getattr(group, name)).data.nbytes


@dataclass(frozen=True)
class Temporary:
    """Upper bounds of the bytes of temporary buckets: the most at a time, and what stays in the optimizer step.

    A layer's weights are gathered beside those of layers ahead, and gradients wait for their reduction, as many as
    Megatron-FSDP says; one layer more is begun each time. What lies in no layer stays gathered once it is.
    """

    most: int
    kept: int

    @classmethod
    def of(cls, buckets: list[Bucket], module: Any, ddp: Any) -> Temporary:
        """Return the bounds of a model chunk.

        Args:
            buckets: of its parameter groups.
            module: Megatron-FSDP's wrapper of it.
            ddp: Bridge's DistributedDataParallelConfig.
        """
        outside = sum(bucket.weights for bucket in buckets if bucket.unit is None)
        weights = _in_layers([(b.unit, b.weights) for b in buckets if b.unit is not None])
        gradients = _in_layers([(b.unit, b.reduced) for b in buckets])
        has_pools = any(b.unit is not None for b in buckets) and (
            ddp.fsdp_double_buffer or ddp.megatron_fsdp_max_pool_double_buffer or ddp.nccl_ub
        )
        if has_pools and ddp.fsdp_db_use_persist_buf_on_alloc_fail:
            kept = weights.all + gradients.all
        else:
            kept = POOL_BUFFERS * (weights.largest + gradients.largest) if has_pools else 0
        prefetched = module.suggested_AG_prefetch_size * max(ceil(b.weights / b.numel) for b in buckets)
        queued = module.suggested_RS_queue_capacity * max(ceil(b.reduced / b.numel) for b in buckets)
        ahead = min(weights.all, 2 * weights.largest + prefetched)
        waiting = min(gradients.all, 2 * gradients.largest + queued)
        return cls(max(kept, ahead + waiting) + outside, kept + outside)


@dataclass(frozen=True)
class _Layers:
    all: int
    largest: int


def _in_layers(sizes: list[tuple[int | None, int]]) -> _Layers:
    """Return the bytes of all buckets, and no less than those of any layer: of pools, which hold the largest of each.

    What lies in no layer counts as a layer of its own.
    """
    layers: dict[int | tuple[int], list[int]] = {}
    for place, (unit, nbytes) in enumerate(sizes):
        layers.setdefault((place,) if unit is None else unit, []).append(nbytes)
    places = zip_longest(*(sorted(layer, reverse=True) for layer in layers.values()), fillvalue=0)
    return _Layers(sum(nbytes for _, nbytes in sizes), sum(map(max, places)))
