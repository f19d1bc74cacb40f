"""The bench's options, and its run: link probe, arms in turn, one table, JSON and pictures.

Nothing here imports torch before it runs.
"""

from __future__ import annotations

import importlib.util
import json
import os
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

from rich.console import Console

from bridge_fgo.tools.link import launcher, probe
from bridge_fgo.tools.settings import option
from bridge_fgo.tools.show import table
from harness.arms.runner import ArmFailed, ArmRun, file_name, run_arm
from harness.bench.figures import make_row, summary_of
from harness.bench.in_turn import TURN_STEPS, WARM_UP_STEPS, InTurn, squeezed_arms
from harness.bench.plots import draw_step
from harness.bench.presets import BenchArm, arms, read_name, resident_of, save_options, size_options

NOT_EQUAL = 1
FAILED = 2
ARM_SECONDS = 1800.0
"""After these an arm is given up."""

Preset = Literal["4k", "8k", "moe-4k", "moe-8k", "short", "long", "moe", "slabs", "tight"]
Optimizer = Literal["adam", "muon", "dist_muon"]
Sharding = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]

type Runs = tuple[dict[str, ArmRun], dict[str, str]]
"""Arms that ended well, and why the others did not, by their names."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one bench; ValueError if some do not go together, or there is no such arm."""

    arms: Annotated[
        str | None,
        option(
            "Which arms, resident first: resident,native,half,hybrid by default, mcore with --megatron-lm, "
            "fsdp_resident,fsdp with --fsdp. "
            "native:NAME=VALUE is one with a variable of its own, compared with resident:NAME=VALUE if that is there."
        ),
    ] = None
    preset: Annotated[Preset, option("What to train.")] = "8k"
    steps: Annotated[
        int | None, option("Steps of each arm, 16 by default; from the 7th on they count. Not with --in-turn.", min=8)
    ] = None
    rounds: Annotated[int, option("With --in-turn: how often each arm has its turn.", min=1)] = 1
    in_turn: Annotated[
        bool,
        option(
            "Have all arms alive at once, and train a few steps in turn. All must fit on the GPUs side by side.",
            "--in-turn",
        ),
    ] = False
    gpus: Annotated[int | None, option("How many GPUs; all by default.", min=1)] = None
    microbatches: Annotated[
        int | None, option("Microbatches of a step on each data-parallel rank; default: the preset's.", min=1)
    ] = None
    layers: Annotated[
        int | None, option("Layers of the model; default: the preset's. Fewer let arms fit side by side.", min=1)
    ] = None
    optimizer: Annotated[
        Optimizer,
        option("Muons need emerging-optimizers; their mcore arm also a patched Bridge, see the bench's page."),
    ] = "adam"
    fsdp: Annotated[
        Sharding | None,
        option("Two arms more, with Megatron-FSDP that shards this: E beside that of DistributedOptimizer."),
    ] = None
    full_graphs: Annotated[
        bool, option("Capture forward and backward of a step into one CUDA graph, in every arm.", "--full-graphs")
    ] = False
    megatron_lm: Annotated[
        Path | None, option("Checkout of Megatron-LM's dev branch for the mcore arm.", metavar="DIR")
    ] = None
    keep: Annotated[Path, option("Where all files go.", metavar="DIR")] = Path("bench")
    traces: Annotated[bool, option("Profile two steps more an arm, and draw them (needs matplotlib).")] = True
    saves: Annotated[
        bool,
        option(
            "Have each arm but mcore save twice in the background, and measure how long the second save stalls "
            "training. DIR needs room for two checkpoints, and the host for one more in memory.",
            "--saves",
        ),
    ] = False

    def __post_init__(self) -> None:
        if not self.in_turn and self.rounds > 1:
            raise ValueError(f"--rounds {self.rounds}: only arms in turn train in rounds; give --in-turn too")
        if self.in_turn and self.steps is not None:
            raise ValueError("--steps with --in-turn: --rounds says how many")
        if self.in_turn and self.saves:
            raise ValueError(
                "--in-turn with --saves: a background save would run into other arms' turns; leave one out"
            )
        if self.in_turn and "half" in {read_name(arm)[0] for arm in self.names}:
            raise ValueError(
                "--in-turn with the half arm: its budget follows a resident arm that has ended; leave one out"
            )
        self.chosen()

    @property
    def names(self) -> list[str]:
        """The arms' names."""
        if self.arms is not None:
            return self.arms.split(",")
        found = ["resident", "native", *([] if self.in_turn or self.fsdp else ["half"])]
        found += [*(["mcore"] if self.megatron_lm else []), *(["fsdp_resident", "fsdp"] if self.fsdp else [])]
        return found + (["hybrid"] if self.optimizer == "adam" else [])

    @property
    def train_steps(self) -> int:
        """Steps of each arm that are not for its trace."""
        return WARM_UP_STEPS + self.rounds * TURN_STEPS if self.in_turn else self.steps or 16

    def chosen(self) -> list[BenchArm]:
        """Return the arms."""
        checkout = None if self.megatron_lm is None else str(self.megatron_lm.resolve())
        return arms(self.names, checkout, self.preset, self.optimizer, self.fsdp)

    def size(self) -> list[str]:
        """Return the arms' options that say what each trains."""
        return size_options(self.preset, self.gpus or 1, self.microbatches, self.layers)


