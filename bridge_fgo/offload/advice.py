"""Times the copies of one step, and says in a line how much shorter steps would be with more GPU memory."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from bridge_fgo.memory.auto_budget import AutoBudget
from bridge_fgo.memory.meters import PeakMeter, StepClock
from bridge_fgo.memory.slab import Slab, SlabState
from bridge_fgo.memory.transfers import Transfers

TIMED_STEP = 3
"""The step that is timed, of those that follow one with a plan. The first of them is the first that prefetches; after
it the engine knows what copies out the update hides; and only the third begins with all other states on the GPU."""

MORE_GIB = (2, 4, 8)
LEAST_SECONDS = 0.01  # of waiting in a step that are worth a line


class Advice:
    """Times how long training waits for copies in one step, on the GPU and without a wait of the host.

    A byte that stays on the GPU saves its copy out and its copy in. Both directions run at once, so it saves as long as
    one copy takes, until training waits for none.
    """

    def __init__(self, transfers: Transfers, meter: PeakMeter) -> None:
        self._transfers, self._meter = transfers, meter
        self._clock = StepClock(meter)
        self._planned = 0  # steps with a plan so far
        self._sent = 0  # bytes of the copies out that were timed, until the line is made

    @contextmanager
    def training_step(self, is_planned: bool) -> Iterator[None]:
        """Context of a training step, after one that went by a plan or not."""
        self._planned += is_planned
        if not self._is_timed:
            yield
            return
        self._clock.begin_step()
        self._transfers.timing = self._clock.measure
        try:
            yield
        finally:
            self._transfers.timing = nullcontext

    @property
    def _is_timed(self) -> bool:
        return self._planned == TIMED_STEP

    def time_copies(self, slabs: Sequence[Slab], send_off: Callable[[Sequence[Slab]], None]) -> None:
        """Call `send_off`, which copies out what a pass begins with, for some slabs; in the timed step time it."""
        sent = [number for number, slab in enumerate(slabs) if slab.state is SlabState.RESIDENT and slab.exists()]
        if not self._is_timed or len(sent) < 2:
            send_off(slabs)
            return
        after = sent[0] + 1  # the first copy also waits for what the training stream holds
        send_off(slabs[:after])
        self._transfers.mark_out(is_end=False)
        send_off(slabs[after:])
        self._transfers.mark_out(is_end=True)
        self._sent = sum(slabs[number].nbytes for number in sent[1:])

    def line(self, peak: int) -> str:
        """Return the line, once, at the end of a step after the timed one; else nothing.

        `peak` is the planned one, in bytes.
        """
        if not self._sent or not (seconds := self._transfers.seconds_out()):
            return ""
        if (waited := self._clock.seconds()) is None:
            return ""
        rate, self._sent = self._sent / seconds, 0
        most, now = AutoBudget(self._meter).budget_bytes() // 2**30, peak / 2**30
        budgets = [gib for more in MORE_GIB if (gib := math.ceil(now) + more) <= most]
        saved = [min(waited, (gib - now) * 2**30 / rate) for gib in budgets]
        if waited < LEAST_SECONDS or not budgets:
            return ""
        shorter = ", ".join(f"{gib}: {seconds:.2f} s" for gib, seconds in zip(budgets, saved, strict=True))
        return (
            f"training waits {waited:.2f} s a step for copies; OffloadConfig.gpu_memory_budget_gib would make a step "
            f"shorter, with {shorter}"
        )
