"""What the ranks of a job hold: weights and gradients, and the states as the offload's settings divide them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bridge_fgo.bridge.refusals import MUONS, uses_fsdp
from bridge_fgo.config import STRATEGIES, OffloadConfig
from bridge_fgo.tools.job.held import Held
from bridge_fgo.tools.job.job import Job
from bridge_fgo.tools.plan.bound import bound_of, name_of
from bridge_fgo.tools.plan.state import StateBytes, sum_of


@dataclass(frozen=True)
class Layout:
    """What the ranks of each stage hold, and the states of each rank of each stage: the slow part of an estimate."""

    held: list[Held]
    states: list[list[StateBytes]]


def layout_of(job: Job, offload: OffloadConfig) -> Layout:
    """Return the layout of a job: of many experts, what takes the time of an estimate.

    Raises:
        ValueError: the states are not those of Adam or Muon; names the setting.
    """
    require_known_states(job)
    # Upstream copies masters as they are, and so does Megatron-FSDP's source.
    is_whole = is_upstreams(job, offload) or uses_fsdp(job.config)
    copied = replace(offload, master_remainders=False) if is_whole else offload
    held = job.held or [bound_of(job, stage) for stage in range(job.parallel.pipeline)]
    return Layout(held, [_states(of_stage, copied) for of_stage in held])


def require_known_states(job: Job) -> None:
    """Raise ValueError where a job's states are not those of Adam or Muon."""
    name = name_of(job.config.optimizer)
    scalar = getattr(job.config.optimizer, "muon_scalar_optimizer", "adam")
    if name not in ("adam", *MUONS):
        raise ValueError(f"optimizer.optimizer={name!r}: the plan knows the states of Adam and Muon alone")
    if name != "adam" and scalar != "adam":
        raise ValueError(
            f"optimizer.muon_scalar_optimizer={scalar!r}: the plan knows the states of Adam and Muon alone"
        )
    if uses_fsdp(job.config) and (strategy := job.config.ddp.data_parallel_sharding_strategy) not in STRATEGIES:
        raise ValueError(f"ddp.data_parallel_sharding_strategy={strategy!r}: one of {', '.join(STRATEGIES)}")
    if name != "adam" and uses_fsdp(job.config):
        raise ValueError(
            f"optimizer.optimizer={name!r} with ddp.use_megatron_fsdp=True: the plan knows Adam's states alone here"
        )


def is_upstreams(job: Job, offload: OffloadConfig) -> bool:
    """Return whether mcore's own offloader would serve the job; without an mcore to ask, as the settings say."""
    return offload.engine == "mcore" if job.engine is None else job.engine.startswith("mcore")


def updates_whole_parameters(job: Job) -> bool:
    """Return whether each rank has whole states: of Muon, and of Adam without a DistributedOptimizer."""
    return name_of(job.config.optimizer) != "adam" or not job.config.ddp.use_distributed_optimizer


def _states(held: Held, offload: OffloadConfig) -> list[StateBytes]:
    """Return the states of each rank of a stage."""
    known: dict[tuple[int, ...], StateBytes] = {}
    for optimizers in map(tuple, held.ranks):
        if optimizers not in known:
            of_rank = [held.optimizers[i] for i in optimizers]
            found = sum_of(((each.states(), each.divides) for each in of_rank), offload)
            homes = sum(sum(each.homes) for each in of_rank)
            known[optimizers] = replace(found, masters=homes or found.masters)  # a home without states is there too
    return [known[tuple(optimizers)] for optimizers in held.ranks]
