"""What is refused by the name of its setting where Megatron-FSDP shards the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bridge_fgo.config import OffloadConfig

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""Values of `ddp.data_parallel_sharding_strategy`; each shards what the one before does, and one thing more."""

WITH = "optimizer.offload_optimizer_states=True and ddp.use_megatron_fsdp=True"


def uses_fsdp(cfg: Any) -> bool:
    """Return whether a Bridge config asks for Megatron-FSDP, in either of the sections by which Bridge knows."""
    return any(getattr(getattr(cfg, name, None), "use_megatron_fsdp", False) is True for name in ("ddp", "dist"))


def fsdp_refusals(cfg: Any) -> Iterator[str]:
    """Yield why a Bridge config with the flag and Megatron-FSDP is refused, whatever the offload's settings."""
    version = getattr(cfg.ddp, "megatron_fsdp_version", 1)
    if version != 1:
        yield (
            f"ddp.megatron_fsdp_version={version!r} with {WITH}: only the states of the first can be offloaded; "
            "set ddp.megatron_fsdp_version=1 or leave the flag unset"
        )
    checkpoint = cfg.checkpoint
    if checkpoint.save is None:
        return
    if checkpoint.async_save is True:
        yield (
            f"checkpoint.async_save=True with {WITH}: the background writer of fsdp_dtensor checkpoints would read "
            "states while the next step moves them; set checkpoint.async_save=False"
        )
    if getattr(checkpoint, "non_persistent_ckpt_type", None) == "local":
        yield (
            f"checkpoint.non_persistent_ckpt_type='local' with {WITH}: local checkpoints take states as they are, also "
            "those that are away; set checkpoint.non_persistent_ckpt_type='global' or None"
        )


def fsdp_setting_refusals(cfg: Any, settings: OffloadConfig) -> Iterator[str]:
    """Yield why settings of the offload cannot be honoured with Megatron-FSDP."""
    if settings.engine == "mcore":
        yield (
            f"OffloadConfig.engine='mcore' with {WITH}: mcore's offloader knows the buffers of its own DDP alone; use "
            "OffloadConfig(engine='native')"
        )
    if settings.master_remainders:
        yield f"OffloadConfig.master_remainders=True with {WITH}: its masters are copied whole; leave it at None"
    if not settings.moments and getattr(cfg.ddp, "megatron_fsdp_main_params_dtype", "") is None:
        yield (
            "OffloadConfig.moments=False with ddp.megatron_fsdp_main_params_dtype=None: weights have no masters, and "
            "nothing would be offloaded; set moments=True or leave the flag unset"
        )
