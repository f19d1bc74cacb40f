"""Runs the bench: link probe, arms in turn, one table, JSON and pictures. Nothing here imports torch."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from bridge_fgo.tools import page
from bridge_fgo.tools.arms.runner import ArmFailed, ArmProcess, ArmRun, run_arm
from bridge_fgo.tools.bench.figures import Row, make_row
from bridge_fgo.tools.bench.fsdp_gap import gap_of
from bridge_fgo.tools.bench.in_turn import WARM_UP_STEPS, InTurn, order_of, squeezed_arms
from bridge_fgo.tools.bench.plots import gantt, memory_timeline
from bridge_fgo.tools.bench.presets import BenchArm, arms, read_name, resident_of, save_options, size_options
from bridge_fgo.tools.bench.rounds import as_json, faster, rounds_of, table_of_rounds
from bridge_fgo.tools.bench.steps import reference_loop
from bridge_fgo.tools.bench.table import legend_of, summary_of, table_of
from bridge_fgo.tools.bench.trace import Trace, read_trace

ARM = "bridge_fgo.tools.arms.gpu"
NOT_EQUAL = 1
FAILED = 2

type Runs = dict[str, list[ArmRun]]
"""The rounds of each arm, by its name."""


@dataclass(frozen=True)
class Settings:
    """Settings of one bench. folder: where it leaves events, logs, traces, `bench.json`, PNGs and `bench.html`."""

    arms: list[str]
    preset: str
    steps: int
    """How many steps each arm trains. With `in_turn` the rounds tell instead: see `train_steps`."""
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
    in_turn: bool = False
    """Whether all arms are alive at once; see `bridge_fgo.tools.bench.in_turn`."""
    turn_steps: int = 5
    """Steps of a turn, of which the first does not count."""
    half_budget_gib: float | None = None
    """Budget of the `half` arm; None for that of half the saving, by the resident arm's peak."""
    tp: int = 1
    microbatches: int | None = None
    """How many microbatches a step has on each data-parallel rank; None for as many as the preset has."""
    layers: int | None = None
    """How many layers the model has; None for as many as the preset has."""
    optimizer: str = "adam"
    """Optimizer of every arm, a key of `presets.OPTIMIZERS`."""
    fsdp: str | None = None
    """Sharding strategy of the arms with Megatron-FSDP, one of `presets.STRATEGIES`; None where no arm has it."""
    full_graphs: bool = False
    """Whether every arm captures forward and backward of a step into one CUDA graph."""
    time_limit: float | None = None
    """Seconds after which arms in turn begin no further round; None for no limit."""
    verbose: bool = False
    """Whether to print every column and what it tells; the page always has them."""

    @property
    def train_steps(self) -> int:
        """Steps of each arm that are not for its trace or for its copies alone."""
        return WARM_UP_STEPS + self.rounds * self.turn_steps if self.in_turn else self.steps

    def check_graphs(self) -> None:
        """Raise ValueError for graphs that an arm cannot capture."""
        if self.full_graphs and self.fsdp is not None:
            raise ValueError(
                f"--full-graphs with --fsdp {self.fsdp}: Megatron-FSDP is not set up to be captured here; leave one out"
            )

    def check_turns(self) -> None:
        """Raise ValueError for what arms that are all alive at once cannot do."""
        if not self.in_turn:
            if self.time_limit is not None:
                raise ValueError(f"--time-limit {self.time_limit:g} ends the rounds of --in-turn: give that too")
            return
        if self.saves:
            raise ValueError(
                "--in-turn with --saves: a background save would run into other arms' turns; leave one out"
            )
        kinds = {read_name(arm)[0] for arm in self.arms}
        if "half" in kinds and self.half_budget_gib is None:
            raise ValueError(
                "--in-turn with the half arm: no resident arm has ended whose peak its budget could follow; give "
                "--half-budget-gib"
            )


def launcher(gpus: int) -> tuple[str, ...]:
    """Return what goes between `python` and `-m` to start a process a GPU."""
    if gpus == 1:
        return ()
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus))


