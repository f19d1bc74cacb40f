"""Checkpoints of the native engine: it hands states to a save, and puts loaded or rewritten ones in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import batched
from typing import Any

import torch

from bridge_fgo.config import readable
from bridge_fgo.engines.engine import Engine
from bridge_fgo.engines.offloaded_source import OffloadedSource
from bridge_fgo.engines.packed_masters import PackedMasters
from bridge_fgo.memory.guard import give_up, own
from bridge_fgo.memory.host_buffer import PINNING_THREADS, CopyFile, SharedHostBuffer, has_files_for_buffers, page_lock
from bridge_fgo.memory.host_memory import free_for_each_rank
from bridge_fgo.memory.slab import Part, Slab, SlabState, require_readable, send_off
from bridge_fgo.memory.slab_file import SlabFile
from bridge_fgo.memory.state_tensor import State
from bridge_fgo.memory.transfers import Transfers
from bridge_fgo.offload.schedule import Schedule
from bridge_fgo.offload.snapshot import Loading, Snapshot, States, Write
from bridge_fgo.states.source import Source

COPIES = "a background save gets copies of the states, which takes longer"


class CheckpointingEngine(Engine):
    """The part of the native engine that reads and writes states outside of a training step, part by part."""

    masters: PackedMasters
    schedule: Schedule
    transfers: Transfers
    _offloaded: dict[Source, OffloadedSource]
    _pins: bool  # whether host memory is page-locked
    file: SlabFile | None  # of slabs that the host has no room for
    host_room: float  # bytes of host memory that it, and a Residency of its states, may take yet

    def __init__(self) -> None:
        self._snapshots: dict[Source, Snapshot] = {}  # of those that are being saved or loaded
        self._half_loaded: set[Source] = set()  # some of their states may be overwritten by a load that has not ended
        self._has_worker = False  # whether a worker process writes what a save gets
        self._lends = False  # whether a save gets host buffers lent in place of copies
        self._said_whole: set[str] = set()

    def warn(self, text: str) -> None:
        """Print a line that concerns this rank."""
        self.schedule.holding.warn(text)

    def steps_whole(self, source: Source) -> bool:
        """Return whether a source's step cannot be divided; say once what keeps it whole."""
        why = source.kept_whole_by()
        if not why or why in self._said_whole:
            return bool(why)
        alike = [offloaded for each, offloaded in self._offloaded.items() if each.kept_whole_by() == why]
        if held := sum(slab.nbytes for offloaded in alike for slab in offloaded.slabs):
            self._said_whole.add(why)
            self.warn(
                f"the optimizer step is not divided, because of {why}: it may need every state, so that all "
                f"{readable(held)} that are offloaded are on the GPU in the optimizer step; take it away to save "
                "that memory there too"
            )
        return True

    def is_checkpointing(self, source: Source) -> bool:
        """Return whether a source is being saved or loaded, so that `hand_out` gives its states wherever they are."""
        return source in self._snapshots

    def hand_out(self, source: Source, param: torch.Tensor, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what `read` returns, the states of the optimizer parameter `param` by name, readable."""
        if source in self._snapshots:
            return self._snapshots[source].hand_out(param, read)
        part = self._offloaded[source].owners.get(id(param))
        if part is not None:
            require_readable(part.slabs)
        with own():
            return read()

    # Whether states may be used.

    def require_whole(self, source: Source, what: str) -> None:
        """Raise RuntimeError if an error ended a step, or a load, half-way; `what` is to be done ("saved")."""
        self.masters.require(source, what)
        self._require_loaded([source], what)
        self._require_untorn(what)

    def _require_untorn(self, what: str) -> None:
        if self.is_torn:
            raise RuntimeError(
                f"the optimizer state cannot be {what}: an error ended an optimizer step after some parameters were "
                "updated and before others were; build the optimizer anew and resume from the last checkpoint"
            )

    # A save.

    @contextmanager
    def saving(self, source: Source, copies: bool) -> Iterator[None]:
        """Context of a save: `hand_out` gives states, with `copies` safe to keep, else to be copied at once.

        RuntimeError if an error ended a step, or a load, half-way.
        """
        self.require_whole(source, "saved")
        lends = copies and self._lends and self._has_spares(source)
        offloaded = self._offloaded[source]
        # Whole: masters that are packed would be reloaded and unpacked for it.
        with self.masters.copied_whole(), self.transfers.computing():
            here = [slab for slab in offloaded.moving if slab.state is SlabState.RESIDENT and not slab.host.in_file]
            send_off(here)  # left to the next pass
        snapshot = self._snapshots[source] = Snapshot(offloaded.owners, self.transfers, copies, self._has_worker, lends)
        snapshot.file = self._file_for_copies(source) if copies else None
        whole = self.masters.copied_whole() if lends else nullcontext()
        try:
            with self.masters.verified(source), whole, snapshot.taken():
                yield
        finally:
            self._snapshots.pop(source, None)

    def _file_for_copies(self, source: Source) -> CopyFile | None:
        """Return a file for a save's copies, if states are in one: the host has no room for copies either."""
        sizes = [state.saved_nbytes for bundle in source.states() for state in bundle.states]
        try:
            return CopyFile(self.file.folder, sizes) if self.file is not None and sizes else None
        except ValueError as error:
            self.warn(f"a save takes host memory for copies of the states: {error}")
            return None

    def use_worker_memory(self) -> None:
        """Give checkpoints shared memory from now on, lent or copied: a worker process writes it."""
        self._has_worker = True
        every = [slab for each in self._offloaded.values() for slab in each.slabs]
        slabs = [slab for slab in every if not isinstance(slab.host, SharedHostBuffer)]  # others are shared already
        self._lends = has_files_for_buffers(len(slabs))
        needed = sum(slab.nbytes for slab in every)
        if self._lends and needed <= self.host_room:
            self.host_room -= needed
        elif self._lends:
            self._lends = False
            self.warn(f"{COPIES}: the limit of host memory has no room for a second buffer of each")
        if self._lends:
            self.transfers.finish_out()
            for some in batched(slabs, PINNING_THREADS):  # so that few slabs have two buffers meanwhile
                for slab, buffer in zip(some, self._shared_hosts(some) if self._lends else (), strict=False):
                    slab.share_host(buffer)

    def _has_spares(self, source: Source) -> bool:
        """Return whether every slab has a host buffer to spare. They are made for the first save."""
        lacking = [slab for slab in self._offloaded[source].slabs if len(slab.spares) == slab.least_spares]
        for slab, buffer in zip(lacking, self._shared_hosts(lacking), strict=False):
            slab.spares.append(buffer)
        return self._lends

    def _shared_hosts(self, slabs: Sequence[Slab]) -> list[SharedHostBuffer]:
        """Return a page-locked host buffer for each slab that it can lend; none if there is no memory.

        From then on saves get copies, which takes longer; a line says so.
        """
        needed = sum(slab.nbytes for slab in slabs)
        try:
            if needed > (free := free_for_each_rank()):
                raise ValueError(f"each rank of this node needs {needed} bytes of host memory, and can have {free}")
            buffers = [slab.host.to_lend() for slab in slabs]
            if self._pins:
                page_lock(buffers)
        except (ValueError, RuntimeError, MemoryError) as error:
            self._lends = False
            for each in self._offloaded.values():
                for slab in each.slabs:
                    slab.drop_spares()
            self.warn(f"{COPIES}: {error}")
            return []
        return buffers

    # A load.

    @contextmanager
    def loading(self, source: Source, everything: bool = False, masters: bool = False) -> Iterator[None]:
        """Context in which states are loaded from a checkpoint: `hand_out` says where to, and `put` writes them.

        With `everything` states that are on the GPU are offloaded first, so that nothing is loaded there; with
        `masters` every master is written inside the block.
        """
        if source in self._snapshots:  # mcore's methods call each other
            yield
        else:
            self.traffic.touches.may_write()
            self.masters.give_up(source)
            with self.masters.trusted(source), self.masters.copied_whole():
                with self.transfers.computing():  # whose memory slabs are
                    self._send_whole(source, everything)
                loading = self._snapshots[source] = Loading(self._offloaded[source].owners, self.transfers)
                try:
                    with loading.taken():
                        yield
                finally:
                    self._snapshots.pop(source, None)
        if masters:
            self.masters.overwritten(source)

    def _send_whole(self, source: Source, everything: bool) -> None:
        """Make the states that the first step would make, slab by slab; copy masters whole that the host has packed.

        With `everything` all other states that may be are offloaded too.
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

    def release_for_kept(self, source: Source) -> None:
        """Release every slab, also of states that no step has made: the host is about to have another process's."""
        with own(), self.transfers.computing():
            for slab in self._offloaded[source].slabs:
                if slab.state is not SlabState.RELEASED:
                    _make(slab.states)
                    slab.require_writable()
                    slab.adopt()
                    slab.release_unchanged()

    def put(
        self, source: Source, param: torch.Tensor, hand_out: Callable[[], object], loaded: States, write: Write
    ) -> None:
        """Put loaded states of the optimizer parameter `param` in their place; see `Loading.put`."""
        loading = self._snapshots[source]
        assert isinstance(loading, Loading)
        loading.put(param, hand_out, loaded, write)

    def load_begins(self, source: Source) -> None:
        """Note that states are about to be overwritten one after another: nothing may use them before `load_ends`."""
        self._half_loaded.add(source)

    def load_ends(self, source: Source) -> None:
        """Note that every state has been overwritten that was to be."""
        self._half_loaded.discard(source)
        self.states_replaced(source)

    def _require_loaded(self, sources: Iterable[Source], what: str) -> None:
        """Raise RuntimeError if a load of one of some sources has failed; `what` is to be done ("saved")."""
        if not self._half_loaded.isdisjoint(sources):
            raise RuntimeError(
                f"the optimizer state cannot be {what}: the load of a checkpoint ended in an error after some states "
                "were overwritten and before others were; load a checkpoint that is whole"
            )

    def states_replaced(self, source: Source) -> None:
        """Free the old tensors' memory; the next pass moves the new ones into the slabs."""
        for slab in self._offloaded[source].slabs:
            if slab.state is SlabState.RESIDENT:
                self.transfers.wait_out(slab)
                slab.drop_if_left()

    def give_up_masters(self, why: str) -> int:
        """Drop masters that cannot be decoded, so that `close` reloads the rest; return their bytes.

        A use of one of them is a RuntimeError with `why` from then on.
        """
        lost = self.masters.undecodable()
        with self.masters.trusted(*self.sources), self.masters.copied_whole():
            for slab in lost:
                if slab.state is not SlabState.RELEASED:
                    slab.send_away()
        for each in self._offloaded.values():
            each.forget(lost)
        self.masters.forget_lost()
        self.transfers.finish_all()  # Race: copies may still read or write the host memory that goes.
        for slab in lost:
            assert slab.gpu is not None
            give_up(slab.tensors(), slab.gpu.untyped_storage(), why)
            slab.close()
        return sum(slab.state_bytes for slab in lost)

    # Writers of all states, or of all masters, one part after another, so that they need not be on the GPU together.

    @contextmanager
    def overwriting_masters(self, source: Source, every: bool = True) -> Iterator[None]:
        """Context for overwriting `every` master. If it fails, and they were not right before, they are lost."""
        self.masters.give_up(source)
        with self.masters.trusted(source):
            self.require_writable(source)
        yield
        if every:
            self.masters.overwritten(source)

    def rewrite_masters(self, source: Source, copy: Callable[[], Any]) -> Any:
        """Call `copy`, which makes every master anew of the model's weights, part by part."""
        self.masters.give_up(source)
        with self.masters.trusted(source), self.masters.copied_whole():
            result = self._copy_by_part(source, copy, writes=True)
        self.masters.overwritten(source)
        return result

    def rewrite_weights(self, source: Source, copy: Callable[[], Any]) -> None:
        """Call `copy`, which makes the model's weights anew of every master, part by part if it can be divided."""
        if source.writes_back_by_part and not source.copy_kept_whole_by():
            self._copy_by_part(source, copy, writes=False)
        else:
            self.require_readable(source, masters_only=True)
            copy()

    def _copy_by_part(self, source: Source, copy: Callable[[], Any], writes: bool) -> Any:
        """Copy masters to weights, or weights to masters (`writes`); return what the last `copy` does."""
        parts = self._offloaded[source].parts
        result = None

        def of_part(part: Part | None) -> None:
            nonlocal result
            with source.rewriting(part, parts):
                result = copy()

        self._by_part(source, of_part, masters_only=True, writes=writes)
        return result

    def make_states(self, source: Source, make: Callable[[], None]) -> None:
        """Call `make`, which makes every state that does not exist, and may write those that do (`Source.making`)."""
        if self.steps_whole(source):
            self.require_writable(source)
            make()
        else:
            with source.making(make, self._offloaded[source].owners) as of_part:
                self._by_part(source, of_part)

    def _by_part(
        self, source: Source, act: Callable[[Part | None], None], masters_only: bool = False, writes: bool = True
    ) -> None:
        """Call `act` for each part, with its states (or `masters_only`) on the GPU, and with None for the rest.

        States that were offloaded, or that `act` has made, are offloaded before the next part is reloaded. If `act`
        writes, the host's copies are stale after it.
        """
        with self.transfers.computing():  # whose memory slabs are
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


def _make(states: Iterable[State]) -> None:
    for state in states:
        if state.make is not None and state.read() is None:
            with own():  # of a master that is away its shape is enough
                state.make()