def run(settings: Settings) -> int:
    """Train the same model through Bridge's own `pretrain()` once an arm, in turn, and compare.

    Exit status: 0, 1 if an arm is not bitwise equal to the resident one, 2 if an arm failed.
    """
    import torch

    console = Console()
    if (here := torch.cuda.device_count()) == 0:
        raise ValueError("torch sees no CUDA device here")
    if settings.gpus is not None and settings.gpus > here:
        raise ValueError(f"--gpus {settings.gpus}: torch sees {here} CUDA devices here")
    settings = replace(settings, gpus=settings.gpus or here)
    if settings.traces and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("pictures need matplotlib: pip install matplotlib, or --no-traces")
    chosen = settings.chosen()
    settings.keep.mkdir(parents=True, exist_ok=True)
    link = probe(settings.gpus or 1)
    console.print("link, GB/s: " + ", ".join(f"{name} {value / 1e9:.1f}" for name, value in link.items()))
    runs, failures = (run_in_turn if settings.in_turn else run_one_by_one)(settings, chosen, console)
    if settings.in_turn and (squeezed := squeezed_arms(runs)):
        failures = failures | squeezed
        console.print("\n".join(squeezed.values()), markup=False)
    there = [arm for arm in chosen if arm.name not in failures]
    if not any(arm.is_fsdp and arm.is_resident for arm in there):
        alone = [arm.name for arm in there if arm.is_fsdp]
        failures |= {name: f"{name}: fsdp_resident, which it is compared with, failed" for name in alone}
        there = [arm for arm in there if not arm.is_fsdp]
    compared_with = {arm.name: resident_of(arm, there).name for arm in there}
    rows = [make_row(runs[compared_with[arm.name]], runs[arm.name], link, arm.bitwise) for arm in there]
    resident = runs[chosen[0].name]
    state_bytes, size = resident.result["state_bytes"], " ".join(settings.size())
    result: dict[str, Any] = {
        "preset": settings.preset,
        "size": size,
        "optimizer": settings.optimizer,
        "gpus": settings.gpus,
        "where": {name: resident.start.get(name) for name in ("device", "bridge", "mcore", "torch")},
        "link_bytes_per_second": link,
        "state_bytes": state_bytes,
        "phase_seconds": resident.result["phase_seconds"],
        "arms": [asdict(row) for row in rows],
        "failed": failures,
    }
    (settings.keep / "bench.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if settings.traces:
        draw_step({arm.name: trace_path(settings, arm) for arm in chosen if arm.name in runs}, settings.keep)
    head, *cells = summary_of(rows, state_bytes)
    console.print(table("", head, cells))
    trained = f"S = {state_bytes / 1e9:.2f} GB of {size}"
    console.print(f"{trained}; all files are in {settings.keep}", markup=False)
    if failures:
        return FAILED
    return NOT_EQUAL if any(row.bitwise_equal is False for row in rows) else 0


def budget_gib(resident: ArmRun) -> float:
    """Return the budget that asks for half of the optimizer state's memory, in GiB."""
    return (resident.result["peak_allocated_bytes"] - resident.result["state_bytes"] / 2) / 2**30


def trace_path(settings: Settings, arm: BenchArm) -> Path:
    """Return where the trace of an arm is left."""
    return settings.keep / f"{file_name(arm.name)}.trace.gz"


def arm_options(settings: Settings, arm: BenchArm, resident: ArmRun | None = None) -> list[str]:
    """Return the options of `harness.arms.gpu` for one arm, without those for saves and turns."""
    options = [*settings.size(), "--steps", str(settings.train_steps), *arm.options]
    if arm.kind == "half":
        assert resident is not None
        options += ["--gpu-memory-budget-gib", repr(budget_gib(resident))]
    if settings.full_graphs:
        options.append("--full-graphs")
    if settings.traces:
        options += ["--trace", str(trace_path(settings, arm))]
    elif settings.saves:  # the step that saves last lasts until another one begins
        options += ["--extra-steps", "1"]
    return options


def _process_of(settings: Settings, arm: BenchArm, options: list[str]) -> dict[str, Any]:
    environment = dict(arm.environment)
    if arm.python_path:
        paths = [arm.python_path, os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # an empty one is the current folder
    return {
        "module": "harness.arms.gpu",
        "options": options,
        "folder": settings.keep,
        "launcher": launcher(settings.gpus or 1),
        "environment": environment,
    }


def run_one(settings: Settings, arm: BenchArm, resident: ArmRun | None) -> ArmRun:
    """Run one arm; its checkpoints are deleted at once."""
    options = arm_options(settings, arm, resident)
    with ExitStack() as until_it_ends:
        if settings.saves and arm.saves:
            checkpoints = TemporaryDirectory(prefix="checkpoints.", dir=settings.keep)
            options += save_options(settings.train_steps, until_it_ends.enter_context(checkpoints))
        return run_arm(arm.name, **_process_of(settings, arm, options), timeout=ARM_SECONDS)


def run_in_turn(settings: Settings, chosen: list[BenchArm], console: Console) -> Runs:
    """Run all arms at once, see `harness.bench.in_turn`; ArmFailed where the first, resident one failed."""
    return InTurn(
        {arm.name: _process_of(settings, arm, arm_options(settings, arm)) for arm in chosen},
        settings.rounds,
        ARM_SECONDS,
        tell=lambda line: console.print(line, markup=False),
    ).run()


def run_one_by_one(settings: Settings, chosen: list[BenchArm], console: Console) -> Runs:
    """Run the arms one after another; ArmFailed where the first, resident one failed."""
    runs: dict[str, ArmRun] = {}
    failures: dict[str, str] = {}
    for arm in chosen:
        try:
            runs[arm.name] = run_one(settings, arm, runs.get(chosen[0].name))
        except ArmFailed as failure:
            if arm is chosen[0]:
                raise
            failures[arm.name] = str(failure)
            console.print(f"{failure}\n{failure.log_tail}", markup=False)
        else:
            console.print(f"{arm.name}: done", markup=False)
    return runs, failures
