"""Whether copies in go before copies out in the optimizer step: arithmetic on how long training waits for each.

Each direction of the link is slower while the other is busy, and more so where GPUs of a host share it. Copies in keep
the update waiting, copies out the next forward, once activations need their place. Which of the two is better slowed
down depends on the link, and on how long a forward takes. So both are tried, and what training waited less with stays.

On two H100 (DP=2, 5.3 GB of states a rank; 52.5 GB/s in one direction, 35.1 in each with both busy) a step got longer
by 0.19 s as copies came, and by 0.07 s where copies in went first in every step. On two others (39.0 GB/s with both
busy), where both ways were tried, rank 0 kept copies as they came (rank 1 did not say); a step got longer by 0.07 s.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from bridge_fgo.memory.meters import WaitMeter

TIMED_STEPS = 2
"""Steps of a kind that are timed in each way. Where so few mislead, both ways take about as long."""

MOST_STEPS = 40
"""Steps of a kind in which it is tried; where they have not been enough, copies go as they come."""

LEAST_GAIN = 0.05
"""Share of the waits that has to be saved: less is noise."""


@dataclass
class _Trial:
    """Waits of the steps of one kind, in which both ways are tried."""

    seconds: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    """Waits of the steps that were timed, by whether copies in went first."""
    steps: int = 0

    @property
    def is_known(self) -> bool:
        """Whether both ways were timed often enough to be compared."""
        return min(map(len, self.seconds.values())) >= TIMED_STEPS

    @property
    def is_over(self) -> bool:
        return self.is_known or self.steps > MOST_STEPS

    @property
    def next_way(self) -> bool:
        """The way that was timed less often; when it is over, the better one."""
        if not self.is_over:
            return len(self.seconds[True]) < len(self.seconds[False])
        return self.is_known and self.waited(True) < (1 - LEAST_GAIN) * self.waited(False)

    def waited(self, h2d_first: bool) -> float:
        """Return the seconds that training waited in a step."""
        return statistics.median(self.seconds[h2d_first])


class CopyOrder:
    """Tries both ways in the steps of each kind. Each rank decides for itself; no bit depends on it.

    Args:
        waits: times the waits; None where every copy is waited for, so that there is no order to choose.
        announce: gets a line when copies in begin to go first.
    """

    def __init__(self, waits: WaitMeter | None, announce: Callable[[str], None]) -> None:
        self.h2d_first = False
        """Whether copies in go first in the present step."""
        self._known: _Trial | None = None
        """The newest trial in which both ways were timed often enough."""
        self._waits, self._announce = waits, announce
        self._trials: dict[object, _Trial] = {}
        self._timed: tuple[_Trial, bool] | None = None
        """Trial and way of the step that was timed last, until its waits are added; None where there is none."""
        self._before: bool | None = None
        """The way of the step before, for whose copies out this one's forward waits; None where no plan held."""

    @property
    def is_better(self) -> bool | None:
        """Whether copies in go first in steps of the kind that was tried last; None until that is known of one."""
        return None if self._known is None else self._known.next_way

    @property
    def waited(self) -> tuple[float, float] | None:
        """Seconds that training waited in a step of that kind, as copies came and with copies in first; None before."""
        return None if self._known is None else (self._known.waited(False), self._known.waited(True))

    def begin_pass(self, kind: object, by_plan: bool, may_time: bool) -> None:
        """Choose the way of this step, and time it where the step before went the same way.

        Args:
            kind: what passes have in common whose waits are alike.
            by_plan: whether states leave late and come early in this pass, as in the ones that follow.
            may_time: whether nobody else times waits, and waits as long as in the steps to come.
        """
        self.h2d_first = False
        if self._waits is None:
            return
        if not may_time:
            self._timed = None
            return
        self._take(self._waits)
        if not by_plan:
            self._before = None  # an evaluation, say, has waited for the copies out
            return
        trial = self._trials.setdefault(kind, _Trial())
        self.h2d_first = trial.next_way
        if trial.is_over:
            return
        trial.steps += 1
        if self._timed is None and self._before is self.h2d_first:
            self._waits.take()  # of a step that somebody else has timed
            self._waits.begin()
            self._timed = (trial, self.h2d_first) if self._waits.is_timing else None

    def _take(self, waits: WaitMeter) -> None:
        """Take the figures of the step that was timed, if they are here."""
        if self._timed is None:
            return
        if waits.is_timing:  # an error has ended the step, or its pass is run again, and has waited for the copies out
            waits.drop()
            self._timed = self._before = None
        elif (seconds := waits.take()) is not None:
            trial, way = self._timed
            trial.seconds[way].append(seconds)
            self._timed = None
            if trial.is_known:
                self._known = trial
                if trial.next_way:
                    self._announce(
                        f"training waited {trial.waited(False) * 1e3:.1f} ms for copies in a step, and "
                        f"{trial.waited(True) * 1e3:.1f} where copies in went first: from now on they do"
                    )

    def end_step(self, updated: bool, by_plan: bool) -> None:
        """End the step's timing, if it is this one's.

        Args:
            updated: whether the optimizer stepped.
            by_plan: whether the plan held to the end.
        """
        held = updated and by_plan
        self._before = self.h2d_first if held else None
        if self._waits is None or self._timed is None or not self._waits.is_timing:
            return
        if held:
            self._waits.end()
        else:
            self._waits.drop()
            self._timed = None
