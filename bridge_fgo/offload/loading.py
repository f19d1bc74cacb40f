"""Writing states from a checkpoint: those that are offloaded are loaded into host memory, where they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, override

import torch

from bridge_fgo.memory.guard import own
from bridge_fgo.memory.slab import Slab, SlabState
from bridge_fgo.memory.transfers import Transfers
from bridge_fgo.offload.part import Part
from bridge_fgo.offload.snapshot import Place, Snapshot


class Loading(Snapshot):
    """Hands out host memory to load the states of one optimizer into, and puts there what was loaded elsewhere.

    Where a slab is on the GPU, or a state is loaded in another dtype than it has, the parameter's states are written
    there by their owner. Two parts at most are there at a time for that.

    Args:
        owners: the part that offloads a parameter's states, by the `id` of the parameter as the optimizer has it.
        transfers: the copies.
    """

    most_borrowed = 2

    def __init__(self, owners: Mapping[int, Part], transfers: Transfers) -> None:
        super().__init__(owners, transfers, copies=False)
        for part in dict.fromkeys(owners.values()):
            for slab in part.slabs:
                slab.own_host(keep=True)
        self._newest: dict[str, Any] = {}
        """The states of the parameter that was handed out last, by name."""

    @override
    def hand_out(self, param: torch.Tensor, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what `read` returns, the state tensors of a parameter by name, with host memory in their place.

        What the host has is to be overwritten in place, and so is a tensor of which the host has nothing. A state that
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
            return torch.empty(value.shape, dtype=torch.float32)
        return slab.host_view(value, offset) if _is_on_the_host(slab, value) else value

    def put(
        self,
        param: torch.Tensor,
        hand_out: Callable[[], object],
        loaded: Mapping[str, Any],
        write: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """Put loaded states of a parameter in their place.

        Args:
            param: the parameter as the optimizer has it.
            hand_out: has `hand_out` called for it.
            loaded: tensors by name, in the memory that was handed out or in any other; and what is no tensor.
            write: writes what it is given to the states; called where the host does not get all of them.
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
        if done.keys() == tensors.keys():
            return
        self._borrow(part.slabs)
        for slab in part.slabs:
            slab.require_writable()
        write({**loaded, **done})  # a state that is right already is written onto itself: the owner wants them all

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
