"""Reads a saved run config (`run_config.yaml`) with nothing of Megatron installed.

The file is what Bridge's `ConfigContainer.to_yaml` writes: every dataclass is a mapping with its class under
`_target_`; dtypes, functions and enum members are such mappings too.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from bridge_fgo.tools.job.target import require_saved_config

SECTIONS = ("model", "optimizer", "train", "ddp", "dist", "checkpoint", "tokenizer")
"""The sections that the refusals and the estimate read."""


def load_saved_config(path: Path) -> SimpleNamespace:
    """Return the config as nested namespaces, as Bridge would hold it after its own validation.

    dtypes are `torch.dtype`s; functions and enum members are their names.

    Raises:
        ValueError: the file is not there, is no YAML, or is no saved ConfigContainer; or its mixed precision is a name:
            what that stands for (16 bits or FP8, the gradients' dtype) is Bridge's.
    """
    content = require_saved_config(path)
    missing = [name for name in SECTIONS if not isinstance(content.get(name), dict)]
    if missing:
        raise ValueError(f"{path}: the run config has no section {', '.join(missing)}")
    config = _plain(content)
    # As Bridge's `ConfigContainer.validate` does: on in both sections where it is on in one.
    if any(getattr(section, "use_distributed_optimizer", False) for section in (config.ddp, config.optimizer)):
        config.ddp.use_distributed_optimizer = config.optimizer.use_distributed_optimizer = True
    mixed = getattr(config, "mixed_precision", None)
    if isinstance(mixed, str):
        raise ValueError(
            f"{path}: mixed_precision={mixed!r}: what it stands for, and so the bytes of parameters and gradients, is "
            "not known without Megatron; install megatron-bridge (no GPU is needed), or give the run_config.yaml that "
            "a run has saved, which has it in full"
        )
    # As Bridge's `MixedPrecisionConfig.setup` does before training: a script may save its config before that.
    for name, value in ({} if mixed is None else vars(mixed)).items():
        for section in (config.model, config.optimizer, config.ddp):
            if not name.startswith("_") and hasattr(section, name):
                setattr(section, name, value)
    return config


def _plain(value: Any) -> Any:
    """Return a value of the YAML file with mappings as namespaces, and dtypes and names resolved."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "_name_" in value:  # a member of an enum
        return value["_name_"]
    target = str(value.get("_target_", ""))
    if target and value.get("_call_") is False:  # a dtype, a function or a class
        name = target.rpartition(".")[2]
        dtype = getattr(torch, name, None) if target.startswith("torch.") else None
        return dtype if isinstance(dtype, torch.dtype) else name
    return SimpleNamespace(**{key: _plain(item) for key, item in value.items()})
