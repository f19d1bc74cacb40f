"""The memory of every rank of a job by component, with and without the offload, and the time on the link."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bridge_fgo.bridge.compat import as_named_in
from bridge_fgo.bridge.refusals import is_layer_wise, uses_fsdp
from bridge_fgo.config import OffloadConfig, readable
from bridge_fgo.engines.gradients import AHEAD, LARGEST_SHARE, MOST_LEAVING
from bridge_fgo.offload.policy import MemoryProfile, budget_refusal, choose_staying, least_budget
from bridge_fgo.tools.job.held import Held
from bridge_fgo.tools.job.job import Job
from bridge_fgo.tools.plan.activations import (
    NO_GRADIENT,
    Backward,
    Course,
    activation_bytes,
    backward_of,
    chunks_of,
    is_unfused,
    offload_modules,
    offloaded_layers,
    pinned_bytes,
    uncounted,
    workspace_bytes,
)
from bridge_fgo.tools.plan.state import StateBytes, is_served_by_mcore, states_of_ranks
from bridge_fgo.tools.plan.systems import SYSTEMS, Link, floor_seconds

UNTRIED = "not held against runs"
"""A note says this where no run has confirmed the count of activations."""
DISK_RATES = (3, 6, 12)  # GB/s of NVMe drives, one or several


@dataclass(frozen=True)
class StageEstimate:
    """The rank of a pipeline stage that needs the most memory, in bytes.

    parameters, gradients: with the padding of their buffers. other: workspaces, and what Megatron-FSDP gathers.
    activations: None if not known. copies: host memory that mcore pins for those that it offloads.
    away: of the states, what the settings offload. spared: by how much less gradients and activations are together with
    `OffloadConfig.gradients` than the sum of both; moving: bytes of gradients that leave between microbatches.
    count: trainable parameters that the rank computes with.
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
    copies: int
    least_budget: int
    away: int
    spared: int
    moving: int

    @property
    def components(self) -> dict[str, int | None]:
        """Bytes by component, resident; None for activations that are not known."""
        return {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "masters": self.states.masters,
            "moments": self.states.moments,
            "activations": self.activations,
            "workspaces": self.other,
        }

    @property
    def fixed(self) -> int:
        """Bytes on the GPU beside activations, with every state resident."""
        return self.parameters + self.gradients + self.states.total + self.other

    def peak(self, offloaded: int) -> int | None:
        """Return the peak of forward and backward with `offloaded` bytes of the states away."""
        return None if self.activations is None else self.fixed + self.activations - offloaded

    @property
    def offloaded_peak(self) -> int | None:
        """The peak of forward and backward with all away that the settings offload."""
        return self.peak(self.away + self.spared)

    def most(self, offloads: bool) -> int:
        """Return the peak of the whole step, resident or as the settings offload; without unknown activations."""
        if offloads and self.away:
            return self.least_budget + self.states.offloaded - self.away
        return self.fixed + (self.activations or 0) - (self.spared if offloads else 0)


@dataclass(frozen=True)
class LinkEstimate:
    """The cost of the copies on one kind of link, on the slowest rank, in seconds.

    pinned: bytes of the fullest node: all that may leave, because the engine pins before it knows what a budget leaves.
    link_seconds: one way of all that is copied, the slower. most_floor: the floor of the added step time with
    nothing to hide behind. floor: the same for the forward and backward that the user gave, or None.
    hidden_from: seconds of a microbatch's forward (its backward taken as twice that) from which the floor is 0.
    Both are None if the activations, whose place copies need in forward and backward, are not known.
    gradient_seconds: one way of the gradients that leave after a microbatch, while others return; one that takes as
    long hides them.
    """

    link: Link
    pinned: int
    link_seconds: float
    most_floor: float
    floor: float | None
    hidden_from: float | None
    gradient_seconds: float


