"""The settings of a `Residency`: those in force, and those that would have no effect, which are refused."""

from dataclasses import replace
from typing import Any

import torch

from bridge_fgo.bridge import activation_offload
from bridge_fgo.bridge.compat import FLAG
from bridge_fgo.bridge.settings import SETTINGS, is_installed, settings_of
from bridge_fgo.config import OffloadConfig
from bridge_fgo.sleep.refusals import movable_optimizers, shared_lease
from bridge_fgo.sleep.state_offloader import DEFAULTS

REFUSED = {
    "gradients": "gradients are managed in Bridge's train_step alone; set it to False, or set "
        "optimizer.offload_optimizer_states and leave config out",
    "host_memory_gib": "that is a limit for a node's states; use Residency(host_memory_limit_gib=...), for all that a "
        "rank moves",
    "nvme_folder": "Bridge's train_step alone keeps states in files; use None, or frozen_folder for frozen parameters",
    "survive_crash": "Bridge's train_step alone keeps finished steps; set it to False, or set "
        "optimizer.offload_optimizer_states and leave config out",
    "measure": "Bridge's train_step alone logs peaks without the offload; set it to False, and read the peaks of "
        "training_step() from bridge_fgo.stats()",
}  # fmt: skip
"""Settings that a `Residency` takes at their defaults alone, and why, and what to do."""

OF_TRAIN_STEP = ("gradients", "host_memory_gib", "nvme_folder", "survive_crash")
"""Settings that only Bridge's train_step with the flag goes by, beside the engine."""


def settings_in_force(config: OffloadConfig | None, optimizer_config: Any, moves_states: bool) -> OffloadConfig:
    """Return the settings of a Residency: `config`, or else the installed ones.

    Raises:
        ValueError: an installed one would have no effect.
    """
    if config is not None or not is_installed():
        return config or DEFAULTS
    found = settings_of(optimizer_config)
    lost = [f"{name}={getattr(found, name)!r}" for name in OF_TRAIN_STEP if getattr(found, name) not in (None, False)]
    lost += ["engine='mcore'"] if found.engine == "mcore" else []
    if moves_states and lost:
        raise ValueError(
            f"Residency with OffloadConfig({', '.join(lost)}) of bridge_fgo.install or optimizer.{SETTINGS}: only "
            f"Bridge's train_step with optimizer.{FLAG}=True goes by that; leave it out, or give Residency a config of "
            "its own"
        )
    return replace(found, engine="native")


def refuse_settings(config: OffloadConfig | None, optimizer: Any, chunks: list[torch.nn.Module]) -> None:
    """Raise ValueError if a setting of `Residency(config=...)` would have no effect."""
    if config is None:
        return
    if not isinstance(config, OffloadConfig):
        raise ValueError(f"Residency(config={config!r}): give the settings as bridge_fgo.OffloadConfig(...)")
    if config.engine == "mcore":
        raise ValueError(
            "Residency(config=OffloadConfig(engine='mcore')): this package's engine alone can move states between "
            "steps; use engine='native'"
        )
    for name, why in REFUSED.items():
        if (value := getattr(config, name)) != getattr(DEFAULTS, name):
            raise ValueError(f"Residency(config=OffloadConfig({name}={value!r})): {why}")
    own = config.native_only_settings()
    if optimizer is None:
        lost = [each for each in own if not each.startswith("pin_memory=")]
        why = " with optimizer=None: there are no states to offload; leave it out, or give Residency the optimizer"
    else:
        lease = shared_lease(movable_optimizers(optimizer))
        lost = [each for each in own if lease is not None and each not in lease.settings.native_only_settings()]
        why = (
            ": the engine that is attached to the optimizer has settings of its own; leave config out, and give the "
            "settings to bridge_fgo.install"
        )
    if lost:
        raise ValueError(f"Residency(config=OffloadConfig({', '.join(lost)})){why}")
    for name in ("activation_waits", "gpu_memory_budget_gib"):
        if (value := getattr(config, name)) and not is_installed():
            raise ValueError(
                f"Residency(config=OffloadConfig({name}={value!r})): call bridge_fgo.install() first, without which it "
                "has no effect"
            )
    if config.activation_waits:
        activation_offload.refuse_unwaited(getattr(chunks[0], "config", None))
