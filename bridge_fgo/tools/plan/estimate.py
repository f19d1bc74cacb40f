"""The memory of every rank of a job by component, with and without the offload, and the time on the link."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bridge_fgo.bridge.refusals import uses_fsdp
from bridge_fgo.config import OffloadConfig
from bridge_fgo.offload.policy import MemoryProfile, budget_refusal, choose_staying, least_budget
from bridge_fgo.tools.bench.floor import floor_seconds
from bridge_fgo.tools.job.held import Held
from bridge_fgo.tools.job.job import Job
from bridge_fgo.tools.plan.activations import WORKSPACES, activation_bytes
from bridge_fgo.tools.plan.bound import is_layer_wise
from bridge_fgo.tools.plan.links import Link
from bridge_fgo.tools.plan.rank_layout import Layout, is_upstreams, layout_of, updates_whole_parameters
from bridge_fgo.tools.plan.state import StateBytes


@dataclass(frozen=True)
class StageEstimate:
    """The rank of a pipeline stage that needs the most memory, in bytes.

    parameters, gradients: with the padding of their buffers. other: workspaces, and what Megatron-FSDP gathers.
    states: exact, or an upper bound (`Held.bound`). activations: None where not known.
    offloaded: of the states, what the peak falls by. count: trainable parameters that the rank computes with.
    least_state: of the stage's rank that updates the fewest. least_budget: the least peak that all ranks of the stage
    can keep to, the engine's `least_budget`; activations that are not known count as nothing in it.
    """

    stage: int
    count: int
    parameters: int
    gradients: int
    other: int
    states: StateBytes
    least_state: int
    activations: int | None
    least_budget: int

    @property
    def fixed(self) -> int:
        """Bytes on the GPU beside activations, with every state resident."""
        return self.parameters + self.gradients + self.states.total + self.other

    def peak(self, offloaded: int) -> int | None:
        """Return the peak of forward and backward with `offloaded` bytes of the states away."""
        return None if self.activations is None else self.fixed + self.activations - offloaded


@dataclass(frozen=True)
class LinkEstimate:
    """The cost of the copies on one kind of link, on the slowest rank, in seconds.

    pinned: bytes of the fullest node: all that may leave, because the engine pins before it knows what a budget leaves.
    link_seconds: one way of all that is copied. most_floor: the floor of the added step time with
    nothing to hide behind. floor: the same for the forward and backward that the user gave, or None.
    hidden_from: seconds of a microbatch's forward (its backward taken as twice that) from which the floor is 0.
    Both are None where the activations, whose place copies need in forward and backward, are not known.
    """

    link: Link
    pinned: int
    link_seconds: float
    most_floor: float
    floor: float | None
    hidden_from: float | None


@dataclass(frozen=True)
class Estimate:
    """A job's memory and copies.

    states: of each rank of each stage. most_offloaded: the most bytes of any rank. pinned: bytes of each rank, in the
    order in which they fill nodes.
    """

    job: Job
    offload: OffloadConfig
    stages: list[StageEstimate]
    held: list[Held]
    states: list[list[StateBytes]]
    most_offloaded: int
    pinned: list[int]
    links: list[LinkEstimate]
    notes: list[str]

    @property
    def resident_peak(self) -> int:
        """Peak of the fullest rank in bytes with all states on the GPU, a lower bound where activations are unknown."""
        return max(stage.fixed + (stage.activations or 0) for stage in self.stages)

    @property
    def least_budget(self) -> int:
        """The least peak in bytes that every rank can keep to, with the same bound."""
        return max(stage.least_budget for stage in self.stages)

    @property
    def most_pinned(self) -> int:
        """The most bytes that any rank pins."""
        return max(self.pinned)

    def fullest_node(self, ranks: int) -> list[int]:
        """Return the bytes that each rank pins of the node of so many ranks that pins the most."""
        return _fullest_node(self.pinned, ranks)

    @property
    def state_bytes_by_rank(self) -> list[list[int]]:
        """Bytes of all states, of each rank of each stage."""
        return [[of_rank.total for of_rank in of_stage] for of_stage in self.states]

    @property
    def refusals(self) -> list[str]:
        """Why training would refuse the job with the flag set."""
        return [*self.job.refusals, *budget_refusals(self.job, self.stages, self.offload)]


def make_estimate(
    job: Job,
    offload: OffloadConfig,
    links: list[Link],
    forward: float | None,
    backward: float | None,
    activations: int | None = None,
    layout: Layout | None = None,
) -> Estimate:
    """Return the estimate of a job.

    Args:
        job: with its tensors.
        offload: what is offloaded.
        links: whose copies to estimate.
        forward: seconds of one microbatch's forward on a rank, where the user knows them.
        backward: of its backward; None for twice the forward.
        activations: peak of each stage's activations in bytes, where the user knows it; None to count them.
        layout: of a job of the same tensors, and of an offload that differs in its budget alone; None to make it.

    Raises:
        ValueError: the states are not those of Adam or Muon, or under Megatron-FSDP not of Adam, so that there is
            nothing to estimate; or upstream's offloader chooses a share of them by a setting of its own.
    """
    share = getattr(job.config.optimizer, "optimizer_state_offload_fraction", 1.0)
    if job.engine == "mcore generation 2" and share != 1.0:
        raise ValueError(
            f"optimizer.optimizer_state_offload_fraction={share!r}: what mcore's chunked offloader takes is not known "
            "to the plan; use OffloadConfig.fraction (--fraction), which the native engine honours"
        )
    layout = layout or layout_of(job, offload)
    states, upstream = layout.states, is_upstreams(job, offload)
    stages = [
        _stage_estimate(job, stage, layout.held[stage], states[stage], activations)
        for stage in range(job.parallel.pipeline)
    ]
    moved = [
        [offloaded_bytes(stage, of_rank, offload) for of_rank in of_stage]
        for stage, of_stage in zip(stages, states, strict=True)
    ]
    most = max(max(of_stage) for of_stage in moved)
    copied = [
        max(
            bytes_ * of_rank.copied // max(1, sum(of_rank.parts))
            for bytes_, of_rank in zip(of_stage, of_ranks, strict=True)
        )
        for of_stage, of_ranks in zip(moved, states, strict=True)
    ]
    loads = [(nbytes, stage.activations) for nbytes, stage in zip(copied, stages, strict=True)]
    ranks = [of_rank for of_stage in states for of_rank in of_stage]
    pinned = [of_rank.pinned_upstream if upstream else of_rank.offloaded for of_rank in ranks]
    of_links = [_link_estimate(link, pinned, loads, forward, backward) for link in links]
    return Estimate(
        job, offload, stages, layout.held, states, most, pinned, of_links, _notes(job, stages, layout, activations)
    )


def _stage_estimate(
    job: Job, stage: int, held: Held, states: list[StateBytes], activations: int | None
) -> StageEstimate:
    tensors = [tensor for chunk in job.stages[stage] for tensor in chunk]
    if activations is None:
        activations = activation_bytes(job, stage)
    of_ranks = sorted(states, key=lambda state: state.total)
    # In the optimizer step there are no activations, and of gathered weights those that lie in no layer.
    other = WORKSPACES + max(held.gathered, held.in_step - (activations or 0))
    throughout = held.parameters + held.gradients + WORKSPACES
    return StageEstimate(
        stage=stage,
        count=sum(tensor.numel for tensor in tensors if tensor.trainable),
        parameters=held.parameters,
        gradients=held.gradients,
        other=other,
        states=of_ranks[-1],
        least_state=of_ranks[0].total,
        activations=activations,
        least_budget=max(
            _least_budget(throughout, held.gathered + (activations or 0), held.in_step, of_rank)
            for of_rank in set(states)
        ),
    )


def _least_budget(others: int, passing: int, in_step: int, states: StateBytes) -> int:
    """Return the engine's least budget of a rank that holds `others` bytes throughout beside states.

    Beside these it holds `passing` bytes in forward and backward, and `in_step` in the optimizer step.
    """
    beside = others + states.total - states.offloaded
    return least_budget(MemoryProfile([beside + passing], step=beside + in_step), states.transits, states.masters_held)


def components(stage: StageEstimate) -> dict[str, int | None]:
    """Return the bytes of a stage by component, resident; None for activations that are not known."""
    return {
        "parameters": stage.parameters,
        "gradients": stage.gradients,
        "masters": stage.states.masters,
        "moments": stage.states.moments,
        "activations": stage.activations,
        "workspaces": stage.other,
    }


def offloaded_bytes(stage: StageEstimate, states: StateBytes, offload: OffloadConfig) -> int:
    """Return the bytes of a rank's states that leave the GPU: all that may, or the parts that exceed the budget.

    Raises:
        ValueError: there is a budget, and it or the activations are not known.
    """
    if offload.gpu_memory_budget_gib == "auto":
        raise ValueError(
            "--gpu-memory-budget-gib auto: what a GPU has room for is measured in training; say how many GiB PyTorch "
            "may allocate there, some 8 less than the GPU has"
        )
    budget = offload.gpu_memory_budget_bytes
    if budget is None:
        return states.offloaded
    if stage.activations is None:
        raise ValueError(
            "--gpu-memory-budget-gib: the activations of this model are not counted, so what has to leave is not "
            "known; give --activations-gb"
        )
    staying = choose_staying(states.parts, budget - stage.least_budget)
    return min(states.offloaded, sum(size for i, size in enumerate(states.parts) if i not in staying))


def budget_refusals(job: Job, stages: list[StageEstimate], offload: OffloadConfig) -> list[str]:
    """Return the text of training's error where there is a budget that is below the least possible peak.

    Where more GPUs may share the states, neither states that stay nor parts of them count: surely below, then.
    """
    budget = offload.gpu_memory_budget_bytes
    if budget is None:
        return []
    least = max(
        stage.least_budget if job.gpus_given else stage.fixed + (stage.activations or 0) - stage.states.total
        for stage in stages
    )
    return [budget_refusal(budget, least, about="about ")] if least > budget else []


def _fullest_node(pinned: list[int], ranks: int) -> list[int]:
    return max((pinned[first : first + ranks] for first in range(0, len(pinned), ranks)), key=sum)


def _link_estimate(
    link: Link, pinned: list[int], loads: list[tuple[int, int | None]], forward: float | None, backward: float | None
) -> LinkEstimate:
    """Return what the copies cost; loads: of each stage, the most bytes that a rank copies, and its activations."""
    of_node = sum(_fullest_node(pinned, link.gpus))
    link = link.of_node_with(min(len(pinned), link.gpus))

    def floor(forward: float, backward: float) -> float:
        """Return the slowest stage's; where activations are not known, they are given no room."""
        return max(
            floor_seconds(nbytes, link.one_way, link.duplex, backward, forward, 0.0, room or 0)
            for nbytes, room in loads
        )

    is_known = all(room is not None for _, room in loads)
    given = None
    if forward is not None and is_known:
        given = floor(forward, 2 * forward if backward is None else backward)
    enough = max(nbytes for nbytes, _ in loads) / link.one_way
    return LinkEstimate(
        link=link,
        pinned=of_node,
        link_seconds=enough,
        most_floor=floor(0.0, 0.0),
        floor=given,
        hidden_from=enough if floor(enough, 2 * enough) == 0 else None,
    )


