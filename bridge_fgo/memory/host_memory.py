"""How much host memory there is, and on which CPUs it is near a GPU."""

from __future__ import annotations

import math
import os
import platform
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PCI = Path("/sys/bus/pci/devices")
NODES = Path("/sys/devices/system/node")
STATUS = Path("/proc/self/status")
NUMA_MAPS = Path("/proc/self/numa_maps")
AUTO_SHARE = 7 / 8  # of what is free, for `OffloadConfig.host_memory_gib="auto"`: the loader and saves take some too
MAPPING_BYTES = 256  # of a line of `NUMA_MAPS`; for each one more the kernel would walk a mapping's pages


class Pool(NamedTuple):
    """Memory that processes share: the host's, some of its NUMA nodes', or what a cgroup may have of it."""

    identity: str  # the same for all processes that share it
    whole: int  # bytes
    free: int  # bytes that can be had now
    name: str = "node"  # for messages
    part: float = 1.0  # of this host's ranks, that shares it


class Need(NamedTuple):
    """Bytes that a rank is about to pin, and the pools that they are taken from."""

    nbytes: int
    pools: list[Pool]


def host_memory_refusal(needs: Sequence[Need], rank: int) -> str:
    """Return why ranks together cannot have the host memory that they need; empty if they can, for every rank alike.

    Linux hands out memory that it does not have and kills who touches it, so it is asked before. `needs` are of
    every rank, all measured before any of them pins; of `rank` the bytes are told, if it is one of those that
    cannot.
    """
    sharing = defaultdict[str, dict[int, Pool]](dict)
    for each, need in enumerate(needs):
        for pool in need.pools:
            sharing[pool.identity][each] = pool
    lacking = []
    for ranks in sharing.values():
        needed, free = sum(needs[each].nbytes for each in ranks), min(pool.free for pool in ranks.values())
        if needed > free:
            lacking.append((rank not in ranks, free / needed, needed, free, ranks))
    if not lacking:
        return ""
    *_, needed, free, ranks = min(lacking, key=lambda each: each[:2])  # of this rank's own, and of those the least
    told = rank if rank in ranks else next(iter(ranks))
    name = ranks[told].name
    more = "give the job more host memory" if name == "node" else "bind its ranks to more nodes (numactl --membind)"
    return (
        f"the offload pins {needs[told].nbytes} bytes of host memory for rank {told}, {needed} for the {len(ranks)} "
        f"rank(s) of its {name}, but the {name} has {ranks[told].whole} bytes, {free} of them free now, at most "
        f"{100 * free // needed / 100:.2f} times as many: set OffloadConfig.host_memory_gib='auto', by "
        f"which states that do not fit stay on the GPU, set gradients='lazy', or {more}"
    )


def ranks_of_this_node() -> int:
    """Return how many ranks torchrun, mpirun or srun has started on this node; 1 if none says.

    srun's nodes may have different numbers ("4(x15),2"): the first, which is the largest as Slurm fills nodes. Raises
    ValueError if a launcher's variable has no number.
    """
    launchers = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE")
    name = next(filter(os.environ.get, launchers), "")
    first = re.match(r"[1-9]\d*(?=$|[(,])", tasks := os.environ.get(name, "1"))
    if first is None:
        raise ValueError(f"the environment variable {name}={tasks!r}: give how many ranks this node has, or unset it")
    return int(first[0])


def available_bytes() -> int:
    """Return the bytes that can be had now: the kernel's estimate, or what NUMA nodes or a cgroup have left if less."""
    return min(pool.free for pool in pools())


