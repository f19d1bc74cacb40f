"""Optimizer states: moves all slabs of the native engine, and knows which of them the host has as they are."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from bridge_fgo.config import OffloadConfig
from bridge_fgo.engines.lease import EngineLease
from bridge_fgo.engines.native import NativeEngine
from bridge_fgo.engines.ranks import gather_or_raise, on_every_rank, pin_on_every_rank
from bridge_fgo.memory.digest import byte_sums, digest_kernel
from bridge_fgo.memory.meters import PeakMeter
from bridge_fgo.memory.slab import MOST_IN_TRANSIT, Slab, SlabState, landing
from bridge_fgo.memory.state_tensor import WeightShard
from bridge_fgo.memory.undo import undo_on_error
from bridge_fgo.sleep.checkpoint_workers import let_go_for, stop_for
from bridge_fgo.sleep.moved import RETURNED_BYTES, Kind, return_to_driver
from bridge_fgo.sleep.refusals import movable_optimizers, shared_lease
from bridge_fgo.states.choice import source_of
from bridge_fgo.states.distributed import MegatronSource

DEFAULTS = OffloadConfig(engine="native")


def offloader_of(optimizer: Any, settings: Callable[[], OffloadConfig], host_bytes: float) -> StateOffloader:
    """Return what moves the states of a top-level optimizer: by the engine of the flag's session, or by one of its own.

    A collective of all ranks.

    Args:
        optimizer: what the training loop steps: a ChainedOptimizer, or an optimizer that `movable_optimizers` takes.
        settings: returns those of an engine of its own.
        host_bytes: the most host memory for an engine of its own; states that do not fit stay on the GPU.

    Raises:
        ValueError: an optimizer cannot be offloaded, on this rank or another; names it.
        RuntimeError: host memory could not be allocated, on this rank or another.
    """

    def find() -> tuple[tuple[list[Any], EngineLease | None], bool]:
        optimizers = movable_optimizers(optimizer)
        lease = shared_lease(optimizers)
        return (optimizers, lease), lease is not None

    (optimizers, lease), are_shared = gather_or_raise(find)
    sources, meter = [source_of(leaf) for leaf in optimizers], PeakMeter()
    if not any(are_shared):
        engine = on_every_rank(lambda: NativeEngine(sources, settings(), meter, host_bytes=host_bytes))
        pin_on_every_rank(engine)
        lease = EngineLease("sleep", sources, engine, engine.config, meter)
    elif lease is None:  # a rank whose optimizers are all stubs has none to share
        lease = EngineLease("step", [], NativeEngine([], DEFAULTS, meter), DEFAULTS, meter)
    with undo_on_error(lease.end_sleeps):
        return on_every_rank(partial(StateOffloader, lease, optimizers))


class StateOffloader:
    """Moves the states of some optimizers on this rank, by the engine that they have."""

    kind: Kind = "optimizer"

    def __init__(self, lease: EngineLease, optimizers: Sequence[Any]) -> None:
        assert isinstance(lease.engine, NativeEngine)
        self.lease, self.engine, self.optimizers = lease, lease.engine, list(optimizers)
        own = {id(leaf) for leaf in optimizers}
        self.sources = [source for source in lease.sources if id(source.optimizer) in own]
        self._offloading = deque[Slab]()  # slabs whose copies out were started, and that are still to be released
        self._cached = 0  # bytes of released slabs that the allocator has not returned to the driver
        # Debug mode overwrites the host's copies. Packed masters are reloaded with their weights.
        is_kept = self.engine.transfers.keeps_host_copies and not (lease.is_stepped or self.reads_weights)
        device = self.sources[0].device if self.sources else torch.device("cpu")
        self._kept = self.engine.slabs if is_kept else []  # those that nothing else moves meanwhile
        # The host has a current copy of a slab if the sum over its bytes is that of its reload.
        self._digests: dict[Slab, int] = {}
        self._sums: dict[Slab, torch.Tensor] = {}  # of the reload under way: int64 on the GPU, not waited for yet
        digest_kernel(device)  # compiled before the first sleep
        let_go_for(self)
        lease.has_residency = True

    @property
    def reads_weights(self) -> bool:
        """Whether masters may be packed, so that they are offloaded and reloaded by their weights."""
        return any(slab.codec.family is not None for slab in self.engine.slabs)

    def read_storages(self) -> set[int]:
        """Return the `_cdata` of the storages of the weights that `reads_weights` is about."""
        slabs = (slab for slab in self.engine.slabs if slab.codec.family is not None)
        shards = (state.rounds_to for slab in slabs for state in slab.states)
        buffers = {id(shard.buffer): shard.buffer for shard in shards if shard is not None}
        return {buffer().untyped_storage()._cdata for buffer in buffers.values()}

    @property
    def is_away(self) -> bool:
        """Whether any of it is not on the GPU."""
        return any(slab.state in (SlabState.RELEASED, SlabState.RELOADING) for slab in self.engine.slabs)

    @property
    def is_here(self) -> bool:
        """Whether any of it is on the GPU."""
        return any(slab.state is not SlabState.RELEASED and slab.exists() for slab in self.engine.slabs)

    @property
    def unmade_bytes(self) -> int:
        """Bytes of states that no step has made yet, in slabs that exist on the GPU alone."""
        new = (slab for slab in self.engine.slabs if slab.gpu is None and slab.exists())
        return sum(state.nbytes for slab in new for state in slab.states if state.read() is None)

    def require_whole(self) -> None:
        """Raise RuntimeError if an error has ended an optimizer step, or a move, half-way."""
        for source in self.sources:
            self.engine.require_whole(source, "offloaded")
        for slab in self.engine.slabs:
            _ = slab.state  # raises

    def start_offload(self) -> int:
        """Start to copy changed states to the host, and release unchanged ones; return the bytes. Then `end_offload`.

        Packed masters read their weights as long as the GPU is behind.
        """
        before = self.engine.traffic.out
        if not self.lease.is_stepped:
            self.give_up_offload()  # an interrupted call may have left copies, which lack later updates
        self.engine.masters.remainders.locate()  # they may have been reloaded to another address
        unchanged = self._unchanged()
        self.forget_copies()  # until the reload: an engine that is served may copy out again
        self._offloading.clear()
        self._cached = 0
        for slab in self.engine.slabs:
            if slab in unchanged:
                slab.release_unchanged()
            elif slab.exists() and slab.state is not SlabState.RELEASED:
                is_new = slab.gpu is None
                slab.offload()
                self._offloading.append(slab)
                # To pack a slab, or to move tensors into it the first time, takes more memory: few at a time.
                while (is_new or slab.is_encoded) and len(self._offloading) >= MOST_IN_TRANSIT:
                    self._release_first()
        return self.engine.traffic.out - before

    def _unchanged(self) -> set[Slab]:
        """Return the slabs on the GPU that are as they were reloaded."""
        known = [slab for slab in self._digests if _is_known(slab)]
        tensors = [slab.gpu for slab in known if slab.gpu is not None]
        sums = byte_sums(tensors).tolist() if tensors else []
        return {slab for slab, digest in zip(known, sums, strict=True) if digest == self._digests[slab]}

    def end_offload(self) -> None:
        """Release all slabs, on the engine's training stream; the driver gets most of their memory meanwhile."""
        while self._offloading:
            self._release_first()
        self.lease.is_asleep = True

    def _release_first(self) -> None:
        gone = self._offloading.popleft()
        gone.release()
        self._cached += gone.nbytes
        if self._cached >= RETURNED_BYTES:
            gone.transfers.await_released()
            return_to_driver(self.sources[0].device)
            self._cached = 0

    def give_up_offload(self) -> None:
        """Keep every slab on the GPU that was not released: training may go on and write it, which its copy lacks."""
        self._offloading.clear()
        for slab in self.engine.slabs:
            if not slab.interrupted and slab.state is SlabState.OFFLOADING:
                slab.require_writable()

    def reload(self) -> int:
        """Reload all states, for work that the current stream gets from now on; return the bytes. Then `finish_reload`.

        Raises:
            torch.OutOfMemoryError: there is no memory for all; the rest stays offloaded, and it may be called again.
            RuntimeError: as `Engine.require_writable`.
        """
        before = self.engine.traffic.back
        if not self.lease.is_stepped:
            # slabs that this call reloads; others may have been written since their copies
            away = {slab for slab in self._kept if slab.state is SlabState.RELEASED}
            for slab in landing(self._kept):  # the copies of the others go on while this one is summed
                if slab in away and slab.gpu is not None and _is_known(slab):
                    self._sums[slab] = byte_sums([slab.gpu])[0]
        self.engine.require_writable()
        self.lease.is_asleep = False
        return self.engine.traffic.back - before

    def finish_reload(self) -> None:
        """Note what `reload` has copied, so that unchanged states need not be copied again; the host waits for it."""
        sums, self._sums = self._sums, {}
        self._digests = dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)) if sums else {}

    def forget_copies(self) -> None:
        """Copy all states in the next offload: something else has moved or updated them."""
        self._digests.clear()
        self._sums.clear()

    # Weights that masters round to.

    def rounded_masters(self) -> list[tuple[MegatronSource, torch.Tensor, WeightShard]]:
        """Return a DistributedOptimizer's masters that are copied whole: source, master, and weights it rounds to."""
        if self.reads_weights:
            return []
        found = [source for source in self.sources if isinstance(source, MegatronSource)]
        moving = {id(state.read()) for slab in self.engine.slabs for state in slab.states}
        pairs = [(source, *pair) for source in found for pair in source.rounded_masters()]
        return [pair for pair in pairs if id(pair[1]) in moving]  # others may be written while these are away

    def on_host(self) -> dict[int, torch.Tensor]:
        """Return the host's copies of the states that are away, each like its tensor, by the `id` of that."""
        away = (slab for slab in self.engine.slabs if slab.state in (SlabState.RELEASED, SlabState.RELOADING))
        return {
            id(tensor): slab.host_view(tensor, offset)
            for slab in away
            for state, offset in zip(slab.states, slab.layout.offsets, strict=True)
            if (tensor := state.read()) is not None
        }

    def round_again(self, pairs: Iterable[tuple[MegatronSource, torch.Tensor, WeightShard]]) -> int:
        """Write the weights that some masters round to, by mcore's own copy; return the bytes that crossed the link.

        Slabs of masters that are away are reloaded one at a time, once for all weights, and released at once: nothing
        has written them.
        """
        before = self.engine.traffic.back + self.engine.traffic.out
        of_source: dict[MegatronSource, dict[int, torch.Tensor]] = {}
        for source, master, _ in pairs:
            of_source.setdefault(source, {})[id(master)] = master
        for source, masters in of_source.items():
            for slab in self.engine.slabs:
                of_slab = [m for state in slab.states if (m := state.read()) is not None and id(m) in masters]
                if of_slab and slab.state is not SlabState.RESIDENT:
                    slab.require_readable()
                    source.round_again(of_slab)
                    slab.release_unchanged()
                    for master in of_slab:
                        del masters[id(master)]
            source.round_again(masters.values())
        return self.engine.traffic.back + self.engine.traffic.out - before

    def close(self) -> None:
        """Release the engine, which its owner closes with all states resident; raise as `Engine.close`."""
        stop_for(self)
        self.engine.host_room = math.inf  # the limit was the Residency's
        self.lease.end_sleeps()


def _is_known(slab: Slab) -> bool:
    """Return whether a slab is on the GPU, whole, in one storage that its states still live in."""
    return (
        slab.state is SlabState.RESIDENT
        and slab.codec.family is None
        and bool(slab.gpu_bytes)
        and all((tensor := state.read()) is not None and slab.holds(tensor) for state in slab.states)
    )
