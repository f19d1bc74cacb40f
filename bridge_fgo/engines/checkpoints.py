"""Hands the native engine's states to a checkpoint's save, and puts loaded ones where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import batched
from typing import Any

import torch

from bridge_fgo.engines.offloaded_source import OffloadedSource, pin
from bridge_fgo.engines.packed_masters import PackedMasters
from bridge_fgo.memory.guard import own
from bridge_fgo.memory.host_buffer import PINNING_THREADS, SharedHostBuffer, has_files_for_buffers
from bridge_fgo.memory.host_memory import free_for_each_rank
from bridge_fgo.memory.slab import Slab, SlabState
from bridge_fgo.memory.state import State
from bridge_fgo.memory.transfers import Transfers
from bridge_fgo.offload.part import Part
from bridge_fgo.offload.snapshot import Loading, Snapshot
from bridge_fgo.states.source import Source


class Checkpoints:
    """Hands out states for a save or a load, of one source at a time or of several.

    Host memory is page-locked near the GPU `pin_near`, or not where that is None.
    """

    def __init__(
        self,
        offloaded: Mapping[Source, OffloadedSource],
        transfers: Transfers,
        masters: PackedMasters,
        pin_near: torch.device | None,
        warn: Callable[[str], None],
    ) -> None:
        self._offloaded = offloaded
        self._transfers = transfers
        self._masters = masters
        self._pin_near = pin_near
        self._warn = warn
        self._snapshots: dict[Source, Snapshot] = {}
        self._has_worker = False  # whether a worker process writes what a save gets
        # those some of whose states a load that has not ended may have overwritten
        self._half_loaded: set[Source] = set()
        self.lends = False  # whether a save gets host buffers lent in place of copies

    def is_checkpointing(self, source: Source) -> bool:
        """Return whether a source is being saved or loaded, so that `hand_out` gives its states."""
        return source in self._snapshots

    def hand_out(self, source: Source, param: torch.Tensor, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what `read` returns, in a form that the save or the load can have."""
        return self._snapshots[source].hand_out(param, read)

    # A save.

    @contextmanager
    def saving(self, source: Source, copies: bool) -> Iterator[None]:
        """Context in which a checkpoint is made, and nothing moves."""
        lends = copies and self.lends and self._has_spares(source)
        owners = self._offloaded[source].owners
        snapshot = self._snapshots[source] = Snapshot(owners, self._transfers, copies, self._has_worker, lends)
        try:
            with (
                self._masters.verified(source),
                self._masters.copied_whole() if lends else nullcontext(),
                snapshot.taken(),
            ):
                yield
        finally:
            self._snapshots.pop(source, None)

    def share(self) -> None:
        """Have saves get shared memory from now on, as a worker process writes them: lent buffers, or copies."""
        self._has_worker = True
        slabs = [slab for each in self._offloaded.values() for slab in each.slabs]
        self.lends = has_files_for_buffers(len(slabs))
        if self.lends:
            self._transfers.finish_out()
            for some in batched(slabs, PINNING_THREADS):  # so that few slabs have two buffers meanwhile
                for slab, buffer in zip(some, self._shared_hosts(some) if self.lends else (), strict=False):
                    slab.share_host(buffer)

    def _has_spares(self, source: Source) -> bool:
        """Return whether every slab has a second host buffer. They are made for the first save."""
        lacking = [slab for slab in self._offloaded[source].slabs if slab.spare is None]
        for slab, buffer in zip(lacking, self._shared_hosts(lacking), strict=False):
            slab.spare = buffer
        return self.lends

    def _shared_hosts(self, slabs: Sequence[Slab]) -> list[SharedHostBuffer]:
        """Return a host buffer for each slab that it can lend, page-locked; none where that cannot be.

        From then on saves get copies, which takes longer; it is said.
        """
        needed = sum(slab.nbytes for slab in slabs)
        try:
            if needed > (free := free_for_each_rank()):
                raise ValueError(f"each rank of this node needs {needed} bytes of host memory, and can have {free}")
            buffers = [SharedHostBuffer(slab.nbytes) for slab in slabs]
            if self._pin_near is not None:
                pin(buffers, self._pin_near)
        except (ValueError, RuntimeError) as error:
            self.lends = False
            for each in self._offloaded.values():
                for slab in each.slabs:
                    slab.drop_spare()
            self._warn(f"a background save gets copies of the states, which takes longer: {error}")
            return []
        return buffers

    # A load.

    @contextmanager
    def loading(self, source: Source, everything: bool = False) -> Iterator[None]:
        """Context in which states are loaded to where they are; see `Engine.loading`."""
        if source in self._snapshots:  # mcore's methods call each other
            yield
            return
        self._masters.give_up(source)
        with self._masters.trusted(source), self._masters.copied_whole():
            with self._transfers.computing():  # whose memory slabs are
                self._send_whole(source, everything)
            loading = self._snapshots[source] = Loading(self._offloaded[source].owners, self._transfers)
            try:
                with loading.taken():
                    yield
            finally:
                self._snapshots.pop(source, None)

    def _send_whole(self, source: Source, everything: bool) -> None:
        """Make the states that the first step would make, slab by slab, and have the host get what it has in part.

        With `everything` what else is on the GPU, and may leave, leaves too.
        """
        for part in self._offloaded[source].parts:
            for slab in part.slabs:
                is_new = not slab.exists()
                if is_new:
                    _make(slab.states)
                leaves = everything and not part.stays and slab.state is not SlabState.RELEASED
                if (is_new or leaves or slab.is_encoded) and slab.exists():
                    slab.send_away()
                elif everything and slab.state is not SlabState.RELEASED:
                    slab.require_writable()  # it is loaded where it is
        for bundle in source.states():
            _make(bundle.states)  # of those that are not offloaded

    def load_begins(self, source: Source) -> None:
        """Note that states of a source are about to be overwritten; see `Engine.load_begins`."""
        self._half_loaded.add(source)

    def load_ends(self, source: Source) -> None:
        """Note that the states of a source have been overwritten."""
        self._half_loaded.discard(source)

    def require_loaded(self, sources: Iterable[Source], what: str) -> None:
        """Raise RuntimeError where a load of one of some sources has failed; `what` is to be done ("saved")."""
        if not self._half_loaded.isdisjoint(sources):
            raise RuntimeError(
                f"the optimizer state cannot be {what}: the load of a checkpoint ended in an error after some states "
                "were overwritten and before others were; load a checkpoint that is whole"
            )

    def make_states(self, source: Source, make: Callable[[], None]) -> None:
        """Have states made part by part; see `Engine.make_states`."""
        with source.making(make, self._offloaded[source].owners) as of_part:
            self.by_part(source, of_part)

    def rewrite_weights(self, source: Source, copy: Callable[[], object]) -> None:
        """Have masters copied to the weights part by part; see `Engine.rewrite_weights`."""
        self._copy_by_part(source, copy, writes=False)

    def rewrite_masters(self, source: Source, copy: Callable[[], Any]) -> Any:
        """Have masters made of the weights part by part; return what the last `copy` does."""
        with self._masters.trusted(source), self._masters.copied_whole():
            return self._copy_by_part(source, copy, writes=True)

    def _copy_by_part(self, source: Source, copy: Callable[[], Any], writes: bool) -> Any:
        parts = self._offloaded[source].parts
        result = None

        def of_part(part: Part | None) -> None:
            nonlocal result
            with source.rewriting(part, parts):
                result = copy()

        self.by_part(source, of_part, masters_only=True, writes=writes)
        return result

    def by_part(
        self, source: Source, act: Callable[[Part | None], None], masters_only: bool = False, writes: bool = True
    ) -> None:
        """Call `act` for one part after another, whose states are on the GPU, and with None for what belongs to none.

        States that were away, or that `act` has made, leave before the next part comes. With `masters_only` only
        masters come. Where `act` writes, the host's copies are stale after it.
        """
        with self._transfers.computing():  # whose memory slabs are
            for part in self._offloaded[source].parts:
                slabs = [slab for slab in part.slabs if slab.written_back or not masters_only]
                leaving = [slab for slab in slabs if slab.state is SlabState.RELEASED or not slab.exists()]
                for slab in slabs:
                    slab.require_writable()
                act(part)
                for slab in leaving:
                    if not slab.exists():
                        continue
                    if writes:
                        slab.send_away()
                    else:
                        slab.release_unchanged()
            act(None)

    def loading_of(self, source: Source) -> Loading:
        """Return the load of a source that is under way."""
        loading = self._snapshots[source]
        assert isinstance(loading, Loading)
        return loading


def _make(states: Iterable[State]) -> None:
    for state in states:
        if state.make is not None and state.read() is None:
            with own():  # of a master that is away its shape is enough
                state.make()
