"""Step times of arms that train in turn, compared within each round, by pure arithmetic on their events.

Arms of one round train within seconds of each other. So the figure of two arms is the median, over rounds, of the
difference or the ratio within a round: a host that slows down for some rounds slows both.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from bridge_fgo.tools.arms.runner import ArmRun
from bridge_fgo.tools.bench.steps import warm_steps


@dataclass(frozen=True)
class ArmRounds:
    """One arm, a value a round."""

    arm: str
    seconds: tuple[float, ...]  # median of the steps that count, which are all of a turn but its first
    host_loop_seconds: tuple[float, ...]  # median of their slowest ranks' loop; () where nobody timed it
    compared_with: str  # name of the arm that this one is compared with
    ratio: tuple[float, ...]  # `seconds` over those of that arm
    added_seconds: float  # median over rounds of what is added to that arm's
    e: float | None  # that over S / link; None for a resident arm


def medians(run: ArmRun) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the median seconds of a step and of its host loop, in each round in order."""
    seconds, loops = [], []
    for _, of_round in itertools.groupby(warm_steps(run), lambda step: step.turn):
        steps = list(of_round)
        seconds.append(statistics.median(step.seconds for step in steps))
        timed = [step.host_loop for step in steps if step.host_loop is not None]
        loops += [statistics.median(timed)] if timed else []
    return tuple(seconds), tuple(loops)


def rounds_of(
    runs: Mapping[str, ArmRun], compared_with: Mapping[str, str], link: Mapping[str, float]
) -> list[ArmRounds]:
    """Return what each arm took in each round, the resident one first; `link` is what the bench's probe measured.

    A resident arm that is compared with itself is compared with the first, to tell what its variables do.
    """
    of_arms = {name: medians(run) for name, run in runs.items()}
    found: list[ArmRounds] = []
    for name, (seconds, loops) in of_arms.items():
        is_resident = compared_with[name] == name
        other = next(iter(runs)) if is_resident else compared_with[name]
        pairs = list(zip(seconds, of_arms[other][0], strict=True))
        added = statistics.median(mine - others for mine, others in pairs)
        e = added * min(link["d2h"], link["h2d"]) / runs[other].result["state_bytes"]
        ratio = tuple(mine / others for mine, others in pairs)
        found.append(ArmRounds(name, seconds, loops, other, ratio, added, None if is_resident else e))
    return found


def faster(arms: list[ArmRounds], residents: set[str]) -> list[str]:
    """Say of each two arms in how many rounds the first was faster; resident arms come second."""
    order = sorted(arms, key=lambda arm: arm.arm in residents)
    found = []
    for one, other in itertools.combinations(order, 2):
        count = sum(x < y for x, y in zip(one.seconds, other.seconds, strict=True))
        found.append(f"{one.arm} faster than {other.arm} in {count} of {len(one.seconds)} rounds")
    return found


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
