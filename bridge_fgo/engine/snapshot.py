"""Reading states for a checkpoint: the bytes of what is offloaded come from the host, where they are already."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from bridge_fgo.engine.part import StepPart, TrackedSlab, require_readable
from bridge_fgo.engine.residency import Residency
from bridge_fgo.engine.transfers import Transfers

MOST_BORROWED = 4
"""Parts that are back on the GPU at once, for states that are read in another dtype and masters whose remainders are
all that the host has: mcore asks in the order of its buffers and parts are in the order of param groups, so that two
or three take turns."""


class Snapshot:
    """Hands out the states of one optimizer as host tensors, and leaves slabs where they are.

    What a writer gets is its own: no tensor that it may hold on to (a background writer for minutes, a cache of CUDA
    handles for the whole run) shares memory with a slab. So nothing has to wait for a writer, no later step can tear
    what it reads, and a released slab is gone (NeMo-RL #3312 and #4183, MLM #6544 tell what happens otherwise).

    Args:
        owners: the part that offloads a parameter's states, by the `id` of the parameter as the Adam inside has it.
        transfers: the copies.
        copies: whether every tensor that is handed out is a copy. Without, a state that is on the host already may be
            handed out as a view of its page-locked buffer, for a reader that copies it at once.
    """

    def __init__(self, owners: Mapping[int, StepPart], transfers: Transfers, copies: bool) -> None:
        self._owners = owners
        self._copies = copies
        self._borrowed: deque[list[TrackedSlab]] = deque()
        """Slabs that were released before, part by part."""
        # Race: a copy out that is still under way would be read half done by the host.
        transfers.finish_out()

    @contextmanager
    def session(self) -> Iterator[None]:
        """Be the checkpoint's making: on the way out parts that were borrowed go back to the host."""
        try:
            yield
        finally:
            while self._borrowed:
                _send_back(self._borrowed.popleft())

    def hand_out(self, param: torch.Tensor, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what `read` returns, the states of an optimizer parameter by name, each tensor safe to keep.

        Args:
            param: the parameter as the Adam inside has it.
            read: mcore's `_get_main_param_and_optimizer_states` of it. It returns state tensors themselves, or
                fp32 copies of moments in 16 bits.
        """
        part = self._owners.get(id(param))
        if part is None:
            return read()
        packed = [slab for slab in part.slabs if slab.slab.is_packed]
        self._borrow(part.slabs if _is_read_in_another_dtype(param, part) else packed)
        places = _places(param, part)
        return {name: self._safe(value, places) for name, value in read().items()}

    def _safe(self, value: Any, places: dict[int, tuple[TrackedSlab, int]]) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() == 0:  # a count of steps is nobody's slab
            return value
        slab, offset = places.get(id(value), (None, 0))
        # A tensor that a load put in the place of another has memory of its own until the next offload.
        if slab is None or slab.tracker.state is Residency.RESIDENT or not slab.slab.holds(value):
            return _copy(value)
        if slab.slab.is_packed:  # on its way out: what the host has is not the masters
            assert slab.tracker.state is Residency.OFFLOADING
            return _copy(value)
        host = slab.slab.host.tensor[offset : offset + value.nbytes].view(value.dtype).view(value.shape)
        return _copy(host) if self._copies else host

    def _borrow(self, slabs: list[TrackedSlab]) -> None:
        away = [slab for slab in slabs if slab.tracker.state is Residency.RELEASED]
        if away:
            while len(self._borrowed) >= MOST_BORROWED:
                _send_back(self._borrowed.popleft())
            self._borrowed.append(away)  # before it can fail, so that what has come goes back
        require_readable(slabs)


def _send_back(slabs: list[TrackedSlab]) -> None:
    for slab in slabs:
        if not slab.tracker.interrupted:  # by what is on its way to the caller, whom a refusal would keep it from
            slab.tracker.offload()
            slab.tracker.release()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory, when it is complete."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


def _is_read_in_another_dtype(param: torch.Tensor, part: StepPart) -> bool:
    """Return whether TE's `FusedAdam.get_unscaled_state` makes fp32 of a state of 16 bits, for which it reads it."""
    refs = [ref for slab in part.slabs for ref in slab.slab.refs if ref.param is param]
    return any(ref.key is not None and ref.dtype in (torch.bfloat16, torch.float16) for ref in refs)


def _places(param: torch.Tensor, part: StepPart) -> dict[int, tuple[TrackedSlab, int]]:
    """Return slab and offset in bytes of each of the parameter's states, by the `id` of the tensor."""
    return {
        id(tensor): (slab, offset)
        for slab in part.slabs
        for ref, offset in zip(slab.slab.refs, slab.slab.layout.offsets, strict=True)
        if ref.param is param and (tensor := ref.tensor()) is not None
    }
