"""`bridge-fgo demo`: the same training twice, resident and offloaded, compared bit by bit.

Each run (an *arm*) is a process of its own, so that neither inherits memory, random
state or patches from the other. An arm appends JSON events to a file, which is
followed here while it runs. Nothing here imports torch, except to look for a GPU.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bridge_fgo.tools.arms.comparator import Comparison, compare
from bridge_fgo.tools.arms.runner import ArmFailed, ArmRun, Event, run_arm

NOT_EQUAL = 1
FAILED = 2
TABLE_ROWS = 60


@dataclass(frozen=True)
class Settings:
    """Settings of one demo.

    device: auto, cuda or cpu. gpu_options: the GPU arm's own. arm_module: the module that is run as the arm instead of
    the device's.
    """

    steps: int = 20
    json_output: bool = False
    device: str = "auto"
    keep: Path | None = None
    gpu_options: tuple[str, ...] = ()
    arm_module: str | None = None


# --- where to run -------------------------------------------------------------------


def missing_packages() -> list[str]:
    """Return the Megatron packages that cannot be found here (looked for, not imported)."""
    return [
        package
        for package, module in (("megatron-bridge", "megatron.bridge"), ("megatron-core", "megatron.core"))
        if importlib.util.find_spec("megatron") is None or importlib.util.find_spec(module) is None
    ]


def choose_device(requested: str) -> tuple[str, str | None]:
    """Return ("cuda" or "cpu", why not the GPU).

    Transformer Engine is tried in a process of its own: it may be there and yet not
    import, and this process should not hold a CUDA context beside the arms.

    Raises:
        ValueError: `requested` is cuda and there is no GPU.
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


# --- the report ---------------------------------------------------------------------


def readable_bytes(count: float | None) -> str:
    """Return a number of bytes in the largest decimal unit that leaves a digit before the point."""
    if count is None:
        return "-"
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def readable_number(value: float | None) -> str:
    """Return a number with nine digits, enough to tell any two fp32 numbers apart."""
    return "-" if value is None else f"{value:.9g}"


def print_report(console: Console, resident: ArmRun, offloaded: ArmRun, same: Comparison, cpu: bool) -> None:
    """Print losses, bytes, and whether the two arms are bitwise equal."""
    losses = Table("step", "loss, resident", "loss, offloaded", "equal")
    rows = list(zip(resident.steps, offloaded.steps, same.steps, strict=False))
    for index, (ours, theirs, equal) in enumerate(rows):
        # Of a long run the first and last steps, and all that differ.
        if len(rows) > TABLE_ROWS and TABLE_ROWS // 2 <= index < len(rows) - TABLE_ROWS // 2 and equal:
            continue
        pair = (readable_number(event.get("loss")) for event in (ours, theirs))
        losses.add_row(str(ours["step"]), *pair, "yes" if equal else "[bold red]NO[/]")
    console.print(losses)

    rows_of_bytes = [
        ("optimizer state", "state_bytes"),
        ("released during forward and backward", "released_bytes"),
        ("pinned host memory", "pinned_bytes"),
    ]
    if cpu:  # there is no allocator to ask: this arm samples the bytes of live state
        rows_of_bytes.append(("peak state in forward and backward", "peak_forward_backward_bytes"))
    else:
        rows_of_bytes += [
            ("peak allocated", "peak_allocated_bytes"),
            ("peak reserved", "peak_reserved_bytes"),
        ]
    bytes_table = Table("", "resident", "offloaded")
    for title, name in rows_of_bytes:
        bytes_table.add_row(title, *(readable_bytes(arm.result.get(name)) for arm in (resident, offloaded)))
    if not cpu:
        bytes_table.add_row("median step", *(f"{median_seconds(arm):.3f} s" for arm in (resident, offloaded)))
    console.print(bytes_table)

    parts = ", ".join(f"{name} {'equal' if equal else 'DIFFERENT'}" for name, equal in same.parts.items())
    if same.bitwise_equal:
        console.print(f"[bold green]Bitwise equal[/]: {parts}.")
    else:
        console.print(f"[bold red]NOT bitwise equal[/]: {parts}.")
    if cpu:
        console.print("This ran on the CPU: it shows correctness and bytes, not speed.")


