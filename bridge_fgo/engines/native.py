"""The native engine: offload of all sources of a rank, slab by slab, in one schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import batched
from typing import Any, override

import torch

from bridge_fgo.config import OffloadConfig
from bridge_fgo.core.codec import Codec
from bridge_fgo.core.cuda_transfers import CudaTransfers
from bridge_fgo.core.debug import debugged
from bridge_fgo.core.device_room import DeviceRoom
from bridge_fgo.core.host_buffer import PINNING_THREADS, HostBuffer
from bridge_fgo.core.host_memory import available_bytes, ranks_of_this_node
from bridge_fgo.core.layout import copied_whole
from bridge_fgo.core.loading import Loading
from bridge_fgo.core.meters import PeakMeter, Traffic
from bridge_fgo.core.part import Part
from bridge_fgo.core.profile import Mark
from bridge_fgo.core.remainders import Remainders, WeightWatch
from bridge_fgo.core.residency import Residency
from bridge_fgo.core.schedule import Schedule
from bridge_fgo.core.shared_copies import OwnCopies, SharedCopies
from bridge_fgo.core.shared_host_buffer import SharedHostBuffer, has_files_for_buffers
from bridge_fgo.core.slab import Slab, require_readable, send_off
from bridge_fgo.core.snapshot import Snapshot
from bridge_fgo.core.state import State
from bridge_fgo.core.transfers import HostTransfers, Transfers
from bridge_fgo.engines.engine import Engine
from bridge_fgo.engines.share import Share, pin
from bridge_fgo.sources.source import Source


class NativeEngine(Engine):
    """Keeps states in exact pinned host memory, and moves them by the plan of a `Schedule`.

    Host memory is planned and mapped here and page-locked by `pin`, before training: what exists is known, and so are
    the sizes and dtypes of what the first step makes.

    Args:
        sources: of this rank, in the order in which they step; there may be none.
        config: what to offload.
        meter: the allocator's peaks.
        transfers: the copies; by default those of the sources' device.

    Raises:
        ValueError: a budget is asked for where GPU memory cannot be measured.
        RuntimeError: host memory could not be mapped.
    """

    name = "native"
    watches_points = True

    def __init__(
        self,
        sources: Sequence[Source],
        config: OffloadConfig,
        meter: PeakMeter,
        transfers: Transfers | None = None,
    ) -> None:
        budget = config.gpu_memory_budget_gib
        if budget is not None and not meter.works:
            raise ValueError(
                f"OffloadConfig.gpu_memory_budget_gib={budget!r} needs a GPU, whose memory it measures: leave it "
                "unset, or set OffloadConfig.fraction"
            )
        self.sources, self.traffic = list(sources), Traffic()
        asked = {"fraction": config.fraction, "moments": config.moments, "master_weights": config.master_weights}
        self.limits = ", ".join(f"OffloadConfig.{name}" for name, share in asked.items() if share < 1)
        self._config = config
        self._device = device = sources[0].device if sources else torch.device("cpu")
        transfers = transfers or make_transfers(device, config)
        self.schedule = schedule = Schedule(
            transfers, meter, config.gpu_memory_budget_bytes, DeviceRoom(meter) if budget == "auto" else None
        )
        packing = schedule.packing  # not the schedule itself, which would go only when Python looks for cycles
        self._remainders = Remainders(device, wanted=lambda: config.master_remainders or packing.packs)
        codec_of = copied_whole if config.master_remainders is False else self._remainders.codec_of
        make_slab = partial(Slab, device=device, transfers=transfers, ledger=schedule.ledger, traffic=self.traffic)
        shares = [Share(source, config, codec_of, make_slab) for source in sources]
        self._shares = dict(zip(self.sources, shares, strict=True))
        schedule.parts += [part for share in shares for part in share.parts]
        self.state_bytes = sum(share.state_bytes for share in shares)
        self.planned_bytes = sum(share.planned_bytes for share in shares)
        schedule.holding.margin_bytes = max((share.margin_bytes for share in shares), default=0)
        schedule.holding.masters_held_bytes = sum(share.masters_held_bytes for share in shares)
        self._remainders.ready()
        if config.master_remainders is None and self._remainders.are_fast:
            for part in schedule.parts:
                part.packable_bytes = sum(slab.nbytes for slab in part.slabs if slab.codec.family is not None)
        schedule.count_packable()
        masters = {
            source: [slab.codec for slab in share.slabs if slab.codec.family is not None]
            for source, share in self._shares.items()
        }
        self._watches = {source: WeightWatch(self._remainders, codecs) for source, codecs in masters.items() if codecs}
        self._whole: set[Source] = set()
        """Sources whose steps are planned not to be divided."""
        self._said: set[str] = set()
        self._snapshots: dict[Source, Snapshot] = {}
        self._copier = OwnCopies()
        self._lends = False
        """Whether a checkpoint gets host buffers lent in place of copies."""
        self._is_saved_next = False
        self._checked: set[Source] = set()
        """Sources whose weights have been compared for the optimizer step that comes next."""
        self._masters_lost: set[Source] = set()
        """Sources whose masters were brought back though the weights had changed, and were not written since."""
        self._stepped: set[Source] | None = None
        """Sources that have ended their step in the present training step; None before any has begun to step."""

    @property
    def slabs(self) -> list[Slab]:
        """All slabs, in the order in which they move."""
        return [slab for part in self.schedule.parts for slab in part.slabs]

    def parts_of(self, source: Source) -> list[Part]:
        """Return the parts of one source, in the order in which they step."""
        return self._shares[source].parts

    def _slabs_of(self, source: Source | None, masters_only: bool = False) -> list[Slab]:
        slabs = self.slabs if source is None else self._shares[source].slabs
        return [slab for slab in slabs if slab.written_back] if masters_only else slabs

    @property
    @override
    def bytes_to_pin(self) -> int:
        pins = self._config.pin_memory and self._device.type == "cuda"
        return sum(slab.nbytes for slab in self.slabs) if pins else 0

    @override
    def pin(self) -> None:
        self.pin_seconds = self._page_lock([slab.host for slab in self.slabs])

    def _page_lock(self, buffers: Sequence[HostBuffer]) -> float:
        return pin(buffers, self._device) if self.bytes_to_pin else 0.0

    @override
    def take_in(self) -> None:
        with self._copied_whole():
            self.schedule.release_everything()

    @contextmanager
    def _copied_whole(self) -> Iterator[None]:
        """Context in which masters that leave are copied whole, so that no weights need be as they are now."""
        before, self._remainders.wanted = self._remainders.wanted, lambda: False
        try:
            yield
        finally:
            self._remainders.wanted = before

    # Figures.

    @property
    @override
    def pinned_bytes(self) -> int:
        return sum(slab.pinned_bytes for slab in self.slabs)

    @property
    @override
    def held_budget_bytes(self) -> int | None:
        return self._config.gpu_memory_budget_bytes if self.schedule.is_planned else None

    @property
    @override
    def failed_fetches(self) -> int:
        return self.schedule.queue.failed_fetches

    @override
    def has_states(self) -> bool:
        return any(slab.exists() for slab in self.slabs)

    # What is encoded, and may not be right any more.

    def locate_weights(self) -> None:
        """Look up where the weights are that masters are packed with, which a pass and a sleep may have moved."""
        self._remainders.locate()

    def _encoded(self, sources: Iterable[Source]) -> list[Codec]:
        """Return the codecs of slabs whose masters are on the GPU in part only, of some sources."""
        return [slab.codec for source in sources for slab in self._shares[source].slabs if slab.is_encoded]

    def _verify(self, sources: Sequence[Source]) -> None:
        """Raise RuntimeError where weights are not what they were when masters that were copied in part left.

        Of masters that left whole that is noted, where weights are watched.
        """
        watches = self._watches_of(sources)
        encoded = self._encoded(sources)
        if not encoded and not watches:
            return
        with self.schedule.transfers.computing():
            for watch in watches:
                watch.compare()
            if encoded:
                self._remainders.verify(encoded)

    def _watches_of(self, sources: Iterable[Source]) -> list[WeightWatch]:
        """Return the watches of some sources, where their weights are watched in the present step."""
        if not self.schedule.packing.is_watching:
            return []
        return [self._watches[source] for source in sources if source in self._watches]

    def _masters_leave(self, sources: Iterable[Source]) -> None:
        if watches := self._watches_of(sources):
            with self.schedule.transfers.computing():
                for watch in watches:
                    watch.begin()

    def _masters_are_here(self, sources: Iterable[Source]) -> None:
        for source in sources:
            if source in self._watches:
                self._watches[source].end()

    def _choose_packing(self) -> None:
        """Have the policy decide, once it can, by what the watches have seen."""
        if self.schedule.packing.can_decide:
            with self.schedule.transfers.computing():
                changed = any(watch.has_changed() for watch in self._watches.values())
            self.schedule.packing.decide(changed)

    @contextmanager
    def _verified(self, *sources: Source) -> Iterator[None]:
        """Context that checks once what is encoded of some sources, and then trusts in it."""
        self._verify(sources)
        with self._trusted(*sources):
            yield

    def _trusted(self, *sources: Source) -> AbstractContextManager[None]:
        """Context that trusts in what is encoded of some sources, and of no others."""
        slabs = (slab for source in sources for slab in self._shares[source].slabs)
        return self._remainders.verified([slab.codec for slab in slabs if slab.codec.family is not None])

    def _require_restorable(self, sources: Iterable[Source]) -> None:
        """Check that states of some sources can be brought back for an optimizer step, once for each step."""
        unchecked = [source for source in sources if source not in self._checked]
        for source in sources:
            self._require_masters(source, "brought back")
        self._verify(unchecked)
        self._checked.update(unchecked)

    def _require_masters(self, source: Source, what: str) -> None:
        if source in self._masters_lost:
            raise RuntimeError(
                f"the optimizer state cannot be {what}: weights of the model were changed while their master weights "
                "were offloaded in part (OffloadConfig.master_remainders), and what was to write the masters anew "
                "has failed; load a checkpoint, or call reload_model_params()"
            )

    @override
    def require_whole(self, source: Source, what: str) -> None:
        self._require_masters(source, what)
        self._require_untorn(what)

    def _require_untorn(self, what: str) -> None:
        if self.is_torn:
            raise RuntimeError(
                f"the optimizer state cannot be {what}: an error ended an optimizer step after some parameters were "
                "updated and before others were; build the optimizer anew and resume from the last checkpoint"
            )

    @property
    @override
    def is_lost(self) -> bool:
        return any(slab.interrupted for slab in self.slabs)

    # A training step.

    @contextmanager
    @override
    def training_step(self, kind: object, is_saved_next: bool = False) -> Iterator[None]:
        self.schedule.signature = kind
        self._stepped = None
        self._is_saved_next = is_saved_next
        try:
            yield
            if self._stepped is not None:
                self.is_torn = False
        finally:
            self._stepped = None

    def _is_whole(self, source: Source) -> bool:
        """Return whether a source's step is not divided; what keeps it whole is said once."""
        why = source.kept_whole_by()
        if why and self._shares[source].slabs and why not in self._said:
            self._said.add(why)
            self.schedule.holding.warn(
                f"the optimizer step is not divided, because of {why}: it may need every state, so that all that is "
                "offloaded is on the GPU in the optimizer step; take it away to save that memory there too"
            )
        return bool(why)

    def _plan_for_whole_steps(self) -> None:
        """Have plans count all states of a source whose step is not divided; where that changes, measure anew."""
        whole = {source for source in self.sources if self._is_whole(source)}
        if whole == self._whole:
            return
        holding = self.schedule.holding
        for source in whole ^ self._whole:
            more = self._shares[source].held_more_if_whole_bytes
            holding.masters_held_bytes += more if source in whole else -more
        self._whole = whole
        holding.forget()

    @override
    def begin_pass(self, is_like_others: bool = True) -> None:
        self._plan_for_whole_steps()
        self.traffic.most_released = self.traffic.released
        self.locate_weights()
        self._checked.clear()
        # Of a pass that is run again some are on their way back.
        coming = [source for source, share in self._shares.items() if share.coming]
        with self._verified(*coming) if coming else nullcontext():
            send_off(slab for part in self.schedule.parts if not part.stays for slab in part.slabs)
        self._masters_are_here(coming)  # they had come back, and left anew
        self.schedule.begin_pass(is_like_others)
        self._choose_packing()
        self._masters_leave(self.sources)

    @override
    def release(self) -> None:
        self.schedule.release()

    @override
    def point(self, mark: Mark) -> bool:
        if self.schedule.transfers.capturing():
            return False
        self.schedule.point(mark)
        return True

    @override
    def reload(self) -> None:
        self.schedule.reload()

    @override
    def updating(self) -> None:
        if self._stepped is None:
            self._require_untorn("updated")
            self._require_restorable(self.sources)  # of all, before the first of them is updated
            self._stepped = set()

    @contextmanager
    @override
    def stepping(self, source: Source) -> Iterator[None]:
        share = self._shares[source]

        def run() -> None:
            keep_masters, in_order = not source.writes_back_by_part, source.keeps_order
            if not in_order:
                source.step(None)  # parameters whose states are not offloaded
            self.schedule.step(share.parts, source.step, keep_masters, share.together_bytes, in_order)
            if in_order:
                source.step(None)  # `select` takes the first parameters, so these are the last

        with ExitStack() as stack:
            if self._lends and self._is_saved_next:
                # Beside the update that costs a part of what it costs a save to bring them back and unpack them.
                stack.enter_context(self._copied_whole())
            if self._is_whole(source):
                self.require_writable(source)
            else:
                self._require_restorable([source])
                self._checked.discard(source)
                stack.enter_context(self._trusted(source))
                if source.updates_in_place and share.is_all_here:
                    # One launch for all parameters takes the host less time than one for each part.
                    for slab in share.slabs:
                        slab.require_writable()
                else:
                    stack.enter_context(source.stepping(run, share.owners))
            if self._stepped is not None:
                self._stepped.discard(source)
                self.is_torn = True
            yield
        self._masters_are_here([source])
        self._masters_leave([source])
        if self._stepped is not None:
            self._stepped.add(source)
            # Of a chain each has stepped: an error from here on, in the scheduler say, leaves states that are whole.
            self.is_torn = not self._stepped >= set(self.sources)

    @override
    def write_back(self, source: Source, copy: Callable[[], Any]) -> Any:
        with source.writing_back() as written:
            if written is not None:
                left = [part for part in self._shares[source].parts if not part.ids <= written]
                require_readable(slab for part in left for slab in part.slabs if slab.written_back)
            return copy()

    @override
    def settle(self) -> None:
        """End the step's moves; what is released stays so, and comes back when somebody asks for it."""
        for source, share in self._shares.items():
            if coming := share.coming:
                with self._verified(source):
                    require_readable(coming)
                self._masters_are_here([source])

    @override
    def end_step(self, updated: bool) -> None:
        self.schedule.end_step(updated)
        self._choose_packing()

    # Readers and writers.

    @override
    def require_readable(self, source: Source | None = None, masters_only: bool = False) -> None:
        sources = self.sources if source is None else [source]
        self._checked.difference_update(sources)  # where memory runs out on the way, a later step compares anew
        with self._verified(*sources):
            require_readable(self._slabs_of(source, masters_only))
        self._masters_are_here(sources)

    @override
    def require_writable(self, source: Source | None = None, masters_only: bool = False) -> None:
        self.require_readable(source, masters_only)
        for slab in self._slabs_of(source, masters_only):
            slab.require_writable()

    @contextmanager
    @override
    def overwriting_masters(self, source: Source) -> Iterator[None]:
        """Context for overwriting every master. Where it fails, and they were not right before, they are lost."""
        self._give_up_masters(source)
        with self._trusted(source):
            self.require_writable(source)
        yield
        self._masters_lost.discard(source)

    def _give_up_masters(self, source: Source) -> None:
        """Note that masters are about to be overwritten, and lost until then where they cannot be decoded."""
        if encoded := self._encoded([source]):
            with self.schedule.transfers.computing():
                if not self._remainders.can_decode(encoded):
                    self._masters_lost.add(source)
        self._masters_are_here([source])  # what they were says nothing

    @override
    def rewrite_masters(self, source: Source, copy: Callable[[], Any]) -> Any:
        """Call `copy` for one part after another, so that masters that are away need not be there together."""
        parts = self._shares[source].parts
        self._give_up_masters(source)
        with self._trusted(source), self._copied_whole():
            for part in parts:
                masters = [slab for slab in part.slabs if slab.written_back]
                away = [slab for slab in masters if slab.state is Residency.RELEASED]
                for slab in masters:
                    slab.require_writable()
                with source.rewriting(part, parts):
                    copy()
                for slab in away:
                    _send_away(slab)
        with source.rewriting(None, parts):
            result = copy()
        self._masters_lost.discard(source)
        return result

    @override
    def states_replaced(self, source: Source) -> None:
        """Let go of the old tensors' memory; the next pass takes the new ones into the slabs."""
        for slab in self._shares[source].slabs:
            if slab.state is Residency.RESIDENT:
                self.schedule.transfers.wait_out(slab)
                slab.drop_if_left()

    @override
    def make_room(self) -> None:
        self.schedule.release_everything()

    # Checkpoints.

    @contextmanager
    @override
    def saving(self, source: Source, copies: bool) -> Iterator[None]:
        """Context in which a checkpoint is made, and nothing moves."""
        owners, transfers = self._shares[source].owners, self.schedule.transfers
        lends = copies and self._lends and self._has_spares(source)
        snapshot = self._snapshots[source] = Snapshot(owners, transfers, copies, self._copier, lends)
        try:
            with self._verified(source), self._copied_whole() if lends else nullcontext(), snapshot.taken():
                yield
        finally:
            self._snapshots.pop(source, None)

    @override
    def is_away(self, source: Source) -> bool:
        return source in self._snapshots

    @contextmanager
    @override
    def loading(self, source: Source, everything: bool = False, masters: bool = False) -> Iterator[None]:
        if source in self._snapshots:  # mcore's methods call each other
            yield
        else:
            self._give_up_masters(source)
            with self._trusted(source), self._copied_whole():
                with self.schedule.transfers.computing():  # whose memory slabs are
                    self._send_whole(source, everything)
                loading = self._snapshots[source] = Loading(self._shares[source].owners, self.schedule.transfers)
                try:
                    with loading.taken():
                        yield
                finally:
                    self._snapshots.pop(source, None)
        if masters:
            self._masters_lost.discard(source)

    def _send_whole(self, source: Source, everything: bool) -> None:
        """Make the states that the first step would make, slab by slab, and have the host get what it has in part.

        everything: what else is on the GPU, and may leave, leaves too.
        """
        for part in self._shares[source].parts:
            for slab in part.slabs:
                is_new = not slab.exists()
                if is_new:
                    _make(slab.states)
                leaves = everything and not part.stays and slab.state is not Residency.RELEASED
                if (is_new or leaves or slab.is_encoded) and slab.exists():
                    _send_away(slab)
        for bundle in source.states():
            _make(bundle.states)  # of those that are not offloaded

    @override
    def put(
        self,
        source: Source,
        param: torch.Tensor,
        hand_out: Callable[[], object],
        loaded: Mapping[str, Any],
        write: Callable[[Mapping[str, Any]], None],
    ) -> None:
        loading = self._snapshots[source]
        assert isinstance(loading, Loading)
        loading.put(param, hand_out, loaded, write)

    @override
    def hand_out(self, source: Source, param: torch.Tensor, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if source in self._snapshots:
            return self._snapshots[source].hand_out(param, read)
        part = self._shares[source].owners.get(id(param))
        if part is not None:
            require_readable(part.slabs)
        return read()

    @override
    def share_copies(self) -> None:
        self._copier = SharedCopies(page_locks=self.bytes_to_pin > 0)
        self._lends = has_files_for_buffers(sum(len(slab.states) for slab in self.slabs))
        if self._lends:
            self.schedule.transfers.finish_out()
            for some in batched(self.slabs, PINNING_THREADS):  # so that few slabs have two buffers meanwhile
                for slab, buffer in zip(some, self._shared_hosts(some) if self._lends else (), strict=False):
                    slab.share_host(buffer)

    def _has_spares(self, source: Source) -> bool:
        """Return whether every slab has a second host buffer. They are made for the first save."""
        lacking = [slab for slab in self._shares[source].slabs if slab.spare is None]
        for slab, buffer in zip(lacking, self._shared_hosts(lacking), strict=False):
            slab.spare = buffer
        return self._lends

    def _shared_hosts(self, slabs: Sequence[Slab]) -> list[SharedHostBuffer]:
        """Return a host buffer for each slab that it can lend, page-locked.

        None where that cannot be. From then on checkpoints get copies, which takes longer; it is said.
        """
        needed, ranks = sum(slab.nbytes for slab in slabs), ranks_of_this_node()
        try:
            if ranks * needed > (free := available_bytes()):
                raise ValueError(f"{ranks} rank(s) of this node need {needed} bytes of host memory each, of {free}")
            buffers = [slab.make_shared_host() for slab in slabs]
            self._page_lock(buffers)
        except (ValueError, RuntimeError) as error:
            self._lends = False
            self.schedule.holding.warn(f"a background save gets copies of the states, which takes longer: {error}")
            return []
        return buffers

    @override
    def copied_for_a_save(self) -> list[int]:
        return [state.saved_nbytes for slab in self.slabs for state in slab.states]

    @override
    def close(self) -> None:
        self._require_restorable(self.sources)
        with self._trusted(*self.sources):
            self.require_writable()
        self._copier.close()
        for slab in self.slabs:
            slab.close()
        self.schedule.forget_parts()
        self._shares.clear()
        self._watches.clear()
        self.sources = []


def _make(states: Iterable[State]) -> None:
    for state in states:
        if state.make is not None and state.read() is None:
            state.make()


def _send_away(slab: Slab) -> None:
    slab.require_writable()  # a copy out under way may be of what it was
    slab.offload()
    slab.release()


def make_transfers(device: torch.device, config: OffloadConfig) -> Transfers:
    """Return the transfers for states on `device`, in debug mode where the environment asks for it."""
    is_cuda = device.type == "cuda"
    return debugged(CudaTransfers(device, config.piece_bytes) if is_cuda else HostTransfers(config.piece_bytes))