@dataclass(frozen=True)
class Estimate:
    """A job's memory and copies.

    states: of each rank of each stage. pinned: bytes of each rank, in the order in which they fill nodes. room: bytes
    that a peak may have; None for those of the system.
    """

    job: Job
    offload: OffloadConfig
    stages: list[StageEstimate]
    states: list[list[StateBytes]]
    pinned: list[int]
    links: list[LinkEstimate]
    notes: list[str]
    room: int | None = None

    @property
    def resident_peak(self) -> int:
        """Peak of the fullest rank in bytes with all states on the GPU, a lower bound where activations are unknown."""
        return max(stage.most(offloads=False) for stage in self.stages)

    @property
    def least_budget(self) -> int:
        """The least peak in bytes that every rank can keep to, with the same bound."""
        return max(stage.least_budget for stage in self.stages)

    @property
    def offloaded_peak(self) -> int:
        """Peak of the fullest rank in bytes, the optimizer step's too, as the settings offload, with the same bound."""
        return max(stage.most(offloads=True) for stage in self.stages)

    @property
    def knows_activations(self) -> bool:
        """Whether the activations of all stages are known."""
        return all(stage.activations is not None for stage in self.stages)

    @property
    def refusals(self) -> list[str]:
        """Why training would refuse the job with the flag set."""
        return [*self.job.refusals, *budget_refusals(self.job, self.stages, self.offload)]


