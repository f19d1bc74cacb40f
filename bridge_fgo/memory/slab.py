"""A slab: whole tensors with one GPU allocation and one host buffer of the same layout, which move as one.

`SlabState` says where the bytes of a slab are. The verbs of `SlabStateMachine` move it, in any order. `Slab` has the
actions behind the verbs, and the memory: on the GPU, on the host and, for a slab that is encoded, the staging memory
that is copied in its place. Nothing else decides whether a state tensor may be read or written.
"""

from __future__ import annotations

import enum
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import override

import torch

from bridge_fgo.memory.guard import Guard, Touches, Views, empty, fill, first_byte, lies_in, own, rebind
from bridge_fgo.memory.host_buffer import HostBuffer, SharedHostBuffer
from bridge_fgo.memory.layout import Codec, PartBytes, SlabPlace
from bridge_fgo.memory.meters import Ledger, Traffic
from bridge_fgo.memory.remainders import MastersMove
from bridge_fgo.memory.state_tensor import State, local
from bridge_fgo.memory.transfers import Transfers

MOST_IN_TRANSIT = 4  # slabs that are copied at once where all move: staging memory comes on top of theirs

AWAY = (
    "offloaded optimizer state was used in a way that does not bring it back (by a kernel of an extension, a "
    "collective, a view that C++ code or gc.freeze() hides, or another thread during a step): call "
    "bridge_fgo.reload_states() first, or Residency.reload('optimizer'), between steps and on the thread that trains"
)
"""The error that such code gets."""
HIDDEN = (
    "cannot move with its slab: a view of it, which would keep old bytes, cannot be found, as gc.freeze() hides it or "
    "C++ code alone holds it: call gc.unfreeze(), or let go of the view"
)
SPANNING = (
    "cannot move with its slab: a tensor of shape {}, which would keep old bytes, spans it and other memory, or is of "
    "one that is not contiguous: let go of that, or give states memory of their own: "
    "state.data = state.data.clone().contiguous()"
)
_slabs: weakref.WeakSet[Slab] = weakref.WeakSet()


class SlabState(enum.Enum):
    """Where the bytes of a slab are."""

    RESIDENT = "resident"  # on the GPU; to be used on the training stream, and on that of whoever asked for it
    OFFLOADING = "offloading"  # a copy to the host is under way; the GPU copy is still there and readable
    RELEASED = "released"  # only the host copy is valid; the GPU memory is gone
    RELOADING = "reloading"  # GPU memory is allocated again and a copy to it is under way; not readable yet


class StillShared(RuntimeError):
    """GPU memory cannot be freed, because somebody else holds it. Nothing has changed."""


