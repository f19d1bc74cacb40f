"""What this machine has for the offload: what is installed, GPUs and their CPUs, host memory and limits."""

from __future__ import annotations

import os
import platform
import re
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import bridge_fgo
from bridge_fgo.bridge.compat import version_of
from bridge_fgo.memory.host_memory import available_bytes, local_cpus, numa_nodes, total_bytes
from bridge_fgo.tools.show import readable_bytes

DISTRIBUTIONS = ("megatron-bridge", "megatron-core", "transformer-engine", "nemo-run", "nvidia-resiliency-ext")
DRIVER = Path("/proc/driver/nvidia/version")


def installed(answer: dict[str, Any]) -> dict[str, Any]:
    """Return versions by name, None for what is not there, without importing Megatron or Transformer Engine.

    By the builder's answer: "mcore", the version that a job would import (a checkout may shadow the wheel),
    "offloader", mcore's own, and "install", why `bridge_fgo.install` refuses this Bridge, or Megatron does not import,
    or None.
    """
    versions = {name: version_of(name) for name in DISTRIBUTIONS}
    return {
        "bridge_fgo": bridge_fgo.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "driver": driver_version(),
        **{name: None if version == "unknown" else version for name, version in versions.items()},
        "mcore": answer.get("mcore"),
        "offloader": answer.get("offloader"),
        "install": answer.get("install_refuses"),
    }


def driver_version() -> str | None:
    """Return the version of NVIDIA's kernel driver, or None without one."""
    try:
        match = re.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)", DRIVER.read_text())
    except OSError:
        return None
    return match[1] if match else None


@dataclass(frozen=True)
class Gpu:
    """A GPU. near_cpus: CPUs of its NUMA node that this process may use; None where the machine does not say."""

    name: str
    memory_bytes: int
    near_cpus: int | None


@dataclass(frozen=True)
class Machine:
    """Bytes of host memory; CPUs that this process may use; limits, None for none."""

    gpus: list[Gpu]
    numa_nodes: int
    cpus: int
    host_bytes: int
    free_bytes: int
    lockable_bytes: int | None
    shared_memory_bytes: int | None


def look() -> Machine:
    """Return what this machine has. Makes a CUDA context on each GPU for a moment."""
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        near = local_cpus(torch.device("cuda", index))
        gpus.append(Gpu(properties.name, properties.total_memory, None if near is None else len(near)))
    lockable, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    try:
        shared = os.statvfs("/dev/shm")
    except OSError:
        shared = None
    return Machine(
        gpus=gpus,
        numa_nodes=len(numa_nodes()),
        cpus=len(os.sched_getaffinity(0)),
        host_bytes=total_bytes(),
        free_bytes=available_bytes(),
        lockable_bytes=None if lockable == resource.RLIM_INFINITY else lockable,
        shared_memory_bytes=None if shared is None else shared.f_bavail * shared.f_frsize,
    )


def warnings(machine: Machine, pinned_by_rank: int | None) -> list[str]:
    """Return what does not keep a job from training but can slow or end it, where it is known what a rank pins."""
    found = []
    if machine.numa_nodes > 1 and any(gpu.near_cpus is None for gpu in machine.gpus):
        found.append(
            f"{machine.numa_nodes} NUMA nodes, and no CPUs near a GPU that this process may use, or the machine does "
            "not say which are: start each rank on the CPUs of its GPU (numactl --cpunodebind --membind by local rank)"
        )
    needed, lockable = pinned_by_rank or 0, machine.lockable_bytes
    if machine.gpus and lockable is not None and needed > lockable:
        found.append(
            f"`ulimit -l` is {readable_bytes(lockable)} and a rank page-locks {readable_bytes(needed)}: "
            "raise it (--ulimit memlock=-1) in case CUDA refuses to page-lock"
        )
    return found
