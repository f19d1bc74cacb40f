"""Optimizer state in phases: all slabs of the native engine leave, or come back, between steps."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from bridge_fgo.config import OffloadConfig
from bridge_fgo.engines.attachment import ATTACHED, Attachment, attachment_of
from bridge_fgo.engines.native import NativeEngine
from bridge_fgo.engines.ranks import gather, on_every_rank, pin_on_every_rank
from bridge_fgo.memory.meters import PeakMeter
from bridge_fgo.memory.slab import MOST_IN_TRANSIT, Slab, SlabState
from bridge_fgo.memory.state import WeightShard
from bridge_fgo.sleep.checkpoint_workers import let_go_for, stop_for
from bridge_fgo.sleep.host_copies import HostCopies
from bridge_fgo.sleep.movable import STATES, attached_engine, movable_optimizers
from bridge_fgo.sleep.moved import RETURNED_BYTES, return_to_driver
from bridge_fgo.states.choice import source_of
from bridge_fgo.states.megatron import McoreSource, MegatronSource

WHOLE_MASTERS = OffloadConfig(engine="native", master_remainders=False)
"""Whole masters tell the weights, so that these need not be copied."""


class OptimizerStates:
    """The states of a top-level optimizer on this rank, and the engine that moves them.

    Args:
        optimizer: what the training loop steps: a ChainedOptimizer, or an optimizer as `movable_optimizers` has them.
        config: for an engine of its own, where none is attached; `WHOLE_MASTERS` when None.
        alone: the other ranks may not come here now, and are not asked.

    Raises:
        ValueError: an optimizer cannot be offloaded, on this rank or another; names it.
        RuntimeError: host memory could not be had, on this rank or another.
    """

    def __init__(self, optimizer: Any, config: OffloadConfig | None = None, alone: bool = False) -> None:
        self.config = config or WHOLE_MASTERS
        self.meter = PeakMeter()
        together = _on_this_rank if alone else on_every_rank
        self.optimizers = together(lambda: movable_optimizers(optimizer))
        attached = together(lambda: attached_engine(self.optimizers, config))
        # Of all ranks alike: one whose optimizers are all stubs has none to be attached.
        self.is_owner = attached is None if alone else not any(gather(attached is not None))
        """Whether the engine serves nobody else, so that the optimizer's own methods know nothing of it."""
        self.sources = [source_of(leaf) for leaf in self.optimizers]
        if attached is None:
            attached = together(self._make) if self.is_owner else NativeEngine([], WHOLE_MASTERS, PeakMeter())
        self.engine = attached
        if not self.is_owner:
            own = {id(leaf) for leaf in self.optimizers}
            found = [source for source in attached.sources if isinstance(source, McoreSource)]
            self.sources = [source for source in found if id(source.optimizer) in own]
        elif alone:
            self.engine.pin()
        else:
            pin_on_every_rank(self.engine)
        self.may_be_unchanged = True
        """Whether states may be what they were when they came back; not where whoever steps them says so."""
        self._copies: HostCopies | None = None
        """None where others move the slabs too, or where the host's copies are overwritten (debug mode)."""
        self._leaving = deque[Slab]()
        """Slabs whose copies out were started, and whose memory is there still."""
        self._cached = 0
        """Bytes that slabs have left to the allocator since the driver last got them."""
        self.is_driven = False
        """Whether training steps drive an engine of its own too, which then stays attached."""
        self._serves = 0
        together(lambda: self._finish(refuses=not alone))
        if self.is_owner:
            for leaf in self.optimizers:
                setattr(leaf, STATES, self)

    def _finish(self, refuses: bool) -> None:
        let_go_for(self)
        if self.is_owner and self.sources and self.engine.schedule.transfers.keeps_host_copies:
            self._copies = HostCopies(self._slabs, self.sources[0].device)
        if self.is_owner and refuses:
            self.engine.traffic.touches.refusals.append(partial(_refuse_asleep, weakref.ref(self)))

    def _make(self) -> NativeEngine:
        return NativeEngine(self.sources, self.config, self.meter)

    @property
    def reads_weights(self) -> bool:
        """Whether masters may be packed, so that the weights must be there when they leave and when they come."""
        return any(slab.codec.family is not None for slab in self._slabs)

    @property
    def is_served(self) -> bool:
        """Whether installed patches bring states to whoever reads or steps the optimizer."""
        return not self.is_owner or self.is_driven or self._serves > 0

    @property
    def is_away(self) -> bool:
        """Whether any of it is not on the GPU: sent away, or by an engine that others drive too."""
        return any(slab.state in (SlabState.RELEASED, SlabState.RELOADING) for slab in self._slabs)

    @property
    def is_here(self) -> bool:
        """Whether any of it is on the GPU."""
        return any(slab.state is not SlabState.RELEASED and slab.exists() for slab in self._slabs)

    @property
    def _slabs(self) -> list[Slab]:
        return self.engine.slabs

    @property
    def unmade_bytes(self) -> int:
        """Bytes of states that no step has made yet, in slabs that have never left; these leave with room for them."""
        new = (slab for slab in self._slabs if slab.gpu is None and slab.exists())
        return sum(state.nbytes for slab in new for state in slab.states if state.read() is None)

    @property
    def released_bytes(self) -> int:
        """The bytes of masters and moments whose GPU memory is gone: a count, as each tensor's would take long."""
        return self.engine.traffic.released

    def require_whole(self) -> None:
        """Raise RuntimeError where an error has ended an optimizer step, or a move, half-way."""
        for source in self.sources:
            self.engine.require_whole(source, "offloaded")
        for slab in self._slabs:
            _ = slab.state  # raises

    def start_offload(self) -> int:
        """Start to copy what has changed to the host, and let go of what has not; return the bytes that cross.

        Packed masters read their weights as long as the GPU is behind. `end_offload` is to follow.
        """
        before = self.engine.traffic.out
        if self.is_owner and not self.is_driven:
            self.give_up_offload()  # a call that was interrupted may have left copies, which lack later updates
        self.engine.masters.locate_weights()  # they were asleep too, perhaps, and have come back to another address
        unchanged = set[Slab]()
        if self._copies is not None:
            if self.may_be_unchanged and not self.is_driven:  # steps by parts copy too
                unchanged = self._copies.unchanged()
            self._copies.forget()  # until it is back: an attached engine may copy out anew
        self._leaving.clear()
        self._cached = 0
        for slab in self._slabs:
            if slab in unchanged:
                slab.release_unchanged()
            elif slab.exists() and slab.state is not SlabState.RELEASED:
                is_new = slab.gpu is None
                slab.offload()
                self._leaving.append(slab)
                # To pack a slab, or to move tensors into it the first time, takes more memory: few at a time.
                while (is_new or slab.is_encoded) and len(self._leaving) >= MOST_IN_TRANSIT:
                    self._let_go()
        return self.engine.traffic.out - before

    def end_offload(self) -> None:
        """Let go of all slabs; the driver gets most of their memory while others are copied.

        The GPU may be behind when it returns: memory is free on the engine's training stream.
        """
        while self._leaving:
            self._let_go()

    def _let_go(self) -> None:
        """Let go of the slab whose copy was started first."""
        gone = self._leaving.popleft()
        gone.release()
        self._cached += gone.nbytes
        if self._cached >= RETURNED_BYTES:
            gone.transfers.await_released()
            return_to_driver(self.sources[0].device)
            self._cached = 0

    def give_up_offload(self) -> None:
        """Have every slab stay whose memory has not gone, after something failed between the two.

        Training may go on and write them: their copies would be of what they were.
        """
        self._leaving.clear()
        for slab in self._slabs:
            if not slab.interrupted and slab.state is SlabState.OFFLOADING:
                slab.require_writable()

    def reload(self) -> int:
        """Bring all of it back; return the bytes that crossed. Work that the current stream gets finds it there.

        The GPU may be behind when it returns. `came_back` is to follow when the host has nothing better to do.

        Raises:
            torch.OutOfMemoryError: there is no memory for all; the rest is still away, and it may be called again.
            RuntimeError: as `Engine.require_writable`.
        """
        before = self.engine.traffic.back
        if self._copies is not None and not self.is_driven and not self.reads_weights:
            self._copies.bring_back()
        self.engine.require_writable()
        self.may_be_unchanged = True
        self._detach()
        return self.engine.traffic.back - before

    def came_back(self) -> None:
        """Note what came back by `reload`, so that what does not change need not be copied; the host waits for it."""
        if self._copies is not None:
            self._copies.came_back()

    def attach(self) -> None:
        """Have installed patches serve what reads or steps the optimizer by an engine of its own, until `reload`."""
        for source in self.sources if self.is_owner else ():
            setattr(source.optimizer, ATTACHED, Attachment(self.engine, source))

    def _detach(self) -> None:
        if self.is_owner and not (self.is_driven or self._serves):
            for leaf in self.optimizers:
                vars(leaf).pop(ATTACHED, None)

    def drive(self) -> None:
        """Stay attached from now on: training steps drive the engine, until `leave` or `close`."""
        self.attach()
        self.is_driven = True
        self.may_be_unchanged = False

    def leave(self) -> None:
        """Make the states resident, and be attached no more; the engine stays.

        Raises:
            torch.OutOfMemoryError, RuntimeError: as `reload`; it stays attached then.
        """
        self.engine.require_writable()
        self.is_driven = False
        if self._copies is not None:
            self._copies.forget()
        self._detach()

    @contextmanager
    def served(self) -> Iterator[None]:
        """Context in which installed patches serve what reads or loads states, from the host where they are away."""
        was_attached = all(attachment_of(leaf) is not None for leaf in self.optimizers)
        self.attach()
        self._serves += 1
        try:
            yield
        finally:
            self._serves -= 1
            if not was_attached:
                self._detach()

    # Weights that masters tell.

    def rounded_masters(self) -> list[tuple[MegatronSource, torch.Tensor, WeightShard]]:
        """Return each master of this rank that leaves whole, its source, and the weights that it is rounded to.

        Those of DistributedOptimizers, whose weights lie in DDP's buffers.
        """
        if self.reads_weights:
            return []
        found = [source for source in self.sources if isinstance(source, MegatronSource)]
        return [(source, *pair) for source in found for pair in source.rounded_masters()]

    def round_again(self, source: MegatronSource, masters: Sequence[torch.Tensor]) -> int:
        """Write the weights that some masters of a source are rounded to; return the bytes that crossed.

        Of masters that are away each slab comes by itself and goes at once: nothing has written it.
        """
        before = self.engine.traffic.back + self.engine.traffic.out
        wanted = {id(master) for master in masters}
        for slab in self._slabs:
            of_slab = [m for state in slab.states if (m := state.read()) is not None and id(m) in wanted]
            if not of_slab or slab.state is SlabState.RESIDENT:
                continue
            wanted -= {id(master) for master in of_slab}
            slab.require_readable()
            source.round_again(of_slab)
            slab.release_unchanged()
        source.round_again([master for master in masters if id(master) in wanted])
        return self.engine.traffic.back + self.engine.traffic.out - before

    def close(self) -> None:
        """Make the states resident, and let go of an engine of its own.

        Raises:
            RuntimeError: as `Engine.close`.
        """
        stop_for(self)
        if self.is_owner:
            self.engine.close()
            self._copies = None
            self.is_driven = False
            self._detach()
            for leaf in self.optimizers:
                vars(leaf).pop(STATES, None)


def _refuse_asleep(states: weakref.ref[OptimizerStates]) -> str:
    """Return what to call where states are touched that a `Residency` has sent away, and that nothing serves."""
    owner = states()
    if owner is None or owner.is_served:
        return ""
    return "call Residency.reload('optimizer') first, or save and load checkpoints in Residency.checkpointing()"


def _on_this_rank[T](act: Callable[[], T]) -> T:
    return act()
