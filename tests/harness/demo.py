"""`bridge-fgo demo`: the same training twice, resident and offloaded, compared bit by bit.

Each run (an *arm*) is a process of its own, so that neither inherits memory, random state or patches from the other.
Its JSON events are followed here while it runs. Nothing here imports torch, except to look for a GPU.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bridge_fgo.tools.job.answers import missing_packages
from bridge_fgo.tools.link import launcher
from bridge_fgo.tools.settings import Json, option
from bridge_fgo.tools.show import are_not_installed, readable_bytes, readable_number, table
from harness.arms.runner import ArmRun, Comparison, Event, compare, run_arm

NOT_EQUAL = 1
DEFAULT_STEPS = 20
MODULE = "harness.arms.gpu"
"""The module that trains one arm."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of either demo; what is None is up to it. ValueError for an option of --rl alone."""

    rl: Annotated[bool, option("Train by GRPO, once asleep between updates, and compare with one awake.", "--rl")] = (
        False
    )
    steps: Annotated[int | None, option("Training steps of each arm: 20; with --rl 200, on a GPU 300.", min=1)] = None
    json_output: Json = False
    device: Annotated[Literal["auto", "cuda", "cpu"], option("Where to run; auto takes the GPU if it can.")] = "auto"
    keep: Annotated[Path | None, option("Keep logs and events here.", metavar="DIR")] = None
    ranks: Annotated[int | None, option("--rl: processes of an arm, a GPU each.", min=1)] = None
    tp: Annotated[int | None, option("--rl: tensor-parallel ranks.", min=1)] = None
    pp: Annotated[int | None, option("--rl: pipeline stages.", min=1)] = None
    crowd: Annotated[
        bool, option("--rl on a GPU of one's own: a second process holds all but what training needs.", "--crowd")
    ] = False

    def __post_init__(self) -> None:
        if not self.rl and (wrong := [f"--{name}" for name in self.given("ranks", "tp", "pp", "crowd")]):
            raise ValueError(f"{', '.join(wrong)}: only of --rl; leave out what this demo does not take")

    def given(self, *names: str) -> dict[str, Any]:
        """Return those of the named settings that the user gave."""
        return {name: value for name in names if (value := getattr(self, name))}


