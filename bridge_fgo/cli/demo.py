"""``bridge-fgo demo``: the same training twice, resident and offloaded, compared bit by bit.

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
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

NOT_EQUAL = 1
FAILED = 2
LOG_LINES_SHOWN = 30
TABLE_ROWS = 60
POLL_SECONDS = 0.1
DIGESTS = ("params", "masters", "moments")

Event = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """One demo.

    ``device`` is auto, cuda or cpu. ``gpu_options`` go to the GPU arm as they are.
    ``arm_module`` overrides the module that is run as the arm.
    """

    steps: int = 20
    json_output: bool = False
    device: str = "auto"
    keep: Path | None = None
    gpu_options: tuple[str, ...] = ()
    arm_module: str | None = None


@dataclass
class ArmRun:
    """The events of one finished arm."""

    name: str
    start: Event = field(default_factory=dict)
    steps: list[Event] = field(default_factory=list)
    result: Event = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Files ``event`` by its kind; kinds that this version does not know are left out."""
        kind = event.get("event")
        if kind == "start":
            self.start = event
        elif kind == "step":
            self.steps.append(event)
        elif kind == "result":
            self.result = event

    def values(self, name: str) -> list[float | None]:
        """Returns the number called ``name`` of every step."""
        return [event.get(name) for event in self.steps]


class ArmFailed(RuntimeError):
    """An arm ended with an error, or without a result; ``log_tail`` holds its last lines."""

    def __init__(self, name: str, why: str, log_tail: str) -> None:
        super().__init__(f"the {name} arm failed: {why}")
        self.log_tail = log_tail


# --- comparison ---------------------------------------------------------------------


def number_bits(event: Event, name: str) -> str:
    """Returns text that is equal for two numbers exactly when their bits are.

    Prefers the event's hexadecimal form. ``==`` would not do: it holds 0.0 and -0.0
    for equal, and a NaN for different from itself.
    """
    text = event.get(f"{name}_hex")
    if text is not None:
        return str(text)
    value = event.get(name)
    return "none" if value is None else struct.pack("<d", value).hex()


@dataclass(frozen=True)
class Comparison:
    """What of two arms is equal to the last bit. ``steps[i]`` is the i-th step's loss."""

    steps: tuple[bool, ...]
    same_steps: bool
    grad_norms: bool
    digests: dict[str, bool]

    @property
    def parts(self) -> dict[str, bool]:
        """Every part that was compared, by name."""
        losses = self.same_steps and all(self.steps)
        return {"losses": losses, "grad norms": self.grad_norms, **self.digests}

    @property
    def bitwise_equal(self) -> bool:
        """Whether all parts are equal."""
        return all(self.parts.values())


def compare(resident: ArmRun, offloaded: ArmRun) -> Comparison:
    """Compares losses, gradient norms, skipped steps and the digests of the final state.

    A digest that is missing on either side counts as different: equality has to be shown.
    """
    pairs = list(zip(resident.steps, offloaded.steps, strict=False))
    whole = len(resident.steps) == len(offloaded.steps) > 0
    ours, theirs = offloaded.result.get("digests", {}), resident.result.get("digests", {})

    def equal(name: str) -> list[bool]:
        return [number_bits(a, name) == number_bits(b, name) for a, b in pairs]

    def ran_alike(a: Event, b: Event) -> bool:
        return a["step"] == b["step"] and bool(a["skipped"]) == bool(b["skipped"])

    return Comparison(
        steps=tuple(equal("loss")),
        same_steps=whole and all(ran_alike(a, b) for a, b in pairs),
        grad_norms=whole and all(equal("grad_norm")),
        digests={name: bool(ours.get(name)) and ours.get(name) == theirs.get(name) for name in DIGESTS},
    )


# --- running an arm -----------------------------------------------------------------


class EventTail:
    """Reads the whole lines that were appended to a file since the last call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new_events(self) -> Iterator[Event]:
        """Yields the new events; a line still being written waits for the next call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            lines = file.read().split(b"\n")
        for line in lines[:-1]:
            self._offset += len(line) + 1
            if line.strip():
                yield json.loads(line)