def probe(gpus: int) -> dict[str, float]:
    """Return the bandwidths of the link in bytes a second, all GPUs copying at once."""
    command = [sys.executable, *launcher(gpus), "-m", "bridge_fgo.tools.bench.probe"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        raise ArmFailed("link probe", f"exit status {done.returncode}", done.stderr[-3000:])
    return json.loads(lines[-1])


def budget_gib(resident: ArmRun) -> float:
    """Return the budget that asks for half of the optimizer state's memory, in GiB."""
    return (resident.result["peak_allocated_bytes"] - resident.result["state_bytes"] / 2) / 2**30


def size_of(settings: Settings) -> list[str]:
    """Return the options of `bridge_fgo.tools.arms.gpu` that say what every arm trains.

    Raises:
        ValueError: as many GPUs cannot train that.
    """
    return size_options(settings.preset, settings.gpus, settings.tp, settings.microbatches, settings.layers)


def arm_options(settings: Settings, arm: BenchArm, number: int, resident: ArmRun | None) -> list[str]:
    """Return the options of `bridge_fgo.tools.arms.gpu` for one arm in one round, without those for saves and turns."""
    options = size_of(settings)
    options += ["--steps", str(settings.train_steps), *arm.options]
    if arm.half and settings.half_budget_gib is not None:
        options += ["--gpu-memory-budget-gib", repr(settings.half_budget_gib)]
    elif arm.half:
        assert resident is not None
        options += ["--gpu-memory-budget-gib", repr(budget_gib(resident))]
    options += ["--full-graphs"] if settings.full_graphs else []
    # In every arm, as the profiled steps: they train too. The step that saves last lasts until another one begins.
    alone_steps = max(settings.alone_steps, int(settings.saves and not settings.traces))
    options += ["--alone-steps", str(alone_steps)]
    if settings.traces:
        options += ["--trace", str(trace_path(settings, arm, number))]
    return options


def trace_path(settings: Settings, arm: BenchArm, number: int) -> Path:
    """Return where the trace of one arm in one round is left."""
    return settings.folder / f"{arm.file_name}.{number}.trace.gz"


def arm_environment(arm: BenchArm) -> dict[str, str]:
    """Return the variables of an arm beside this process's."""
    environment = dict(arm.environment)
    if arm.python_path:
        paths = [arm.python_path, *sys.path[:1], os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(
            path for path in paths if path
        )  # an empty one is the current folder
    return environment


def run_one(settings: Settings, arm: BenchArm, number: int, resident: ArmRun | None) -> ArmRun:
    """Run one arm; its trace is `NAME.NUMBER.trace.gz` in the folder, and its checkpoints are deleted at once."""
    options = arm_options(settings, arm, number, resident)
    with ExitStack() as until_it_ends:
        if settings.saves and arm.saves:
            checkpoints = TemporaryDirectory(prefix=f"{arm.file_name}.{number}.checkpoints.", dir=settings.folder)
            options += save_options(settings.steps, until_it_ends.enter_context(checkpoints))
        run = run_arm(
            f"{arm.file_name}.{number}",
            ARM,
            options,
            settings.folder,
            launcher=launcher(settings.gpus),
            environment=arm_environment(arm),
            timeout=settings.arm_timeout,
        )
    run.name = arm.name
    return run


def run_in_turn(settings: Settings, chosen: list[BenchArm], console: Console) -> tuple[Runs, dict[str, str]]:
    """Run all arms at once, see `bridge_fgo.tools.bench.in_turn`; return as `run_one_by_one` does.

    Raises:
        ArmFailed: the first arm has failed, which is resident.
    """
    by_name = {arm.name: arm for arm in chosen}

    def start(name: str, address: Path) -> ArmProcess:
        arm = by_name[name]
        return ArmProcess(
            f"{arm.file_name}.0",
            ARM,
            [*arm_options(settings, arm, 0, None), "--turns", str(address)],
            settings.folder,
            launcher=launcher(settings.gpus),
            environment=arm_environment(arm),
        )

    turns = InTurn(
        list(by_name),
        start,
        settings.rounds,
        settings.turn_steps,
        settings.arm_timeout,
        is_needed=lambda name: name == chosen[0].name,
        tell=lambda line: console.print(line, markup=False),
        time_limit=settings.time_limit,
    )
    turns.run()
    for name, run in turns.results.items():
        run.name = name
    runs = {name: [turns.results[name]] if name in turns.results else [] for name in by_name}
    return runs, {name: str(failure) for name, failure in turns.failures.items()}


def run_one_by_one(settings: Settings, chosen: list[BenchArm], console: Console) -> tuple[Runs, dict[str, str]]:
    """Run the arms one after another, as many times as there are rounds; return what they left, and who failed how.

    Raises:
        ArmFailed: the first arm has failed, which is resident.
    """
    runs: Runs = {arm.name: [] for arm in chosen}
    failures: dict[str, str] = {}
    for number in range(settings.rounds):
        for arm in chosen:
            if arm.name in failures:
                continue
            try:
                run = run_one(settings, arm, number, next(iter(runs[chosen[0].name]), None))
            except ArmFailed as failure:
                if arm is chosen[0]:
                    raise
                failures[arm.name] = str(failure)
                console.print(f"{failure}\n{failure.log_tail}", markup=False)
                continue
            runs[arm.name].append(run)
            console.print(f"{arm.name}, round {number + 1}: done", markup=False)
    return runs, failures


def run(settings: Settings) -> int:
    """Run the bench; return the exit status: 1 where an arm that must be bitwise equal is not, 2 for a failure.

    Raises:
        ValueError: settings that do not go together.
    """
    console = Console(stderr=settings.json_output)
    settings.check_turns()
    settings.check_graphs()
    if settings.traces and importlib.util.find_spec("matplotlib") is None:
        console.print("bridge-fgo bench: pictures need matplotlib: pip install 'bridge-fgo[bench]', or --no-traces")
        return FAILED
    chosen = arms(settings.arms, settings.megatron_lm, settings.preset, settings.optimizer, settings.fsdp)
    size_of(settings)  # refuses what cannot be before anything starts
    settings.folder.mkdir(parents=True, exist_ok=True)
    try:
        link = probe(settings.gpus)
        console.print("link, GB/s: " + ", ".join(f"{name} {value / 1e9:.1f}" for name, value in link.items()))
        runs, failures = (run_in_turn if settings.in_turn else run_one_by_one)(settings, chosen, console)
    except ArmFailed as failure:
        console.print(f"bridge-fgo bench: {failure}\n{failure.log_tail}", markup=False)
        return FAILED
    if settings.in_turn and (squeezed := squeezed_arms(runs)):
        failures |= squeezed
        console.print("\n".join(squeezed.values()), markup=False)
    there = [arm for arm in chosen if arm.name not in failures]
    if not any(arm.is_fsdp and arm.is_resident for arm in there):
        alone = [arm.name for arm in there if arm.is_fsdp]
        failures |= {name: f"{name}: fsdp_resident, which it is compared with, failed" for name in alone}
        there = [arm for arm in there if not arm.is_fsdp]
    traces: dict[str, Trace] = {}
    if settings.traces:
        traces = {arm.name: read_trace(trace_path(settings, arm, 0)) for arm in chosen if runs[arm.name]}
    reference = reference_loop(run for of_arm in runs.values() for run in of_arm)
    compared_with = {arm.name: resident_of(arm, there).name for arm in there}
    rows = [
        make_row(runs[compared_with[arm.name]], runs[arm.name], link, traces.get(arm.name), arm.bitwise, reference)
        for arm in there
    ]
    result, texts = {}, []
    e = {row.arm: row.e for row in rows}
    if settings.in_turn:
        by_rounds = rounds_of({arm.name: runs[arm.name][0] for arm in there}, compared_with, link)
        comparisons = faster(by_rounds, {arm.name for arm in there if arm.is_resident})
        names = [arm.name for arm in chosen]
        order = [order_of(names, number + 1) for number in range(len(by_rounds[0].seconds))]
        result, texts = {"in_turn": as_json(by_rounds, order, comparisons)}, table_of_rounds(by_rounds)
        e = {arm.arm: arm.e for arm in by_rounds}
        for comparison in comparisons:
            console.print(str(comparison), markup=False)
    if (gap := gap_of(e, settings.fsdp)) is not None:
        console.print(str(gap), markup=False, highlight=False)
        result["fsdp"] = gap.as_json()
    report(settings, console, link, rows, traces, failures, runs[chosen[0].name][0], result, texts)
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
    of_rounds: dict[str, Any],
    texts_of_rounds: list[list[str]],
) -> None:
    """Print the table or the JSON, and leave both and the pictures in the folder.

    Of arms in turn, what `of_rounds` has goes into the JSON, and the cells of the rounds' table are shown too.
    """
    texts, summary = table_of(rows, settings.saves), summary_of(rows, resident.result["state_bytes"])
    legend = legend_of(texts[0])
    result: dict[str, Any] = {
        "preset": settings.preset,
        "size": " ".join(size_of(settings)),
        "optimizer": settings.optimizer,
        "gpus": settings.gpus,
        "where": {name: resident.start.get(name) for name in ("device", "bridge", "mcore", "torch")},
        "link_bytes_per_second": link,
        "state_bytes": resident.result["state_bytes"],
        "phase_seconds": resident.result["phase_seconds"],
        "arms": [row.as_json() for row in rows],
        "failed": failures,
        **of_rounds,
    }
    (settings.folder / "bench.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if traces:
        pictures = [settings.folder / "memory.png", settings.folder / "gantt.png"]
        memory_timeline(traces, pictures[0])
        gantt(traces, pictures[1])
        title = f"bridge-fgo bench: {settings.preset}, {settings.gpus} x {resident.start.get('device')}"
        parts = [page.table(cells) for cells in (summary, texts_of_rounds) if cells]
        parts += [page.picture(path) for path in pictures]
        parts += [page.heading("Every figure"), page.table(texts), *map(page.paragraph, legend)]
        parts += [page.paragraph(f"Trained with {' '.join(size_of(settings))}")]
        page.write_page(settings.folder / "bench.html", title, parts)
    if settings.json_output:
        print(json.dumps(result))
        return
    print_table(console, summary)
    if settings.verbose:
        print_table(console, [list(cells) for cells in zip(*texts, strict=True)])  # an arm a row is too wide
        if texts_of_rounds:
            print_table(console, texts_of_rounds)
        for line in legend:
            console.print(line, markup=False, highlight=False)
    trained = f"S = {resident.result['state_bytes'] / 1e9:.2f} GB of {' '.join(size_of(settings))}"
    console.print(f"{trained}; all files are in {settings.folder}", markup=False)
    if not settings.verbose:
        console.print("Every figure and what it tells: --verbose.", markup=False)


def print_table(console: Console, cells: list[list[str]]) -> None:
    """Print the cells as a table; the first row is the head."""
    table = Table(*cells[0])
    for row in cells[1:]:
        table.add_row(*row)
    console.print(table)
