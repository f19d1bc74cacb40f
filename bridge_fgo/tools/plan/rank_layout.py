"""How weights and states lie on the ranks of a job: in DDP's buffers, whole, or in Megatron-FSDP's parameter groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from bridge_fgo.bridge.refusals import uses_fsdp
from bridge_fgo.config import OffloadConfig
from bridge_fgo.tools.job.job import Job
from bridge_fgo.tools.plan.fsdp_layout import groups_of, sharding_of
from bridge_fgo.tools.plan.fsdp_state import fsdp_state_bytes, fsdp_weights
from bridge_fgo.tools.plan.layout import Buffer, buffers_of
from bridge_fgo.tools.plan.state import StateBytes, state_bytes
from bridge_fgo.tools.plan.weights import WeightBytes, ddp_weights
from bridge_fgo.tools.plan.whole_state import kept_by, updates_whole_parameters, whole_state_bytes


@dataclass(frozen=True)
class Layout:
    """Weights of the ranks of each stage, and the states of each rank of each stage: the slow part of an estimate."""

    weights: list[WeightBytes]
    states: list[list[StateBytes]]


def layout_of(job: Job, offload: OffloadConfig) -> Layout:
    """Return the layout of a job: of many experts, what takes the time of an estimate.

    Raises:
        ValueError: the states are not those of Adam or Muon, or it is not known how they lie; names the setting.
    """
    # Upstream copies masters as they are.
    copied = replace(offload, master_remainders=False) if is_upstreams(job, offload) else offload
    of_stage = _whole_stage if updates_whole_parameters(job.config.optimizer, job.config.ddp) else _ddp_stage
    if uses_fsdp(job.config):
        if (name := job.config.optimizer.optimizer) != "adam":
            raise ValueError(
                f"optimizer.optimizer={name!r} with ddp.use_megatron_fsdp=True: the plan knows Adam's states alone here"
            )
        of_stage = _fsdp_stage
    found = [of_stage(job, stage, copied) for stage in range(job.parallel.pipeline)]
    return Layout([weights for weights, _ in found], [states for _, states in found])


def is_upstreams(job: Job, offload: OffloadConfig) -> bool:
    """Return whether mcore's own offloader would serve the job; without an mcore to ask, as the settings say."""
    return offload.engine == "mcore" if job.engine is None else job.engine.startswith("mcore")


def stage_buffers(job: Job, stage: int) -> list[Buffer]:
    """Return DDP's buffers of a pipeline stage."""
    return [
        buffer
        for index, chunk in enumerate(job.stages[stage])
        for buffer in buffers_of(chunk, stage == index == 0, job.config.ddp, job.parallel, _others(job, stage))
    ]


def _others(job: Job, stage: int) -> int:
    """Return the elements of a stage's chunks but the first, which the size of its buckets may go by."""
    return sum(tensor.numel for chunk in job.stages[stage][1:] for tensor in chunk)


def _is_mxfp8(job: Job) -> bool:
    return getattr(job.config.model, "fp8_recipe", None) == "mxfp8"


def _ddp_stage(job: Job, stage: int, offload: OffloadConfig) -> tuple[WeightBytes, list[StateBytes]]:
    buffers = stage_buffers(job, stage)

    def states_of(rank: int, dense: int, expert: int) -> StateBytes:
        shards = [(buffer, expert if buffer.expert else dense) for buffer in buffers]
        return state_bytes(shards, job.config.optimizer, job.config.ddp, offload)

    return _ddp_weights(job, stage, buffers), _of_ranks(job, states_of)


def _whole_stage(job: Job, stage: int, offload: OffloadConfig) -> tuple[WeightBytes, list[StateBytes]]:
    tensors = [tensor for chunk in job.stages[stage] for tensor in chunk]

    def states_of(rank: int, dense: int, expert: int) -> StateBytes:
        kept = kept_by(rank, tensors, job.config.optimizer, job.parallel)
        return whole_state_bytes(kept, job.config.optimizer, offload)

    return _ddp_weights(job, stage, stage_buffers(job, stage)), _of_ranks(job, states_of)


def _ddp_weights(job: Job, stage: int, buffers: list[Buffer]) -> WeightBytes:
    tensors = [tensor for chunk in job.stages[stage] for tensor in chunk]
    return ddp_weights(tensors, buffers, _is_mxfp8(job))


def _fsdp_stage(job: Job, stage: int, offload: OffloadConfig) -> tuple[WeightBytes, list[StateBytes]]:
    optimizer, ddp, parallel = job.config.optimizer, job.config.ddp, job.parallel
    chunks = [groups_of(chunk, i == 0, ddp, parallel) for i, chunk in enumerate(job.stages[stage])]
    sharding = sharding_of(ddp, parallel)

    def states_of(rank: int, dense: int, expert: int) -> StateBytes:
        return fsdp_state_bytes(chunks, (dense, expert), optimizer, ddp, parallel, offload)

    def index(rank: int, expert: bool) -> int:
        return sharding.index(parallel, rank, expert) if sharding.states else 0

    return fsdp_weights(chunks, optimizer, ddp, parallel, _is_mxfp8(job)), _of_ranks(job, states_of, index)


def _of_ranks(
    job: Job, states_of: Callable[[int, int, int], StateBytes], index: Callable[[int, bool], int] | None = None
) -> list[StateBytes]:
    """Return the states of each rank of a stage.

    Args:
        job: with its parallelism.
        states_of: of a rank, by its number and by which shards of dense and expert parameters it has.
        index: of a rank's number, and whether it is about experts, which shard it has; None for DDP's.
    """
    index = index or job.parallel.shard_index
    known: dict[tuple[int, int], StateBytes] = {}
    found = []
    for rank in range(job.parallel.stage_ranks):
        key = (index(rank, False), index(rank, True))
        if key not in known:
            known[key] = states_of(rank, *key)
        found.append(known[key])
    return found
