"""Masters that are packed before they are copied: whether they can be decoded, and whose masters are lost.

They cannot be decoded if something but the optimizer has changed their weights meanwhile.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from bridge_fgo.engines.offloaded_source import OffloadedSource
from bridge_fgo.memory.remainders import Remainders, SlabRemainders
from bridge_fgo.memory.slab import Slab, SlabState
from bridge_fgo.memory.transfers import Transfers
from bridge_fgo.states.source import Source


class PackedMasters:
    """Checks packed masters before they are unpacked, and knows whose masters are lost.

    The host waits for each check, and nowhere else.
    """

    def __init__(
        self, remainders: Remainders, offloaded: Mapping[Source, OffloadedSource], transfers: Transfers
    ) -> None:
        self.remainders = remainders
        self._offloaded = offloaded
        self._transfers = transfers
        self._checked: set[Source] = set()  # sources whose weights were compared for the next optimizer step
        # those whose masters were decoded though the weights had changed, and were not written since
        self._lost: set[Source] = set()

    def _packable(self, sources: Iterable[Source], encoded: bool = False) -> list[SlabRemainders]:
        """Return the codecs of some sources' masters that may be packed; if `encoded`, only those that are now."""
        slabs = (slab for source in sources for slab in self._offloaded[source].slabs)
        return [
            slab.codec for slab in slabs if isinstance(slab.codec, SlabRemainders) and (slab.is_encoded or not encoded)
        ]

    # As masters are offloaded.

    @contextmanager
    def copied_whole(self) -> Iterator[None]:
        """Context in which masters are copied whole, so that no weights need be as they are now."""
        before, self.remainders.is_paused = self.remainders.is_paused, True
        try:
            yield
        finally:
            self.remainders.is_paused = before

    # Whether they can be decoded.

    def _verify(self, sources: Iterable[Source]) -> None:
        """Raise RuntimeError if weights are not what they were when masters were packed."""
        if encoded := self._packable(sources, encoded=True):
            with self._transfers.computing():
                self.remainders.verify(encoded)

    @contextmanager
    def verified(self, *sources: Source) -> Iterator[None]:
        """Context that checks once what is encoded of some sources, and then trusts in it."""
        self._verify(sources)
        with self.trusted(*sources):
            yield

    def trusted(self, *sources: Source) -> AbstractContextManager[None]:
        """Context that trusts in what is encoded of some sources, and of no others."""
        return self.remainders.verified(self._packable(sources))

    def begin_pass(self) -> None:
        """Forget what was checked for the optimizer step before."""
        self._checked.clear()

    def require_restorable(self, sources: Iterable[Source]) -> None:
        """Check that masters of some sources can be decoded for an optimizer step, once for each step."""
        unchecked = [source for source in sources if source not in self._checked]
        for source in sources:
            self.require(source, "brought back")
        self._verify(unchecked)
        self._checked.update(unchecked)

    def check_anew(self, sources: Iterable[Source]) -> None:
        """Make the next `require_restorable` compare the weights of some sources, whatever was checked before."""
        self._checked.difference_update(sources)

    def require(self, source: Source, what: str) -> None:
        """Raise RuntimeError if masters are lost; `what` is to be done with the states ("saved")."""
        if source in self._lost:
            raise RuntimeError(
                f"the optimizer state cannot be {what}: weights of the model were changed while their master weights "
                "were offloaded in part (OffloadConfig.master_remainders), and what was to write the masters anew "
                "has failed; load a checkpoint, or call reload_model_params()"
            )

    def give_up(self, source: Source) -> None:
        """Note that masters are about to be overwritten, and lost until then if they cannot be decoded."""
        if encoded := self._packable([source], encoded=True):
            with self._transfers.computing():
                if not self.remainders.can_decode(encoded):
                    self._lost.add(source)

    def undecodable(self) -> set[Slab]:
        """Return the slabs of masters that cannot be decoded, as weights have changed; the host waits for each."""
        found = set[Slab]()
        with self._transfers.computing():
            for source, offloaded in self._offloaded.items():
                for slab in offloaded.slabs:
                    is_away = slab.is_encoded and slab.state in (SlabState.RELEASED, SlabState.RELOADING)
                    if (slab.written_back and source in self._lost) or (
                        is_away and not self.remainders.can_decode([slab.codec])
                    ):
                        found.add(slab)
        return found

    def forget_lost(self) -> None:
        """Note that the masters that cannot be decoded were given up."""
        self._lost.clear()

    def overwritten(self, source: Source) -> None:
        """Note that every master of a source was written."""
        self._lost.discard(source)
