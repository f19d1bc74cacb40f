"""How much host memory there is, and on which CPUs it is near a GPU."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
PCI = Path("/sys/bus/pci/devices")


def require_host_memory(nbytes: int, pinned: int, ranks: int | None = None) -> None:
    """Raise ValueError where this rank, or the ranks of this node together, need more than the host has.

    Linux hands out memory that it does not have and kills whoever touches it, so it is asked before.
    What the other ranks pin is taken to be as much as this one's.

    Args:
        nbytes: what this rank is about to pin.
        pinned: what it has pinned already, for other optimizers.
        ranks: of this node; `ranks_of_this_node` when None.
    """
    if ranks is None:
        ranks = ranks_of_this_node()
    free, whole = available_bytes(), total_bytes()
    needed = pinned + nbytes
    if nbytes > free:
        gc.collect()  # an optimizer that was dropped and its offloader, which pins as much, refer to each other
        free = available_bytes()
    if nbytes <= free and ranks * needed <= whole:
        return
    raise ValueError(
        f"offloading the optimizer state pins {needed} bytes of host memory a rank, about {ranks * needed} on this "
        f"node with its {ranks} rank(s), but the node has {whole} bytes, {free} of them free now: lower "
        f"OffloadConfig.fraction (at most {min(pinned + free, whole // ranks) / needed:.2f} times what it is now), set "
        "moments=False or master_weights=False, or give the job more host memory"
    )


def ranks_of_this_node() -> int:
    """Return how many ranks torchrun, or srun, has started on this node; 1 where neither says.

    srun's nodes may have different numbers ("4(x15),2"): the first, which is the largest as Slurm fills nodes.
    """
    tasks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    return int(tasks.split("(")[0].split(",")[0])


def available_bytes() -> int:
    """Return the bytes that can be had now: the kernel's estimate, or what the cgroup has left if less."""
    free = _meminfo("MemAvailable")
    for folder, files in _cgroups():
        limit, used = _number(folder / files.limit), _number(folder / files.used)
        if limit is not None and used is not None:
            # Page cache counts as used, and goes when memory is asked for.
            free = min(free, limit - used + _cgroup_stat(folder, files.cache))
    return free


def total_bytes() -> int:
    """Return the bytes of the host, or of a cgroup if less."""
    limits = (_number(folder / files.limit) for folder, files in _cgroups())
    return min([_meminfo("MemTotal"), *(limit for limit in limits if limit is not None)])


def power_of_two_at_least(nbytes: int) -> int:
    """Return the size of the block that PyTorch's own pinned allocator takes for `nbytes` (pytorch#150517)."""
    return 1 << (nbytes - 1).bit_length() if nbytes > 1 else nbytes


def local_cpus(device: torch.device) -> set[int] | None:
    """Return the CPUs of a GPU's NUMA node that this process may use; None where that is not known."""
    properties = torch.cuda.get_device_properties(device)
    if not hasattr(properties, "pci_bus_id"):
        return None
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    try:
        text = (PCI / address / "local_cpulist").read_text()
    except OSError:  # no such file in many containers and virtual machines
        return None
    return parse_cpulist(text) & os.sched_getaffinity(0) or None


def parse_cpulist(text: str) -> set[int]:
    """Return the numbers in a kernel list such as "0-3,8"."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _meminfo(name: str) -> int:
    for line in MEMINFO.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{MEMINFO} has no {name}")


class _Files(NamedTuple):
    """Names of a cgroup's files, and of a line of its `memory.stat`."""

    limit: str
    used: str
    cache: str


_V2 = _Files("memory.max", "memory.current", "inactive_file")
_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _cgroups() -> Iterator[tuple[Path, _Files]]:
    """Yield the cgroups that this process is in, up to the root of each hierarchy: any of them may have a limit.

    Slurm and systemd limit a cgroup below the root. In a container the root is often the container's own, and the
    path is the host's: what is not there has no limit that could be read.
    """
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:  # no such file system
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, files = (CGROUP / "memory", _V1) if controllers else (CGROUP, _V2)
        names = [name for name in path.split("/") if name not in ("", "..")]
        for count in range(len(names), -1, -1):
            yield root.joinpath(*names[:count]), files


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:  # no such cgroup here, or no limit at the root
        return None
    return None if text == "max" else int(text)


def _cgroup_stat(folder: Path, name: str) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)
