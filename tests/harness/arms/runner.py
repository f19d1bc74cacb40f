"""Arms and their events, JSON that each writes: starts arms, follows them, and compares two bit by bit."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from bridge_fgo.tools.report import bits

LOG_LINES_SHOWN = 30
TRACEBACK_LINES_SHOWN = 60
POLL_SECONDS = 0.1
TESTS = Path(__file__).parents[2]

DIGESTS = ("params", "masters", "moments")  # parts of the final state of which an arm leaves a digest

FIRST_COUNTED_STEP = 7
"""The first step whose time counts. By then moments exist, peaks are measured, two steps were timed, and masters are
copied as they will be: every step is like the next."""

Event = dict[str, Any]


@dataclass
class ArmRun:
    """The events of one finished arm."""

    name: str
    start: Event = field(default_factory=dict)
    steps: list[Event] = field(default_factory=list)
    result: Event = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """File an event by its kind; kinds that this version does not know are left out."""
        match event.get("event"):
            case "step":
                self.steps.append(event)
            case "start" | "result" as kind:
                setattr(self, kind, event)

    def values(self, name: str) -> list[float | None]:
        """Return the number called `name` of every step; None where JSON has no word for it."""
        return [event.get(name) for event in self.steps]


class ArmFailed(ChildProcessError):
    """An arm ended with an error, or without a result; `log_tail`, its note, is what `telling_lines` returns."""

    def __init__(self, name: str, why: str, log_tail: str) -> None:
        super().__init__(f"the {name} arm failed: {why}")
        self.log_tail = log_tail
        self.add_note(f"Its last lines:\n{log_tail}")


def telling_lines(log: str) -> str:
    """Return a log's first traceback, of the rank that failed first, and its last lines: torchrun's table, say."""
    lines = log.splitlines()
    end = max(0, len(lines) - LOG_LINES_SHOWN)
    first = next((i for i, line in enumerate(lines[:end]) if "Traceback (most recent call last)" in line), end)
    traceback = lines[first : min(end, first + TRACEBACK_LINES_SHOWN)]
    left_out = ["[...]"] if traceback and first + TRACEBACK_LINES_SHOWN < end else []
    return "\n".join([*traceback, *left_out, *lines[end:]])


def exact_number(event: Event, name: str) -> float | None:
    """Return a number of an event to the last bit, also one that JSON has no word for; None where there is none."""
    text = event.get(f"{name}_hex")
    return event.get(name) if text is None else float.fromhex(text)


class EventWriter:
    """Appends events to a file, each a line of JSON that is on disk when the call returns.

    JSON has no NaN or infinity: such a number is null, and the field `<name>_hex` keeps it exactly.
    """

    def __init__(self, path: Path | str) -> None:
        self._file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 (lives as long as the run)

    def start(self, device: str) -> None:
        """Write the first event: where the arm runs ("cpu", or the GPU's name) and on which versions."""
        distributions = {"bridge": "megatron-bridge", "mcore": "megatron-core", "torch": "torch"}
        versions = {name: metadata.version(wheel) for name, wheel in distributions.items()}
        self._write("start", device=device, **versions)

    def step(self, *, loss: float | None, grad_norm: float | None, **figures: Any) -> None:
        """Write the event of one training step: `step` (its number), `skipped`, `passes`, `seconds`, and what else."""
        self._write("step", **_number("loss", loss), **_number("grad_norm", grad_norm), **figures)

    def result(self, *, digests: Mapping[str, str], **figures: Any) -> None:
        """Write the last event: the final state and the figures of the run, in bytes and seconds; None: not measured.

        Every arm has `engine`, `state_bytes`, `released_bytes` and `pinned_bytes`.
        """
        self._write("result", digests=dict(digests), **figures)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: str, **fields: Any) -> None:
        self._file.write(json.dumps({"event": event, **fields}, allow_nan=False) + "\n")


def _number(name: str, value: float | None) -> dict[str, float | str | None]:
    finite = value is not None and math.isfinite(value)
    return {name: value if finite else None, f"{name}_hex": None if value is None else float(value).hex()}


class EventTail:
    """Reads the lines that were appended to a file since the last call, once they are whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new_events(self) -> Iterator[Event]:
        """Yield the new events; a line still being written waits for the next call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            lines = file.read().split(b"\n")
        for line in lines[:-1]:
            self._offset += len(line) + 1
            if line.strip():
                yield json.loads(line)


