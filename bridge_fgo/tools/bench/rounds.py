"""Step times of arms that train in turn, compared within each round, by pure arithmetic on their events.

Arms of one round train within seconds of each other. So the figure of two arms is the median, over rounds, of the
difference or the ratio within a round: a host that slows down for some rounds slows both.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bridge_fgo.tools.arms.runner import ArmRun
from bridge_fgo.tools.bench.steps import warm_steps_of_turns


@dataclass(frozen=True)
class ArmRounds:
    """One arm, a value a round.

    seconds: median of the steps that count, which are all of a turn but its first.
    host_loop_seconds: median of their slowest ranks' loop; () where nobody timed it.
    ratio: `seconds` over those of the arm that this one is compared with.
    compared_with: its name.
    added_seconds: median over rounds of what is added to that arm's.
    e: that over S / link; None for a resident arm.
    """

    arm: str
    seconds: tuple[float, ...]
    host_loop_seconds: tuple[float, ...]
    compared_with: str
    ratio: tuple[float, ...]
    added_seconds: float
    e: float | None


def medians(run: ArmRun) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the median seconds of a step and of its host loop, in each round in order."""
    rounds = warm_steps_of_turns(run)
    seconds = tuple(statistics.median(step.seconds for step in steps) for _, steps in sorted(rounds.items()))
    loops = [[step.host_loop for step in steps if step.host_loop is not None] for _, steps in sorted(rounds.items())]
    return seconds, tuple(statistics.median(of_round) for of_round in loops) if all(loops) else ()


def rounds_of(
    runs: Mapping[str, ArmRun], compared_with: Mapping[str, str], link: Mapping[str, float]
) -> list[ArmRounds]:
    """Return what each arm took in each round.

    Args:
        runs: by the arms' names, the resident arm first.
        compared_with: for each the name of the resident arm that it is compared with. A resident arm which is its own
            is compared with the first, to tell what its variables do.
        link: see `bridge_fgo.tools.bench.probe`.
    """
    of_arms = {name: medians(run) for name, run in runs.items()}
    first = next(iter(runs))
    found: list[ArmRounds] = []
    for name, (seconds, loops) in of_arms.items():
        is_resident = compared_with[name] == name
        other = first if is_resident else compared_with[name]
        pairs = list(zip(seconds, of_arms[other][0], strict=True))
        added = statistics.median(mine - others for mine, others in pairs)
        e = added * min(link["d2h"], link["h2d"]) / runs[other].result["state_bytes"]
        ratio = tuple(mine / others for mine, others in pairs)
        found.append(ArmRounds(name, seconds, loops, other, ratio, added, None if is_resident else e))
    return found


@dataclass(frozen=True)
class Faster:
    """In how many rounds an arm was faster than another one."""

    arm: str
    than: str
    rounds: int
    of: int

    def __str__(self) -> str:
        return f"{self.arm} faster than {self.than} in {self.rounds} of {self.of} rounds"


def faster(arms: list[ArmRounds], residents: set[str]) -> list[Faster]:
    """Return for each two arms in how many rounds the first was faster; resident arms come second."""
    order = sorted(arms, key=lambda arm: arm.arm in residents)
    return [
        Faster(a.arm, b.arm, sum(x < y for x, y in zip(a.seconds, b.seconds, strict=True)), len(a.seconds))
        for a, b in itertools.combinations(order, 2)
    ]


def table_of_rounds(arms: list[ArmRounds]) -> list[list[str]]:
    """Return the cells, a round a row, an arm a column: seconds of a step, ratio, host loop in ms."""
    cells = [["round", *(f"{arm.arm}: s, ratio, loop ms" for arm in arms)]]
    for number in range(len(arms[0].seconds)):
        row = [str(number + 1)]
        for arm in arms:
            loop = f"{1e3 * arm.host_loop_seconds[number]:.2f}" if arm.host_loop_seconds else "-"
            row.append(f"{arm.seconds[number]:.3f}  {arm.ratio[number]:.3f}  {loop}")
        cells.append(row)
    over = [f"{statistics.median(arm.seconds):.3f}  {statistics.median(arm.ratio):.3f}" for arm in arms]
    cells.append(["median", *over])
    cells.append(["E by rounds", *("-" if arm.e is None else f"{arm.e:.2f}" for arm in arms)])
    return cells


def as_json(arms: list[ArmRounds], order: list[list[str]], comparisons: list[Faster]) -> dict[str, Any]:
    """Return what `bench.json` holds of the rounds. order: in which arms had their turns, in each round."""
    return {
        "order": order,
        "arms": [asdict(arm) for arm in arms],
        "faster": [asdict(comparison) for comparison in comparisons],
    }
