"""How long Python's garbage collector takes: up to a second for a full collection of a process that has Megatron."""

from __future__ import annotations

import gc
import time


class CollectorClock:
    """Counts the seconds that collections take, until `end`."""

    def __init__(self) -> None:
        self._seconds = self._started = 0.0
        self._forgot = False
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

    def forget_what_lives(self) -> None:
        """Collect once more, and have no later collection look through what is left.

        A full collection takes 0.6 to 0.9 s on an H100's host, as long as a step. It comes in another step in each arm
        and on each rank, and hid what was compared. Jobs have `train.manual_gc` for it.
        """
        gc.collect()
        gc.freeze()
        self._forgot = True

    def end(self) -> None:
        """Stop counting, and look through everything again."""
        if self._forgot:
            gc.unfreeze()
        gc.callbacks.remove(self._collecting)
