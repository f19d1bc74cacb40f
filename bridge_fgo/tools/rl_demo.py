"""`bridge-fgo demo --rl`: GRPO twice, once with a trainer that sleeps between updates, compared bit by bit.

Each run (an *arm*) is a process of its own, or one for each rank, as in `bridge_fgo.tools.demo`. Nothing here imports
torch, except to look for a GPU.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bridge_fgo.tools.arms.rl.options import RlOptions
from bridge_fgo.tools.arms.runner import ArmFailed, ArmRun, Event, run_arm
from bridge_fgo.tools.demo import FAILED, NOT_EQUAL, choose_device, missing_packages
from bridge_fgo.tools.iteration_picture import draw_iteration, states_of_run
from bridge_fgo.tools.rl_report import RlRuns

MODULE = "bridge_fgo.tools.arms.rl.arm"
ARMS = (("resident", False), ("sleeping", True))
ON_A_GPU: dict[str, Any] = {
    "layers": 4,
    "hidden": 2048,
    "heads": 16,
    "lr": 6e-6,
    "prompts": 16,
    "group": 16,
    "micro_batch_size": 128,
    "steps": 300,
}
"""Defaults of a GPU: 0.27 billion parameters, which take 5 GB with gradients and states. The learning rate is such that
an update moves the policy as far as the CPU's does."""


@dataclass(frozen=True)
class Settings:
    """Settings of one demo.

    options: those of `RlOptions` that the user gave. ranks: processes of an arm. arm_module: the module that is run as
    the arm.
    """

    options: dict[str, Any] = field(default_factory=dict)
    json_output: bool = False
    device: str = "auto"
    keep: Path | None = None
    picture: Path | None = None
    ranks: int = 1
    arm_module: str = MODULE


def run(settings: Settings) -> int:
    """Run both arms, one after the other, and report.

    Returns:
        The exit status: 0; NOT_EQUAL where the arms differ; FAILED where an arm failed or could not start.
    """
    errors = Console(stderr=True, soft_wrap=True)
    try:
        options = _options(settings, errors)
        with _folder(settings.keep) as folder:
            runs = RlRuns(*_run_arms(settings, options, folder, errors))
        if settings.picture is not None:
            draw_iteration(states_of_run(runs.sleeping), settings.picture, "One iteration, as it was measured")
    except (ValueError, OSError) as error:
        errors.print(f"bridge-fgo demo --rl: {error}", markup=False)
        return FAILED
    except ArmFailed as failure:
        errors.print(f"bridge-fgo demo --rl: {failure}. Its last lines:", markup=False)
        errors.print(failure.log_tail, markup=False, highlight=False)
        return FAILED
    if settings.json_output:
        print(json.dumps(runs.as_json(), allow_nan=False))
    else:
        runs.print(Console())
    return 0 if runs.bitwise_equal else NOT_EQUAL


def _options(settings: Settings, errors: Console) -> RlOptions:
    """Return the options of the arms.

    Raises:
        ValueError: a package or a GPU is missing, or an option cannot be had.
    """
    if settings.arm_module == MODULE and (missing := missing_packages()):
        raise ValueError(f"{', '.join(missing)} is not installed here: install megatron-bridge 0.6, megatron-core 0.19")
    with errors.status("Looking for a GPU and Transformer Engine"):
        device, why = choose_device(settings.device)
    if why:
        errors.print(f"Running on the CPU: {why}.", markup=False)
    options = RlOptions(device=device, **(ON_A_GPU if device == "cuda" else {}) | settings.options)
    if settings.ranks % (options.tp * options.pp):
        raise ValueError(f"--ranks {settings.ranks}: use a multiple of --tp x --pp = {options.tp * options.pp}")
    return options


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with TemporaryDirectory(prefix="bridge-fgo-demo-") as folder:
            yield Path(folder)
        return
    keep.mkdir(parents=True, exist_ok=True)
    yield keep


def _run_arms(settings: Settings, options: RlOptions, folder: Path, errors: Console) -> tuple[ArmRun, ArmRun]:
    launcher: tuple[str, ...] = ()
    if settings.ranks > 1:
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(settings.ranks))
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[reward]}"),
    )  # fmt: skip
    found = []
    with Progress(*columns, console=errors) as progress:
        for name, sleep in ARMS:
            task = progress.add_task(name, total=options.steps, reward="")

            def advance(event: Event, task: object = task) -> None:
                if event.get("event") == "step":
                    reward = f"reward {event['reward']:.2f}"
                    progress.update(task, completed=event["step"], reward=reward)  # type: ignore[reportArgumentType]

            arguments = replace(options, sleep=sleep).as_arguments()
            found.append(run_arm(name, settings.arm_module, arguments, folder, advance, launcher))
    resident, sleeping = found
    return resident, sleeping
