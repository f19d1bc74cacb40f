"""What is installed, looked up without importing Megatron or Transformer Engine."""

from __future__ import annotations

import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import bridge_fgo

DISTRIBUTIONS = ("megatron-bridge", "megatron-core", "transformer-engine", "nemo-run", "nvidia-resiliency-ext")
DRIVER = Path("/proc/driver/nvidia/version")


def installed(answer: dict[str, Any]) -> dict[str, Any]:
    """Return versions by name, None for what is not there.

    Beside the distributions: "mcore", the version that a job would import (a checkout may shadow the wheel),
    "offloader", the optimizer-state offloader that this mcore brings, and "install", why `bridge_fgo.install` refuses
    this Bridge, or why Megatron does not import, or None.

    Args:
        answer: of `bridge_fgo.tools.job.builder`, empty where there is no Megatron.
    """
    import torch

    return {
        "bridge_fgo": bridge_fgo.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "driver": driver_version(),
        **{name: _version(name) for name in DISTRIBUTIONS},
        "mcore": answer.get("mcore"),
        "offloader": answer.get("offloader"),
        "install": answer.get("install_refuses"),
    }


def driver_version() -> str | None:
    """Return the version of NVIDIA's kernel driver, or None without one."""
    try:
        text = DRIVER.read_text()
    except OSError:
        return None
    match = re.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)", text)
    return match[1] if match else None


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
