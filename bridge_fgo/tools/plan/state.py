"""The optimizer states of one rank, by the engine's own arithmetic on tensors without memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from bridge_fgo.config import OffloadConfig
from bridge_fgo.memory.host_memory import power_of_two_at_least
from bridge_fgo.memory.layout import PartLayout, copied_whole, lay_out, offloaded_bundles, part_bytes
from bridge_fgo.memory.remainders import Remainders
from bridge_fgo.memory.state import Bundle
from bridge_fgo.offload.policy import PartBytes
from bridge_fgo.states.distributed import MASTER, MOMENTS, bundles
from bridge_fgo.states.masters import MasterCopy
from bridge_fgo.tools.plan.layout import Buffer

META = torch.device("meta")


@dataclass(frozen=True)
class StateBytes:
    """Bytes of a rank: master weights, moments, and what of both is offloaded.

    masters, offloaded: with the padding of storages that must not be rebound, Megatron-FSDP's.
    pinned_upstream: what mcore's offloader would pin for it, a buffer a tensor, each in a block of a power of two.
    saved: of each copy that the native engine makes for a checkpoint (its `copied_for_a_save`).
    parts: of each part that the native engine updates in one go, in its order; transits: the most GPU memory that
    each holds on its way; copied: of all parts, what a copy takes over the link.
    masters_held: what of them the optimizer step holds to its end (`HoldPolicy.masters_held_bytes`).
    """

    masters: int
    moments: int
    offloaded: int
    pinned_upstream: int
    saved: tuple[int, ...]
    parts: tuple[int, ...]
    transits: tuple[int, ...]
    copied: int
    masters_held: int

    @property
    def total(self) -> int:
        """All optimizer state: the engine's `state_bytes`."""
        return self.masters + self.moments


def state_bytes(shards: list[tuple[Buffer, int]], optimizer: Any, ddp: Any, config: OffloadConfig) -> StateBytes:
    """Return the states of the rank that updates the given shards.

    Args:
        shards: buffers, each with the index of the rank's shard.
        optimizer: Bridge's OptimizerConfig.
        ddp: Bridge's DistributedDataParallelConfig.
        config: what is offloaded. With a fraction, exact to the states of one parameter.
    """
    of_optimizers = []
    for expert in (False, True):  # mcore makes an optimizer of each, and so does the engine
        of_kind = _optimizer([(buffer, index) for buffer, index in shards if buffer.expert is expert], optimizer, ddp)
        master_copy = MasterCopy(of_kind)
        of_optimizers.append((bundles(of_kind, master_copy.rounded_weights()), master_copy.divides()))
    return sum_of(of_optimizers, config)


def sum_of(of_optimizers: Iterable[tuple[list[Bundle], bool]], config: OffloadConfig) -> StateBytes:
    """Return the states of a rank.

    Args:
        of_optimizers: of each of mcore's, the states, and whether masters are copied to weights part by part.
        config: what is offloaded.
    """
    by_kind = {"master": 0, "moment": 0}
    offloaded, parts, masters_held, padding = [], [], 0, 0
    codec_of = copied_whole if config.master_remainders is False else Remainders(META).codec_of
    for everything, divides in of_optimizers:
        for bundle in everything:
            for state in bundle.states:
                by_kind[state.kind] += state.nbytes
        chosen = offloaded_bundles(everything, config)
        layouts = lay_out(chosen, part_bytes(chosen, config), codec_of)
        offloaded += [state for bundle in chosen for state in bundle.states]
        parts += layouts
        padding += sum(map(padding_bytes, layouts))
        if not divides:
            masters_held += sum(written_back_bytes(layout) for layout in layouts)
    sizes = [size_of(layout) for layout in parts]
    return StateBytes(
        by_kind["master"] + padding,
        by_kind["moment"],
        sum(state.nbytes for state in offloaded) + padding,
        sum(power_of_two_at_least(state.nbytes) for state in offloaded),
        tuple(state.saved_nbytes for state in offloaded),
        tuple(size.nbytes for size in sizes),
        tuple(size.transit_bytes for size in sizes),
        sum(copied_bytes(layout) for layout in parts),
        masters_held,
    )


def size_of(part: PartLayout) -> PartBytes:
    """Return the bytes of the slabs of a part, and the most GPU memory that they hold, which is on their way."""
    nbytes = sum(slab.layout.nbytes for slab in part.slabs)
    return PartBytes(nbytes, nbytes + sum(slab.codec.staging_bytes for slab in part.slabs))


def copied_bytes(part: PartLayout) -> int:
    """Return the bytes that a copy of a part's slabs takes over the link."""
    return sum(slab.codec.link_bytes for slab in part.slabs)


def padding_bytes(part: PartLayout) -> int:
    """Return the bytes that no state has of the storages of a part that others hold views of: they leave too."""
    whole = [slab for slab in part.slabs if any(state.home is not None for state in slab.states)]
    return sum(slab.layout.nbytes - sum(state.nbytes for state in slab.states) for slab in whole)


def written_back_bytes(part: PartLayout) -> int:
    """Return the bytes of a part's slabs whose states are copied to the model's weights after the update."""
    return sum(slab.layout.nbytes for slab in part.slabs if slab.written_back)


def _optimizer(shards: list[tuple[Buffer, int]], config: Any, ddp: Any) -> SimpleNamespace:
    """Return what the engine's layout reads of a DistributedOptimizer, as mcore would build it for these shards."""
    adam_has_masters = keeps_masters_in_adam(config)
    masters, weights, models = [], [], []
    for buffer, index in shards:
        for tensor, numel in buffer.shard(index):
            of_model = torch.empty(numel, dtype=tensor.dtype, device="meta")
            if tensor.dtype == torch.float32 or adam_has_masters:
                weights.append(of_model)  # of native fp32 parameters the weight itself is updated
            else:
                masters.append(of_model.float())
                models.append(of_model if not tensor.quantized else of_model.to(torch.uint8))
    adam = SimpleNamespace(param_groups=[{"params": [*weights, *masters]}], state={})
    if config.use_precision_aware_optimizer:
        adam.name_to_dtype_map = {key: getattr(config, f"{key}_dtype") for key in MOMENTS}
        adam.name_to_dtype_map[MASTER] = config.main_params_dtype
        adam.master_weights = adam_has_masters
        adam.store_param_remainders = config.store_param_remainders
    return SimpleNamespace(
        optimizer=adam,
        shard_fp32_from_float16_groups=[masters],
        model_float16_groups=[models],
        model_param_gbuf_map=dict.fromkeys(models, (0, None, 0)),
        _get_model_param_range_map=lambda model: {"gbuf_world_in_bucket": SimpleNamespace(start=0, size=model.numel())},
        buffers=[SimpleNamespace(buckets=[None])],
        config=config,
        ddp_config=ddp,
    )


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