def _notes(job: Job, stages: list[StageEstimate], layout: Layout, activations: int | None) -> list[str]:
    model: Any = job.config.model
    notes = [f"tensors from {job.source}"]
    if job.gpus_note:
        notes.append(job.gpus_note)
    if activations is not None:
        notes.append("activations: as --activations-gb says, on each stage")
    elif any(stage.activations is None for stage in stages):
        notes.append("activations of this kind of model are not counted: peaks are lower bounds; give --activations-gb")
    elif getattr(model, "num_moe_experts", None):
        notes.append("activations: tokens spread evenly over experts, no dispatcher's buffers; not held against runs")
    if activations is None and getattr(model, "fp8", None):
        notes.append("activations: counted as 16-bit, without the FP8 copies of weights; not held against runs")
    if bound := layout.held[0].bound:
        notes.append(
            f"upper bounds, without mcore's own layout ({bound}): each rank has its share of every parameter, padded"
        )
    if uses_fsdp(job.config):
        of_first = "" if bound else "; each rank's states are those of the first, which has the least padding"
        notes.append(
            "Megatron-FSDP: `other` is an upper bound of the weights that are gathered, and of the gradients that wait "
            f"for their reduction{of_first}"
        )
    elif is_layer_wise(job.config.optimizer):
        notes.append("the layer-wise optimizer's all-gather of updated parameters is not counted")
    elif updates_whole_parameters(job):
        notes.append("each data-parallel rank has all states of its parameters: no DistributedOptimizer shards them")
    if hasattr(job.config.optimizer, "provide"):
        notes.append(
            "optimizer.provide: what it builds is not known here; where its step is not Adam's or Muon's own, all that "
            "is offloaded is on the GPU in the optimizer step too, which is not counted"
        )
    if getattr(job.config.dist, "use_tp_pp_dp_mapping", False):
        notes.append("dist.use_tp_pp_dp_mapping: pinned bytes per node are of ranks in the default order")
    return notes
