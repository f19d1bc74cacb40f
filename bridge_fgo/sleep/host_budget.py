"""The host memory that a `Residency` may take on a rank, and which groups of weights it has room for."""

import math
from collections.abc import Iterable
from typing import Any

from bridge_fgo.config import readable
from bridge_fgo.engines.native import NativeEngine


def fitting[T: Any](groups: Iterable[T], host_bytes: float) -> list[T]:
    """Return the groups that have room in so much host memory; first those that free most of the GPU's for it.

    A group has `nbytes`, of GPU memory, and `host_bytes`.
    """
    found = []
    for group in sorted(groups, key=lambda group: group.host_bytes / max(1, group.nbytes)):
        if group.host_bytes <= host_bytes:
            host_bytes -= group.host_bytes
            found.append(group)
    return found


def limit_bytes(gib: Any) -> float:
    """Return a limit in bytes; raise ValueError unless it is None or a positive number of GiB."""
    if gib is None:
        return math.inf
    if isinstance(gib, bool) or not isinstance(gib, int | float) or not gib > 0:
        raise ValueError(f"Residency(host_memory_limit_gib={gib!r}): use a number of GiB above 0, or None")
    return gib * 2**30


class HostBudget:
    """The bytes of host memory that may still be taken on this rank.

    With optimizer states their engine counts them, because background saves take of the same.
    """

    def __init__(self, limit: float) -> None:
        self.limit = self._left = limit
        self.engine: NativeEngine | None = None

    @property
    def left(self) -> float:
        """Bytes that may still be taken."""
        return self._left if self.engine is None else self.engine.host_room

    @left.setter
    def left(self, nbytes: float) -> None:
        if self.engine is None:
            self._left = nbytes
        else:
            self.engine.host_room = nbytes

    def require(self, call: str, nbytes: int, instead: str, beside: str = "", has_room: bool = True) -> None:
        """Raise ValueError if a call needs more bytes than are left, or has no room `beside` what else it takes."""
        if nbytes > self.left or not has_room:
            raise ValueError(
                f"{call} takes {readable(nbytes)} of host memory{beside}, and host_memory_limit_gib leaves "
                f"{readable(max(0, self.left))}: {instead}give Residency a higher limit"
            )
