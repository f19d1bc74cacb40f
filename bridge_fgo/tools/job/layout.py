"""Lays out what the ranks of a pipeline stage hold, by mcore's wrappers and optimizers on torch's meta device.

Bridge wraps the model chunks and builds their optimizer as `pretrain()` does; the engine's own sources say which states
there are. Runs in the builder, whose process groups do nothing.
"""

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass
from itertools import zip_longest
from math import ceil
from typing import Any
from unittest import mock

import torch

from bridge_fgo.bridge.compat import FLAG
from bridge_fgo.bridge.refusals import uses_fsdp
from bridge_fgo.states.choice import leaves, source_of
from bridge_fgo.states.fsdp import BUFFER
from bridge_fgo.tools.job.held import FP8_BYTES, MXFP8_BYTES, Held, OptimizerStates
from bridge_fgo.tools.job.parallel import Parallel
from bridge_fgo.tools.standins import te_shapes
from bridge_fgo.tools.standins.cuda import fsdp_on_meta

FSDP = "FullyShardedDataParallel"
POOL_BUFFERS = 2  # buffers of each size in a pool of double buffers of Megatron-FSDP


def held_by_ranks(config: Any, chunks: list[Any], groups: Any, parallel: Parallel) -> Held:
    """Return what the ranks of a pipeline stage hold; `chunks`, built with the process groups, are wrapped in place."""
    ddp, settings = copy(config.ddp), copy(config.optimizer)  # both are changed
    setattr(settings, FLAG, False)
    if uses_fsdp(config):
        with fsdp_on_meta():
            return _in_fsdp(config, ddp, settings, chunks, groups, parallel)
    from megatron.bridge.models.model_provider import _ddp_wrap
    from megatron.bridge.training.optim import setup_optimizer

    early = settings.overlap_param_gather_with_optimizer_step
    wrapped = _ddp_wrap(chunks, False, ddp, early, pg_collection=groups)
    optimizers: list[OptimizerStates] = []
    known: dict[tuple[int, int], list[int]] = {}
    ranks = []
    for rank in range(parallel.stage_ranks):
        shards = parallel.shard_index(rank, expert=False), parallel.shard_index(rank, expert=True)
        if shards not in known:
            with as_shards(groups, *shards):
                optimizer, _ = setup_optimizer(settings, config.scheduler, wrapped)
            known[shards] = []
            for states in states_of_leaves(optimizer):
                if states not in optimizers:
                    optimizers.append(states)
                known[shards].append(optimizers.index(states))
        ranks.append(known[shards])
    return held_of(config.model, wrapped, optimizers, ranks)