def file_name(name: str) -> str:
    """Return the name of an arm in a form that file names may have."""
    return re.sub(r"[^\w.:=-]+", "_", name)


class ArmProcess:
    """A running arm: the process of `python LAUNCHER... -m module options... --events FILE` and its events so far.

    Leaves `NAME.events.jsonl` and `NAME.log` in the folder; see `file_name`. `on_event` is called with each event as it
    comes in, `launcher` is what `link.launcher(ranks)` returns, `environment` has variables beside this process's.
    """

    def __init__(
        self,
        name: str,
        module: str,
        options: list[str],
        folder: Path,
        on_event: Callable[[Event], None] = lambda event: None,
        launcher: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        events, self._log = (folder / f"{file_name(name)}.{end}" for end in ("events.jsonl", "log"))
        events.unlink(missing_ok=True)  # the arm appends: an earlier demo's events must not count
        self.arm, self._tail, self._on_event = ArmRun(name), EventTail(events), on_event
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, *launcher, "-m", module, *options, "--events", str(events)],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment_of({**os.environ, **(environment or {})}),
            )

    def is_running(self) -> bool:
        """Take in the new events, and return whether the process still runs."""
        runs = self._process.poll() is None
        for event in self._tail.new_events():
            self.arm.add(event)
            self._on_event(event)
        return runs

    def end(self) -> None:
        """End the process if it still runs."""
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def result(self, late: str = "") -> ArmRun:
        """Return the events of an arm that has ended; ArmFailed where it was ended (`late`: why) or left no result."""
        assert not self.is_running(), self.arm.name
        status = self._process.returncode
        if status != 0 or not self.arm.result:
            why = late or (f"exit status {status}" if status else "it left no result")
            raise ArmFailed(self.arm.name, why, telling_lines(self._log.read_text(errors="replace")))
        return self.arm


def environment_of(given: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which a process finds the harness and the package, after what it is given."""
    path = (given.get("PYTHONPATH"), str(TESTS), str(TESTS.parent))
    return {**given, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def run_arm(*process: Any, timeout: float = math.inf, **others: Any) -> ArmRun:
    """Run an arm, see `ArmProcess`, to its end and return its events; ArmFailed as `result`, or after `timeout` s."""
    arm = ArmProcess(*process, **others)
    deadline = time.monotonic() + timeout
    late = ""
    try:
        while arm.is_running():
            if time.monotonic() >= deadline:
                late = f"it ran longer than {timeout:g} s"
                break
            time.sleep(POLL_SECONDS)
    finally:
        arm.end()  # Ctrl-C here must not leave a trainer on the GPU
    return arm.result(late)


@dataclass(frozen=True)
class Comparison:
    """The parts of two arms that are equal to the last bit, by name. `steps[i]` is the i-th step's loss."""

    steps: tuple[bool, ...]
    parts: dict[str, bool]

    @property
    def bitwise_equal(self) -> bool:
        """Whether all parts are equal."""
        return all(self.parts.values())


def compare(resident: ArmRun, offloaded: ArmRun) -> Comparison:
    """Compare losses, gradient norms, skipped steps and the digests of the final state of two arms."""
    pairs = list(zip(resident.steps, offloaded.steps, strict=False))
    whole = len(resident.steps) == len(offloaded.steps) > 0

    def are_equal(name: str) -> tuple[bool, ...]:
        return tuple(bits(exact_number(a, name)) == bits(exact_number(b, name)) for a, b in pairs)

    def ran_alike(a: Event, b: Event) -> bool:
        return a["step"] == b["step"] and bool(a["skipped"]) == bool(b["skipped"])

    losses = are_equal("loss")
    mine, theirs = (arm.result.get("digests", {}) for arm in (resident, offloaded))
    parts = {
        "losses": whole and all(ran_alike(a, b) for a, b in pairs) and all(losses),
        "grad norms": whole and all(are_equal("grad_norm")),
        # One that is missing counts as different: equality has to be shown.
        **{name: bool(mine.get(name)) and mine.get(name) == theirs.get(name) for name in DIGESTS},
    }
    return Comparison(losses, parts)
