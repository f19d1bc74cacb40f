"""Writing states from a checkpoint: those that are offloaded are loaded into host memory, where they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, override

import torch

from bridge_fgo.core.part import Part
from bridge_fgo.core.residency import Residency
from bridge_fgo.core.slab import Slab
from bridge_fgo.core.snapshot import Snapshot
from bridge_fgo.core.state import State
from bridge_fgo.core.transfers import Transfers


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
        self._transfers = transfers
        self._homes: dict[str, torch.Tensor] = {}
        """Of the parameter that was handed out last: host memory of each state that is loaded there, by name."""

    @override
    def hand_out(self, param: torch.Tensor, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what `read` returns, the state tensors of a parameter by name, with host memory in their place.

        What the host has is to be overwritten in place, and so is a tensor of which the host has nothing.
        """
        self._homes = {}
        part = self._owners.get(id(param))
        found = read()
        if part is None:
            return found
        places = self._places(part, param)
        for name, value in found.items():
            if id(value) in places:
                found[name] = self._target(name, value, *places[id(value)])
        return found

    def _target(self, name: str, value: torch.Tensor, state: State, slab: Slab, offset: int) -> torch.Tensor:
        if state.converts:
            return torch.empty(value.shape, dtype=torch.float32)
        if slab.state is not Residency.RELEASED or slab.is_encoded or not slab.holds(value):
            return value
        self._homes[name] = home = slab.host_view(value, offset)
        return home

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
            loaded: tensors by name.
            write: writes them to the GPU; called where the host does not have all of them.
        """
        hand_out()
        tensors = {name: value for name, value in loaded.items() if isinstance(value, torch.Tensor)}
        homes = self._homes
        # What is of another dtype is the owner's to convert, or to refuse.
        if all(name in homes and homes[name].dtype == value.dtype for name, value in tensors.items()):
            for name, value in tensors.items():
                homes[name].copy_(value)
            return
        # What was loaded into the host's copy is no more to be read there once that is on its way.
        own = {name: tensors[name].clone() for name in tensors.keys() & homes.keys()}
        part = self._owners.get(id(param))
        if part is not None:
            self._borrow(part.slabs)
            for slab in part.slabs:
                slab.require_writable()
        write({**loaded, **own})

    @override
    def _send_back(self, left: int) -> None:
        super()._send_back(left)
        # Race: what the host writes into a buffer would be overwritten by a copy out that is still under way.
        self._transfers.finish_out()
