"""Runs the bench: link probe, arms in turn, one table, JSON and pictures. Nothing here imports torch."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from bridge_fgo.cli import page
from bridge_fgo.cli.bench.figures import Row, make_row
from bridge_fgo.cli.bench.plots import gantt, memory_timeline
from bridge_fgo.cli.bench.presets import BenchArm, arms, save_options, size_options
from bridge_fgo.cli.bench.steps import reference_loop
from bridge_fgo.cli.bench.trace import Trace, read_trace
from bridge_fgo.harness.runner import ArmFailed, ArmRun, run_arm

ARM = "bridge_fgo.harness.gpu"
NOT_EQUAL = 1
FAILED = 2


@dataclass(frozen=True)
class Settings:
    """Settings of one bench. folder: where it leaves events, logs, traces, `bench.json`, PNGs and `bench.html`."""

    arms: list[str]
    preset: str
    steps: int
    rounds: int
    gpus: int
    folder: Path
    megatron_lm: list[str]
    json_output: bool
    traces: bool
    """Whether to profile two steps more in each arm, for the pictures and the shares of hidden copies."""
    arm_timeout: float
    alone_steps: int
    """Steps more in each arm, for the host's time to enqueue copies by itself."""
    saves: bool
    """Whether arms save in the background, for the time that this stalls training."""


def launcher(gpus: int) -> tuple[str, ...]:
    """Return what goes between `python` and `-m` to start a process a GPU."""
    if gpus == 1:
        return ()
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus))


