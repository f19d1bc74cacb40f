"""`bridge-fgo demo --rl`: GRPO twice, once with a trainer that sleeps between updates, compared bit by bit.

Each run (an *arm*) is a process of its own, or one for each rank, as in `bridge_fgo.tools.demo`. Nothing here imports
torch, except to look for a GPU.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bridge_fgo.tools.arms.rl.options import RlOptions
from bridge_fgo.tools.demo import NOT_EQUAL, find_device, run_arms, status_of
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
    return status_of("demo --rl", errors, lambda: _run(settings, errors))


def _run(settings: Settings, errors: Console) -> int:
    device = find_device(settings.device, errors) if settings.arm_module == MODULE else settings.device
    options = RlOptions(device=device, **(ON_A_GPU if device == "cuda" else {}) | settings.options)
    if settings.ranks % (options.tp * options.pp):
        raise ValueError(f"--ranks {settings.ranks}: use a multiple of --tp x --pp = {options.tp * options.pp}")
    arms = {name: replace(options, sleep=sleep).as_arguments() for name, sleep in ARMS}
    runs = RlRuns(
        *run_arms(
            settings.arm_module, arms, options.steps, settings.keep, errors, settings.ranks,
            told=lambda event: f"reward {event['reward']:.2f}",
        )
    )  # fmt: skip
    if settings.picture is not None:
        draw_iteration(states_of_run(runs.sleeping), settings.picture, "One iteration, as it was measured")
    if settings.json_output:
        print(json.dumps(runs.as_json(), allow_nan=False))
    else:
        runs.print(Console())
    return 0 if runs.bitwise_equal else NOT_EQUAL
