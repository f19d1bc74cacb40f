"""What a session drives: the offloader of each DistributedOptimizer, and the order of the native engine's moves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bridge_fgo.config import OffloadConfig
from bridge_fgo.engine.debug import debugged
from bridge_fgo.engine.native import NativeOffloader
from bridge_fgo.engine.offloader import Offloader
from bridge_fgo.engine.peaks import PeakMeter
from bridge_fgo.engine.schedule import Schedule
from bridge_fgo.engine.states import home_device
from bridge_fgo.engine.transfers import make_transfers
from bridge_fgo.upstream.generation1 import Generation1Offloader
from bridge_fgo.upstream.generation2 import Generation2Offloader

UPSTREAM_OFFLOADERS: dict[str, Callable[[Any], Offloader]] = {
    "_state_offloader": Generation1Offloader,
    "_optimizer_state_offloader": Generation2Offloader,
}
"""The attribute in which each generation of mcore keeps its offloader, and the adapter for it."""


def make_schedule(distributed: list[Any], config: OffloadConfig, meter: PeakMeter) -> Schedule:
    """Return the order of moves of the native engine on this rank.

    Raises:
        ValueError: a budget is asked for where GPU memory cannot be measured.
    """
    budget = config.gpu_memory_budget_gib
    if budget is not None and not meter.works:
        raise ValueError(
            f"OffloadConfig.gpu_memory_budget_gib={budget!r} needs a GPU, whose memory it measures: leave it unset, or "
            "set OffloadConfig.fraction"
        )
    device = home_device(distributed[0]) if distributed else torch.device("cpu")
    transfers = debugged(make_transfers(device, config.piece_bytes))
    schedule = Schedule(transfers, meter, config.gpu_memory_budget_bytes)
    schedule.planner.agree = partial(agree, stage_of(distributed))
    return schedule


def stage_of(distributed: list[Any]) -> int | None:
    """Return this rank's place in the pipeline of the model that its optimizers train; None where none says it.

    By DDP's own group: with `dist.use_decentralized_pg` mcore's global state is never set up.
    """
    from megatron.core import parallel_state

    for leaf in distributed:
        for chunk in getattr(leaf, "model_chunks", ()):
            group = getattr(chunk, "pp_group", None)
            if group is not None:
                rank: int = (group[0] if isinstance(group, list) else group).rank()
                return rank
    return parallel_state.get_pipeline_model_parallel_rank() if parallel_state.is_initialized() else None


def agree(stage: int | None, room: int, least: int) -> tuple[int, int]:
    """Return the bytes that may stay on every rank of this pipeline stage, and the least budget of the fullest rank.

    Ranks of one stage hold equal shards, so that one that kept less would make the others wait for its copies.
    Stages differ in what they hold, and each chooses for itself.

    Args:
        stage: see `stage_of`.
        room: bytes that may stay on this rank.
        least: least possible budget of this rank in bytes.
    """
    if not torch.distributed.is_initialized():
        return room, least
    answers: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(answers, (stage, room, least))
    return min(r for s, r, _ in answers if s == stage), max(bytes_ for _, _, bytes_ in answers)


def make_offloader(leaf: Any, config: OffloadConfig, schedule: Schedule | None) -> Offloader:
    """Return the offloader of a DistributedOptimizer that is not a stub: the native engine's where there is a schedule.

    Raises:
        ValueError, RuntimeError: see `NativeOffloader` and `_upstream_offloader`.
    """
    if schedule is None:
        return _upstream_offloader(leaf)
    _drop_upstream_offloader(leaf)
    return NativeOffloader(leaf, config, schedule)


def _upstream_offloader(leaf: Any) -> Offloader:
    """Return the adapter of the offloader that mcore built into a DistributedOptimizer.

    Raises:
        ValueError: mcore built none, because the flag was set after the optimizer was made.
    """
    for name, adapter in UPSTREAM_OFFLOADERS.items():
        if vars(leaf).get(name) is not None:
            return adapter(leaf)
    raise ValueError(
        "optimizer.offload_optimizer_states=True was set after the optimizer was built, so mcore gave it no "
        "offloader: set it before, or use OffloadConfig(engine='native')"
    )


def _drop_upstream_offloader(leaf: Any) -> None:
    """Take an unused offloader of mcore's off a DistributedOptimizer that the native engine serves."""
    for name in UPSTREAM_OFFLOADERS:
        if vars(leaf).get(name) is not None:
            setattr(leaf, name, None)
