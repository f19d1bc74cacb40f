"""`tiny`: a small GPT on made-up data, on one GPU of any kind or on the CPU, to try a launch from end to end."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import yaml

from bridge_fgo.config import OffloadConfig

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer

STEPS = 10
OFFLOAD = "optimizer.offload"
SIZE = ("--layers", "4", "--hidden", "256", "--heads", "8", "--vocab", "1024", "--seq", "256", "--gbs", "8")


def gpu_config() -> ConfigContainer:
    """Return the configuration for Bridge's `pretrain()`: 4 layers, hidden size 256, `STEPS` steps."""
    from bridge_fgo.tools.arms import gpu
    from bridge_fgo.tools.arms.gpu_config import build_config

    as_in_jobs = ("--no-deterministic", "--fused-loss")
    return build_config(gpu.parse([*SIZE, "--steps", str(STEPS), *as_in_jobs, "--events", "unused"]))


def cpu_overrides(overrides: Sequence[str]) -> tuple[int, dict[str, Any]]:
    """Return how many steps to train on the CPU, and the settings of the offload.

    Raises:
        ValueError: `overrides` has anything but `train.train_iters` and `optimizer.offload`: there is no `pretrain()`
            to read it.
    """
    steps, settings = STEPS, {}
    for override in overrides:
        name, _, value = override.partition("=")
        section, _, setting = name.rpartition(".")
        if section == OFFLOAD:
            settings[setting] = yaml.safe_load(value)
        elif name == "train.train_iters" and value.isdecimal():
            steps = int(value)
        else:
            raise ValueError(
                f"{override}: on the CPU tiny takes no override but train.train_iters=NUMBER and "
                f"{OFFLOAD}.SETTING=VALUE"
            )
    return steps, settings


def train_on_cpu(offload: OffloadConfig | None, steps: int) -> None:
    """Train through Bridge's real `train_step` on the CPU, with what `bridge_fgo.tools.standins` stands in.

    `offload` is None for a resident run. Prints a line a step.
    """
    from bridge_fgo.tools.arms.cpu_training import CpuOptions, CpuTraining
    from bridge_fgo.tools.standins.cuda import install_standins

    install_standins()
    import bridge_fgo

    installed = contextlib.nullcontext() if offload is None else bridge_fgo.install(offload)
    with installed, CpuTraining(CpuOptions(offload=offload is not None)) as training:
        for _ in range(steps):
            step = training.step()
            stats = bridge_fgo.stats()
            released = 0 if stats is None else stats.released_bytes
            print(f"step {step.step}/{steps}: loss {step.loss:.6f}, {released:,} bytes released", flush=True)
