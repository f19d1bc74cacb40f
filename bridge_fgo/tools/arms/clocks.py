"""Times phases of a step on the GPU, and the host's speed, in a GPU arm."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

FIRST_COUNTED_STEP = 7
"""The first step whose time counts. By then moments exist, peaks are measured, two steps were timed, and masters are
copied as they will be: every step is like the next."""

ADDITIONS = 20_000
"""Additions of one loop: 0.5 to 1 ms. Long beside the clock's resolution, short beside a step of half a second and
beside the tens of milliseconds for which a scheduler lets a process run."""


def host_loop_seconds() -> float:
    """Return the seconds of a loop of Python that allocates nothing: the speed of a host that others use, too."""
    started = time.perf_counter()
    total = 0
    for number in range(ADDITIONS):
        total += number
    return time.perf_counter() - started


class PhaseClock:
    """Times phases by CUDA events around the calls of the forward step, up to step `last`; no pipeline parallelism.

    What lies between the end of a forward and the begin of the next one is a backward. After the last forward of a step
    there are its backward, the gradients' reduction and the optimizer step.
    """

    def __init__(self, last: int) -> None:
        self.last = last
        self._steps: list[list[tuple[Any, Any]]] = []
        self._turns: list[int] = []

    def begin_turn(self, step: int) -> None:
        """Note that `step`, counted from 1, is the first of a turn: it begins cold, and after a wait for others."""
        self._turns.append(step)

    def timed(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward step with events around it."""
        import torch
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        @functools.wraps(forward_step)
        def step(*args: Any, **kwargs: Any) -> Any:
            if not self._steps or len(self._steps[-1]) == get_num_microbatches():
                self._steps.append([])
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            result = forward_step(*args, **kwargs)
            end.record()
            self._steps[-1].append((start, end))
            return result

        return step

    def medians(self) -> dict[str, float | None]:
        """Return the medians over all whole steps in seconds; None where there is nothing to tell a phase by.

        `rest` is the time from the end of a step's last forward to the first forward of the next step. Of `forward` all
        but the step's first count, which is `first_forward`, and of `backward` all but the last: those may wait for
        copies. The first turn does not count, nor the first step of a turn, nor the wait for it.
        """
        begin = self._turns[1] if len(self._turns) > 1 else FIRST_COUNTED_STEP
        last = min(self.last, len(self._steps))
        steps = {n: self._steps[n - 1] for n in range(begin, last + 1) if n not in self._turns}
        groups = {
            "forward": [_seconds(*pair) for step in steps.values() for pair in (step[1:] or step)],
            "first_forward": [_seconds(*step[0]) for step in steps.values()],
            "backward": [_seconds(a[1], b[0]) for step in steps.values() for a, b in itertools.pairwise(step)],
            "rest": [_seconds(step[-1][1], steps[n + 1][0][0]) for n, step in steps.items() if n + 1 in steps],
        }
        return {name: statistics.median(values) if values else None for name, values in groups.items()}


def _seconds(start: Any, end: Any) -> float:
    return start.elapsed_time(end) / 1e3
