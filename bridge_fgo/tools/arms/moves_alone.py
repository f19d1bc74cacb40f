"""What the host's work for copies takes by itself: steps in which it has nothing of the training's to wait for.

Where the host runs ahead of the GPU until the driver's queue of launches is full, whoever enqueues next waits for the
GPU, and the clock counts that as theirs. So in these steps the queue never fills.
"""

from __future__ import annotations

import math
import time
from typing import Any

from bridge_fgo.memory.meters import Traffic

APART = 0.002
"""Seconds, at least, between two waits. The driver's queue takes about 1000 launches, and the host enqueues no more
than 500 in that time. A wait makes the moves after it slower by itself: 12 to 29% with one before each, in a loop of
the engine alone on an H200's host, where nothing fills the queue."""


class MovesAlone:
    """Has the host wait for the training stream before a move of a slab, `APART` after it last has, until `end`.

    The wait is not among what `Traffic` counts. It makes the step longer, and changes no bit.

    Args:
        stream: the training stream.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._waited = -math.inf
        Traffic.before_block.append(self._wait)

    def _wait(self) -> None:
        if time.perf_counter() - self._waited > APART:
            self._stream.synchronize()
            self._waited = time.perf_counter()

    def end(self) -> None:
        """Make moves as they were."""
        Traffic.before_block.remove(self._wait)
