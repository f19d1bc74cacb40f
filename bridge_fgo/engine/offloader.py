"""The one protocol between the wiring and whatever moves the bytes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Offloader(Protocol):
    """Drives the states of one DistributedOptimizer. Every verb is idempotent, in any order."""

    @property
    def engine(self) -> str:
        """ "native", or the upstream offloader's name."""
        ...

    @property
    def state_bytes(self) -> int:
        """Bytes of all states of the optimizer on this rank, offloaded or not; before the first step made the
        moments, as they will be."""
        ...

    @property
    def planned_bytes(self) -> int:
        """Bytes of them that are offloaded when all exist."""
        ...

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host bytes held for them."""
        ...

    @property
    def pin_seconds(self) -> float:
        """Host time that page-locking took, before training; 0 where nobody counts it."""
        ...

    @property
    def bytes_out(self) -> int:
        """Bytes copied to the host so far."""
        ...

    @property
    def bytes_in(self) -> int:
        """Bytes copied from the host so far."""
        ...

    @property
    def released_bytes(self) -> int:
        """The most bytes of state that were off the GPU at once since the newest `offload`."""
        ...

    @property
    def enqueue_seconds(self) -> float:
        """Host time spent so far on enqueuing copies, waits and changes of memory; 0 where nobody counts it."""
        ...

    def offload(self) -> None:
        """A forward-backward pass begins: start the copies to the host."""

    def release(self) -> None:
        """Nothing reads the states until the optimizer steps: give the GPU memory back."""

    def reload(self) -> None:
        """The last backward is done: take GPU memory again and start the copies to it."""

    def stepping(self) -> AbstractContextManager[None]:
        """Be the optimizer's step with ready gradients: the inner step finds its states where it needs them."""
        ...

    def copy_masters(self, copy: Callable[[], Any]) -> Any:
        """Call `copy`, which copies masters to the model's weights, with every master readable that it reads."""

    def saving(self, copies: bool) -> AbstractContextManager[None]:
        """Be the making of a checkpoint's state dictionary; inside, `hand_out` gives the states.

        copies: whether what is handed out has to be safe to keep, or is copied at once.
        """
        ...

    def require_whole(self, what: str) -> None:
        """Raise RuntimeError where an error ended an optimizer step half-way.

        what: is about to be done to the states, in a word.
        """

    @property
    def is_saving(self) -> bool:
        """Whether inside the block states need not be readable, because `hand_out` gives them."""
        ...

    def hand_out(self, param: torch.Tensor, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what `read` returns, the states of the optimizer parameter `param` by name, readable."""
        ...

    def copied_for_a_save(self) -> list[int]:
        """Return the bytes, at most, of each host tensor that a checkpoint gets of the states."""
        ...

    def require_readable(self, masters_only: bool = False) -> None:
        """Return when work queued on the current stream from now on may read the states (or masters)."""

    def require_writable(self, masters_only: bool = False) -> None:
        """Return when work queued on the current stream from now on may read and write the states (or masters)."""

    def overwriting_masters(self) -> AbstractContextManager[None]:
        """Be the writing of every master, states beside: what masters were need not be right before."""
        ...

    def require_restorable(self) -> None:
        """An optimizer is about to step: raise RuntimeError where states that are away cannot be brought back."""

    @property
    def is_lost(self) -> bool:
        """Whether something came in the midst of a move, so that nothing may use the states any more."""
        ...

    def settle(self) -> None:
        """A training step has ended: what reads the masters on the current stream may, from now on."""

    def states_replaced(self) -> None:
        """Something may have put other tensors in the place of the states: let go of the old ones' memory."""

    def has_states(self) -> bool:
        """Return whether there is anything to offload yet."""
        ...

    def resident_note(self) -> str:
        """Return, in words, what stays on the GPU and why; empty where nothing does."""
        ...

    def close(self) -> None:
        """Make the states resident for good and let go of host memory, streams and hooks."""


def total(offloaders: list[Offloader], name: str) -> Any:
    """Return the sum of the attribute `name` over the offloaders."""
    return sum(getattr(offloader, name) for offloader in offloaders)
