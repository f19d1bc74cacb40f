"""What this machine has for the offload: GPUs and their CPUs, host memory and limits."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

import torch

from bridge_fgo.memory.host_memory import available_bytes, local_cpus, numa_nodes, total_bytes
from bridge_fgo.tools.show import readable_bytes


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
    return Machine(
        gpus=gpus,
        numa_nodes=len(numa_nodes()),
        cpus=len(os.sched_getaffinity(0)),
        host_bytes=total_bytes(),
        free_bytes=available_bytes(),
        lockable_bytes=None if lockable == resource.RLIM_INFINITY else lockable,
        shared_memory_bytes=_free_in(Path("/dev/shm")),
    )


def _free_in(folder: Path) -> int | None:
    try:
        disk = os.statvfs(folder)
    except OSError:
        return None
    return disk.f_bavail * disk.f_frsize


def warnings(machine: Machine, pinned_by_rank: int | None) -> list[str]:
    """Return what does not keep a job from training but can slow or end it.

    Args:
        machine: this one.
        pinned_by_rank: bytes that a rank will page-lock; None where that is not known.
    """
    if not machine.gpus:
        return []
    found = []
    if machine.numa_nodes > 1 and any(gpu.near_cpus is None for gpu in machine.gpus):
        found.append(
            f"{machine.numa_nodes} NUMA nodes, and no CPUs near a GPU that this process may use, or the machine does "
            "not say which are: start each rank on the CPUs of its GPU (numactl --cpunodebind --membind by local rank)"
        )
    needed = pinned_by_rank or 0
    if machine.lockable_bytes is not None and needed > machine.lockable_bytes:
        found.append(
            f"`ulimit -l` is {readable_bytes(machine.lockable_bytes)} and a rank page-locks {readable_bytes(needed)}: "
            "raise it (--ulimit memlock=-1) in case CUDA refuses to page-lock"
        )
    return found
