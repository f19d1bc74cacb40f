"""Upper bounds of what the ranks of a stage hold, from sizes alone: for where mcore cannot lay the job out.

That is without Megatron, or where its layout cannot be made without a GPU. On one rank for each parameter the states
are exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, lcm
from typing import Any

import torch

from bridge_fgo.bridge.refusals import LAYER_WISE, MUONS, uses_fsdp
from bridge_fgo.config import STRATEGIES
from bridge_fgo.states.distributed import MASTER, MOMENTS
from bridge_fgo.states.float16 import MOMENTUM, SECOND_MOMENT
from bridge_fgo.tools.job.held import FP8_BYTES, MXFP8_BYTES, Held, OptimizerStates, StateKind, Tensor
from bridge_fgo.tools.job.job import Job


def bound_of(job: Job, stage: int) -> Held:
    """Return bounds of what the ranks of a stage hold, all of them alike."""
    config, tensors = job.config, job.tensors(stage)
    fsdp, layer_wise = uses_fsdp(config), is_layer_wise(config.optimizer)
    level = STRATEGIES.index(config.ddp.data_parallel_sharding_strategy) if fsdp else 0
    is_spread = level >= 1 if fsdp else layer_wise or config.ddp.use_distributed_optimizer
    parameters = gradients = 0
    buffers: list[tuple[int, int, int]] = []
    bundles: dict[bool, list[list[int]]] = {}
    kinds: list[list[StateKind]] = []
    groups: dict[Any, list[Tensor]] = {}  # of the same states, on the same ranks
    for tensor in tensors:
        key = (tensor.dtype, tensor.quantized, tensor.expert, tensor.trainable, tensor.matrix)
        groups.setdefault(key, []).append(tensor)
    for alike in groups.values():
        kind, shards = alike[0], job.parallel.shards(alike[0].expert)
        whole = _padded(alike, shards, config.ddp)
        share = ceil(whole / shards)
        of_weights = share if level == 3 else whole
        if not kind.quantized:
            parameters += of_weights * kind.dtype.itemsize
        else:
            parameters += int(of_weights * (MXFP8_BYTES if config.model.fp8_recipe == "mxfp8" else FP8_BYTES))
        if not kind.trainable:
            continue
        gradients += (share if level >= 2 else whole) * _gradients_dtype(config, kind).itemsize
        stored = 1 if kind.quantized else kind.dtype.itemsize
        buffers.append((stored, whole * stored, share * stored))
        most = share if is_spread else whole
        if layer_wise:
            most += max(tensor.numel for tensor in alike)  # of whole parameters
        kinds.append(list(_kinds(config, kind)))
        bundles.setdefault(kind.expert, []).extend([len(kinds) - 1, numel] for numel in _filled(alike, most))
    states = [OptimizerStates(_divides(config), kinds, each, []) for each in bundles.values()]
    ranks = [list(range(len(states)))] * job.parallel.stage_ranks
    # Megatron-FSDP gathers all weights, and all gradients wait to be reduced, at most.
    sizes = [(tensor.numel * tensor.dtype.itemsize, tensor.trainable) for tensor in tensors]
    gathered = sum(nbytes * ((level == 3) + (level >= 2 and trains)) for nbytes, trains in sizes)
    return Held(parameters, gradients, gathered, gathered, buffers, states, ranks, bound=job.not_held)


def _padded(tensors: list[Tensor], shards: int, ddp: Any) -> int:
    """Return the elements of a buffer over so many ranks, at most.

    mcore starts a parameter at a multiple of 64, and ends a bucket of them at one of the ranks, of 128, or of 65,536.
    """
    far = 2**16 if getattr(ddp, "pad_buckets_for_high_nccl_busbw", False) else 1
    multiple = lcm(shards, 128, far)
    return sum(tensor.numel + (64 + multiple) * (tensor.numel % multiple > 0) for tensor in tensors)


def _filled(tensors: list[Tensor], share: int) -> Iterator[int]:
    """Yield a share in whole tensors, the largest first where it is not all: what is updated in one go is no larger."""
    sizes = [tensor.numel for tensor in reversed(tensors)]  # the last first, as in mcore's buffers
    for numel in sizes if share >= sum(sizes) else sorted(sizes, reverse=True):
        if share > 0:
            yield min(numel, share)
        share -= numel


def _gradients_dtype(config: Any, tensor: Tensor) -> torch.dtype:
    """Return the dtype of a kind of gradients in their buffer."""
    if uses_fsdp(config):
        return getattr(config.ddp, "megatron_fsdp_main_grads_dtype", None) or tensor.dtype
    return torch.float32 if config.ddp.grad_reduce_in_fp32 else tensor.dtype


def _divides(config: Any) -> bool:
    """Return whether masters are copied to the weights part by part; see `bridge_fgo.states.masters.MasterCopy`."""
    quantized = any(getattr(config.ddp, name, False) for name in ("fp8_param_gather", "fp4_param_gather"))
    if not uses_fsdp(config) and not config.ddp.use_distributed_optimizer:
        return True  # whole parameters, each by itself
    return not (quantized or getattr(config.optimizer, "reuse_grad_buf_for_mxfp8_param_ag", False))


def _kinds(config: Any, tensor: Tensor) -> Iterator[StateKind]:
    """Yield the states of a parameter."""
    optimizer = config.optimizer
    rounds = tensor.dtype == torch.bfloat16 and not tensor.quantized and not uses_fsdp(config) and _divides(config)
    adam_has_masters = keeps_masters_in_adam(optimizer) and not uses_fsdp(config)
    if tensor.dtype != torch.float32 and not adam_has_masters:
        yield "master", "master weight", "float32", False, True, rounds, False
    if name_of(optimizer) in MUONS and tensor.matrix:
        is_whole = getattr(optimizer, "adaptive_muon_moment2_method", "adamuon") == "adamuon"
        names = [MOMENTUM, SECOND_MOMENT] if "adaptive" in name_of(optimizer) and is_whole else [MOMENTUM]
        dtypes = dict.fromkeys(names, torch.float32)
    elif optimizer.use_precision_aware_optimizer:
        dtypes = {name: getattr(optimizer, f"{name}_dtype") for name in MOMENTS}
    else:
        dtypes = dict.fromkeys(MOMENTS, torch.float32)
    for name, dtype in dtypes.items():
        yield "moment", name, str(dtype).removeprefix("torch."), True, False, False, False
    if adam_has_masters:
        remainders = optimizer.store_param_remainders and tensor.dtype == torch.bfloat16
        dtype = torch.int16 if remainders else optimizer.main_params_dtype
        yield "master", MASTER, str(dtype).removeprefix("torch."), True, False, False, False


def name_of(optimizer: Any) -> str:
    """Return what mcore calls the optimizer of an OptimizerConfig."""
    return getattr(optimizer, "optimizer", "adam")


def is_layer_wise(optimizer: Any) -> bool:
    """Return whether each rank keeps some of the parameters, by mcore's LayerWiseDistributedOptimizer."""
    named = name_of(optimizer) in LAYER_WISE
    return named or getattr(optimizer, "use_layer_wise_distributed_optimizer", False) is True


def keeps_masters_in_adam(config: Any) -> bool:
    """Return whether Transformer Engine's Adam has the master weights, and not mcore.

    mcore's `use_precision_aware_optimizer_no_fp8_or_ds_fp8`: it has them under the precision-aware optimizer, but
    for FP8 recipes other than delayed scaling.
    """
    return config.use_precision_aware_optimizer and (
        config.main_params_dtype != torch.float32
        or config.fp8_recipe in (None, "delayed")
        or config.optimizer_cpu_offload
    )
