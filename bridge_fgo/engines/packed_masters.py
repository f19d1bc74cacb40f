"""Masters of which the host has a part only: whether they can be brought back, and whether more are to leave so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from bridge_fgo.engines.offloaded_source import OffloadedSource
from bridge_fgo.memory.layout import Codec
from bridge_fgo.memory.remainders import Remainders, WeightWatch
from bridge_fgo.memory.transfers import Transfers
from bridge_fgo.offload.packing_policy import PackingPolicy
from bridge_fgo.states.source import Source


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
