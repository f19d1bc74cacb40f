"""Counts the states, weights and gradients of a rank under Megatron-FSDP.

States are counted by the engine's own source, on tensors without memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from bridge_fgo.config import OffloadConfig
from bridge_fgo.states.distributed import MOMENTS
from bridge_fgo.states.fsdp import BUFFER, FsdpSource
from bridge_fgo.tools.job.parallel import Parallel
from bridge_fgo.tools.plan.fsdp_gathered import gathered_of
from bridge_fgo.tools.plan.fsdp_layout import Group, gradients_dtype, itemsize, sharding_of
from bridge_fgo.tools.plan.state import META, StateBytes, sum_of
from bridge_fgo.tools.plan.weights import WeightBytes


def fsdp_state_bytes(
    chunks: list[list[Group]],
    index: tuple[int, int],
    optimizer: Any,
    ddp: Any,
    parallel: Parallel,
    config: OffloadConfig,
) -> StateBytes:
    """Return the states of a rank of a pipeline stage. Masters have the padding of their storages with them.

    Args:
        chunks: the parameter groups of each of its model chunks.
        index: which part of dense and of expert parameters the rank has.
        optimizer: Bridge's OptimizerConfig.
        ddp: Bridge's DistributedDataParallelConfig.
        parallel: how many ranks share what.
        config: what is offloaded.
    """
    sharding = sharding_of(ddp, parallel)

    def part_of(group: Group) -> tuple[int, int]:
        """Return which part of a group the rank has, and of how many."""
        return (index[group.expert], sharding.ranks(parallel, group.expert)) if sharding.states else (0, 1)

    source = FsdpSource(_optimizer(chunks, part_of, optimizer, ddp))
    # Its masters are copied whole.
    found = sum_of([(source.states(), source.writes_back_by_part)], replace(config, master_remainders=False))
    dtype = _masters_dtype(ddp)
    trained = [group for chunk in chunks for group in chunk if group.kind.trainable]
    numel = sum(group.numel(ranks) // ranks for group in trained for _, ranks in [part_of(group)])
    return replace(found, masters=0 if dtype is None else numel * dtype.itemsize)


def _masters_dtype(ddp: Any) -> torch.dtype | None:
    """Return the dtype of the masters; None where the weights are updated themselves."""
    dtype: torch.dtype | None = getattr(ddp, "megatron_fsdp_main_params_dtype", torch.float32)
    return dtype


def _optimizer(
    chunks: list[list[Group]], part_of: Callable[[Group], tuple[int, int]], config: Any, ddp: Any
) -> SimpleNamespace:
    """Return what `FsdpSource` reads of a DistributedOptimizer over Megatron-FSDP, as mcore would build it."""
    stepped: list[torch.Tensor] = []

    def stands_for(group: Group) -> SimpleNamespace:
        """Return a parameter group, and have the optimizer step its parameters on this rank."""
        index, ranks = part_of(group)
        dtype = _masters_dtype(ddp)
        buffer = torch.empty(group.numel(ranks) // ranks, dtype=dtype or group.kind.dtype, device=META)
        params = []
        for _, first, numel in group.part(index, ranks):
            params.append(torch.empty(0, device=META))
            stepped.append(_updating(buffer[first : first + numel], params[-1]))
        masters = None if dtype is None else SimpleNamespace(data=buffer)
        kind = "float8" if group.kind.quantized else group.kind.dtype
        return SimpleNamespace(params=params, dtype=kind, main_weight_buffer=masters)

    def buffer_of(chunk: list[Group]) -> SimpleNamespace:
        groups = [stands_for(group) for group in chunk if group.kind.trainable]
        return SimpleNamespace(parameter_groups=groups)

    adam = SimpleNamespace(param_groups=[{"params": stepped}], state={}, step=None)
    if config.use_precision_aware_optimizer:
        adam.name_to_dtype_map = {key: getattr(config, f"{key}_dtype") for key in MOMENTS}
    models = [SimpleNamespace(**{BUFFER: buffer_of(chunk)}) for chunk in chunks]
    return SimpleNamespace(optimizer=adam, model_chunks=models, ddp_config=ddp, config=config)


def _updating(shard: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return what the optimizer steps, marked with the model's parameter that it is of."""
    shard.orig_param = param  # type: ignore[reportAttributeAccessIssue]
    return shard


def fsdp_weights(chunks: list[list[Group]], optimizer: Any, ddp: Any, parallel: Parallel, mxfp8: bool) -> WeightBytes:
    """Return the weights and gradients of the ranks of a pipeline stage.

    Args:
        chunks: the parameter groups of each of its model chunks.
        optimizer: Bridge's OptimizerConfig.
        ddp: Bridge's DistributedDataParallelConfig.
        parallel: how many ranks share what.
        mxfp8: whether quantized weights have a buffer for their columns too, and scales that are not sharded.
    """
    sharding = sharding_of(ddp, parallel)
    parameters = gradients = in_step = gathered = 0
    for chunk in chunks:
        for group in chunk:
            ranks = sharding.ranks(parallel, group.expert)
            whole = group.numel(ranks if sharding.states else 1)
            kept = whole // (parallel.shards(group.expert) if sharding.weights else 1)
            kinds = 2 if mxfp8 and group.kind.quantized else 1
            parameters += kept * kinds * itemsize(group.kind)
            if mxfp8 and group.kind.quantized:
                parameters += whole * kinds // 32
            if not group.kind.trainable:
                continue
            dtype = gradients_dtype(group, ddp)
            gradients += whole // (parallel.shards(group.expert) if sharding.gradients else 1) * dtype.itemsize
            masters = _masters_dtype(ddp)
            if masters not in (None, dtype) and not optimizer.use_precision_aware_optimizer:
                in_step += whole // (ranks if sharding.states else 1) * masters.itemsize
        of_chunk = gathered_of(chunk, ddp, parallel)
        gathered += of_chunk.most
        in_step += of_chunk.kept
    return WeightBytes(parameters, gradients, gathered, in_step)
