"""What is offloaded of each source, and whether masters that the host has in part can be brought back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from bridge_fgo.config import OffloadConfig
from bridge_fgo.memory.host_buffer import HostBuffer, page_lock
from bridge_fgo.memory.host_memory import local_cpus
from bridge_fgo.memory.layout import (
    ChooseCodec,
    Codec,
    SlabPlace,
    lay_out,
    offloaded_bundles,
    part_bytes,
    pipeline_bytes,
)
from bridge_fgo.memory.remainders import Remainders, WeightWatch
from bridge_fgo.memory.slab import Part, Slab, SlabState
from bridge_fgo.memory.transfers import Transfers
from bridge_fgo.offload.packing_policy import PackingPolicy
from bridge_fgo.states.source import Source

MARGIN_PARTS = 4
"""The least margin of the schedule, in parts (`HoldPolicy.margin_bytes`)."""

MARGIN_OF_STATES = 16
"""It is no more than a 16th of the states: of few bytes a part is a large share."""


class OffloadedSource:
    """What is offloaded of one source: `codec_of` says how each slab is copied, `make_slab` gives it its memory."""

    def __init__(
        self, source: Source, config: OffloadConfig, codec_of: ChooseCodec, make_slab: Callable[[SlabPlace], Slab]
    ) -> None:
        everything = source.states()
        chosen = offloaded_bundles(everything, config)
        target = part_bytes(chosen, config)
        # in the order in which they step
        self.parts = [
            Part([bundle.param for bundle in layout.bundles], [make_slab(place) for place in layout.slabs])
            for layout in lay_out(chosen, target, codec_of)
        ]
        self.slabs = [slab for part in self.parts for slab in part.slabs]
        self.owners = {i: part for part in self.parts for i in part.ids}  # the part of a parameter, by its `id`
        self.group_bytes = pipeline_bytes(chosen)  # what the step moves in one go
        self.state_bytes = sum(bundle.nbytes for bundle in everything)  # of all states of the source, offloaded or not
        self.planned_bytes = sum(bundle.nbytes for bundle in chosen)
        self.margin_bytes = min(MARGIN_PARTS * target, self.planned_bytes // MARGIN_OF_STATES)
        masters = [slab.block_bytes for slab in self.slabs if slab.written_back]
        self.held_through_step = 0 if source.writes_back_by_part else sum(masters)
        # what the step holds to its end beside these where it is not divided
        self.held_more_if_whole_bytes = sum(slab.block_bytes for slab in self.slabs) - self.held_through_step

    @property
    def is_all_here(self) -> bool:
        """Whether every part stays on the GPU, and is there."""
        return all(part.stays for part in self.parts) and all(slab.state is SlabState.RESIDENT for slab in self.slabs)

    @property
    def coming(self) -> list[Slab]:
        """The slabs that are on their way back."""
        return [slab for slab in self.slabs if slab.state is SlabState.RELOADING]


def pin(buffers: Sequence[HostBuffer], device: torch.device) -> float:
    """Page-lock host buffers near a GPU, and return the seconds that it took; raises as `page_lock`."""
    started = time.perf_counter()
    page_lock(buffers, local_cpus(device))
    return time.perf_counter() - started


class PackedMasters:
    """Compares the weights that packed masters need with what they were, and knows whose masters are lost.

    `packing` decides whether masters leave packed, once it knows whether their weights stay as they are.
    """

    def __init__(
        self,
        remainders: Remainders,
        offloaded: Mapping[Source, OffloadedSource],
        transfers: Transfers,
        packing: PackingPolicy,
    ) -> None:
        self._remainders = remainders
        self._offloaded = offloaded
        self._transfers = transfers
        self._packing = packing
        masters = {source: self._packable(source) for source in offloaded}
        self._watches = {source: WeightWatch(remainders, codecs) for source, codecs in masters.items() if codecs}
        # those whose weights have been compared for the optimizer step that comes next
        self._checked: set[Source] = set()
        # those whose masters were brought back though the weights had changed, and were not written since
        self._lost: set[Source] = set()

    def _packable(self, source: Source) -> list[Codec]:
        return [slab.codec for slab in self._offloaded[source].slabs if slab.codec.family is not None]

    def _encoded(self, sources: Iterable[Source]) -> list[Codec]:
        """Return the codecs of slabs whose masters are on the GPU in part only, of some sources."""
        return [slab.codec for source in sources for slab in self._offloaded[source].slabs if slab.is_encoded]

    # As masters leave, and return.

    def locate_weights(self) -> None:
        """Look up where the weights are that masters are packed with, which a pass and a sleep may have moved."""
        self._remainders.locate()

    @contextmanager
    def copied_whole(self) -> Iterator[None]:
        """Context in which masters that leave are copied whole, so that no weights need be as they are now."""
        before, self._remainders.wanted = self._remainders.wanted, lambda: False
        try:
            yield
        finally:
            self._remainders.wanted = before

    def leave(self, sources: Iterable[Source]) -> None:
        """Note that masters of some sources are about to leave, with their weights as they are now."""
        if watches := self._watches_of(sources):
            with self._transfers.computing():
                for watch in watches:
                    watch.begin()

    def are_here(self, sources: Iterable[Source]) -> None:
        """Note that masters of some sources have come back."""
        for source in sources:
            if source in self._watches:
                self._watches[source].end()

    def decide(self) -> None:
        """Have the policy decide, once it can, by what the watches have seen."""
        if self._packing.can_decide:
            with self._transfers.computing():
                changed = any(watch.has_changed() for watch in self._watches.values())
            self._packing.decide(changed)

    def _watches_of(self, sources: Iterable[Source]) -> list[WeightWatch]:
        """Return the watches of some sources, where their weights are watched in the present step."""
        if not self._packing.checks_weights:
            return []
        return [self._watches[source] for source in sources if source in self._watches]

    # Whether they can be brought back.

    def _verify(self, sources: Sequence[Source]) -> None:
        """Raise RuntimeError where weights are not what they were when masters that were copied in part left.

        Of masters that left whole that is noted, where weights are watched.
        """
        watches = self._watches_of(sources)
        encoded = self._encoded(sources)
        if not encoded and not watches:
            return
        with self._transfers.computing():
            for watch in watches:
                watch.compare()
            if encoded:
                self._remainders.verify(encoded)

    @contextmanager
    def verified(self, *sources: Source) -> Iterator[None]:
        """Context that checks once what is encoded of some sources, and then trusts in it."""
        self._verify(sources)
        with self.trusted(*sources):
            yield

    def trusted(self, *sources: Source) -> AbstractContextManager[None]:
        """Context that trusts in what is encoded of some sources, and of no others."""
        return self._remainders.verified([codec for source in sources for codec in self._packable(source)])

    def begin_pass(self) -> None:
        """Forget what was checked for the optimizer step before."""
        self._checked.clear()

    def require_restorable(self, sources: Iterable[Source]) -> None:
        """Check that masters of some sources can be brought back for an optimizer step, once for each step."""
        unchecked = [source for source in sources if source not in self._checked]
        for source in sources:
            self.require(source, "brought back")
        self._verify(unchecked)
        self._checked.update(unchecked)

    def check_anew(self, sources: Iterable[Source]) -> None:
        """Have the next `require_restorable` compare the weights of some sources, whatever was checked before."""
        self._checked.difference_update(sources)

    def require(self, source: Source, what: str) -> None:
        """Raise RuntimeError where masters are lost; `what` is to be done with the states ("saved")."""
        if source in self._lost:
            raise RuntimeError(
                f"the optimizer state cannot be {what}: weights of the model were changed while their master weights "
                "were offloaded in part (OffloadConfig.master_remainders), and what was to write the masters anew "
                "has failed; load a checkpoint, or call reload_model_params()"
            )

    def give_up(self, source: Source) -> None:
        """Note that masters are about to be overwritten, and lost until then where they cannot be decoded."""
        if encoded := self._encoded([source]):
            with self._transfers.computing():
                if not self._remainders.can_decode(encoded):
                    self._lost.add(source)
        self.are_here([source])  # what they were says nothing

    def overwritten(self, source: Source) -> None:
        """Note that every master of a source was written."""
        self._lost.discard(source)

    def close(self) -> None:
        """Let go of what watches the weights."""
        self._watches.clear()
