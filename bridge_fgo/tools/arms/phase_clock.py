"""How long a microbatch's forward and backward and the rest of the step take on the GPU."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable
from typing import Any

FIRST_COUNTED_STEP = 7
"""The first step whose time counts. By then moments exist, peaks are measured, two steps were timed, and masters are
copied as they will be: every step is like the next."""


class PhaseClock:
    """Times phases by CUDA events around the calls of the forward step; no pipeline parallelism.

    What lies between the end of a forward and the begin of the next one is a backward. After the last forward of
    a step there are its backward, the gradients' reduction and the optimizer step.

    Args:
        last: the last step that counts.
    """

    def __init__(self, last: int) -> None:
        self._last = last
        self._steps: list[list[tuple[Any, Any]]] = []
        self._turns: list[int] = []

    def begin_turn(self, step: int) -> None:
        """Note that `step`, counted from 1, is the first of a turn: it begins cold, and after a wait for others."""
        self._turns.append(step)

    def end_with(self, step: int) -> None:
        """Note that `step` is the last one that counts."""
        self._last = step

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
        """Return the medians, in seconds, of `forward`, `backward` and `rest` of all whole steps.

        `rest` is the time from the end of a step's last forward to the first forward of the next step. All
        but the first forward and all but the last backward of a step count: those may wait for copies.
        `first_forward` is that first one. None where there is nothing to tell a phase by. In turns, the first turn
        does not count, nor does the first step of a turn, nor the wait for it.
        """
        begin = self._turns[1] if len(self._turns) > 1 else FIRST_COUNTED_STEP
        numbers = [
            number for number in range(begin, min(self._last, len(self._steps)) + 1) if number not in self._turns
        ]
        steps = [self._steps[number - 1] for number in numbers]
        forward = [_seconds(*pair) for step in steps for pair in (step[1:] or step)]
        first = [_seconds(*step[0]) for step in steps]
        backward = [_seconds(a[1], b[0]) for step in steps for a, b in itertools.pairwise(step)]
        following = [number for number in numbers if number + 1 in numbers]
        rest = [_seconds(self._steps[number - 1][-1][1], self._steps[number][0][0]) for number in following]
        groups = {"forward": forward, "first_forward": first, "backward": backward, "rest": rest}
        return {name: statistics.median(values) if values else None for name, values in groups.items()}


def _seconds(start: Any, end: Any) -> float:
    return start.elapsed_time(end) / 1e3
