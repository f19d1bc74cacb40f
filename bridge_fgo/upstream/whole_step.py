"""What the adapters share: upstream's offloaders have every state on the GPU for the optimizer step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class WholeStep(ABC):
    """The parts of `Offloader` that come down to its gates."""

    enqueue_seconds = 0.0
    pin_seconds = 0.0
    """Upstream's own code enqueues and pins."""

    @property
    def is_lost(self) -> bool:
        """See `Offloader.is_lost`; what upstream does itself is not watched."""
        return False

    @abstractmethod
    def require_readable(self, masters_only: bool = False) -> None:
        """See `Offloader.require_readable`."""

    @abstractmethod
    def require_writable(self, masters_only: bool = False) -> None:
        """See `Offloader.require_writable`."""

    @contextmanager
    def overwriting_masters(self) -> Iterator[None]:
        """See `Offloader.overwriting_masters`."""
        self.require_writable()
        yield

    def require_restorable(self) -> None:  # noqa: B027
        """See `Offloader.require_restorable`: upstream copies states whole."""

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """See `Offloader.stepping`."""
        self.require_writable()
        yield

    def copy_masters(self, copy: Callable[[], Any]) -> Any:
        """See `Offloader.copy_masters`."""
        self.require_readable(masters_only=True)
        return copy()

    @contextmanager
    def saving(self, copies: bool) -> Iterator[None]:
        """See `Offloader.saving`: every state is on the GPU for it."""
        self.require_readable()
        yield

    def require_whole(self, what: str) -> None:  # noqa: B027
        """See `Offloader.require_whole`: a step is what it is without the package."""

    is_saving = False
    """See `Offloader.is_saving`."""

    def copied_for_a_save(self) -> list[int]:
        """See `Offloader.copied_for_a_save`: a checkpoint gets the tensors themselves."""
        return []

    def hand_out(self, param: Any, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """See `Offloader.hand_out`."""
        self.require_readable()
        return read()
