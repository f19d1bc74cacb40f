"""What the host's work for copies takes by itself: steps in which it has nothing of the training's to wait for.

Where the host runs ahead of the GPU until the driver's queue of launches is full, whoever enqueues next waits for the
GPU, and the clock counts that as theirs. So in these steps the queue is empty before each move.
"""

from __future__ import annotations

from typing import Any

from bridge_fgo.engine.part import Traffic


class MovesAlone:
    """Has the host wait for the training stream before each move of a slab, until `end`.

    The wait is not among what `Traffic` counts. It makes the step longer, and changes no bit.

    Args:
        stream: the training stream.
    """

    def __init__(self, stream: Any) -> None:
        enter = self._enter = Traffic.__enter__

        def wait_first(self: Traffic) -> None:
            stream.synchronize()
            enter(self)

        Traffic.__enter__ = wait_first

    def end(self) -> None:
        """Moves are as they were."""
        Traffic.__enter__ = self._enter