def probe(gpus: int) -> dict[str, float]:
    """Return the bandwidths of the link in bytes a second, all GPUs copying at once."""
    command = [sys.executable, *launcher(gpus), "-m", "bridge_fgo.cli.bench.probe"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        raise ArmFailed("link probe", f"exit status {done.returncode}", done.stderr[-3000:])
    return json.loads(lines[-1])


def budget_gib(resident: ArmRun) -> float:
    """Return the budget that asks for half of the optimizer state's memory, in GiB."""
    return (resident.result["peak_allocated_bytes"] - resident.result["state_bytes"] / 2) / 2**30


def run_one(settings: Settings, arm: BenchArm, number: int, resident: ArmRun | None) -> ArmRun:
    """Run one arm; its trace is `NAME.NUMBER.trace.gz` in the folder, and its checkpoints are deleted at once."""
    options = [*size_options(settings.preset, settings.gpus), "--steps", str(settings.steps), *arm.options]
    if arm.half:
        assert resident is not None
        options += ["--budget-gib", repr(budget_gib(resident))]
    options += ["--alone-steps", str(settings.alone_steps)]  # in every arm, as the profiled steps: they train too
    if settings.traces:
        options += ["--trace", str(settings.folder / f"{arm.name}.{number}.trace.gz")]
    environment = {}
    if arm.python_path:
        environment["PYTHONPATH"] = os.pathsep.join([arm.python_path, *sys.path[:1], os.environ.get("PYTHONPATH", "")])
    with ExitStack() as until_it_ends:
        if settings.saves and arm.saves:
            checkpoints = TemporaryDirectory(prefix=f"{arm.name}.{number}.checkpoints.", dir=settings.folder)
            options += save_options(settings.steps, until_it_ends.enter_context(checkpoints))
        run = run_arm(
            f"{arm.name}.{number}",
            ARM,
            options,
            settings.folder,
            launcher=launcher(settings.gpus),
            environment=environment,
            timeout=settings.arm_timeout,
        )
    run.name = arm.name
    return run


def run(settings: Settings) -> int:
    """Run the bench; return the exit status: 1 where an arm that must be bitwise equal is not, 2 for a failure."""
    console = Console(stderr=settings.json_output)
    if settings.traces and importlib.util.find_spec("matplotlib") is None:
        console.print("bridge-fgo bench: pictures need matplotlib: pip install 'bridge-fgo[bench]', or --no-traces")
        return FAILED
    chosen = arms(settings.arms, settings.megatron_lm, settings.preset)
    settings.folder.mkdir(parents=True, exist_ok=True)
    runs: dict[str, list[ArmRun]] = {arm.name: [] for arm in chosen}
    failures: dict[str, str] = {}
    try:
        link = probe(settings.gpus)
        console.print("link, GB/s: " + ", ".join(f"{name} {value / 1e9:.1f}" for name, value in link.items()))
        for number in range(settings.rounds):
            for arm in chosen:
                if arm.name in failures:
                    continue
                try:
                    run = run_one(settings, arm, number, next(iter(runs["resident"]), None))
                except ArmFailed as failure:
                    if arm.name == "resident":
                        raise
                    failures[arm.name] = str(failure)
                    console.print(f"{failure}\n{failure.log_tail}", markup=False)
                    continue
                runs[arm.name].append(run)
                console.print(f"{arm.name}, round {number + 1}: done", markup=False)
    except ArmFailed as failure:
        console.print(f"bridge-fgo bench: {failure}\n{failure.log_tail}", markup=False)
        return FAILED
    traces: dict[str, Trace] = {}
    if settings.traces:
        traces = {arm.name: read_trace(settings.folder / f"{arm.name}.0.trace.gz") for arm in chosen if runs[arm.name]}
    reference = reference_loop(run for of_arm in runs.values() for run in of_arm)
    rows = [
        make_row(runs["resident"], runs[arm.name], link, traces.get(arm.name), arm.bitwise, reference)
        for arm in chosen
        if arm.name not in failures
    ]
    report(settings, console, link, rows, traces, failures, runs["resident"][0])
    if failures:
        return FAILED
    return NOT_EQUAL if any(row.bitwise_equal is False for row in rows) else 0


def report(
    settings: Settings,
    console: Console,
    link: dict[str, float],
    rows: list[Row],
    traces: dict[str, Trace],
    failures: dict[str, str],
    resident: ArmRun,
) -> None:
    """Print the table or the JSON, and leave both and the pictures in the folder."""
    texts = table_of(rows, settings.saves)
    result: dict[str, Any] = {
        "preset": settings.preset,
        "gpus": settings.gpus,
        "where": {name: resident.start.get(name) for name in ("device", "bridge", "mcore", "torch")},
        "link_bytes_per_second": link,
        "state_bytes": resident.result["state_bytes"],
        "phase_seconds": resident.result["phase_seconds"],
        "arms": [row.as_json() for row in rows],
        "failed": failures,
    }
    (settings.folder / "bench.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if traces:
        pictures = [settings.folder / "memory.png", settings.folder / "gantt.png"]
        memory_timeline(traces, pictures[0])
        gantt(traces, pictures[1])
        title = f"bridge-fgo bench: {settings.preset}, {settings.gpus} x {resident.start.get('device')}"
        parts = [page.table(texts), *(page.picture(path) for path in pictures)]
        page.write_page(settings.folder / "bench.html", title, parts)
    if settings.json_output:
        print(json.dumps(result))
        return
    table = Table(*(row[0] for row in texts))  # an arm a column: the other way it is too wide for a terminal
    for cells in list(zip(*texts, strict=True))[1:]:
        table.add_row(*cells)
    console.print(table)
    console.print(
        f"S = {resident.result['state_bytes'] / 1e9:.2f} GB; all files are in {settings.folder}", markup=False
    )


def table_of(rows: list[Row], saves: bool = False) -> list[list[str]]:
    """Return the cells of the table, its head first; with `saves` the stall of a save is the last of each row."""

    def number(value: float | None, digits: int = 2) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    def extent(seconds: Sequence[float]) -> str:
        return f"{min(seconds):.3f}-{max(seconds):.3f}" if len(seconds) > 1 else "-"

    def percent(share: float | None) -> str:
        return "-" if share is None else f"{share:.1%}"

    table = [
        [
            "arm", "step, s", "min-max", "steps counted", "host loop, ms", "host loop min-max", "GC, most, s",
            "added, s", "E", "E of copies", "floor E",
            "forward, s", "rest, s", "of ranks",
            "allocated, GB", "reserved, GB", "saved / S",
            "saved reserved / S", "pinned, GB", "pin, s", "steps 1-2 added, s", "enqueue", "by the clock",
            "hidden / floor",
            "bitwise equal", *(["save stall, s"] if saves else []),
        ]
    ]  # fmt: skip
    for row in rows:
        equal = {True: "yes", False: "NO", None: "-"}[row.bitwise_equal]
        table.append(
            [
                row.arm, number(row.step_seconds, 3), extent([row.step_seconds_min, row.step_seconds_max]),
                row.steps_counted, number(None if row.host_loop_seconds is None else 1e3 * row.host_loop_seconds),
                extent([1e3 * seconds for seconds in row.host_loop_seconds_range]),
                number(row.collector_seconds),
                number(row.added_seconds, 3), number(row.e), number(row.e_of_copies), number(row.floor_e),
                number(row.forward_seconds, 3), number(row.rest_seconds, 3), extent(row.rest_seconds_of_ranks),
                number(row.peak_allocated_bytes / 1e9), number(row.peak_reserved_bytes / 1e9),
                number(row.saved_allocated, 3), number(row.saved_reserved, 3), number(row.pinned_bytes / 1e9),
                number(row.pin_seconds), number(row.first_two_steps_added_seconds),
                percent(row.enqueue_share), percent(row.enqueue_by_the_clock_share), number(row.hidden), equal,
                *([number(row.save_stall_seconds)] if saves else []),
            ]
        )  # fmt: skip
    return table
