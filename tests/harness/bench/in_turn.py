"""Runs all arms at once, which train in turn on the same GPUs, so that a host that changes its speed slows all alike.

    start     all arms start and build side by side, until each waits before its first step
    warm-up   each trains `WARM_UP_STEPS` in a turn of its own: moments come to exist, and engines make their plans
    rounds    in each round every arm has a turn of some steps; the order rotates from round to round
    end       one arm after another takes what is left of its steps, and writes its result

An arm that fails ends alone, but for the first, which the others are compared with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from harness.arms.runner import FIRST_COUNTED_STEP, POLL_SECONDS, ArmFailed, ArmProcess, ArmRun
from harness.arms.turns import WARM_UP, Turnstile
from harness.bench.presets import read_name

WARM_UP_STEPS = FIRST_COUNTED_STEP + 2
"""Steps of the turn that does not count: to the first that would count without turns, and the first ones whose masters
are packed (`bridge_fgo.engines.packed_masters`)."""

TURN_STEPS = 5
"""Steps of a turn that counts, but for its first one."""


def order_of(names: list[str], number: int) -> list[str]:
    """Return the order of arms in round `number`, counted from 1: each round begins with another arm."""
    first = (number - 1) % len(names)
    return names[first:] + names[:first]


def squeezed_arms(runs: Mapping[str, ArmRun]) -> dict[str, str]:
    """Return, by name, why arms with a budget of "auto" tell nothing: others held memory that would be theirs."""
    left = {name: run.result["released_bytes"] for name, run in runs.items()}
    return {
        name: f"{name}: {nbytes / 1e9:.2f} GB of states left the GPU, whose memory the other arms shared; run it "
        "without --in-turn, or beside fewer arms"
        for name, nbytes in left.items()
        if nbytes and read_name(name)[0] == "auto"
    }


@dataclass
class InTurn:
    """Arms that take turns; `arms` has the arguments of `ArmProcess` by name, those of the resident arm first.

    Each has `rounds` turns that count. One that takes `timeout` seconds to come up, or to end its turn, is given up.
    `tell` gets a line on whatever happens.
    """

    arms: dict[str, dict[str, Any]]
    rounds: int
    timeout: float
    tell: Callable[[str], None] = lambda line: None
    _results: dict[str, ArmRun] = field(default_factory=dict, init=False)
    _failures: dict[str, str] = field(default_factory=dict, init=False)
    _turnstiles: dict[str, Turnstile] = field(default_factory=dict, init=False)
    _processes: dict[str, ArmProcess] = field(default_factory=dict, init=False)

    def run(self) -> tuple[dict[str, ArmRun], dict[str, str]]:
        """Run all arms; return those that ended well, and why others did not; ArmFailed where the first did not."""
        names = list(self.arms)
        with ExitStack() as stack:
            # Its permissions keep others out; and the path of a socket has to be short.
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="turns.")))
            for number, (name, how) in enumerate(self.arms.items()):
                address = folder / str(number)
                self._turnstiles[name] = stack.enter_context(closing(Turnstile(address)))
                given: dict[str, Any] = how | {"options": [*how["options"], "--turns", str(address)]}
                self._processes[name] = process = ArmProcess(name, **given)
                stack.callback(process.end)  # Ctrl-C here must not leave a trainer on the GPU
            for name in names:
                self._await(name, "its start", until_it_waits=True)
            self.tell("all arms wait for their turns: warm-up")
            self._take_turns(names, WARM_UP, WARM_UP_STEPS)
            for number in range(1, self.rounds + 1):
                self._take_turns(order_of(names, number), number, TURN_STEPS)
                self.tell(f"round {number} of {self.rounds}")
            self._take_turns(names, self.rounds + 1, None)
        return self._results, self._failures

    def _take_turns(self, names: list[str], turn: int, steps: int | None) -> None:
        for name in names:
            self._await(name, "its wait for a turn", until_it_waits=True)  # it may have died in another's
            if name in self._processes:
                self._turnstiles[name].grant(turn, steps)
                self._await(name, f"turn {turn}", until_it_waits=steps is not None)

    def _await(self, name: str, what: str, until_it_waits: bool) -> None:
        """Return when the arm's process has ended, and before that when it waits for its next turn."""
        process = self._processes.get(name)
        if process is None:
            return
        turnstile, deadline, late = self._turnstiles[name], time.monotonic() + self.timeout, ""
        while not (until_it_waits and turnstile.is_awaited):
            turnstile.poll(POLL_SECONDS)
            if not process.is_running():
                break
            if time.monotonic() >= deadline:
                late = f"{what} took longer than {self.timeout:g} s"
                break
        else:
            return
        process.end()
        del self._processes[name]
        try:
            self._results[name] = process.result(late)
        except ArmFailed as failure:
            if name == next(iter(self.arms)):
                raise
            self._failures[name] = str(failure)
            self.tell(f"{failure}\n{failure.log_tail}")