def held_of(model: Any, wrapped: list[Any], optimizers: list[OptimizerStates], ranks: list[list[int]]) -> Held:
    """Return what ranks hold of model chunks in DDP; see `Held` for the last two."""
    of_quantized = MXFP8_BYTES if getattr(model, "fp8_recipe", None) == "mxfp8" else FP8_BYTES
    frozen = [p for chunk in wrapped for p in chunk.parameters() if not p.requires_grad]
    parameters = sum(int(p.numel() * of_quantized) if te_shapes.is_quantized(p) else p.nbytes for p in frozen)
    gradients, shares, buckets = 0, [], []
    numbers = {id(param): n for n, param in enumerate(param for chunk in wrapped for param in chunk.parameters())}
    for buffer in (buffer for chunk in wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)):
        gradients += buffer.grad_data.nbytes
        for bucket in buffer.buckets:
            # A shared embedding gets a gradient as the output layer, and perhaps as the embedding.
            is_output = any(getattr(param, "shared_embedding", False) for param in bucket.params)
            last = len(numbers) if is_output else max(numbers[id(param)] for param in bucket.params)
            buckets.append((last, bucket.grad_data.nbytes))
        share = sum(bucket.grad_data.numel() // buffer.data_parallel_world_size for bucket in buffer.buckets)
        shares.append(tuple(numel * buffer.param_dtype.itemsize for numel in (1, buffer.numel, share)))
        if not any(map(te_shapes.is_quantized, buffer.params)):
            parameters += buffer.numel * buffer.params[0].dtype.itemsize
        elif getattr(model, "fp8_recipe", None) == "mxfp8":
            parameters += int(sum(param.numel() for param in buffer.params) * MXFP8_BYTES)  # in no buffer
        else:
            parameters += buffer.numel * FP8_BYTES
    return Held(parameters, gradients, 0, 0, shares, optimizers, ranks, buckets)


def states_of_leaves(optimizer: Any) -> Iterator[OptimizerStates]:
    """Yield the states of each optimizer within one of mcore's."""
    for leaf in leaves(optimizer):
        if leaf.optimizer is not None and not getattr(leaf, "is_stub_optimizer", False):
            yield OptimizerStates.of(source_of(leaf))


@contextlib.contextmanager
def as_shards(groups: Any, dense: int, expert: int) -> Iterator[None]:
    """Context in which this process has these ranks in the groups that share states of dense and expert parameters.

    What ranks gather of each other is alike: they have the same parameters.
    """
    spread = {groups.dp_cp: dense, groups.intra_dp_cp: dense, groups.expt_dp: expert, groups.intra_expt_dp: expert}
    own_rank = torch.distributed.ProcessGroup.rank

    def rank(group: torch.distributed.ProcessGroup) -> int:
        return spread[group] if group in spread else own_rank(group)

    def gather(answers: list[Any], own: Any, group: Any = None) -> None:
        answers[:] = [own] * len(answers)

    with (
        mock.patch.object(torch.distributed.ProcessGroup, "rank", rank),
        mock.patch.object(torch.distributed, "all_gather_object", gather),
    ):
        yield


def _in_fsdp(config: Any, ddp: Any, settings: Any, chunks: list[Any], groups: Any, parallel: Parallel) -> Held:
    """Return what ranks hold under Megatron-FSDP: what the first does, as padding ends a buffer."""
    from megatron.bridge.models.model_provider import _ddp_wrap
    from megatron.bridge.training.optim import setup_optimizer
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer
    from megatron.core.utils import get_model_config

    if ddp.nccl_ub:  # NCCL's own memory, of the same bytes, with which Megatron-FSDP has double buffers
        ddp.nccl_ub, ddp.fsdp_double_buffer = False, True
    for chunk in chunks:
        get_model_config(chunk).init_model_with_meta_device = False  # its parameters have no values to be initialized
    with ExitStack() as stack:
        for name in ("validate_uneven_dtensor", "update_uneven_dtensor_chunk_metadata"):
            # They ask all ranks, for checkpoints, and take most of the time.
            stack.enter_context(mock.patch.object(param_and_grad_buffer, name, lambda dtensor: None))
        # It asks the GPU's random number generator, with tensor parallelism.
        # From mcore 0.20 on there are two classes, and a function of that name.
        adapter: Any = vars(mcore_fsdp_adapter).get(f"{FSDP}V1") or vars(mcore_fsdp_adapter)[FSDP]
        stack.enter_context(mock.patch.object(adapter, "sync_rng_states_across_tp_group", lambda self: None))
        wrapped = _ddp_wrap(chunks, False, ddp, False, use_megatron_fsdp=True, pg_collection=groups)
    optimizer, _ = setup_optimizer(settings, config.scheduler, wrapped)
    states = list(states_of_leaves(optimizer))
    parameters = gradients = gathered = in_step = 0
    for chunk in wrapped:
        buckets = list(buckets_of(chunk, ddp, parallel))
        most, kept = temporary_bytes(buckets, chunk.module, ddp)
        gathered += most
        in_step += kept + (0 if settings.use_precision_aware_optimizer else sum(bucket.cast for bucket in buckets))
        parameters += sum(bucket.parameters for bucket in buckets)
        gradients += sum(bucket.gradients for bucket in buckets)
    return Held(parameters, gradients, gathered, in_step, [], states, [[*range(len(states))]] * parallel.stage_ranks)


@dataclass(frozen=True)
class Bucket:
    """The bytes that a rank has of one parameter group of Megatron-FSDP."""

    unit: int | None  # number of the layer that is gathered with it, None outside of layers
    numel: int  # the group's elements
    parameters: int  # of its part, or of all if that is not spread
    gradients: int  # likewise
    weights: int  # of the temporary buckets in which weights are gathered
    reduced: int  # of those in which gradients wait to be reduced
    cast: int  # of the step's gradients in the masters' dtype, where that is another


def buckets_of(chunk: Any, ddp: Any, parallel: Parallel) -> Iterator[Bucket]:
    """Yield what a rank has of each parameter group of a model chunk."""
    for group in getattr(chunk, BUFFER).parameter_groups:
        weights, masters, grads = group.model_weight_buffer, group.main_weight_buffer, group.main_grad_buffer
        gradients = reduced = cast = 0
        if grads is not None:
            gradients = _held(group, "hfsdp_helper_gbuf", "main_grad_buffer")
            sent = ddp.megatron_fsdp_grad_comm_dtype or grads.dtype
            if grads.is_data_distributed or sent != grads.dtype:
                reduced = grads.bucket_index.size * sent.itemsize * (2 if parallel.optimizer_instances > 1 else 1)
            if masters and masters.dtype != grads.dtype:
                cast = masters.data.nbytes
        if weights is None:  # no_shard leaves the model's own parameters alone
            parameters = sum(param.nbytes for param in group.params)
        else:
            parameters = _held(group, "hfsdp_helper_wbuf", "model_weight_buffer")
            if (columns := group.transpose_weight_buffer) is not None:
                parameters += columns.data.nbytes + 2 * weights.bucket_index.size // 32  # scales, which are not spread
        yield Bucket(
            group.fsdp_unit_id,
            sum(param.numel() for param in group.params),
            parameters,
            gradients,
            weights.bucket_index.size * weights.dtype.itemsize if weights and weights.is_data_distributed else 0,
            reduced,
            cast,
        )


def _held(group: Any, helper: str, name: str) -> int:
    """Return the bytes of the buffer that has the memory; the other, where there are both, is a view of it."""
    return (getattr(group, helper, None) or getattr(group, name)).data.nbytes


def temporary_bytes(buckets: list[Bucket], module: Any, ddp: Any) -> tuple[int, int]:
    """Return upper bounds of a chunk's temporary buckets: the most at a time, and what stays in the optimizer step.

    A layer's weights are gathered beside those of layers ahead, and gradients wait for their reduction, as many as
    Megatron-FSDP (`module`) says; one layer more is begun each time. What lies in no layer stays gathered once it is.
    """
    outside = sum(bucket.weights for bucket in buckets if bucket.unit is None)
    weights, of_layer = _in_layers([(b.unit, b.weights) for b in buckets if b.unit is not None])
    gradients, reduced_of_layer = _in_layers([(b.unit, b.reduced) for b in buckets])
    has_pools = any(b.unit is not None for b in buckets) and (
        ddp.fsdp_double_buffer or ddp.megatron_fsdp_max_pool_double_buffer or ddp.nccl_ub
    )
    if has_pools and ddp.fsdp_db_use_persist_buf_on_alloc_fail:
        kept = weights + gradients
    else:
        kept = POOL_BUFFERS * (of_layer + reduced_of_layer) if has_pools else 0
    prefetched = module.suggested_AG_prefetch_size * max(ceil(b.weights / b.numel) for b in buckets)
    queued = module.suggested_RS_queue_capacity * max(ceil(b.reduced / b.numel) for b in buckets)
    ahead = min(weights, 2 * of_layer + prefetched)
    waiting = min(gradients, 2 * reduced_of_layer + queued)
    return max(kept, ahead + waiting) + outside, kept + outside


def _in_layers(sizes: list[tuple[int | None, int]]) -> tuple[int, int]:
    """Return the bytes of all buckets, and no less than those of any layer: of pools, which hold the largest of each.

    What lies in no layer counts as a layer of its own.
    """
    layers: dict[int | tuple[int], list[int]] = {}
    for place, (unit, nbytes) in enumerate(sizes):
        layers.setdefault((place,) if unit is None else unit, []).append(nbytes)
    places = zip_longest(*(sorted(layer, reverse=True) for layer in layers.values()), fillvalue=0)
    return sum(nbytes for _, nbytes in sizes), sum(map(max, places))
