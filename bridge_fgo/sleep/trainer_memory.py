"""What a `Residency` moves on a rank: the weights, gradients and states of a model, and the host memory for them."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bridge_fgo.config import OffloadConfig, readable
from bridge_fgo.engines.ranks import gather_or_raise, on_every_rank, require_host_memory
from bridge_fgo.memory.host_buffer import HostBuffer, page_lock
from bridge_fgo.memory.storage_slab import find_aliases
from bridge_fgo.memory.undo import undo_on_error
from bridge_fgo.sleep.caches import Caches
from bridge_fgo.sleep.checks import Checks
from bridge_fgo.sleep.gradient_offloader import Backwards, GradientOffloader
from bridge_fgo.sleep.host_budget import HostBudget, fitting
from bridge_fgo.sleep.moved import Kind, map_hosts
from bridge_fgo.sleep.refusals import ddp_of
from bridge_fgo.sleep.state_offloader import StateOffloader, offloader_of
from bridge_fgo.sleep.weight_offloader import WeightOffloader, WeightSlab

Unit = WeightSlab | GradientOffloader | StateOffloader  # what moves as one


class TrainerMemory:
    """The memory of model chunks and their optimizer.

    The constructor is a collective, and raises as that of `Residency`. It divides the budget of host memory, `limit` on
    every rank: states first get what weights leave, then weights get what states leave. The rest stays on the GPU.

    `settings` returns those of the offload. `gradients_ready` is called before DDP finishes a reduction of gradients.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        optimizer: Any,
        settings: Callable[[], OffloadConfig],
        limit: float,
        frozen_folder: Any,
        gradients_ready: Callable[[], None],
    ) -> None:
        self.chunks, self.budget = list(chunks), HostBudget(limit)
        self.gradients_ready = gradients_ready
        """A method of the `Residency`, which lives as long as this, and this as long as hooks are on the model."""
        self.states: StateOffloader | None = None
        self.is_closed = False  # on all ranks
        self._parts: list[Any] = []
        with undo_on_error(self.close):
            self._make(optimizer, settings, frozen_folder)

    def _make(self, optimizer: Any, settings: Callable[[], OffloadConfig], frozen_folder: Any) -> None:
        """Find what moves, and allocate host memory for it. Between collectives nothing may fail on one rank alone."""
        room, in_files = gather_or_raise(lambda: self._find_weights(frozen_folder, optimizer is None))
        if any(each is not None for each in in_files) and not any(in_files):  # also if this rank was given no folder
            raise ValueError(
                f"Residency(frozen_folder={str(frozen_folder)!r}): no parameter is frozen on any rank; leave it out"
            )
        if optimizer is not None:
            self.states = self._closing(offloader_of(optimizer, settings, room))
        staying, places = gather_or_raise(self._find_weights_without_room)
        alike = set[Any]().union(*places) - {None}
        _, self.unhosted_by_rank = gather_or_raise(lambda: self._settle(staying, alike))
        """For each rank the bytes of parameters and of states that have no room, and stay on the GPU."""
        self.settings = settings() if self.states is None else self.states.lease.settings
        self.pins = self.device.type == "cuda" and self.settings.pin_memory
        hosts = on_every_rank(lambda: map_hosts(self.weights.slabs))
        require_host_memory(sum(buffer.tensor.numel() for buffer in hosts) if self.pins else 0)
        on_every_rank(lambda: self._finish(hosts, optimizer))

    def _find_weights(self, frozen_folder: Any, all_are_frozen: bool) -> tuple[float, int | None]:
        """Find weights and gradients; return the bytes of host memory that the limit leaves for states.

        And, for all ranks, the bytes of frozen weights in files; None without a folder.
        """
        self.ddps = [ddp for chunk in self.chunks for ddp in ddp_of(chunk)]
        buffers = [buffer for ddp in self.ddps for buffer in ddp.buffers + ddp.expert_parallel_buffers]
        names = {id(param): name for chunk in self.chunks for name, param in chunk.named_parameters()}
        devices = [buffer.grad_data.device for buffer in buffers]
        devices += [parameter.device for chunk in self.chunks for parameter in chunk.parameters()]
        self.device = next((device for device in devices if device.type == "cuda"), torch.device("cpu"))
        self.gradients = self._closing(GradientOffloader(buffers, names))
        self.weights = self._closing(WeightOffloader(self.chunks, buffers, names, self.device))
        if not isinstance(frozen_folder, str | os.PathLike | None) or frozen_folder == "":
            raise ValueError(f"Residency(frozen_folder={frozen_folder!r}): name a folder, or leave it out")
        in_files = None if frozen_folder is None else self.weights.keep_in_files(Path(frozen_folder), all_are_frozen)
        # Weights first: DDP's buffers free most of the GPU's memory for the host's.
        limit = self.budget.limit
        return limit - sum(slab.host_bytes for slab in fitting(self.weights.slabs, limit)), in_files

    def _find_weights_without_room(self) -> tuple[list[WeightSlab], set[Any]]:
        """Return the weights for which states leave no host memory, and, for all ranks, their places."""
        taken, limit = 0 if self.states is None else self.states.engine.host_bytes, self.budget.limit
        if taken > limit:
            raise ValueError(
                f"Residency(host_memory_limit_gib={limit / 2**30:g}): the engine that is attached to the optimizer has "
                f"{readable(taken)} of host memory already: raise the limit, or lower OffloadConfig.fraction"
            )
        moving = set(fitting(self.weights.slabs, limit - taken))
        staying = [slab for slab in self.weights.slabs if slab not in moving]
        return staying, {slab.place for slab in staying}

    def _settle(self, staying: list[WeightSlab], alike: set[Any]) -> tuple[None, tuple[int, int]]:
        """Keep weights on the GPU for good; return, for all ranks, their bytes, and those of states that stay too.

        alike: places of what stays on some rank, and so on all that gather it.
        """
        states, weights = self.states, self.weights
        own = set(staying)
        for slab in weights.slabs:
            slab.stays = slab in own or slab.place in alike
        left = self.budget.limit - sum(slab.host_bytes for slab in weights.slabs)
        if states is not None:
            left -= states.engine.host_bytes
            self.budget.engine = states.engine
            weights.round_from(states)
        self.budget.left = left
        self.checks = self._closing(Checks(lambda: self.away, states))
        self.backwards = self._closing(Backwards(self.ddps))
        self.caches = self._closing(Caches(self.chunks, self.device))
        unhosted = weights.unhosted_bytes, 0 if states is None else states.engine.unhosted_bytes
        self.unhosted = sum(unhosted)
        find_aliases(self.weights.slabs + self.gradients.slabs)
        return None, unhosted

    def _finish(self, hosts: Sequence[HostBuffer], optimizer: Any) -> None:
        self.lock(hosts)
        self.checks.on_model(self.chunks, self.ddps, self.backwards)
        if self.states is not None:
            self.checks.on_optimizer(optimizer, self.backwards)
        for ddp in self.ddps:
            self.checks.before(ddp, "finish_grad_sync", self.gradients_ready)

    def _closing[T](self, part: T) -> T:
        """Return a part, which `close` closes."""
        self._parts.append(part)
        return part

    def lock(self, hosts: Sequence[HostBuffer]) -> None:
        """Page-lock host memory, if it is to be locked."""
        if self.pins and hosts:
            page_lock(hosts)

    @property
    def units(self) -> list[Unit]:
        """All that moves."""
        return [*self.weights.slabs, self.gradients, *([] if self.states is None else [self.states])]

    @property
    def away(self) -> frozenset[Kind]:
        """The kinds that are not on the GPU, or not all of them."""
        return frozenset(unit.kind for unit in self.units if unit.is_away)

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host bytes."""
        slabs = self.weights.slabs + self.gradients.slabs
        own = sum(slab.host.pinned_bytes for slab in slabs if slab.host is not None)
        own += sum(bucket.pinned_bytes for bucket in self.gradients.buckets)
        return own + (self.states.engine.pinned_bytes if self.states is not None else 0)

    @property
    def has_gradients(self) -> bool:
        """Whether a backward has run whose gradients no step has used and nobody has zeroed."""
        return bool(self.backwards.pending)

    @property
    def lacks_weights(self) -> bool:
        """Whether states cannot move before weights are reloaded, which packed masters need."""
        reads = self.states is not None and self.states.reads_weights
        return reads and any(slab.is_away for slab in self.weights.read_by_masters)

    def require_open(self, in_block: bool = False) -> None:
        """Raise RuntimeError after `close`, and, unless `in_block`, while kept weights are in the parameters."""
        if self.is_closed:
            raise RuntimeError("a Residency was used after close(): make another by Residency(model, optimizer)")
        if self.checks.swapped and not in_block:
            raise RuntimeError(
                f"a Residency was used in the block of its weights({self.checks.swapped!r}), where only keep() and "
                "drop() may be called: end the block first"
            )

    def wait_for_collectives(self) -> None:
        """Make the current stream wait for gathers and reductions in flight; DDP keeps the handles, and waits too."""
        for ddp in self.ddps:
            for group in ddp.bucket_groups + ddp.expert_parallel_bucket_groups:
                for handle in (group.param_gather_handle, group.grad_reduce_handle):
                    if handle is not None:
                        # Race: the collective would write into memory that was released, or not be in the copy.
                        handle.wait()

    def close(self) -> None:
        """Remove all hooks, release host memory and the engine; raise as `Engine.close`."""
        for part in reversed(self._parts):
            part.close()
        self._parts.clear()
        self.states = None
