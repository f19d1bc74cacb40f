"""States for a checkpoint: read from the host, where the bytes of what is offloaded are, and loaded to it."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, override

import torch

from bridge_fgo.memory.guard import own
from bridge_fgo.memory.host_buffer import CopyFile, shared_copy
from bridge_fgo.memory.slab import Part, Slab, SlabState, require_readable
from bridge_fgo.memory.state_tensor import State
from bridge_fgo.memory.transfers import Transfers

States = Mapping[str, Any]  # of a parameter, by name
Write = Callable[[States], None]
Place = tuple[State, Slab, int]  # where a tensor is: its state, the slab, and the offset in it in bytes


class Snapshot:
    """Hands out the states of one optimizer as host tensors, and leaves slabs where they are.

    What a writer gets is its own: no tensor that it may hold on to (a background writer for minutes, a cache of CUDA
    handles for the whole run) shares memory with a slab, or that memory is lent and nothing writes it. So nothing has
    to wait for a writer, no later step can tear what it reads, and a released slab is gone (NeMo-RL #3312 and #4183,
    MLM #6544 tell what happens otherwise).

    `owners` has the part that offloads a parameter's states, by the `id` that the optimizer's has. Without `copies` a
    state that is on the host may be handed out as a view of its page-locked buffer, for a reader that copies it at
    once. With `shares` copies are in memory that a process that saves gets as it is. With `lends` a slab that can lends
    its host buffer; what is offloaded meanwhile is copied whole then.
    """

    most_borrowed = 4
    """Parts that are back on the GPU at once, for states that are read in another dtype and masters whose remainders
    are all that the host has: mcore asks in the order of its buffers and parts are in the order of param groups, so
    that two or three take turns."""

    def __init__(
        self, owners: Mapping[int, Part], transfers: Transfers, copies: bool, shares: bool = False, lends: bool = False
    ) -> None:
        self._owners = owners
        self._transfers = transfers
        self._copies = copies
        self._shares = shares
        self.file: CopyFile | None = None  # for copies, if the host has no room for these
        self._lends = lends
        self._borrowed: deque[list[Slab]] = deque()  # slabs that were released before, part by part
        self._here: list[Slab] = []  # slabs that were on the GPU before, and are copied out to be lent
        # Race: a copy out that is still under way would be read half done by the host.
        transfers.finish_out()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Context in which a checkpoint is made; at its end parts that were borrowed go back to the host."""
        try:
            yield
        finally:
            self._send_back(0)
            self._finish_lending()

    def hand_out(self, param: torch.Tensor, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what `read` returns, the states of an optimizer parameter by name, each tensor safe to keep."""
        part = self._owners.get(id(param))
        if part is None:
            return read()
        encoded = [slab for slab in part.slabs if slab.is_encoded]
        converts = any(state.converts for slab in part.slabs for state in slab.states if state.param is param)
        self._borrow(part.slabs if converts else encoded)  # another dtype is made on the GPU
        with own():
            places = self._places(part, param)
            return {name: self._safe(value, places) for name, value in read().items()}

    def _places(self, part: Part, param: torch.Tensor) -> dict[int, Place]:
        return {
            id(tensor): (state, slab, offset)
            for slab in part.slabs
            for state, offset in zip(slab.states, slab.layout.offsets, strict=True)
            if state.param is param and (tensor := state.read()) is not None
        }

    def _safe(self, value: Any, places: dict[int, Place]) -> Any:
        """Return a state that is safe to keep; `places`: what `_places` returned."""
        if not isinstance(value, torch.Tensor) or value.dim() == 0:  # a count of steps is nobody's slab
            return value
        _, slab, offset = places.get(id(value), (None, None, 0))
        if slab is not None and self._lends and slab.holds(value) and self._can_lend(slab):
            return slab.lend(value, offset)
        # A tensor that a load put in the place of another has memory of its own until the next offload. Of a slab that
        # is encoded, on its way out, what the host has is not the states.
        if slab is None or slab.state is SlabState.RESIDENT or slab.is_encoded or not slab.holds(value):
            return self._copy(value)
        host = slab.host_view(value, offset)
        return self._copy(host) if self._copies else host

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.file is not None and (copied := self.file.copy(tensor)) is not None:
            return copied
        return shared_copy(tensor) if self._shares else host_copy(tensor)

    def _can_lend(self, slab: Slab) -> bool:
        """Return whether a slab can lend its host buffer, which has the slab whole, or will by the end."""
        if not slab.is_encoded and slab.state in (SlabState.OFFLOADING, SlabState.RELEASED):
            return slab.can_lend
        if slab.is_lent or not slab.can_lend:  # the copy out would go to the one buffer that is not lent
            return False
        if slab.state is SlabState.RESIDENT:
            self._here.append(slab)
        slab.require_writable()  # gives up a copy out that is encoded
        slab.offload()
        return True

    def _finish_lending(self) -> None:
        if self._lends:
            # Race: the writer would read what has not landed.
            self._transfers.finish_out()
        for slab in self._here:
            # Not those that were borrowed, nor one whose move was interrupted: what interrupted it is to come out.
            if not slab.interrupted and slab.state is SlabState.OFFLOADING:
                slab.require_writable()

    def _borrow(self, slabs: list[Slab]) -> None:
        away = [slab for slab in slabs if slab.state is SlabState.RELEASED]
        if away:
            self._send_back(self.most_borrowed - 1)
            self._borrowed.append(away)  # before it can fail, so that what has come goes back
        require_readable(slabs)

    def _send_back(self, left: int) -> None:
        while len(self._borrowed) > left:
            for slab in self._borrowed.popleft():
                if not slab.interrupted:  # by what is on its way to the caller, whom a refusal would keep it from
                    slab.offload()
                    slab.release()


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor in host memory of its own."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())


class Loading(Snapshot):
    """Hands out host memory to load the states of one optimizer into, and puts there what was loaded elsewhere.

    If a slab is on the GPU, or a state is loaded in another dtype, their owner writes them there, two parts at most.
    """

    most_borrowed = 2

    def __init__(self, owners: Mapping[int, Part], transfers: Transfers) -> None:
        super().__init__(owners, transfers, copies=False)
        # Race: what is loaded would be written over what a copy in still reads, of masters that weights were made of.
        transfers.finish_in()
        for part in dict.fromkeys(owners.values()):
            for slab in part.slabs:
                slab.own_host(keep=True)
        self._newest: dict[str, Any] = {}  # the states of the parameter that was handed out last, by name

    @override
    def hand_out(self, param: torch.Tensor, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what `read` returns, the state tensors of a parameter by name, with host memory in their place.

        What the host has is to be overwritten in place, and so is a tensor that the host does not have. A state that
        is loaded in another dtype than it has gets fp32 memory of its own.
        """
        part = self._owners.get(id(param))
        with own():
            self._newest = found = read()
            places = {} if part is None else self._places(part, param)
            return {name: self._target(value, places.get(id(value))) for name, value in found.items()}

    def _target(self, value: Any, place: Place | None) -> Any:
        if place is None:
            return value
        state, slab, offset = place
        if state.converts:
            return torch.empty(value.shape, dtype=torch.float32, device="cpu")
        return slab.host_view(value, offset) if _is_on_the_host(slab, value) else value

    def put(self, param: torch.Tensor, hand_out: Callable[[], object], loaded: States, write: Write) -> None:
        """Put loaded states of a parameter in their place: tensors by name, and what is no tensor.

        They are in the memory that `hand_out` has handed out or in any other; it is called once more. If the host
        does not get all of them, `write` writes what it is given to the states.
        """
        hand_out()
        mine = self._newest
        part = self._owners.get(id(param))
        if part is None:
            write(loaded)
            return
        tensors = {name: value for name, value in loaded.items() if isinstance(value, torch.Tensor)}
        with own():
            places = self._places(part, param)
            done = {
                name: mine[name]
                for name, value in tensors.items()
                if name in mine and self._put_on_the_host(value, mine[name], places.get(id(mine[name])))
            }
        if done.keys() >= tensors.keys() | {name for name, value in mine.items() if isinstance(value, torch.Tensor)}:
            return
        self._borrow(part.slabs)
        for slab in part.slabs:
            slab.require_writable()
        # A state that is right already is written onto itself: its owner wants all, and refuses what was not loaded.
        write({**loaded, **done})

    def _put_on_the_host(self, value: torch.Tensor, mine: torch.Tensor, place: Place | None) -> bool:
        """Return whether the host has what was loaded of a state, or whether it has been brought from there since."""
        if place is None or place[0].converts or value.dtype != mine.dtype:  # the owner's to convert, or to refuse
            return False
        _, slab, offset = place
        home = slab.host_view(mine, offset)
        is_there = value.data_ptr() == home.data_ptr()
        if not _is_on_the_host(slab, mine):
            return is_there and any(slab in slabs for slabs in self._borrowed)
        if not is_there:
            home.copy_(value)
        return True

    @override
    def _send_back(self, left: int) -> None:
        super()._send_back(left)
        # Race: what the host writes into a buffer would be overwritten by a copy out that is still under way.
        self._transfers.finish_out()


def _is_on_the_host(slab: Slab, tensor: torch.Tensor) -> bool:
    """Return whether the host buffer has a state as it is, and the GPU has not."""
    return slab.state is SlabState.RELEASED and not slab.is_encoded and slab.holds(tensor)
