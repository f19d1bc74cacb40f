"""How much host memory there is, and on which CPUs it is near a GPU."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
PCI = Path("/sys/bus/pci/devices")


def require_host_memory(nbytes: int, ranks: int | None = None) -> None:
    """Raise ValueError where this rank, or the ranks of this node together, need more than the host has.

    Linux hands out memory that it does not have and kills whoever touches it, so it is asked before.
    What the other ranks pin is taken to be as much as this one's.

    Args:
        nbytes: what this rank is about to pin.
        ranks: of this node; as torchrun or srun says when None.
    """
    ranks = ranks_of_this_node() if ranks is None else ranks
    free, whole = available_bytes(), total_bytes()
    if nbytes > free:
        gc.collect()  # an optimizer that was dropped and its offloader, which pins as much, refer to each other
        free = available_bytes()
    if nbytes > free or ranks * nbytes > whole:
        raise ValueError(
            f"offloading the optimizer state pins {nbytes} bytes of host memory a rank, about {ranks * nbytes} on this "
            f"node with its {ranks} rank(s), but the node has {whole} bytes, {free} of them free now: lower "
            f"OffloadConfig.fraction (at most {min(free, whole // ranks) / nbytes:.2f} times what it is now), set "
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
    return min([_meminfo("MemAvailable"), *(free for _, free in _cgroups())])


def total_bytes() -> int:
    """Return the bytes of the host, or of a cgroup if less."""
    return min([_meminfo("MemTotal"), *(limit for limit, _ in _cgroups())])


def power_of_two_at_least(nbytes: int) -> int:
    """Return the size of the block that PyTorch's own pinned allocator takes for `nbytes` (pytorch#150517)."""
    return 1 << (nbytes - 1).bit_length() if nbytes > 1 else nbytes


def local_cpus(device: torch.device) -> set[int] | None:
    """Return the CPUs of a GPU's NUMA node that this process may use; None where that is not known."""
    properties = torch.cuda.get_device_properties(device)
    if not hasattr(properties, "pci_bus_id"):
        return None
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    text = _read(PCI / address / "local_cpulist")  # which is not there in many containers and virtual machines
    return parse_cpulist(text) & os.sched_getaffinity(0) or None


def parse_cpulist(text: str) -> set[int]:
    """Return the numbers in a kernel list such as "0-3,8"."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}


def _meminfo(name: str) -> int:
    kib = _field(MEMINFO.read_text(), f"{name}:")
    if kib is None:
        raise RuntimeError(f"{MEMINFO} has no {name}")
    return kib * 1024


_V2 = "memory.max", "memory.current", "inactive_file"
_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
"""Names of a cgroup's files (limit, used bytes), and of the line of its `memory.stat` that has the page cache."""


def _cgroups() -> Iterator[tuple[int, int]]:
    """Yield limit and free bytes of the cgroups of this process, up to the root of each hierarchy, that have a limit.

    Slurm and systemd limit a cgroup below the root. In a container the root is often the container's own, and the
    path is the host's: what is not there has no limit that could be read.
    """
    for line in _read(OWN_CGROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, (of_limit, of_used, of_cache) = (CGROUP / "memory", _V1) if controllers else (CGROUP, _V2)
        names = [name for name in path.split("/") if name not in ("", "..")]
        for count in range(len(names), -1, -1):
            folder = root.joinpath(*names[:count])
            limit, used = _number(folder / of_limit), _number(folder / of_used)
            if limit is not None and used is not None:
                # Page cache counts as used, and goes when memory is asked for.
                yield limit, limit - used + (_field(_read(folder / "memory.stat"), of_cache) or 0)


def _number(path: Path) -> int | None:
    text = _read(path).strip()  # empty where there is no such cgroup here, or no limit at the root
    return None if text in ("", "max") else int(text)


def _field(text: str, name: str) -> int | None:
    """Return the number after a name, where each line begins with one."""
    fields = (line.split() for line in text.splitlines())
    return next((int(words[1]) for words in fields if words[0] == name), None)


def _read(path: Path) -> str:
    """Return the text of a file, empty where there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""