def median_seconds(arm: ArmRun) -> float:
    """Return the median step time in seconds, without the first three steps where there are more."""
    seconds = [event["seconds"] for event in arm.steps]
    return statistics.median(seconds[3:] or seconds)


def json_report(resident: ArmRun, offloaded: ArmRun, same: Comparison) -> Event:
    """Return the object that `--json` prints. A loss that JSON cannot hold (NaN, inf) is null."""

    def losses(arm: ArmRun) -> list[float | None]:
        return [loss if loss is not None and math.isfinite(loss) else None for loss in arm.values("loss")]

    after, before = offloaded.result, resident.result
    return {
        "device": offloaded.start.get("device"),
        "bridge": offloaded.start.get("bridge"),
        "mcore": offloaded.start.get("mcore"),
        "engine": after.get("engine"),
        "steps": len(offloaded.steps),
        "loss_resident": losses(resident),
        "loss_offloaded": losses(offloaded),
        "bitwise_equal": same.bitwise_equal,
        "equal": same.parts,
        "state_bytes": after.get("state_bytes"),
        "released_bytes": after.get("released_bytes"),
        "pinned_bytes": after.get("pinned_bytes"),
        **{
            name: {"resident": before.get(name), "offloaded": after.get(name)}
            for name in ("peak_allocated_bytes", "peak_reserved_bytes", "peak_forward_backward_bytes")
        },
    }


# --- the command --------------------------------------------------------------------


def run(settings: Settings) -> int:
    """Run both arms, one after the other, and report.

    Returns:
        The exit status: 0; NOT_EQUAL where the arms differ or nothing was released; FAILED where an arm failed or
        could not start.
    """
    errors, output = Console(stderr=True, soft_wrap=True), Console()
    module, device = settings.arm_module, "cpu"
    if module is None:
        if missing := missing_packages():
            errors.print(f"bridge-fgo demo: {', '.join(missing)} is not installed in this environment.")
            errors.print("Install megatron-bridge 0.6 and megatron-core 0.19.")
            return FAILED
        try:
            with errors.status("Looking for a GPU and Transformer Engine"):
                device, why = choose_device(settings.device)
        except ValueError as error:
            errors.print(f"bridge-fgo demo: {error}", markup=False)
            return FAILED
        if why:
            errors.print(f"Running on the CPU: {why}.", markup=False)
        module = "bridge_fgo.tools.arms.gpu" if device == "cuda" else "bridge_fgo.tools.arms.cpu"
    options = ["--steps", str(settings.steps)]
    if device == "cuda":
        options += settings.gpu_options
    elif settings.gpu_options:
        unused = " ".join(settings.gpu_options)
        errors.print(f"bridge-fgo demo: {unused}: only the GPU's demo has these sizes; leave them out", markup=False)
        return FAILED

    with contextlib.ExitStack() as stack:
        if settings.keep is not None:
            folder = settings.keep
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                errors.print(f"bridge-fgo demo: --keep: {error}", markup=False)
                return FAILED
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bridge-fgo-demo-")))
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        progress = stack.enter_context(Progress(*columns, console=errors))
        arms: dict[str, ArmRun] = {}
        for name, offload in (("resident", "off"), ("offloaded", "on")):
            task = progress.add_task(name, total=settings.steps)

            def advance(event: Event, task: Any = task) -> None:
                if event.get("event") == "step":
                    progress.update(task, completed=event["step"])

            try:
                arms[name] = run_arm(name, module, [*options, "--offload", offload], folder, advance)
            except ArmFailed as failure:
                progress.stop()
                errors.print(f"bridge-fgo demo: {failure}. Its last lines:", markup=False)
                errors.print(failure.log_tail, markup=False, highlight=False)
                return FAILED

    same = compare(arms["resident"], arms["offloaded"])
    if settings.json_output:
        print(json.dumps(json_report(arms["resident"], arms["offloaded"], same), allow_nan=False))
    else:
        print_report(output, arms["resident"], arms["offloaded"], same, cpu=device == "cpu")
    released = arms["offloaded"].result.get("released_bytes") or 0
    if not released:
        errors.print("bridge-fgo demo: the offloaded arm released no memory.")
    return 0 if same.bitwise_equal and released else NOT_EQUAL
