"""Hands the native engine's states to a checkpoint's save, and puts loaded ones where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import batched
from typing import Any

import torch

from bridge_fgo.core.host_buffer import PINNING_THREADS
from bridge_fgo.core.host_memory import available_bytes, ranks_of_this_node
from bridge_fgo.core.loading import Loading
from bridge_fgo.core.residency import Residency
from bridge_fgo.core.shared_copies import OwnCopies, SharedCopies
from bridge_fgo.core.shared_host_buffer import SharedHostBuffer, has_files_for_buffers
from bridge_fgo.core.slab import Slab
from bridge_fgo.core.snapshot import Snapshot
from bridge_fgo.core.state import State
from bridge_fgo.core.transfers import Transfers
from bridge_fgo.engines.packed_masters import PackedMasters
from bridge_fgo.engines.share import Share, pin
from bridge_fgo.sources.source import Source


class Checkpoints:
    """Hands out states for a save or a load, of one source at a time or of several.

    Args:
        shares: what is offloaded of each source.
        transfers: the copies.
        masters: those that the host may have in part.
        pin_near: the GPU near which host memory is page-locked; None where it is not.
        warn: prints a line.
    """

    def __init__(
        self,
        shares: Mapping[Source, Share],
        transfers: Transfers,
        masters: PackedMasters,
        pin_near: torch.device | None,
        warn: Callable[[str], None],
    ) -> None:
        self._shares = shares
        self._transfers = transfers
        self._masters = masters
        self._pin_near = pin_near
        self._warn = warn
        self._snapshots: dict[Source, Snapshot] = {}
        self._copier = OwnCopies()
        self.lends = False
        """Whether a save gets host buffers lent in place of copies."""

    def is_away(self, source: Source) -> bool:
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
        owners = self._shares[source].owners
        snapshot = self._snapshots[source] = Snapshot(owners, self._transfers, copies, self._copier, lends)
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
        self._copier = SharedCopies(page_locks=self._pin_near is not None)
        slabs = [slab for share in self._shares.values() for slab in share.slabs]
        self.lends = has_files_for_buffers(len(slabs))
        if self.lends:
            self._transfers.finish_out()
            for some in batched(slabs, PINNING_THREADS):  # so that few slabs have two buffers meanwhile
                for slab, buffer in zip(some, self._shared_hosts(some) if self.lends else (), strict=False):
                    slab.share_host(buffer)

    def _has_spares(self, source: Source) -> bool:
        """Return whether every slab has a second host buffer. They are made for the first save."""
        lacking = [slab for slab in self._shares[source].slabs if slab.spare is None]
        for slab, buffer in zip(lacking, self._shared_hosts(lacking), strict=False):
            slab.spare = buffer
        return self.lends

    def _shared_hosts(self, slabs: Sequence[Slab]) -> list[SharedHostBuffer]:
        """Return a host buffer for each slab that it can lend, page-locked.

        None where that cannot be. From then on saves get copies, which takes longer; it is said.
        """
        needed, ranks = sum(slab.nbytes for slab in slabs), ranks_of_this_node()
        try:
            if ranks * needed > (free := available_bytes()):
                raise ValueError(f"{ranks} rank(s) of this node need {needed} bytes of host memory each, of {free}")
            buffers = [slab.make_shared_host() for slab in slabs]
            if self._pin_near is not None:
                pin(buffers, self._pin_near)
        except (ValueError, RuntimeError) as error:
            self.lends = False
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
            loading = self._snapshots[source] = Loading(self._shares[source].owners, self._transfers)
            try:
                with loading.taken():
                    yield
            finally:
                self._snapshots.pop(source, None)

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
                    slab.send_away()
        for bundle in source.states():
            _make(bundle.states)  # of those that are not offloaded

    def loading_of(self, source: Source) -> Loading:
        """Return the load of a source that is under way."""
        loading = self._snapshots[source]
        assert isinstance(loading, Loading)
        return loading

    def close(self) -> None:
        """Let go of memory for copies that is kept."""
        self._copier.close()


def _make(states: Iterable[State]) -> None:
    for state in states:
        if state.make is not None and state.read() is None:
            state.make()
