"""What the ranks of a job hold, and the bytes of their optimizer states by the engine's own arithmetic."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from bridge_fgo.bridge.refusals import MUONS, uses_fsdp
from bridge_fgo.config import OffloadConfig
from bridge_fgo.memory.host_memory import power_of_two_at_least
from bridge_fgo.memory.layout import PartBytes, PartLayout, copied_whole, lay_out, offloaded_bundles, part_bytes
from bridge_fgo.memory.remainders import Remainders
from bridge_fgo.memory.slab_file import buffer_bytes, parts_in_file
from bridge_fgo.memory.state_tensor import Bundle, State
from bridge_fgo.tools.job.held import Held
from bridge_fgo.tools.job.job import Job
from bridge_fgo.tools.job.parallel import STRATEGIES

META = torch.device("meta")


@dataclass(frozen=True)
class StateBytes:
    """Bytes of a rank: master weights, moments, and what of both is offloaded.

    masters, offloaded: with the padding of storages that must not be rebound, Megatron-FSDP's.
    pinned_upstream: what mcore's offloader would pin for it, a buffer a tensor, each in a block of a power of two.
    saved: of each copy that the native engine makes for a checkpoint (its `copied_for_a_save`).
    parts: of each part that the native engine updates in one go, in its order; transits: the most GPU memory that
    each holds on its way; copied: of all parts, what a copy takes over the link.
    masters_held: what of them the optimizer step holds to its end (`HoldPolicy.held_through_step`).
    in_file: what `nvme_folder` has in place of the host; hosted: what the host has, with buffers for copies from and to
    files.
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
    in_file: int
    hosted: int

    @property
    def total(self) -> int:
        """All optimizer state: the engine's `state_bytes`."""
        return self.masters + self.moments


def sum_of(
    of_optimizers: Iterable[tuple[list[Bundle], bool]], config: OffloadConfig, host_bytes: float = math.inf
) -> StateBytes:
    """Return the bytes of a rank: of each of its optimizers the states, and whether masters are copied part by part.

    host_bytes: the most host memory for what is offloaded.
    """
    codec_of = Remainders(META).codec_of if config.master_remainders else copied_whole
    by_kind = {"master": 0, "moment": 0}
    offloaded: list[State] = []
    parts: list[PartLayout] = []
    masters_held = 0
    for everything, divides in of_optimizers:
        for bundle in everything:
            for state in bundle.states:
                by_kind[state.kind] += state.nbytes
        chosen = offloaded_bundles(everything, config, host_bytes if config.nvme_folder is None else math.inf)
        offloaded += [state for bundle in chosen for state in bundle.states]
        layouts = lay_out(chosen, part_bytes(chosen, config), codec_of)
        parts += layouts
        of_source = [slab for part in layouts for slab in part.slabs]
        host_bytes -= 0 if config.nvme_folder else sum(slab.layout.nbytes for slab in of_source)
        masters_held += 0 if divides else sum(slab.layout.nbytes for slab in of_source if slab.written_back)
    slabs = [slab for part in parts for slab in part.slabs]
    # Storages that others hold views of leave whole, with bytes that no state has.
    whole = [slab for slab in slabs if any(state.home is not None for state in slab.states)]
    padding = sum(slab.layout.nbytes - sum(state.nbytes for state in slab.states) for slab in whole)
    sizes = [size_of(part) for part in parts]
    of_slabs = [[slab.layout.nbytes for slab in part.slabs] for part in parts]
    in_file = parts_in_file(of_slabs, host_bytes, config) if config.nvme_folder is not None else ()
    filed = sum(sum(of_slabs[position]) for position in in_file)
    of_states = sum(state.nbytes for state in offloaded) + padding
    return StateBytes(
        by_kind["master"] + padding,
        by_kind["moment"],
        of_states,
        sum(power_of_two_at_least(state.nbytes) for state in offloaded),
        tuple(state.saved_nbytes for state in offloaded),
        tuple(size.nbytes for size in sizes),
        tuple(size.transit_bytes for size in sizes),
        sum(slab.codec.link_bytes for slab in slabs),
        masters_held,
        filed,
        of_states - filed + (buffer_bytes([nbytes for part in of_slabs for nbytes in part]) if filed else 0),
    )