def make_estimate(
    job: Job,
    offload: OffloadConfig | None = None,
    links: Sequence[Link] = (),
    forward: float | None = None,
    backward: float | None = None,
    activations: int | None = None,
    states: list[list[StateBytes]] | None = None,
    room: int | None = None,
    ranks_of_node: int | None = None,
) -> Estimate:
    """Return the estimate of a job with some offload, by default its own, and of its copies on some links.

    forward, backward: seconds of one microbatch on a rank, where the user knows them; backward is twice the forward by
    default. activations: peak of each stage in bytes, where the user knows it; else they are counted. states: of a
    job of the same tensors, and of an offload that differs in its budget alone; else they are worked out. room: see
    `Estimate`. ranks_of_node: of the largest of `links` by default.

    Raises:
        ValueError: the states are not those of Adam or Muon, or under Megatron-FSDP not of Adam, so that there is
            nothing to estimate; or upstream's offloader chooses a share of them by a setting of its own; or what a
            budget leaves is not known.
    """
    offload = offload or job.offload
    share = getattr(job.config.optimizer, "optimizer_state_offload_fraction", 1.0)
    if job.engine == "mcore generation 2" and share != 1.0:
        raise ValueError(
            f"optimizer.optimizer_state_offload_fraction={share!r}: what mcore's chunked offloader takes is not known "
            "to the plan; use OffloadConfig.fraction (--fraction), which the native engine honours"
        )
    ranks_of_node = ranks_of_node or min(max((link.gpus for link in links), default=1), job.parallel.gpus)
    states = states or states_of_ranks(job, offload, ranks_of_node)
    is_auto = offload.gpu_memory_budget_gib == "auto"
    # Training measures what "auto" is. Here it is the room of the one system that was named; without one, or without
    # counted activations, everything is offloaded.
    of_system = SYSTEMS[links[0].name].room if len(links) == 1 and links[0].name in SYSTEMS else None
    budget = (room or of_system) if is_auto else offload.gpu_memory_budget_bytes
    stages, loads = [], []
    for stage, (held, of_ranks) in enumerate(zip(job.held, states, strict=True)):
        of_job = activation_bytes(job, stage) if activations is None else activations
        if is_auto and of_job is None:
            budget = None
        estimate, leaving = _stage_estimate(job, stage, held, of_ranks, of_job, offload, budget)
        stages.append(estimate)
        copied = [n * rank.copied // max(1, sum(rank.parts)) for n, rank in zip(leaving, of_ranks, strict=True)]
        loads.append((max(copied), of_job))
    copies = 6 if offload.copies_to_buddy_every else 1 + offload.survive_crash
    upstream = is_served_by_mcore(job, offload)
    pinned = [
        stage.copies + stage.moving + (of_rank.pinned_upstream if upstream else of_rank.hosted * copies)
        for stage, of_stage in zip(stages, states, strict=True)
        for of_rank in of_stage
    ]
    moving = max(stage.moving for stage in stages)
    gradients = moving, job.microbatches - 1 if moving else 0
    of_links = [_link_estimate(link, pinned, loads, gradients, forward, backward) for link in links]
    notes = [*_notes(job, stages, activations), *_notes_on_gradients(job, stages, offload)]
    if is_auto and budget is None:
        notes.append("gpu_memory_budget_gib='auto': all counts as offloaded, without --system or activations")
    if offload.host_limit_gib is not None:
        is_known = isinstance(offload.host_memory_gib, float | int)
        counted = f"of {ranks_of_node} ranks" if is_known else "all counts as offloaded"
        notes.append(f"host_memory_gib={offload.host_memory_gib!r}: {counted}")
    if offload.nvme_folder is not None and isinstance(offload.host_memory_gib, float | int):
        in_file = max(of_rank.in_file for of_stage in states for of_rank in of_stage)
        of_node = in_file * ranks_of_node
        waits = ", ".join(f"{2 * of_node / rate / 1e9:.1f} s at {rate} GB/s" for rate in DISK_RATES)
        notes.append(
            f"nvme_folder: {readable(in_file)} a rank in files, {readable(of_node)} a node, which each step reads and "
            f"writes ({of_node * 1440 / 1e12:.3g} TB a day with a step a minute); where the GPU has no room for it, a "
            f"step waits {waits}, of reads and writes together"
        )
    return Estimate(job, offload, stages, states, pinned, of_links, notes, room)


def _stage_estimate(
    job: Job,
    stage: int,
    held: Held,
    states: list[StateBytes],
    activations: int | None,
    offload: OffloadConfig,
    budget: int | None,
) -> tuple[StageEstimate, list[int]]:
    """Return the estimate of a stage, and what of each of its ranks' states leaves."""
    # In the optimizer step there are no activations, and of gathered weights those that lie in no layer.
    workspaces = workspace_bytes(job)
    other = workspaces + max(held.gathered, held.in_step - (activations or 0))
    throughout = held.parameters + held.gradients + workspaces
    spared = spared_bytes(job, stage, held, offload, activations)
    budgets = []
    for of_rank in set(states):
        beside = throughout + of_rank.total - of_rank.offloaded
        peak = beside + held.gathered + (activations or 0) - spared
        profile = MemoryProfile([peak], step=beside + held.in_step)
        budgets.append(least_budget(profile, of_rank.transits, of_rank.masters_held))
    least = max(budgets)
    leaving = {of_rank: _offloaded_bytes(of_rank, activations, least, budget) for of_rank in set(states)}
    fullest = max(reversed(states), key=lambda of_rank: of_rank.total)
    estimate = StageEstimate(
        stage=stage,
        count=sum(tensor.numel for tensor in job.tensors(stage) if tensor.trainable),
        parameters=held.parameters,
        gradients=held.gradients,
        other=other,
        states=fullest,
        least_state=min(of_rank.total for of_rank in states),
        activations=activations,
        copies=pinned_bytes(job, stage) or 0,
        least_budget=least,
        away=leaving[fullest],
        spared=spared,
        moving=moving_bytes(held, offload),
    )
    return estimate, [leaving[of_rank] for of_rank in states]


# Gradients under `OffloadConfig.gradients`, by the rules of `bridge_fgo.engines.gradients` on mcore's own buckets.


def moves(held: Held, nbytes: int) -> bool:
    """Return whether a bucket of so many bytes is small enough to leave between microbatches."""
    return LARGEST_SHARE * nbytes <= held.gradients


def moving_bytes(held: Held, offload: OffloadConfig) -> int:
    """Return the bytes of a rank's gradients that may leave between microbatches, for which host memory is pinned."""
    if offload.gradients is not True:
        return 0
    return sum(nbytes for _, nbytes in held.buckets if moves(held, nbytes))


def spared_bytes(job: Job, stage: int, held: Held, offload: OffloadConfig, activations: int | None) -> int:
    """Return by how much less gradients and activations of a stage have together than the sum of their peaks."""
    if not offload.gradients or activations is None:
        return 0
    is_several = job.microbatches > 1
    if is_several and offload.gradients == "lazy":
        return 0
    backward = backward_of(job, stage)
    if backward is None or backward.peak != activations:
        # Nothing else is known of activations: they go with each of the tensors alike.
        tensors = len(job.tensors(stage))
        course = [(activations * (number + 1) // tensors, number) for number in reversed(range(tensors))]
        backward = Backward([(activations, NO_GRADIENT), *course], [(activations, NO_GRADIENT), *course])
    buckets = sorted(held.buckets, reverse=True)  # as a backward needs them
    changing = [(last, nbytes) for last, nbytes in buckets if not is_several or moves(held, nbytes)]
    staying = held.gradients - sum(nbytes for _, nbytes in changing)
    # In a step's last backward buckets come and stay; in the others they leave again, some at a time.
    most = _together(backward.last, changing, AHEAD if is_several else 0, len(changing))
    if is_several:
        most = max(most, _together(backward.most, changing, AHEAD, MOST_LEAVING))
    return max(0, activations + held.gradients - staying - most)


def _together(course: Course, buckets: list[tuple[int, int]], ahead: int, leaving: int) -> int:
    """Return the most bytes of activations and buckets.

    Of the buckets those are there that a backward has reached, but of these at most the newest and so many `leaving`,
    and so many `ahead`.
    """
    found = []
    for activations, reached in course:
        come = sum(last >= reached for last, _ in buckets)
        there = buckets[max(0, come - 1 - leaving) : come + ahead]
        found.append(activations + sum(nbytes for _, nbytes in there))
    return max(found)


def _offloaded_bytes(states: StateBytes, activations: int | None, least: int, budget: int | None) -> int:
    """Return the bytes of a rank's states that leave the GPU: all that may, or the parts that exceed the budget."""
    if budget is None:
        return states.offloaded
    if activations is None:
        raise ValueError(
            "--gpu-memory-budget-gib: the activations of this model are not counted, so what has to leave is not "
            "known; give --activations-gb"
        )
    staying = choose_staying(states.parts, budget - least)
    return min(states.offloaded, sum(size for i, size in enumerate(states.parts) if i not in staying))


def budget_refusals(job: Job, stages: list[StageEstimate], offload: OffloadConfig) -> list[str]:
    """Return the text of training's error where there is a budget that is below the least possible peak.

    If more GPUs may share the states, neither states that stay nor parts of them count: surely below, then.
    """
    budget = offload.gpu_memory_budget_bytes
    if budget is None:
        return []
    least = max(
        stage.least_budget
        if job.gpus_given
        else stage.fixed + (stage.activations or 0) - stage.states.total - stage.spared
        for stage in stages
    )
    return [budget_refusal(budget, least, about="about ")] if least > budget else []


def fullest_node(pinned: list[int], ranks: int) -> list[int]:
    """Return the bytes that each rank pins of the node of so many ranks that pins the most."""
    return max((pinned[first : first + ranks] for first in range(0, len(pinned), ranks)), key=sum)


def _link_estimate(
    link: Link,
    pinned: list[int],
    loads: list[tuple[int, int | None]],
    gradients: tuple[int, int],
    forward: float | None,
    backward: float | None,
) -> LinkEstimate:
    """Return what the copies cost.

    loads: of each stage, the most bytes that a rank copies, and its activations. gradients: bytes of them that move,
    and how often they leave and return in a step.
    """
    of_node = sum(fullest_node(pinned, link.gpus))
    link = link.of_node_with(min(len(pinned), link.gpus))
    moving, times = gradients
    of_gradients = moving / link.duplex if times else 0.0

    def floor(forward: float, backward: float) -> float:
        """Return the slowest stage's; if activations are not known, they are given no room."""
        of_states = max(
            floor_seconds(nbytes, link.d2h, link.h2d, link.duplex, backward, forward, 0.0, room or 0)
            for nbytes, room in loads
        )
        return of_states + times * max(0.0, of_gradients - forward - backward)

    given = None
    if forward is not None and all(room is not None for _, room in loads):
        given = floor(forward, 2 * forward if backward is None else backward)
    one_way = max(nbytes for nbytes, _ in loads) / link.one_way
    enough = max(one_way, of_gradients / 3)
    hidden = enough if floor(enough, 2 * enough) == 0 else None
    return LinkEstimate(link, of_node, one_way, floor(0.0, 0.0), given, hidden, of_gradients)


def _notes(job: Job, stages: list[StageEstimate], activations: int | None) -> Iterator[str]:
    config, optimizer = job.config, job.config.optimizer
    yield f"tensors from {job.source}"
    if job.gpus_note:
        yield job.gpus_note
    if activations is not None:
        yield "activations: as --activations-gb says, on each stage"
    elif any(stage.activations is None for stage in stages):
        yield f"{not_counted(config)}: peaks are lower bounds; give --activations-gb"
    elif getattr(config.model, "num_moe_experts", None):
        tried = "" if job.parallel.expert == 1 else f", no dispatcher's buffers; of experts on several ranks {UNTRIED}"
        yield f"activations: tokens spread evenly over experts{tried}"
    yield from notes_on_pinned(job, stages)
    if offload_modules(config.model) and chunks_of(config.model) > 1:
        yield (
            f"activation offload: with several model chunks a rank, peaks are {UNTRIED}; mcore 0.19 ends with Chunk "
            "mismatch where a chunk has one layer, unless bridge_fgo offloads states too, or activation_waits=True"
        )
    if activations is None and offloaded_layers(config.model):
        tried = "" if is_unfused(config.model) else f", with fused attention {UNTRIED}"
        yield (
            "activations: those of layers that Transformer Engine offloads are on the host, but with "
            f"NVTE_CPU_OFFLOAD_V1=1 less of them{tried}"
        )
    if activations is None and getattr(config.model, "fp8", None):
        yield f"activations: counted as 16-bit, without the FP8 copies of weights; {UNTRIED}"
    if uses_fsdp(config):
        yield (
            "Megatron-FSDP: `other` is an upper bound of the weights that are gathered, and of the gradients that wait "
            "for their reduction; each rank's states are those of the first, which has the least padding"
        )
    elif is_layer_wise(optimizer):
        yield "the layer-wise optimizer's all-gather of updated parameters is not counted"
    elif optimizer.optimizer != "adam" or not config.ddp.use_distributed_optimizer:
        yield "each data-parallel rank has all states of its parameters: no DistributedOptimizer shards them"
    if hasattr(optimizer, "provide"):
        yield (
            "optimizer.provide: what it builds is not known here; where its step is not Adam's or Muon's own, all that "
            "is offloaded is on the GPU in the optimizer step too, which is not counted"
        )
    if getattr(config.dist, "use_tp_pp_dp_mapping", False):
        yield "dist.use_tp_pp_dp_mapping: pinned bytes per node are of ranks in the default order"


def notes_on_pinned(job: Job, stages: list[StageEstimate]) -> Iterator[str]:
    """Yield what mcore and Transformer Engine pin of host memory, and what of it is not counted."""
    config = job.config
    if offload_modules(config.model) or offloaded_layers(config.model):
        figure = f"{max(stage.copies for stage in stages) / 1e9:.2f} GB a rank"
        if uncounted(config) or any(pinned_bytes(job, stage.stage) is None for stage in stages):
            figure = f"bytes that are not known ({not_counted(config)})"
        who, when = "mcore", "in its first iteration"
        if offloaded_layers(config.model):
            who, when = "Transformer Engine", "or up to twice as much where the host runs ahead of the GPU (by reading)"
        yield f"activations: {who} offloads some, and pins {figure} for them {when}"
    name = "moe_paged_stash_buffer_size_factor_cpu"
    if getattr(config.model, "moe_paged_stash", False) and (factor := getattr(config.model, name, 0)):
        setting = as_named_in(config.model, f"model.{name}={factor!r}")
        yield f"{setting}: mcore pins host memory for activations of experts in its second iteration, not counted here"


def not_counted(config: Any) -> str:
    """Return the sentence that activations are not counted, with the setting that is the reason, if one is."""
    setting = uncounted(config)
    return f"activations are not counted {f'with {setting}' if setting else 'for this kind of model'}"


def _notes_on_gradients(job: Job, stages: list[StageEstimate], offload: OffloadConfig) -> Iterator[str]:
    if not offload.gradients:
        return
    setting, several = f"OffloadConfig.gradients={offload.gradients!r}", job.microbatches > 1
    if several and offload.gradients == "lazy":
        yield (
            f"{setting} with {job.microbatches} microbatches a step: every gradient is there at the peak, which stays "
            "as it is; use True"
        )
    elif offload.gradients is True and offload.gpu_memory_budget_gib is not None:
        yield (
            f"{setting} with a budget: figures are those of all gradients that may leave; in training states leave "
            "first, and gradients only if that is not enough"
        )
    elif not several and offload.gradients is True:
        yield (
            f"{setting} with one microbatch a step: host memory is pinned for gradients, and none leaves; use 'lazy', "
            "which frees as much"
        )
    elif several and (staying := [stage for stage in stages if stage.moving < stage.gradients]):
        sizes = ", ".join(f"{(each.gradients - each.moving) / 1e9:.2f} GB on stage {each.stage}" for each in staying)
        yield (
            f"{setting}: {sizes} stay, in buckets with more than a fourth of a rank's gradients each; mcore makes one "
            "bucket of a model chunk, but of the first stage's first"
        )
