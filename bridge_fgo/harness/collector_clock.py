"""How long Python's garbage collector takes: up to a second for a full collection of a process that has Megatron."""

from __future__ import annotations

import gc
import time


class CollectorClock:
    """Counts the seconds that collections take, until `end`."""

    def __init__(self) -> None:
        self._seconds = self._started = 0.0
        gc.callbacks.append(self._collecting)

    def _collecting(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._started = time.perf_counter()
        else:
            self._seconds += time.perf_counter() - self._started

    def take(self) -> float:
        """Return the seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def end(self) -> None:
        """Stop counting."""
        gc.callbacks.remove(self._collecting)