class SlabStateMachine(ABC):
    """The state of one slab, or of all that one of mcore's own offloaders moves.

    A subclass supplies the five actions, each of which is called only in the state that it is valid in. A verb does
    nothing where the present state does not call for it, so verbs may be called in any order and any number of times: a
    pass that is run again, a skipped step and an early exit need no special case.

    In any state but RESIDENT the tensors are guarded: whatever touches one gets the states back, writable, so that no
    list of readers and writers has to be complete.
    """

    state_bytes = 0  # bytes of the states

    def __init__(self, touches: Touches | None = None) -> None:
        self._state = SlabState.RESIDENT
        self.touches = touches or Touches()
        self._guard = Guard(self._touched)
        # type of the exception that interrupted an action, other than an error that leaves the slab as it was
        self.interrupted = ""

    def tensors(self) -> Iterable[torch.Tensor]:
        """Return the tensors of the states that exist, as others hold them."""
        return ()

    @abstractmethod
    def _start_offload(self) -> None:
        """Start the copy to the host, after all work queued on the current stream."""

    @abstractmethod
    def _release(self) -> None:
        """Free the GPU memory; it must not be reused before the copy to the host has read it."""

    @abstractmethod
    def _give_up_offload(self) -> None:
        """Free what only the copy to the host needed: nobody will use that copy."""

    @abstractmethod
    def _start_reload(self) -> None:
        """Allocate GPU memory and start the copy to it, after the copy to the host has ended."""

    @abstractmethod
    def _wait_reload(self) -> None:
        """Make the current stream wait for the copy to the GPU."""

    @property
    def state(self) -> SlabState:
        """The present state; RuntimeError where an action was interrupted, so that it is not known."""
        if self.interrupted:
            raise RuntimeError(
                f"the optimizer state cannot be used: {self.interrupted} came while a part of it was on "
                "its way between GPU and host; build the optimizer anew and resume from the last checkpoint"
            )
        return self._state

    def _do(
        self, action: Callable[[], None], becomes: SlabState, failures: tuple[type[RuntimeError], ...] = (RuntimeError,)
    ) -> None:
        """Do an action and note the state after it, or neither.

        Ctrl-C, a signal's handler or a restart in process may interrupt any line between. `failures` are what the
        action raises where it fails and leaves the slab as it was. A handler that raises RuntimeError (PyTorch's for a
        DataLoader's worker that died does) is told from a failure in `_release` alone.
        """
        if self._state is SlabState.RESIDENT:
            self._guard.put_on(self.tensors())
        try:
            with own():
                action()
            self._state = becomes
        except failures:
            raise
        except BaseException as error:
            self.interrupted = type(error).__name__
            raise
        finally:
            self._take_off_guard()

    def _take_off_guard(self) -> None:
        if self._state is SlabState.RESIDENT and not self.interrupted:
            self._guard.take_off()

    def _touched(self, tensor: torch.Tensor) -> None:
        """Make the states readable and writable for whoever touches a tensor of them, or raise RuntimeError."""
        was_away = self.state is SlabState.RELEASED
        if refusal := self.touches.refusal():
            raise RuntimeError(f"{self.name_of(tensor)} was used, and its memory is away: {refusal}")
        with torch.inference_mode(False), torch.no_grad():  # else what is made for it could not be written outside
            self.require_writable()
        self._take_off_guard()  # also where something came between a move and its note
        self.touches.count(self.state_bytes if was_away else 0)

    def name_of(self, tensor: torch.Tensor) -> str:
        """Return what to call one of the tensors in a message."""
        return "optimizer state"

    def offload(self, start: Callable[[], None] | None = None) -> None:
        """Start the copy to the host, from RESIDENT or RELOADING: by `start`, if given, not by `_start_offload`."""
        if self.state is SlabState.RELOADING:
            # Race: the copy to the host would read GPU memory that the reload has not filled yet, and
            # write the host buffer that the reload still reads.
            self._do(self._wait_reload, SlabState.RESIDENT)
        if self._state is SlabState.RESIDENT:
            self._do(start or self._start_offload, SlabState.OFFLOADING)

    def release(self) -> None:
        """Free the GPU memory of an OFFLOADING slab."""
        if self.state is SlabState.OFFLOADING:
            # Memory that was freed cannot be had back; before it is freed, only these can be raised.
            self._do(self._release, SlabState.RELEASED, (torch.OutOfMemoryError, StillShared))

    def release_unchanged(self) -> None:
        """Free the GPU memory of a RESIDENT slab of which the caller knows that the host's copy is the same."""
        if self.state is SlabState.RESIDENT:
            self._do(self._release, SlabState.RELEASED, (torch.OutOfMemoryError, StillShared))

    def reload(self) -> None:
        """Start the copy to the GPU; a slab that was not released stays there, and its offload is given up."""
        if self.state is SlabState.RELEASED:
            self._do(self._start_reload, SlabState.RELOADING)
        else:
            self._keep()

    def _keep(self) -> None:
        if self.state is SlabState.OFFLOADING:
            self._do(self._give_up_offload, SlabState.RESIDENT)

    def reloaded(self) -> None:
        """Note that what `_wait_reload` does for a RELOADING slab was done together with others'."""
        self._state = SlabState.RESIDENT
        self._take_off_guard()

    def require_readable(self) -> None:
        """Make the states readable by work that the current stream gets from now on."""
        if self.state is SlabState.RELEASED:
            self.reload()
        if self._state is SlabState.RELOADING:
            self._do(self._wait_reload, SlabState.RESIDENT)

    def require_writable(self) -> None:
        """Do as `require_readable`, and give up an offload under way: its host copy will be stale."""
        self.require_readable()
        self._keep()

    def send_away(self) -> None:
        """Copy the states to the host as they are now, and free the GPU memory."""
        self.require_writable()  # a copy out under way may be of what they were
        self.offload()
        self.release()


