"""The runner of arms: starts each as a process of its own and follows its events.

Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LOG_LINES_SHOWN = 30
TRACEBACK_LINES_SHOWN = 60
POLL_SECONDS = 0.1

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
        kind = event.get("event")
        if kind == "start":
            self.start = event
        elif kind == "step":
            self.steps.append(event)
        elif kind == "result":
            self.result = event

    def values(self, name: str) -> list[float | None]:
        """Return the number called `name` of every step; None where JSON has no word for it."""
        return [event.get(name) for event in self.steps]


class ArmFailed(RuntimeError):
    """An arm ended with an error, or without a result; `log_tail`, its note, is what `telling_lines` returns."""

    def __init__(self, name: str, why: str, log_tail: str) -> None:
        super().__init__(f"the {name} arm failed: {why}")
        self.log_tail = log_tail
        self.add_note(log_tail)


def telling_lines(log: str) -> str:
    """Return the first traceback of a log and its last lines.

    Of several ranks, the first to fail has others fail after it, and torchrun ends the log with a table of its own.
    """
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


def run_arm(
    name: str,
    module: str,
    options: list[str],
    folder: Path,
    on_event: Callable[[Event], None] = lambda event: None,
    launcher: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> ArmRun:
    """Run `python LAUNCHER... -m module options... --events FILE` and return its events.

    Leaves `NAME.events.jsonl` and `NAME.log` in the folder.

    Args:
        name: what to call the arm.
        module: what runs it.
        options: the module's.
        folder: where its files go.
        on_event: called with each event as it comes in.
        launcher: for arms of several ranks: `("-m", "torch.distributed.run", ...)`.
        environment: variables beside this process's.
        timeout: in seconds.

    Raises:
        ArmFailed: the process failed, took too long, or left no result.
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
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
        )
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        try:
            while process.poll() is None and time.monotonic() < deadline:
                collect()
                time.sleep(POLL_SECONDS)
            timed_out = process.poll() is None
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
        if timed_out:
            why = f"it ran longer than {timeout:g} s"
        raise ArmFailed(name, why, telling_lines(log.read_text(errors="replace")))
    return arm
