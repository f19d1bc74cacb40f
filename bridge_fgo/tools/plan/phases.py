"""The bytes and seconds of a sleep and a wake of `bridge_fgo.Residency`, by the rules of `bridge_fgo.sleep`.

Gradients are dropped. Parameters that masters round to are rounded anew. Where these come back without their masters,
and where no masters tell them, a rank copies its own shard, and gets the others by an all-gather. Masters and moments
cross whole. All in the steady state, from the second cycle on.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from rich.console import Console

from bridge_fgo.bridge.refusals import is_layer_wise
from bridge_fgo.sleep.host_budget import fitting
from bridge_fgo.sleep.state_offloader import DEFAULTS
from bridge_fgo.tools.job.job import Job
from bridge_fgo.tools.plan.estimate import Estimate, StageEstimate
from bridge_fgo.tools.plan.report import gigabytes, print_lines
from bridge_fgo.tools.plan.report import seconds as in_seconds
from bridge_fgo.tools.plan.state import is_served_by_mcore, states_of_stage
from bridge_fgo.tools.plan.systems import Link
from bridge_fgo.tools.show import table, tell

SLEEP, ALONE, REST, SLEEP_ALL, WAKE_ALL, REFERENCE = (
    "sleep, of an iteration",
    "wake the weights alone",
    "wake the rest",
    "sleep, woken as a whole",
    "wake as a whole",
    "wake a reference model",
)


def _move(name: str, params: int = 0, optimizer: int = 0) -> dict[str, Any]:
    """Return the bytes of one rank that cross the link in one move, by kind, and all of them: `copied`."""
    return {"name": name, "params": params, "grads": 0, "optimizer": optimizer, "copied": params + optimizer}


@dataclass(frozen=True)
class StagePhases:
    """A pipeline stage's rank that has the most states, in bytes.

    params, grads, optimizer: what a sleep frees on the GPU. stays: what does not leave, Transformer Engine's own copies
    of FP8 weights and what settings keep of the states. unhosted: of that, what has no room in host memory.
    shard: of the parameters that train, what the rank copies. untold: of the shard, what no master tells. frozen:
    parameters that do not train, which cross whole, and out once only. states: what of the states crosses. reference:
    the weights of the same model without DDP, which each rank has whole.
    """

    stage: int
    params: int
    grads: int
    optimizer: int
    stays: int
    shard: int
    untold: int
    frozen: int
    states: int
    reference: int
    unhosted: int = 0

    @property
    def moves(self) -> list[dict[str, Any]]:
        """The moves of an iteration, in order, as `_move` returns them."""
        return [
            _move(SLEEP, self.shard, self.states),
            _move(ALONE, self.shard + self.frozen),
            _move(REST, optimizer=self.states),
            _move(SLEEP_ALL, self.untold, self.states),
            _move(WAKE_ALL, self.untold + self.frozen, self.states),
            _move(REFERENCE, self.reference),
        ]


@dataclass(frozen=True)
class Phases:
    """The stages of a job, each link's seconds of its moves on the stage with the most bytes, and what to know.

    refusals: what `Residency` would refuse as the config is.
    """

    stages: list[StagePhases]
    seconds: list[tuple[Link, dict[str, float]]]
    notes: list[str]
    refusals: list[str]

    @property
    def fullest(self) -> StagePhases:
        """The stage whose iteration copies the most."""
        return max(self.stages, key=lambda stage: stage.shard + stage.states)

    def as_json(self) -> dict[str, Any]:
        """Return the phases as JSON takes them: bytes and seconds."""
        return {
            "stages": [asdict(stage) | {"moves": stage.moves} for stage in self.stages],
            "seconds": [
                {"system": link.name, "d2h": link.d2h, "h2d": link.h2d, **seconds} for link, seconds in self.seconds
            ],
            "notes": self.notes,
            "refusals": self.refusals,
        }


class _Weights(NamedTuple):
    """Weights that move together: their bytes, those that a rank copies, and those of an element where they train."""

    nbytes: int
    host_bytes: int
    size: int | None = None


def plan_phases(estimate: Estimate, host_memory_limit_gib: float | None = None) -> Phases:
    """Return the phases of a job that is estimated, with a limit as `Residency` has it.

    Raises:
        ValueError: `Residency` would refuse the job, and it is not known what would move; names the setting.
    """
    for refusal in _unplanned(estimate.job):
        raise ValueError(f"--phases: {refusal}")
    limit = math.inf if host_memory_limit_gib is None else host_memory_limit_gib * 2**30
    stages = [_stage(estimate, stage, limit) for stage in estimate.stages]
    phases = Phases(stages, [], list(_notes(estimate, stages)), list(_refusals(estimate.job)))
    for of_link in estimate.links:
        link = of_link.link  # of one GPU beside the others of its node
        speeds = {SLEEP: link.d2h, SLEEP_ALL: link.d2h}
        seconds = {m["name"]: m["copied"] / speeds.get(m["name"], link.h2d) for m in phases.fullest.moves}
        phases.seconds.append((link, seconds))
    return phases


def _stage(estimate: Estimate, of_stage: StageEstimate, limit: float) -> StagePhases:
    job, held, states = estimate.job, estimate.job.held[of_stage.stage], of_stage.states
    sizes = [(tensor.numel * tensor.dtype.itemsize, tensor.trainable) for tensor in job.tensors(of_stage.stage)]
    weights = [_Weights(nbytes, share, size) for size, nbytes, share in held.buffers]
    weights += [_Weights(nbytes, nbytes) for nbytes, trains in sizes if not trains]
    # With the flag the states are those that its settings send away, packed where they say so, and come first.
    if not job.flag:
        room = limit - sum(group.host_bytes for group in fitting(weights, limit))
        states = max(reversed(states_of_stage(held, DEFAULTS, room)), key=lambda of_rank: of_rank.total)
    elif sum(states.parts) > limit:
        raise ValueError(
            f"--host-memory-limit-gib {limit / 2**30:g}: the flag's engine has {gigabytes(sum(states.parts))} GB of "
            "host memory already, and Residency would refuse the limit: raise it, or lower --fraction"
        )
    leaving, crossing = states.offloaded, states.copied if job.flag else states.offloaded
    moving = fitting(weights, limit - sum(states.parts))
    trained = [(group.size, group.host_bytes) for group in moving if group.size is not None]
    params, is_packed = sum(group.nbytes for group in moving), crossing < leaving
    asked = of_stage.states.offloaded if job.flag else of_stage.states.total
    return StagePhases(
        stage=of_stage.stage,
        params=params,
        grads=of_stage.gradients,
        optimizer=leaving,
        stays=of_stage.parameters - params + states.total - leaving,
        shard=sum(share for _, share in trained),
        untold=sum(share for size, share in trained if is_packed or not (size == 2 and held.has_masters)),
        frozen=sum(group.nbytes for group in moving if group.size is None),
        states=crossing,
        reference=sum(group.nbytes for group in fitting([_Weights(nbytes, nbytes) for nbytes, _ in sizes], limit)),
        unhosted=sum(group.nbytes for group in weights) - params + asked - leaving,
    )


REFUSED = {
    "ddp.nccl_ub": "the buffers are registered with NCCL; set ddp.nccl_ub=False",
    **{
        f"model.{name}": f"graphs have addresses baked in; set model.{name}='none'"
        for name in ("cuda_graph_impl", "vision_cuda_graph_impl")
    },
    "optimizer.optimizer_cuda_graph": "its graph has addresses baked in; set it to False",
}
"""Why `Residency` would refuse a setting that is on and changes no bytes."""
UNPLANNED = {
    "ddp.use_megatron_fsdp": "Megatron-FSDP manages its memory itself; set ddp.use_megatron_fsdp=False",
    "dist.use_megatron_fsdp": "Megatron-FSDP manages its memory itself; set ddp.use_megatron_fsdp=False",
    "dist.use_torch_fsdp2": "torch FSDP2 manages its memory itself; set it to False",
    "optimizer.optimizer_cpu_offload": "states are on the CPU already; set it to False",
}
"""The same of one with which it is not known what would move."""


def _told(job: Job, refusals: Mapping[str, str]) -> Iterator[str]:
    for name, why in refusals.items():
        section, _, setting = name.partition(".")
        if (value := getattr(getattr(job.config, section), setting, None)) not in (None, False, "none"):
            yield f"{name}={value!r}: {why}"


def _refusals(job: Job) -> Iterator[str]:
    """Yield why `Residency` would refuse a job whose moves are known."""
    yield from _told(job, REFUSED)
    ddp = job.config.ddp
    if is_layer_wise(job.config.optimizer) and ddp.overlap_param_gather and not ddp.use_distributed_optimizer:
        yield (
            "ddp.overlap_param_gather=True: under a layer-wise optimizer a rank has old weights of other ranks until "
            "the forward after a step; set it to False"
        )


def _unplanned(job: Job) -> Iterator[str]:
    """Yield why `Residency` would refuse a job whose moves are not known."""
    config: Any = job.config
    yield from _told(job, UNPLANNED)
    quantized = any(tensor.quantized for stage in job.stages for chunk in stage for tensor in chunk)
    if quantized and getattr(config.optimizer, "reuse_grad_buf_for_mxfp8_param_ag", False):
        yield (
            "optimizer.reuse_grad_buf_for_mxfp8_param_ag=True: the real weights of MXFP8 lie in Transformer Engine's "
            "tensors, which Residency does not move yet; plan with 16-bit weights "
            "(mixed_precision=bf16_mixed)"
        )
    if job.flag and is_served_by_mcore(job, job.offload):
        yield "Residency does not go with mcore's own offloader: use engine='native'"


def _notes(estimate: Estimate, stages: list[StagePhases]) -> Iterator[str]:
    job = estimate.job
    yield (
        "seconds are the bytes over the link, of the fullest rank, while all GPUs of a node copy; beside them sums are "
        "made, and the driver takes memory back and gives it"
    )
    if job.parallel.shards(False) > 1:
        yield "the weights' all-gather, GPU to GPU, is not in the seconds"
    if any(stage.untold < stage.shard for stage in stages):
        yield (
            "the first sleep copies no weights that masters tell; where they then come alone, the slabs with their "
            "masters cross for them, once"
        )
    if job.flag:
        yield (
            "the flag is set: states move as its settings say, masters packed as once training waits for copies; "
            "then weights are copied, and come before the states"
        )
    if lacks := max(stage.unhosted for stage in stages):
        yield f"the limit of host memory has no room for {gigabytes(lacks)} GB of the rank with most: they stay"
    if any(stage.stays > stage.unhosted for stage in stages):
        yield "on the GPU stay Transformer Engine's own copies of FP8 weights, and states that settings keep there"


def print_phases(console: Console, phases: Phases) -> None:
    """Print what a sleep frees, and what each move copies and how long that takes."""
    stage = phases.fullest
    freed = stage.params + stage.grads + stage.optimizer
    tell(
        console,
        f"Asleep, the fullest rank of stage {stage.stage} frees {gigabytes(freed)} GB: "
        f"parameters {gigabytes(stage.params)}, "
        f"gradients {gigabytes(stage.grads)}, masters and moments {gigabytes(stage.optimizer)}",
        "bold",
    )
    kinds = [(name, *map(gigabytes, nbytes)) for name, *nbytes in map(dict.values, stage.moves)]
    console.print(table("GB that cross the link", ("move", "params", "grads", "optimizer", "all"), kinds))
    times = [(m["name"], *(in_seconds(of_link[m["name"]]) for _, of_link in phases.seconds)) for m in stage.moves]
    console.print(table("Seconds", ("move", *(link.title for link, _ in phases.seconds)), times))
    print_lines(console, phases.notes)
    for refusal in phases.refusals:
        tell(console, f"refused by Residency: {refusal}", "red")