def size_of(part: PartLayout) -> PartBytes:
    """Return the bytes of the slabs of a part, and the most GPU memory that they hold, which is on their way."""
    nbytes = sum(slab.layout.nbytes for slab in part.slabs)
    return PartBytes(nbytes, nbytes + sum(slab.codec.staging_bytes for slab in part.slabs))


def states_of_ranks(job: Job, offload: OffloadConfig, ranks_of_node: int) -> list[list[StateBytes]]:
    """Return the states of each rank of each stage: of many experts, what takes the time of an estimate.

    ranks_of_node: those that share `host_memory_gib`, of which "auto" counts as room for all.

    Raises:
        ValueError: the states are not those of Adam or Muon, and names the setting; or mcore could not lay the job out.
    """
    _require_known_states(job)
    if not job.held and uses_fsdp(job.config) and (pipeline := job.config.model.pipeline_model_parallel_size) > 1:
        raise ValueError(
            f"ddp.use_megatron_fsdp=True with model.pipeline_model_parallel_size={pipeline}: mcore's mesh of "
            f"Megatron-FSDP has no pipeline ({job.not_held}); use model.pipeline_model_parallel_size=1, or "
            "ddp.use_megatron_fsdp=False"
        )
    if not job.held:
        refused = "".join(f"{why}\n" for why in job.refusals)
        raise ValueError(
            f"{refused}mcore cannot lay this job out without a GPU, so its bytes are not known: {job.not_held}"
        )
    # Upstream copies masters as they are, and so does Megatron-FSDP's source.
    is_whole = is_served_by_mcore(job, offload) or uses_fsdp(job.config)
    copied = replace(offload, master_remainders=False) if is_whole else offload
    limit = offload.host_memory_gib
    host_bytes = limit * 2**30 / ranks_of_node if isinstance(limit, float | int) else math.inf
    return [states_of_stage(of_stage, copied, host_bytes) for of_stage in job.held]


def states_of_stage(held: Held, offload: OffloadConfig, host_bytes: float = math.inf) -> list[StateBytes]:
    """Return the states of each rank of a stage."""
    known: dict[tuple[int, ...], StateBytes] = {}
    for optimizers in map(tuple, held.ranks):
        if optimizers not in known:
            of_rank = [held.optimizers[i] for i in optimizers]
            found = sum_of(((each.states(), each.divides) for each in of_rank), offload, host_bytes)
            homes = sum(sum(each.homes) for each in of_rank)
            known[optimizers] = replace(found, masters=homes or found.masters)  # a home without states is there too
    return [known[tuple(optimizers)] for optimizers in held.ranks]


def _require_known_states(job: Job) -> None:
    optimizer = job.config.optimizer
    name, scalar = optimizer.optimizer, getattr(optimizer, "muon_scalar_optimizer", "adam")
    if name not in ("adam", *MUONS):
        raise ValueError(f"optimizer.optimizer={name!r}: the plan knows the states of Adam and Muon alone")
    if name != "adam" and scalar != "adam":
        raise ValueError(
            f"optimizer.muon_scalar_optimizer={scalar!r}: the plan knows the states of Adam and Muon alone"
        )
    if not uses_fsdp(job.config):
        return
    if (strategy := job.config.ddp.data_parallel_sharding_strategy) not in STRATEGIES:
        raise ValueError(f"ddp.data_parallel_sharding_strategy={strategy!r}: one of {', '.join(STRATEGIES)}")
    if name != "adam":
        raise ValueError(
            f"optimizer.optimizer={name!r} with ddp.use_megatron_fsdp=True: the plan knows Adam's states alone here"
        )


def is_served_by_mcore(job: Job, offload: OffloadConfig) -> bool:
    """Return whether mcore's own offloader would serve the job; if it is refused, as the settings say."""
    return (job.engine or offload.engine).startswith("mcore")