def free_for_each_rank() -> int:
    """Return the bytes that each rank of this node can have now if all take as many."""
    ranks = ranks_of_this_node()
    return min(pool.free // math.ceil(ranks * pool.part) for pool in pools())


def total_bytes() -> int:
    """Return the bytes of the host, or of NUMA nodes or a cgroup if less."""
    return min(pool.whole for pool in pools())


def pools() -> list[Pool]:
    """Return the host's memory, that of its NUMA nodes if this process may not have all, and that of its cgroups.

    Containers of a host have names of their own but share its memory and the kernel's boot id; virtual machines, which
    have memory of their own, boot for themselves. A cgroup is known by its inode, which is the same under whatever path
    a container sees it. So ranks in containers of one host count together against its memory, and each container's
    ranks against its limit.
    """
    host = _read(BOOT_ID).strip() or platform.node()
    own = Pool(host, _meminfo("MemTotal"), _meminfo("MemAvailable"))
    return [own, *_of_nodes(host), *(Pool(f"{host} {inode}", limit, free) for inode, limit, free in _cgroups())]


def numa_nodes() -> set[int]:
    """Return the NUMA nodes that have CPUs: the memory of others may be a GPU's (eight of a GH200's nine nodes)."""
    return {node for node in _all_nodes() if _read(NODES / f"node{node}" / "cpulist").strip()}


def _all_nodes() -> set[int]:
    return {int(folder.name.removeprefix("node")) for folder in NODES.glob("node[0-9]*")}


def _of_nodes(host: str) -> Iterator[Pool]:
    """Yield the memory of the NUMA nodes that this process takes pages from, if these are not all."""
    with_cpus, bound = numa_nodes(), _bound_nodes()
    nodes = bound & with_cpus or bound
    if not nodes or nodes == _all_nodes():
        return
    name = f"NUMA node{'s' * (len(nodes) > 1)} {', '.join(map(str, sorted(nodes)))}"
    texts = [_read(NODES / f"node{node}" / "meminfo").replace(f"Node {node} ", "") for node in nodes]

    def total(field: str) -> int:
        return sum(1024 * (_field(text, f"{field}:") or 0) for text in texts)

    free = total("MemFree") + _reclaimable(total, _NODE)
    yield Pool(f"{host} {name}", total("MemTotal"), free, name, len(nodes) / max(1, len(with_cpus)))


def _bound_nodes() -> set[int]:
    """Return the NUMA nodes that this process may have pages of, by its cgroups and by its policy (`numactl`)."""
    allowed = next((line for line in _read(STATUS).splitlines() if line.startswith("Mems_allowed_list:")), "")
    nodes = parse_cpulist(allowed.partition(":")[2]) & _all_nodes()
    try:
        with NUMA_MAPS.open("rb", buffering=0) as file:
            policy = file.read(MAPPING_BYTES).decode().split()[1]
    except (OSError, IndexError):  # a kernel without NUMA, or nothing said
        return nodes
    mode, _, bound = policy.partition(":")
    return nodes & parse_cpulist(bound) if mode.startswith("bind") else nodes  # others fall back to any node


def power_of_two_at_least(nbytes: int) -> int:
    """Return the size of the block that PyTorch's own pinned allocator takes for `nbytes` (pytorch#150517)."""
    return 1 << (nbytes - 1).bit_length() if nbytes > 1 else nbytes


def local_cpus(device: torch.device) -> set[int] | None:
    """Return the CPUs of a GPU's NUMA node that this process may use; None if that is not known."""
    import torch  # not by the keeper of finished steps, which stays small

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


class _Names(NamedTuple):
    """Names of a cgroup's files (limit, bytes in use), and of lines of its `memory.stat` or a NUMA node's `meminfo`."""

    limit: str
    used: str
    cache: tuple[str, ...]  # the page cache without shared memory, which only goes with its file or to swap
    unwritten: tuple[str, ...]  # what of it waits for a disk
    slab: tuple[str, ...]  # the kernel's own memory that it gives back when asked


_NODE = _Names("", "", ("Inactive(file)", "Active(file)"), ("Dirty", "Writeback"), ("SReclaimable",))
_V2 = _Names(
    "memory.max",
    "memory.current",
    ("inactive_file", "active_file"),
    ("file_dirty", "file_writeback"),
    ("slab_reclaimable",),
)
_V1 = _Names(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
    ("total_dirty", "total_writeback"),
    (),  # it does not tell them
)


def _cgroups() -> Iterator[tuple[int, int, int]]:
    """Yield inode, limit and free bytes of this process's cgroups that have a limit, up to the root of each hierarchy.

    Slurm and systemd limit a cgroup below the root. In a container the root is often the container's own, and the path
    is the host's: what is not there has no limit that could be read.
    """
    for line in _read(OWN_CGROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names = (CGROUP / "memory", _V1) if controllers else (CGROUP, _V2)
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for count in range(len(parts), -1, -1):
            folder = root.joinpath(*parts[:count])
            limit, used = _number(folder / names.limit), _number(folder / names.used)
            if limit is not None and used is not None:
                stat = _read(folder / "memory.stat")
                free = limit - used + _reclaimable(lambda name, stat=stat: _field(stat, name) or 0, names)
                yield folder.stat().st_ino, limit, max(0, free)


def _reclaimable(nbytes: Callable[[str], int], names: _Names) -> int:
    """Return the bytes of a cgroup, or of NUMA nodes, that count as used and go when memory is asked for.

    What waits for a disk does not count: pinning touches pages by the gigabyte a second, and if the kernel finds
    nothing but pages that it has to write first, it gives up and kills.
    """
    cache, unwritten, slab = (sum(nbytes(name) for name in kind) for kind in (names.cache, names.unwritten, names.slab))
    return max(0, cache - unwritten) + slab


def _number(path: Path) -> int | None:
    text = _read(path).strip()  # empty if there is no such cgroup here, or no limit at the root
    return None if text in ("", "max") else int(text)


def _field(text: str, name: str) -> int | None:
    """Return the number after a name; each line begins with one."""
    fields = (line.split() for line in text.splitlines())
    return next((int(words[1]) for words in fields if words[0] == name), None)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