class Slab(SlabStateMachine):
    """One slab: state tensors that share one GPU allocation, and host memory of the same layout.

    The tensors keep their identity. Only the storage behind each moves into the slab, so every holder of one (param
    groups, the keys of `optimizer.state`, `param.main_param`) goes on seeing it. Of states that have a home, the
    storage, as it is, is the slab's GPU memory, emptied and filled.

    Host memory is one buffer, or several that take turns: while a checkpoint's writer reads one, or a crash's record
    names it, copies out go to another. A buffer is lent only while another stays free, so that a copy out, which starts
    in mid-step, neither waits nor allocates.
    """

    def __init__(
        self, place: SlabPlace, device: torch.device, transfers: Transfers, ledger: Ledger, traffic: Traffic
    ) -> None:
        super().__init__(traffic.touches)
        self.transfers = transfers
        self.traffic = traffic
        self._ledger = ledger
        self.layout = place.layout
        self.states = place.states
        self.written_back = place.written_back
        self.codec: Codec = place.codec
        self.nbytes = place.layout.nbytes  # of the slab, on the GPU and on the host alike
        self.block_bytes = ledger.block_bytes(self.nbytes)  # of GPU memory that it takes
        self.state_bytes = sum(state.nbytes for state in place.states)  # without what lies between the states
        self._staging_bytes = ledger.block_bytes(place.codec.staging_bytes)
        # the most GPU memory that it holds: while it is on its way
        self.transit_bytes = self.block_bytes + self._staging_bytes
        self.gpu: torch.Tensor | None = None  # uint8 [nbytes]; its storage is empty while released
        self._storage: torch.UntypedStorage | None = None  # of `gpu`; PyTorch would make an object around it each time
        self._views: Views | None = None  # that other code has made of the states
        self._make = partial(torch.empty, dtype=torch.uint8, device=device)
        self._is_in_place = any(state.home is not None for state in place.states)
        self.staging: torch.Tensor | None = None
        """What is copied in place of the slab, uint8 [codec.staging_bytes]; on the GPU while the slab is on its way. In
        one allocation with the slab the allocator reserved 0.75 GB more on an H200 (of 19.7 GB of states)."""
        # `staging` and its storage, emptied or not: cheaper for the host than new ones
        self._staging_home: tuple[torch.Tensor, torch.UntypedStorage] | None = None
        self.is_encoded = False  # whether `staging` was in the newest copy out, until it is decoded
        self.host: HostBuffer = HostBuffer(self.nbytes)  # copies out write it, copies in read it
        self.spares: list[HostBuffer] = []  # others, for while the bytes of `host` have to stay
        self.least_spares = 0  # how many of them it has, also where none is lent
        _slabs.add(self)

    @override
    def tensors(self) -> Iterator[torch.Tensor]:
        for state in self.states:
            yield from state.handles()
        if self._views is not None:
            yield from self._views.find()

    @override
    def name_of(self, tensor: torch.Tensor) -> str:
        names = (state.name for state in self.states if any(tensor is each for each in state.handles()))
        return f"optimizer state {next(names, '')!r} of shape {tuple(tensor.shape)}"

    def exists(self) -> bool:
        """Return whether any tensor of the slab exists; moments are made by the first step."""
        for state in self.states:  # noqa: SIM110 - asked several times a step, and `any` takes twice as long
            if state.read() is not None:
                return True
        return False

    # The five actions.

    def _start_offload(self) -> None:
        self._copy_out(encoded=False)

    def start_encoded(self) -> None:
        """Start the copy out of a slab that `encode_together` has encoded, in place of `_start_offload`."""
        self._copy_out(encoded=True)

    def _copy_out(self, encoded: bool) -> None:
        with self.traffic:
            try:
                self.own_host()
                written = False
                if encoded:
                    self.is_encoded = True
                else:
                    written = self.adopt()
                    if self.codec.family is not None:
                        with self.transfers.computing():
                            written = _encode([self]) or written
                self.transfers.copy_out(self, written)
            except BaseException:
                self.is_encoded = self.codec.just_rounded = False  # it was not copied
                raise
        self.traffic.out += self.moving.numel()

    def _release(self) -> None:
        with self.traffic:
            self.transfers.release(self)
        self.traffic.release(self.state_bytes)

    def _give_up_offload(self) -> None:
        if self.staging is not None:
            with self.traffic:
                self.transfers.wait_out(self)
                self.drop_staging()
        self.is_encoded = False

    def _start_reload(self) -> None:
        self.touches.may_write()
        with self.traffic:
            self.transfers.copy_in(self)
        self.traffic.back += self.moving.numel()
        self.traffic.released -= self.state_bytes

    def _wait_reload(self) -> None:
        if self.is_encoded:
            _verify([self])
        with self.traffic:
            self.transfers.wait_in(self)
            if self.is_encoded:
                with self.transfers.computing():
                    _decode([self])

    @override
    def require_writable(self) -> None:
        self.host.before_update()
        super().require_writable()

    @override
    def release_unchanged(self) -> None:
        if self.transfers.keeps_host_copies:
            super().release_unchanged()
        elif self.state is SlabState.RESIDENT:  # debug mode has overwritten the host's copy
            self.send_away()

    # GPU memory.

    @property
    def gpu_bytes(self) -> int:
        """Bytes of GPU memory that the slab holds now."""
        whole = self.block_bytes if self._storage is not None and self._storage.nbytes() else 0
        return whole if self.staging is None else whole + self._staging_bytes

    @property
    def moving(self) -> torch.Tensor:
        """GPU memory that is copied, uint8: the staging memory where the slab is encoded, else the slab."""
        moving = self.staging if self.is_encoded else self.gpu
        assert moving is not None
        return moving

    @property
    def move(self) -> MastersMove:
        """The slab as `Remainders` encode and decode it."""
        assert self.gpu is not None and self.staging is not None
        return self.codec, self.gpu, self.staging

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lives in the slab's GPU memory, be it released or not."""
        return self._storage is not None and tensor.untyped_storage()._cdata == self._storage._cdata

    def adopt(self) -> bool:
        """Move every tensor that is not in the slab yet into it, bit for bit, on the current stream; return if one was.

        Needed before the first offload, and again for tensors that a checkpoint load replaced. One that was made
        without memory is made here (`State.take_first`). The memory that a tensor had before goes back to the
        allocator, so for a moment one slab is held twice. Raises RuntimeError, and moves nothing, where a tensor is not
        of the size that was planned.
        """
        if self._is_in_place:
            return self._take_in_place()
        gpu = self.gpu
        if gpu is None:
            gpu = self._ledger.change(self.block_bytes, self._make, self.nbytes)
            self._live_in(gpu)
        return self._bind(gpu, copy=True)

    def _bind(self, gpu: torch.Tensor, copy: bool) -> bool:
        """Make `gpu` (uint8 [nbytes]) the memory behind every tensor, its bytes copied or not; return if it was not."""
        for state in self.states if copy else ():
            if (tensor := state.read()) is not None and not self.holds(tensor):
                self._guard.touch_if_others(tensor)  # it has changed places with one of a slab that is offloaded
        address = gpu.data_ptr()
        strangers = [
            (state, tensor, offset)
            for state, offset in zip(self.states, self.layout.offsets, strict=True)
            if (tensor := state.read()) is not None and tensor.data_ptr() != address + offset
        ]
        for state, tensor, _ in strangers:
            state.check_size(tensor)
        # Each is known by itself, and by the storage that is asked for. All first: one look finds the views of all.
        views = [Views(tensor, users=2, is_owners=False) for _, tensor, _ in strangers if copy]
        self._require_found(views)
        for others, (state, tensor, _) in zip(views, strangers, strict=False):
            spanning = others.that_span(tensor)
            known = {id(each) for each in _known()} if spanning else ()
            for each in spanning:
                if id(each) not in known:
                    raise StillShared(f"{state.name!r} {SPANNING.format(tuple(each.shape))}")
        self._live_in(gpu)
        if copy and strangers:
            moved = [tensor for _, tensor, _ in strangers if self.holds(local(tensor))]
            self._leave_to_others([(state, offset) for state, _, offset in strangers], moved)
        moving = [
            (view, offset + first_byte(view) - first_byte(tensor))
            for others, (_, tensor, offset) in zip(views, strangers, strict=False)
            for view in others.find()
            if view is local(view) and lies_in(view, tensor)
        ]
        # States may have changed places within the slab: the first copy would overwrite a state that is copied later.
        kept = {id(tensor): tensor.clone() for _, tensor, _ in strangers if copy and self.holds(local(tensor))}
        for state, tensor, offset in strangers:
            home = gpu[offset : offset + state.nbytes].view(tensor.dtype).view(tensor.shape)
            if copy:
                first = state.take_first()
                home.copy_(kept.get(id(tensor), tensor) if first is None else first)
            tensor.data = home
        for view, place in moving:
            rebind(view, gpu.untyped_storage(), place)
        if strangers and self._views is not None:
            others = [view for view, _ in moving]
            self._guard.put_on(others)  # those of the slab are already
            self._views.add((tensor for _, tensor, _ in strangers), others)
        return bool(strangers)

    def _require_found(self, all_views: Iterable[Views]) -> None:
        """Raise StillShared if others hold views that cannot be found: they would be stale once the states move."""
        for each in {views.place: views for views in all_views}.values():
            if each.hides_some(_known()):
                raise StillShared(f"{self.states[0].name!r} {HIDDEN}")

    def _leave_to_others(self, places: list[tuple[State, int]], moved: list[torch.Tensor]) -> None:
        """Have views of what was in the place of some states, which others have put elsewhere, keep it elsewhere.

        Views of states that have `moved` within the slab follow these.
        """
        assert self._views is not None and self.gpu is not None
        self._views.keep(tensor for state in self.states if (tensor := state.read()) is not None and self.holds(tensor))
        self._require_found([self._views])
        views = self._views.find()
        for state, offset in places if views else ():
            place = self.gpu[offset : offset + state.nbytes]
            stays = [view for view in views if not any(lies_in(view, each) for each in moved)]
            if inside := [view for view in stays if view is local(view) and lies_in(view, place)]:
                kept = place.clone().untyped_storage()
                for view in inside:
                    rebind(view, kept, first_byte(view) - offset)

    def _take_in_place(self) -> bool:
        """Take the storage that all states of the slab are in as its GPU memory; return False: nothing is written."""
        tensors = [state.read() for state in self.states]
        first = tensors[0]
        if first is None:
            return False
        storage = first.untyped_storage()
        for state, tensor, offset in zip(self.states, tensors, self.layout.offsets, strict=True):
            assert tensor is not None, f"{state.name!r} has a home and does not exist"
            state.check_size(tensor)
            is_there = tensor.untyped_storage()._cdata == storage._cdata
            if not is_there or storage.nbytes() != self.nbytes or tensor.storage_offset() * tensor.itemsize != offset:
                raise RuntimeError(
                    f"{state.name!r} is not at byte {offset} of a storage of {self.nbytes} bytes, but at "
                    f"{tensor.storage_offset() * tensor.itemsize} of one of {tensor.untyped_storage().nbytes()}: only "
                    "a whole storage can be emptied in place"
                )
        if not self.holds(first):
            self._ledger.change(self.block_bytes - self.gpu_bytes, self._live_in, self._make(0).set_(storage))
            self._guard.put_on(self.tensors())
        return False

    def _live_in(self, gpu: torch.Tensor | None) -> None:
        if gpu is not self.gpu:
            self.gpu, self._storage = gpu, None if gpu is None else gpu.untyped_storage()
            # In the home of states others have views already.
            self._views = None if gpu is None else Views(gpu, users=0 if self._is_in_place else None)

    def allocate(self) -> None:
        """Allocate GPU memory again for the tensors and for what is copied; its content is undefined."""
        storage = self._storage
        assert storage is not None
        was_empty = not storage.nbytes()
        if was_empty:
            self._ledger.change(self.block_bytes, fill, storage, self.nbytes, AWAY)
        if self.is_encoded and self.staging is None:
            try:
                self._take_staging()
            except torch.cuda.OutOfMemoryError:
                if was_empty:  # else nobody would free it: the slab is still RELEASED
                    self._ledger.change(-self.block_bytes, empty, storage, AWAY)
                raise

    def free(self) -> None:
        """Free the GPU memory; the tensors keep their shape and device.

        Memory that a checkpoint writer shares with the slab (by numpy or another process) cannot be emptied under it.
        Then the tensors move to an allocation of their own, and the old one goes with the writer.
        """
        self._ledger.change(-self.gpu_bytes, self._free)

    def _free(self) -> None:
        assert self.gpu is not None and self._storage is not None
        if not self._storage.resizable():
            if self._is_in_place:
                raise StillShared(
                    f"{self.states[0].name!r} cannot be emptied: something (numpy, another process) shares its memory"
                )
            assert self._views is not None
            self._require_found([self._views])
            views, gpu = self._views.find(), torch.empty_like(self.gpu)
            self._bind(gpu, copy=False)
            for view in views:
                if view is local(view):
                    rebind(view, gpu.untyped_storage(), first_byte(view))
        empty(self._storage, AWAY)
        self._empty_staging()

    def drop_if_left(self) -> None:
        """Free the GPU memory where no tensor lives in it any more, because all were replaced."""
        tensors = (state.read() for state in self.states)
        if self.gpu_bytes and not any(tensor is not None and self.holds(tensor) for tensor in tensors):
            self._ledger.change(-self.gpu_bytes, self._let_go)

    def _let_go(self) -> None:
        self._empty_staging()
        self._live_in(None)

    # Staging memory: what is copied in the slab's place.

    @property
    def stepping_bytes(self) -> int:
        """Bytes of GPU memory that the slab holds from its reload for the optimizer step to its release."""
        return self.transit_bytes if self.codec.encodes else self.block_bytes

    def reserve(self) -> bool:
        """Allocate the staging memory of `_encode`, before a step that may take it; return if there was as much."""
        with suppress(torch.cuda.OutOfMemoryError):
            self._take_staging()
        return self.staging is not None

    def _take_staging(self) -> None:
        nbytes = self.codec.staging_bytes
        if self._staging_home is None:
            memory = self._ledger.change(self._staging_bytes, self._make, nbytes)
            self._staging_home = memory, memory.untyped_storage()
        else:
            self._ledger.change(self._staging_bytes, self._staging_home[1].resize_, nbytes)
        self.staging = self._staging_home[0]

    def drop_staging(self) -> None:
        """Free the staging memory; what reads or writes it must be ordered before."""
        if self.staging is not None:
            self._ledger.change(-self._staging_bytes, self._empty_staging)

    def _empty_staging(self) -> None:
        if self.staging is not None and self._staging_home is not None:
            self._staging_home[1].resize_(0)
            self.staging = None

    # Host memory, and lending it to a checkpoint's writer in place of a copy.

    def host_view(self, tensor: torch.Tensor, offset: int) -> torch.Tensor:
        """Return the host buffer at an offset in bytes as a tensor like one that lives there."""
        return self.host.for_host()[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def share_host(self, buffer: SharedHostBuffer) -> None:
        """Use a buffer that can be lent, with the same bytes, from now on; no copy out may be under way."""
        buffer.tensor.copy_(self.host.tensor)
        before, self.host = self.host, buffer
        before.close()
        self.transfers.forget(before.address)

    @property
    def is_lent(self) -> bool:
        """Whether a checkpoint's writer may still read the host buffer."""
        return self.host.is_lent

    @property
    def can_lend(self) -> bool:
        """Whether the host buffer may be lent, for the first time or once more: another stays free."""
        return sum(not spare.is_lent for spare in self.spares) > self.least_spares

    def lend(self, tensor: torch.Tensor, offset: int) -> torch.Tensor:
        """Return the host memory of a tensor at an offset in bytes, which nothing writes until it goes."""
        assert isinstance(self.host, SharedHostBuffer) and self.can_lend
        return self.host.lend(tensor, offset)

    def own_host(self, keep: bool = False) -> None:
        """Make sure that the host buffer, which is about to be written, is not taken; `keep`: its bytes stay."""
        taken = self.host
        taken.before_write()
        if not taken.is_taken:
            return
        # Race: for minutes a checkpoint's writer reads the buffer; it would save what is written there now.
        place = next(place for place, spare in enumerate(self.spares) if not spare.is_taken)
        if keep:
            self.spares[place].tensor.copy_(taken.tensor)
        self.host, self.spares[place] = self.spares[place], taken

    def drop_spares(self) -> None:
        """Let go of a buffer that was made to lend the other, as none is lent any more; a writer keeps what it has."""
        if self.least_spares or not self.spares:  # those that are kept take turns anyway
            return
        self.transfers.finish_out()  # Race: of a buffer that is lent, what has not landed would not be in the other.
        self.own_host(keep=True)
        for spare in self.spares:
            self.transfers.forget(spare.address)
            spare.close()
        self.spares = []

    @property
    def hosts(self) -> list[HostBuffer]:
        """All its host buffers."""
        return [self.host, *self.spares]

    def close(self) -> None:
        """Let go of the host memory; the tensors stay in the slab's GPU memory, which counts no more."""
        self._ledger.change(-self.gpu_bytes, self._close_host)

    def _close_host(self) -> None:
        for host in self.hosts:
            host.close()


class Part(PartBytes):
    """Parameters that are updated in one go, and the slabs of their states (masters, moments, or one of them)."""

    def __init__(self, params: list[torch.Tensor], slabs: list[Slab]) -> None:
        super().__init__(sum(slab.block_bytes for slab in slabs), sum(slab.transit_bytes for slab in slabs))
        self.params, self.slabs = params, slabs
        self.ids = frozenset(id(param) for param in params)
        # whether some of its states are copied to the model's weights once they are updated
        self.written_back = any(slab.written_back for slab in slabs)

    def mark_just_rounded(self) -> None:
        """Note that its states were just copied to the weights that they round to: to encode them needs no check."""
        for slab in self.slabs:
            if self.stays:
                slab.drop_staging()
            else:
                slab.codec.just_rounded = slab.written_back and slab.codec.family is not None


# Several slabs.


def _known() -> Iterator[torch.Tensor]:
    for slab in _slabs:
        for state in slab.states:
            yield from state.handles()
        yield from (host.tensor for host in slab.hosts)


def require_readable(slabs: Iterable[Slab]) -> None:
    """Have work that the current stream gets from now on find the slabs' tensors readable."""
    for _ in landing(slabs):
        pass


def landing(slabs: Iterable[Slab]) -> Iterator[Slab]:
    """Yield each slab once work that the current stream gets next finds it readable, while others are copied."""
    coming: deque[Slab] = deque()
    for slab in slabs:
        if slab.state is SlabState.RELEASED:
            slab.reload()
        coming.append(slab)
        if len(coming) == MOST_IN_TRANSIT:
            coming[0].require_readable()
            yield coming.popleft()
    for slab in coming:
        slab.require_readable()
        yield slab


def send_off(slabs: Sequence[Slab]) -> None:
    """Start the copies out of slabs whose tensors exist; those that take staging memory for it are released soon."""
    encoded = encode_together(slabs)
    leaving: deque[Slab] = deque()
    with slabs[0].transfers.back_to_back() if slabs else nullcontext():
        for slab in slabs:
            if slab.state in (SlabState.RESIDENT, SlabState.RELOADING) and slab.exists():
                slab.offload(slab.start_encoded if slab in encoded else None)
                if slab.is_encoded and slab not in encoded:
                    leaving.append(slab)
                if len(leaving) == MOST_IN_TRANSIT:
                    leaving.popleft().release()


def decode_together(slabs: Sequence[Slab]) -> None:
    """Wait for those of some slabs that are RELOADING, and decode them by one launch, not one each.

    Where none is encoded, nothing is waited for: each slab is when it is used. The slabs keep their staging memory, to
    be encoded in it again. RuntimeError, of `Remainders.verify` or the driver's, leaves the slabs as they were, unless
    it came from the launch for several: then they are lost.
    """
    coming = [slab for slab in slabs if slab.state is SlabState.RELOADING]
    encoded = [slab for slab in coming if slab.is_encoded]
    if not encoded:
        return
    first = encoded[0]
    _verify(encoded)
    with first.traffic:
        for slab in reversed(coming):  # the last lands last: for those before it nothing need wait
            first.transfers.wait_in(slab)
        try:
            with first.transfers.computing():
                _decode(encoded, keep_staging=True)
            for slab in coming:  # now: of one that counts as on its way the host's copy counts as its states
                slab.reloaded()
        except BaseException as error:
            for slab in encoded:  # of some the weights' sums may be gone, with which the masters would be checked
                if len(encoded) > 1 or not slab.is_encoded or not isinstance(error, RuntimeError):
                    slab.interrupted = type(error).__name__
            raise


def encode_together(slabs: Iterable[Slab]) -> set[Slab]:
    """Encode slabs that have staging memory by one launch; return those to be sent by `start_encoded` next."""
    ready = [
        slab
        for slab in slabs
        if slab.codec.encodes
        and slab.state is SlabState.RESIDENT
        and (slab.codec.just_rounded or slab.staging is not None)
    ]
    if len(ready) < 2:
        return set()
    first = ready[0]
    with first.traffic:
        for slab in ready:
            slab.adopt()
        with first.transfers.computing():
            _encode(ready)
    encoded = {slab for slab in ready if slab.is_encoded}
    for slab in encoded:
        slab.is_encoded = False  # until it is on its way
    return encoded


def _encode(slabs: Sequence[Slab]) -> bool:
    """Encode slabs on the current stream, where wanted and possible; return if any was enqueued.

    A slab is left whole where its encoding would lose something (a master is not what its weight was rounded from), or
    there is no memory for it.
    """
    encoding = []
    for slab in slabs:
        codec = slab.codec
        was_just_rounded, codec.just_rounded, slab.is_encoded = codec.just_rounded, False, False
        # Else it was kept since the slab was decoded, reserved, or a copy out has failed.
        if codec.encodes and (slab.staging is not None or slab.reserve()):
            encoding.append((slab, was_just_rounded))
    if encoding:
        slabs[0].codec.family.encode([slab.move for slab, _ in encoding])
    unsure = [slab.codec for slab, was_just_rounded in encoding if not was_just_rounded]
    lossy = slabs[0].codec.family.lossy(unsure) if unsure else []
    for slab, _ in encoding:
        slab.is_encoded = slab.codec not in lossy
        if not slab.is_encoded:
            slab.drop_staging()
    return bool(encoding)


def _decode(slabs: Sequence[Slab], keep_staging: bool = False) -> None:
    """Decode slabs, at least one, on the current stream; `keep_staging`: to be encoded again."""
    slabs[0].codec.family.decode([slab.move for slab in slabs])
    for slab in slabs:
        slab.is_encoded = False
        if not keep_staging:
            slab.drop_staging()


def _verify(slabs: Sequence[Slab]) -> None:
    """Raise RuntimeError where encoded slabs cannot be decoded; they are as they were then."""
    with slabs[0].transfers.computing():
        slabs[0].codec.family.verify([slab.codec for slab in slabs])
