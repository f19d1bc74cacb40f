"""`bridge-fgo demo --rl`: GRPO twice, once with a trainer that sleeps between updates, compared bit by bit."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from typing import Any

from rich.console import Console

from bridge_fgo.tools.show import readable_bytes, table
from harness.arms.rl.options import RlOptions
from harness.arms.runner import ArmRun, Event, compare
from harness.demo import NOT_EQUAL, Settings, find_device, print_parts, run_arms

MODULE = "harness.arms.rl.arm"
ARMS = (("resident", False), ("sleeping", True))
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "cuda": {
        "layers": 4, "hidden": 2048, "heads": 16, "lr": 6e-6, "prompts": 16, "group": 16, "micro_batch_size": 128,
        "steps": 300,
    },
}  # fmt: skip
"""Options of each device beside those of `RlOptions`. On a GPU 0.27 billion parameters take 5 GB with gradients and
states. Its learning rate is such that an update moves the policy as far as the CPU's does."""

MOVES = {
    "asleep": "sleep: offload everything",
    "params wake": "wake: reload the weights",
    "awake": "wake: reload the rest",
    "reference wakes": "reload the reference model",
    "reference sleeps": "offload the reference model",
}
"""Phases of an iteration in which something moves, and what to call that."""
FIGURES = ("seconds", "copied", "freed", "returned")
ENDS = 10  # iterations at either end whose mean reward is shown: that of one is noisy


def run(settings: Settings) -> int:
    """Run both arms, one after the other, and report; return 0, or NOT_EQUAL where they differ; raise as `demo.run`."""
    errors = Console(stderr=True, soft_wrap=True)
    device, ranks = find_device(settings.device, errors), settings.ranks or 1
    given = settings.given("steps", "tp", "pp", "crowd")
    options = RlOptions(device=device, **DEFAULTS[device] | given)
    arms = {name: ["--options", replace(options, sleep=sleep).as_json()] for name, sleep in ARMS}
    resident, sleeping = run_arms(
        MODULE, arms, options.steps, settings.keep, errors, ranks, told=lambda event: f"reward {event['reward']:.2f}"
    )
    same_rewards = resident.values("reward") == sleeping.values("reward")
    equal = {"rewards": same_rewards, **compare(resident, sleeping).parts}
    if settings.json_output:
        print(json.dumps(json_report(resident, sleeping, equal), allow_nan=False))
    else:
        print_report(Console(), resident, sleeping, equal)
    return 0 if all(equal.values()) else NOT_EQUAL


def after_the_first(arm: ArmRun) -> list[Event]:
    """Return an arm's iterations, where there are several without the first, in which tensors are taken into slabs."""
    return arm.steps[1:] or arm.steps


def ends_of_rewards(arm: ArmRun) -> tuple[float, float]:
    """Return the mean reward of an arm's first and of its last iterations, `ENDS` of each."""
    found = [float(reward or 0.0) for reward in arm.values("reward")]
    return statistics.fmean(found[:ENDS]), statistics.fmean(found[-ENDS:])


def median_seconds(arm: ArmRun) -> float:
    """Return the median seconds of an iteration."""
    return statistics.median(event["seconds"] for event in after_the_first(arm))


def moves_of(sleeping: ArmRun) -> dict[str, dict[str, float]]:
    """Return the medians of what each move took."""
    found = {}
    for name in MOVES:
        events = [phase for step in after_the_first(sleeping) for phase in step["phases"] if phase["phase"] == name]
        if events:
            found[name] = {figure: statistics.median(event[figure] for event in events) for figure in FIGURES}
    return found


def held_bytes(sleeping: ArmRun) -> int:
    """Return the fewest bytes that the second process held in a sleep; 0 where there was none."""
    return min(step["held"] for step in after_the_first(sleeping))


def json_report(resident: ArmRun, sleeping: ArmRun, equal: dict[str, bool]) -> Event:
    """Return the object that `--json` prints; equal: every part that was compared, by name."""
    return {
        **{name: sleeping.start.get(name) for name in ("device", "bridge", "mcore")},
        "steps": len(sleeping.steps),
        "rewards": sleeping.values("reward"),
        "reward": dict(zip(("first", "last"), ends_of_rewards(sleeping), strict=True)),
        "bitwise_equal": all(equal.values()),
        "equal": equal,
        "moves": moves_of(sleeping),
        "held_bytes": held_bytes(sleeping),
        "pinned_bytes": sleeping.result.get("pinned_bytes"),
        "bytes": sleeping.result.get("bytes_by_kind"),
        "seconds": {arm.name: median_seconds(arm) for arm in (resident, sleeping)},
    }


def print_report(console: Console, resident: ArmRun, sleeping: ArmRun, equal: dict[str, bool]) -> None:
    """Print rewards, moves, and whether the arms are bitwise equal."""
    on_cpu = sleeping.start.get("device") == "cpu"
    ends = min(ENDS, len(sleeping.steps))
    rewards, moves = [], []
    for arm in (resident, sleeping):
        first, last = ends_of_rewards(arm)
        rewards.append([arm.name, f"{first:.3f}", f"{last:.3f}", f"{median_seconds(arm):.3f} s"])
    console.print(table("", ("", f"reward, first {ends}", f"last {ends}", "an iteration"), rewards))
    for name, move in moves_of(sleeping).items():
        copied, freed, returned = (readable_bytes(move[figure]) for figure in ("copied", "freed", "returned"))
        moves.append([MOVES[name], f"{move['seconds']:.4f}", copied, freed, "-" if on_cpu else returned])
    console.print(table("", ("of an iteration", *FIGURES), moves))
    second = f"A second process took and filled {readable_bytes(held_bytes(sleeping))} in each sleep."
    if on_cpu:
        second = "On the CPU there is no driver to give memory back to, and no second process that takes it."
    console.print(second, markup=False)
    print_parts(console, equal, ", asleep between updates or not")
    if on_cpu:
        console.print("This ran on the CPU: it shows correctness and bytes, not speed.")