def choose_device(requested: str) -> tuple[str, str | None]:
    """Return ("cuda" or "cpu", why not the GPU); ValueError where `requested` is cuda and there is no GPU.

    Transformer Engine is tried in a process of its own: it may be there and yet not import, and this process should not
    hold a CUDA context beside the arms.
    """
    if requested == "cpu":
        return "cpu", None
    import torch

    if not torch.cuda.is_available():
        if requested == "cuda":
            raise ValueError("--device cuda: torch sees no CUDA device here")
        return "cpu", "torch sees no CUDA device"
    if requested == "auto":
        probe = [sys.executable, "-c", "import transformer_engine.pytorch, megatron.bridge"]
        outcome = subprocess.run(probe, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        if outcome.returncode != 0:
            last = (outcome.stderr.strip().splitlines() or [f"exit status {outcome.returncode}"])[-1]
            return "cpu", f"Transformer Engine or megatron.bridge does not import: {last}"
    return "cuda", None


def find_device(requested: str, errors: Console) -> str:
    """Return "cuda" or "cpu", and say why not the GPU; ValueError where it, or a package, is missing."""
    if missing := missing_packages():
        raise ValueError(
            f"{are_not_installed(missing)} in this environment: install megatron-bridge 0.6 and megatron-core 0.19"
        )
    with errors.status("Looking for a GPU and Transformer Engine"):
        device, why = choose_device(requested)
    if why:
        errors.print(f"Running on the CPU: {why}.", markup=False)
    return device


def run_arms(
    module: str,
    options: dict[str, list[str]],
    steps: int,
    keep: Path | None,
    errors: Console,
    ranks: int = 1,
    told: Callable[[Event], str] = lambda event: "",
) -> list[ArmRun]:
    """Run arms of a module one after another, with their options by name; return their events.

    Files stay in `keep`, where there is one; `errors` shows how far each is, and what `told` says of a step's event.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    found = []
    with ExitStack() as stack:
        folder = keep or Path(stack.enter_context(TemporaryDirectory(prefix="bridge-fgo-demo-")))
        folder.mkdir(parents=True, exist_ok=True)
        progress = stack.enter_context(Progress(*columns, TextColumn("{task.fields[told]}"), console=errors))
        for name, of_arm in options.items():
            task = progress.add_task(name, total=steps, told="")

            def advance(event: Event, task: Any = task) -> None:
                if event.get("event") == "step":
                    progress.update(task, completed=event["step"], told=told(event))

            found.append(run_arm(name, module, of_arm, folder, on_event=advance, launcher=launcher(ranks)))
    return found


def print_report(console: Console, resident: ArmRun, offloaded: ArmRun, same: Comparison, cpu: bool) -> None:
    """Print losses, bytes, and whether the two arms are bitwise equal."""
    arms = (resident, offloaded)
    losses = []
    for ours, theirs, equal in zip(resident.steps, offloaded.steps, same.steps, strict=False):
        pair = (readable_number(event.get("loss")) for event in (ours, theirs))
        losses.append([str(ours["step"]), *pair, "yes" if equal else "[bold red]NO[/]"])
    console.print(table("", ("step", "loss, resident", "loss, offloaded", "equal"), losses))
    figures = {
        "optimizer state": "state_bytes",
        "released during forward and backward": "released_bytes",
        "pinned host memory": "pinned_bytes",
    }
    if cpu:  # there is no allocator to ask: this arm samples the bytes of live state
        figures["peak state in forward and backward"] = "peak_forward_backward_bytes"
    else:
        figures |= {"peak allocated": "peak_allocated_bytes", "peak reserved": "peak_reserved_bytes"}
    found = [[title, *(readable_bytes(arm.result.get(name)) for arm in arms)] for title, name in figures.items()]
    if not cpu:
        found.append(["median step", *(f"{median_seconds(arm):.3f} s" for arm in arms)])
    console.print(table("", ("", "resident", "offloaded"), found))
    print_parts(console, same.parts)
    if cpu:
        console.print("This ran on the CPU: it shows correctness and bytes, not speed.")


def print_parts(console: Console, parts: dict[str, bool], how: str = "") -> None:
    """Print which compared parts are equal, by name. how: said after "Bitwise equal" where all of them are."""
    told = ", ".join(f"{name} {'equal' if equal else 'DIFFERENT'}" for name, equal in parts.items())
    if all(parts.values()):
        console.print(f"[bold green]Bitwise equal[/]{how}: {told}.")
    else:
        console.print(f"[bold red]NOT bitwise equal[/]: {told}.")


def median_seconds(arm: ArmRun) -> float:
    """Return the median step time in seconds, without the first three steps where there are more."""
    seconds = [event["seconds"] for event in arm.steps]
    return statistics.median(seconds[3:] or seconds)


def json_report(resident: ArmRun, offloaded: ArmRun, same: Comparison) -> Event:
    """Return the object that `--json` prints. A loss that JSON cannot hold (NaN, inf) is null."""

    def losses(arm: ArmRun) -> list[float | None]:
        return [loss if loss is not None and math.isfinite(loss) else None for loss in arm.values("loss")]

    after, before = offloaded.result, resident.result
    peaks = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_forward_backward_bytes")
    return {
        **{name: offloaded.start.get(name) for name in ("device", "bridge", "mcore")},
        "engine": after.get("engine"),
        "steps": len(offloaded.steps),
        "loss_resident": losses(resident),
        "loss_offloaded": losses(offloaded),
        "bitwise_equal": same.bitwise_equal,
        "equal": same.parts,
        **{name: after.get(name) for name in ("state_bytes", "released_bytes", "pinned_bytes")},
        **{name: {"resident": before.get(name), "offloaded": after.get(name)} for name in peaks},
    }


def run(settings: Settings) -> int:
    """Run both arms and report; return 0, or NOT_EQUAL where they differ or nothing was released; ArmFailed."""
    errors = Console(stderr=True, soft_wrap=True)
    device = find_device(settings.device, errors)
    steps = settings.steps or DEFAULT_STEPS
    how = [*["--cpu"] * (device == "cpu"), "--steps", str(steps)]
    arms = {name: [*how, "--offload", offload] for name, offload in (("resident", "off"), ("offloaded", "on"))}
    resident, offloaded = run_arms(MODULE, arms, steps, settings.keep, errors)
    same = compare(resident, offloaded)
    if settings.json_output:
        print(json.dumps(json_report(resident, offloaded, same), allow_nan=False))
    else:
        print_report(Console(), resident, offloaded, same, cpu=device == "cpu")
    released = offloaded.result.get("released_bytes") or 0
    if not released:
        errors.print("bridge-fgo demo: the offloaded arm released no memory.")
    return 0 if same.bitwise_equal and released else NOT_EQUAL
