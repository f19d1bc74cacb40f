"""Whether masters are packed before they are copied, and whether those that are packed can be brought back.

Masters that are packed cannot be brought back where something but the optimizer has changed their weights meanwhile:
training ends. So the weights are watched first, from the optimizer's copy to them up to the next update, as packed
masters would be compared; masters are packed once their weights were seen unchanged.

Packing saves a sixth of the copied bytes, and takes time on the GPU. So it begins only where training waits for
copies for longer than that. A step of 1.051 s on an H100 that hides all of its copies took 1.058 s with packed masters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from bridge_fgo.engines.offloaded_source import OffloadedSource
from bridge_fgo.memory.meters import StepClock
from bridge_fgo.memory.remainders import Remainders, SlabRemainders
from bridge_fgo.memory.slab import Slab, SlabState
from bridge_fgo.memory.transfers import Transfers
from bridge_fgo.states.source import Source

WATCHED_STEPS = 4  # in a row without a change of weights, also by what writes each fourth, before masters are packed
PACKING_SECONDS = 10.3e-3 / 6.6e9  # for a byte of masters, and to unpack it: 10.3 ms for 6.6 GB on an H200


class PackedMasters:
    """Decides whether masters leave packed, and knows whose masters are lost.

    Each rank decides for itself; no bit depends on it. The host waits where it is decided or verified, and nowhere
    else. Where it `decides` it does so in training, else masters leave as `remainders.wanted` says. `waits` times how
    long training waits for copies. `announce` gets a line when masters begin to be packed, `warn` when they never will
    be, because weights have changed.
    """

    def __init__(
        self,
        remainders: Remainders,
        offloaded: Mapping[Source, OffloadedSource],
        transfers: Transfers,
        waits: StepClock,
        decides: bool,
        announce: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self.remainders = remainders
        self._offloaded = offloaded
        self._transfers = transfers
        self._is_undecided = decides
        self._waits = waits
        self._is_worthwhile = True  # whether the newest step that is known waited for longer than packing takes
        self._announce, self._warn = announce, warn
        self._watched = 0  # steps in a row at whose end the weights' sums were taken
        self._then: dict[Source, torch.Tensor] = {}  # sums of the weights when the masters of a source left, if away
        self._differ: torch.Tensor | None = None  # whether weights have changed in any step that was watched
        self._checked: set[Source] = set()  # sources whose weights were compared for the next optimizer step
        # those whose masters were brought back though the weights had changed, and were not written since
        self._lost: set[Source] = set()

    def _packable(self, sources: Iterable[Source], encoded: bool = False) -> list[SlabRemainders]:
        """Return the codecs of some sources' masters that may be packed; of those only that are now, if `encoded`."""
        slabs = (slab for source in sources for slab in self._offloaded[source].slabs)
        return [
            slab.codec for slab in slabs if isinstance(slab.codec, SlabRemainders) and (slab.is_encoded or not encoded)
        ]

    # As masters leave, and return.

    def locate_weights(self) -> None:
        """Look up where the weights are that masters are packed with, which a pass and a sleep may have moved."""
        self.remainders.locate()

    @contextmanager
    def copied_whole(self) -> Iterator[None]:
        """Context in which masters that leave are copied whole, so that no weights need be as they are now."""
        before, self.remainders.is_paused = self.remainders.is_paused, True
        try:
            yield
        finally:
            self.remainders.is_paused = before

    @property
    def checks_weights(self) -> bool:
        """Whether the weights are watched, because masters that move will be packed soon."""
        return self._is_undecided and self._is_worthwhile and self._packable_bytes > 0

    @property
    def _packable_bytes(self) -> int:
        return sum(each.packable_bytes for each in self._offloaded.values())

    def leave(self, sources: Iterable[Source]) -> None:
        """Note that masters of some sources are about to leave, with their weights as they are now."""
        if self.checks_weights:
            with self._transfers.computing():
                for source in sources:
                    if source not in self._then and (now := self._sums_now(source)) is not None:
                        self._then[source] = now.clone()

    def are_here(self, sources: Iterable[Source]) -> None:
        """Note that masters of some sources have come back."""
        for source in sources:
            self._then.pop(source, None)

    def _sums_now(self, source: Source) -> torch.Tensor | None:
        """Return the sums over the weights of a source's masters; None where it has none, or they have no memory."""
        if not (codecs := self._packable([source])):
            return None
        self.remainders.locate()
        if self.remainders.lacked_weights:
            return None
        rows = slice(codecs[0].row, codecs[-1].row + 1)
        assert len(codecs) == rows.stop - rows.start, "the rows of a source follow one another"
        return self.remainders.sums_now(codecs)[rows]

    @contextmanager
    def training_step(self) -> Iterator[None]:
        """Context of a training step, whose waits for copies are timed until it is decided."""
        if self._is_undecided:
            if (waited := self._waits.seconds()) is not None:
                self._is_worthwhile = waited > PACKING_SECONDS * self._packable_bytes
            self._waits.begin_step()
            self._transfers.timing = self._waits.measure
            self._decide()
        try:
            yield
        finally:
            self._transfers.timing = nullcontext

    def end_step(self, updated: bool) -> None:
        """Count a step, if the optimizer `updated` in it, before parts that stayed may move from now on."""
        if updated:
            self._watched = self._watched + 1 if self.checks_weights else 0
        else:
            self._waits.begin_step()  # without an update they say nothing

    def _decide(self) -> None:
        """Decide, once weights were watched as long as it takes: masters are packed from now on, or never."""
        if self._watched <= WATCHED_STEPS or not self.checks_weights:
            return
        with self._transfers.computing():
            have_changed = self.remainders.lacked_weights or (self._differ is not None and bool(self._differ.item()))
        self._is_undecided = False
        if have_changed:
            self._warn(
                "something but the optimizer changed weights of the model between optimizer steps, or let go of their "
                "memory: masters go on being copied whole (OffloadConfig.master_remainders; with False nothing is "
                "watched)"
            )
        else:
            self.remainders.wanted = True
            self._announce("from now on masters are copied in part (OffloadConfig.master_remainders)")

    # Whether they can be brought back.

    def _verify(self, sources: Sequence[Source]) -> None:
        """Raise RuntimeError where weights are not what they were when masters that were copied in part left.

        Of masters that left whole that is noted, where weights are watched.
        """
        watched = [source for source in sources if source in self._then] if self.checks_weights else []
        encoded = self._packable(sources, encoded=True)
        if not encoded and not watched:
            return
        with self._transfers.computing():
            for source in watched:
                if (now := self._sums_now(source)) is not None:
                    differ = (now != self._then[source]).any()
                    self._differ = differ if self._differ is None else self._differ | differ
            if encoded:
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
        if encoded := self._packable([source], encoded=True):
            with self._transfers.computing():
                if not self.remainders.can_decode(encoded):
                    self._lost.add(source)
        self.are_here([source])  # what they were says nothing

    def undecodable(self) -> set[Slab]:
        """Return the slabs of masters that cannot be brought back, as weights have changed; the host waits for each."""
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
        """Note that the masters that cannot be brought back were given up."""
        self._lost.clear()

    def overwritten(self, source: Source) -> None:
        """Note that every master of a source was written."""
        self._lost.discard(source)