def run_arm(
    name: str,
    module: str,
    options: list[str],
    folder: Path,
    on_event: Callable[[Event], None] = lambda event: None,
    launcher: tuple[str, ...] = (),
) -> ArmRun:
    """Runs ``python LAUNCHER... -m module options... --events FILE`` and returns its events.

    ``launcher`` is for arms of several ranks: ``("-m", "torch.distributed.run", ...)``.
    Leaves ``NAME.events.jsonl`` and ``NAME.log`` in ``folder``; calls ``on_event`` as
    events come in. Raises ArmFailed where the process fails or leaves no result.
    """
    events, log = folder / f"{name}.events.jsonl", folder / f"{name}.log"
    events.unlink(missing_ok=True)  # the arm appends: an earlier demo's events must not count
    arm, tail = ArmRun(name), EventTail(events)
    command = [sys.executable, *launcher, "-m", module, *options, "--events", str(events)]

    def collect() -> None:
        for event in tail.new_events():
            arm.add(event)
            on_event(event)

    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            while process.poll() is None:
                collect()
                time.sleep(POLL_SECONDS)
        finally:
            if process.poll() is None:  # Ctrl-C here must not leave a trainer on the GPU
                process.terminate()
                try:
                    process.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
    collect()
    if process.returncode != 0 or not arm.result:
        why = f"exit status {process.returncode}" if process.returncode else "it left no result"
        lines = log.read_text(errors="replace").splitlines()
        raise ArmFailed(name, why, "\n".join(lines[-LOG_LINES_SHOWN:]))
    return arm


# --- where to run -------------------------------------------------------------------


def missing_packages() -> list[str]:
    """Returns the Megatron packages that cannot be found here (looked for, not imported)."""
    return [
        package
        for package, module in (("megatron-bridge", "megatron.bridge"), ("megatron-core", "megatron.core"))
        if importlib.util.find_spec("megatron") is None or importlib.util.find_spec(module) is None
    ]


def choose_device(requested: str) -> tuple[str, str | None]:
    """Returns ("cuda" or "cpu", why not the GPU).

    Transformer Engine is tried in a process of its own: it may be there and yet not
    import, and this process should not hold a CUDA context beside the arms.
    Raises ValueError where ``requested`` is cuda and there is no GPU.
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
    """Returns ``count`` bytes in the largest decimal unit that leaves a digit before the point."""
    if count is None:
        return "-"
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def readable_number(value: float | None) -> str:
    """Returns ``value`` with nine digits, enough to tell any two fp32 numbers apart."""
    return "-" if value is None else f"{value:.9g}"


def print_report(console: Console, resident: ArmRun, offloaded: ArmRun, same: Comparison, cpu: bool) -> None:
    """Prints losses, bytes, and whether the two arms are bitwise equal."""
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
    """Returns the median step time in seconds, without the first three steps where there are more."""
    seconds = [event["seconds"] for event in arm.steps]
    return statistics.median(seconds[3:] or seconds)


def json_report(resident: ArmRun, offloaded: ArmRun, same: Comparison) -> Event:
    """Returns the object that ``--json`` prints. A loss that JSON cannot hold (NaN, inf) is null."""

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
    """Runs both arms one after another and reports.

    Returns the exit status: 0; NOT_EQUAL where the arms differ or nothing was
    released; FAILED where an arm failed or could not start.
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
        module = "bridge_fgo.cli.arms.gpu" if device == "cuda" else "bridge_fgo.cli.arms.cpu"
    options = ["--steps", str(settings.steps)]
    if device == "cuda":
        options += settings.gpu_options
    elif settings.gpu_options:
        errors.print(f"Not used on the CPU: {' '.join(settings.gpu_options)}", markup=False)

    with contextlib.ExitStack() as stack:
        if settings.keep is not None:
            folder = settings.keep
            folder.mkdir(parents=True, exist_ok=True)
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
