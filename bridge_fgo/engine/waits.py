"""How long the training stream waits for copies: whether it is worth while to copy less."""

from __future__ import annotations

from collections.abc import Callable

import torch

LEAST_SECONDS = 50e-6
"""Shorter ones are no waits, but the time that two events take."""


class WaitMeter:
    """Times the training stream's waits for copies in one training step after another. The host waits for nothing.

    The figures of a step come when the GPU is done with it, and the step that is timed next begins after that.

    Args:
        make_event: makes an event with timing.
    """

    def __init__(
        self, make_event: Callable[[], torch.cuda.Event] = lambda: torch.cuda.Event(enable_timing=True)
    ) -> None:
        self._make_event = make_event
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] | None = None
        self._ended: list[tuple[torch.cuda.Event, torch.cuda.Event]] | None = None

    def begin(self) -> None:
        """Time the waits from here on, if the figures of the step before have been taken."""
        self._waits = [] if self._ended is None else None

    def end(self) -> None:
        """The step is over."""
        if self._waits is not None:
            self._ended, self._waits = self._waits, None

    def drop(self) -> None:
        """The step was none that says anything."""
        self._waits = None

    def around(self, wait: Callable[[], None], stream: torch.cuda.Stream) -> None:
        """Have the training stream wait, by `wait`, and time it."""
        if self._waits is None:
            wait()
            return
        events = self._make_event(), self._make_event()
        events[0].record(stream)
        wait()
        events[1].record(stream)
        self._waits.append(events)

    def take(self) -> float | None:
        """Return the seconds that the training stream has waited in the newest timed step, once; None before."""
        if self._ended is None or (self._ended and not self._ended[-1][1].query()):
            return None
        waits = [begin.elapsed_time(end) / 1e3 for begin, end in self._ended]
        self._ended = None
        return sum(seconds for seconds in waits if seconds > LEAST_SECONDS)
