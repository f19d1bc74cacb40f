"""`bridge-fgo doctor`: what is installed, what will happen with the flag on a config, and what is in the way."""

import json
import os
import platform
import re
import resource
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import bridge_fgo
from bridge_fgo.bridge.compat import version_of
from bridge_fgo.bridge.refusals import refuse_small_shared_memory
from bridge_fgo.memory.host_memory import (
    AUTO_SHARE,
    Need,
    available_bytes,
    host_memory_refusal,
    local_cpus,
    numa_nodes,
    pools,
    total_bytes,
)
from bridge_fgo.memory.slab_file import BLOCK_BYTES, direct_file
from bridge_fgo.tools.job.answers import ask_builder, kept_installation, missing_packages
from bridge_fgo.tools.job.job import Job, read_job
from bridge_fgo.tools.link import probe
from bridge_fgo.tools.plan.estimate import Estimate, budget_refusals, fullest_node, make_estimate, notes_on_pinned
from bridge_fgo.tools.plan.state import is_served_by_mcore
from bridge_fgo.tools.settings import DoctorSettings
from bridge_fgo.tools.show import are_not_installed, readable_bytes, tell

DISTRIBUTIONS = ("megatron-bridge", "megatron-core", "transformer-engine", "nemo-run", "nvidia-resiliency-ext")
DRIVER = Path("/proc/driver/nvidia/version")
BLOCK_DEVICES = Path("/sys/dev/block")
REFUSED = 1
CONFIG_NOT_READ = 2


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
    """A GPU. near_cpus: CPUs of its NUMA node that this process may use; None if the machine does not say."""

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


@dataclass
class Findings:
    """Holds the findings, as `--json` prints them."""

    installed: dict[str, Any]
    machine: dict[str, Any]
    link_bytes_per_second: dict[str, float] | None = None
    config: dict[str, Any] | None = None
    refusals: list[str] = field(default_factory=list)  # end training before it starts
    warnings: list[str] = field(default_factory=list)  # do not
    notes: list[str] = field(default_factory=list)
    target: str | None = None
    error: str = ""  # why the config cannot be read
    verdict: str = ""  # whether this machine can train

    def refuse(self, refusals: list[str], flag: bool) -> None:
        """Note what training refuses, with the flag as it is or once it is set."""
        if flag:
            self.refusals += refusals
        else:
            self.notes += [f"with the flag set, refused: {refusal}" for refusal in refusals]


def run(settings: DoctorSettings) -> int:
    """Print the findings; return 1 if this machine cannot train or not this config, 2 if it cannot be read."""
    machine = look()
    answer: dict[str, Any] = {}
    if not missing_packages():
        asked = {name: getattr(settings, name) for name in ("target", "gpus", "offload", "vocab_size", "overrides")}
        try:
            answer = {} if settings.target is not None else kept_installation()
            answer = answer or ask_builder(**asked, patches=True)
        except ValueError as error:
            answer = {"install_refuses": str(error)}
    findings = Findings(installed(answer), asdict(machine), target=settings.target)
    _examine_installed(findings)
    if "kept_of" in answer:
        findings.notes.append(
            "Megatron-Bridge was not imported: these versions are those that this package is tested with; name a "
            "recipe, as tiny, to have it imported and every patch tried"
        )
    if settings.target is not None:
        try:
            _examine_config(findings, settings, machine, answer)
        except ValueError as error:  # what is known of the machine is printed all the same
            findings.error = str(error)
    if machine.gpus and settings.probe:
        try:
            findings.link_bytes_per_second = probe(len(machine.gpus))
        except ChildProcessError as error:
            findings.warnings.append(f"the link was not measured: {error}")
    reason = findings.error or lacking(findings) or next(iter(findings.refusals), "")
    findings.verdict = f"Cannot train here: {reason}" if reason else "Can train here."
    if settings.json_output:
        print(json.dumps(asdict(findings)))
    else:
        _print(Console(), findings)
    if findings.error:
        print(f"bridge-fgo doctor: {findings.error}", file=sys.stderr)
        return CONFIG_NOT_READ
    return REFUSED if reason else 0


def lacking(findings: Findings) -> str:
    """Return what this machine lacks to train at all; "" for nothing. The recipe `tiny` trains without a GPU."""
    if missing := missing_packages():
        return f"{are_not_installed(missing)} (pip install 'megatron-bridge>=0.6,<0.7')"
    if not findings.machine["gpus"] and findings.target != "tiny":
        return "torch sees no GPU; the recipe tiny trains without one"
    return ""


def _examine_installed(findings: Findings) -> None:
    if missing := missing_packages():
        findings.notes.append(f"{are_not_installed(missing)} here: nothing can be trained")
    elif findings.installed["transformer-engine"] is None:
        lacks = "transformer-engine is not installed: Megatron-Bridge does not import without it"
        if findings.machine["gpus"]:
            findings.refusals.append(lacks)
        else:
            findings.warnings.append(f"{lacks}; the recipe tiny trains with a stand-in, and nothing else trains here")
    if findings.installed["install"] is not None:
        findings.refusals.append(findings.installed["install"])
    if not findings.machine["gpus"]:
        findings.notes.append("no GPU here: links and host memory are not those of a job")


def _examine_config(findings: Findings, settings: DoctorSettings, machine: Machine, answer: dict[str, Any]) -> None:
    assert settings.target is not None
    if findings.installed["install"] is not None:
        findings.notes.append("the config was not looked at, because this Megatron-Bridge is refused")
        return
    job = read_job(settings.target, settings.gpus, settings.offload, settings.vocab_size, settings.overrides, answer)
    findings.config = {"flag": job.flag, "engine": job.engine, "gpus": job.parallel.gpus, "source": job.source}
    if job.bridge_refuses is not None:
        findings.refusals.append(f"Megatron-Bridge refuses the config: {job.bridge_refuses}")
    if not job.flag:
        findings.notes.append("optimizer.offload_optimizer_states is not set: trains as without the package")
    findings.refuse(job.refusals, job.flag)
    pinned = None
    if not job.refusals and job.bridge_refuses is None:
        try:
            # Memory is pinned for all that may leave, before training measures what a budget leaves.
            offload = replace(job.offload, gpu_memory_budget_gib=None)
            if offload.host_limit_gib == "auto" and machine.gpus:
                offload = replace(offload, host_memory_gib=AUTO_SHARE * available_bytes() / 2**30)
            ranks = settings.gpus_per_node or len(machine.gpus) or 1
            estimate = make_estimate(job, offload, ranks_of_node=min(ranks, job.parallel.gpus))
        except ValueError as error:
            findings.notes.append(f"bytes are not known: {error}")
        else:
            pinned = _examine_memory(findings, findings.config, settings.gpus_per_node, machine, estimate)
            if offload.nvme_folder is not None:
                _examine_folder(findings, offload.nvme_folder, min(ranks, job.parallel.gpus), machine, estimate)
    findings.warnings += warnings(machine, pinned)


def _examine_folder(findings: Findings, folder: str, ranks: int, machine: Machine, estimate: Estimate) -> None:
    """Note what a node has in files, and whether there is room for it here, if this is a node of the job."""
    findings.notes += [note for note in estimate.notes if note.startswith("nvme_folder")]
    if machine.gpus:
        in_file = max(of_rank.in_file for of_stage in estimate.states for of_rank in of_stage)
        try:  # what is allocated, and freed at once, is there for training too
            os.close(direct_file(folder, max(in_file * ranks, BLOCK_BYTES)))
        except ValueError as error:
            findings.refuse([str(error)], estimate.job.flag)
        else:
            _examine_wear(findings, folder, in_file * ranks)


def _examine_wear(findings: Findings, folder: str, written: int) -> None:
    """Note how often a day steps that write so many bytes write the whole drive."""
    device = os.stat(folder).st_dev
    drives = _drives(BLOCK_DEVICES / f"{os.major(device)}:{os.minor(device)}")
    if whole := sum(512 * int((drive / "size").read_text()) for drive in drives if drive.exists()):
        daily = written * 1440 / whole
        (findings.warnings if daily > 1 else findings.notes).append(
            f"nvme_folder={folder!r}: a step a minute writes the drive's {whole / 1e12:.3g} TB {daily:.2g} times a "
            f"day; drives of data centres are rated for 1 to 3 such writes, and steps of {60 * daily:.0f} s do 1"
        )


def _drives(block: Path) -> set[Path]:
    """Return the drives of a block device in sysfs, through partitions, LVM and RAID."""
    block = block.resolve()
    block = block.parent if (block / "partition").exists() else block
    below = list((block / "slaves").glob("*"))
    return set().union(*map(_drives, below)) if below else {block}


def _examine_memory(
    findings: Findings, config: dict[str, Any], gpus_per_node: int | None, machine: Machine, estimate: Estimate
) -> int:
    """Note what will be offloaded and pinned; return the most bytes that a rank pins."""
    job, pinned = estimate.job, max(estimate.pinned)
    ranks = gpus_per_node or len(machine.gpus) or None
    # This machine tells how many ranks share a node, unless it has no GPU and the job has several.
    is_known = ranks is not None or job.parallel.gpus == 1
    here = min(ranks or 1, job.parallel.gpus)
    of_node = sum(fullest_node(estimate.pinned, here)) if is_known else None
    config |= {
        "state_bytes": [stage.states.total for stage in estimate.stages],
        "pinned_by_rank": pinned if job.flag else 0,
        "pinned_by_node": of_node if job.flag else 0,
        "ranks_of_node": here if is_known else None,
    }
    if job.gpus_note:
        findings.notes.append(job.gpus_note)
    findings.notes += notes_on_pinned(job, estimate.stages)
    findings.refuse(budget_refusals(job, estimate.stages, job.offload), job.flag)
    if not job.flag:
        return 0
    if machine.gpus and is_served_by_mcore(job, estimate.offload):
        # mcore's own offloader does not ask for the memory of this machine.
        needed, free, whole = sum(fullest_node(estimate.pinned, here)), available_bytes(), total_bytes()
        if needed > free:
            findings.warnings.append(
                f"mcore's offloader pins {pinned} bytes a rank in the first steps, about {needed} on this "
                f"node with its {here} rank(s), but the node has {whole} bytes, {free} of them free now: Linux kills "
                "who takes more; OffloadConfig.engine='native' pins less, and says so before training"
            )
    elif machine.gpus:
        refusals = list(_memory_refusals(job, estimate, here))
        if job.gpus_given:
            findings.refusals += refusals
        else:  # on more, each rank has less
            findings.notes += [f"refused on so few: {refusal}" for refusal in refusals]
    return pinned


def _memory_refusals(job: Job, estimate: Estimate, ranks: int) -> Iterator[str]:
    """Yield what training would say of this machine as the node of `ranks` ranks that needs the most."""
    here = pools()
    if refusal := host_memory_refusal([Need(nbytes, here) for nbytes in fullest_node(estimate.pinned, ranks)], rank=0):
        yield refusal
    # Only the native engine saves in the background.
    copies = [of_rank.saved for of_stage in estimate.states for of_rank in of_stage]
    try:
        for fullest in (max(copies, key=sum), max(copies, key=len)):
            refuse_small_shared_memory(job.config.checkpoint, list(fullest), ranks)
    except ValueError as error:
        yield str(error)


def _judged(lockable: int | None, pinned: int | None) -> str:
    """Return the limit on page-locked memory, and whether what a rank pins is within it."""
    if lockable is None:
        return "unlimited: enough"
    if pinned is None:
        return f"{readable_bytes(lockable)}: name a config to have it judged"
    verdict = "enough" if pinned <= lockable else f"less than the {readable_bytes(pinned)} that a rank pins"
    return f"{readable_bytes(lockable)}: {verdict}"


def _print(console: Console, findings: Findings) -> None:
    tell(console, findings.verdict, "bold")
    table = Table(show_header=False)
    for row in _rows(findings, findings.machine, findings.config or {}):
        table.add_row(*row)
    console.print(table)
    for word, lines in (("note", findings.notes), ("warning", findings.warnings), ("REFUSED", findings.refusals)):
        for line in lines:
            tell(console, f"{word}: {line}", "red" if word == "REFUSED" else None)
    if not findings.refusals and findings.config is not None:
        console.print("Nothing is refused by the offload.")


def _rows(findings: Findings, machine: dict[str, Any], config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the lines of the table: first those of the machine, then those of the config."""
    for name, value in findings.installed.items():
        if name != "install":
            yield name, "-" if value is None else str(value)
    size = readable_bytes
    for gpu in machine["gpus"]:
        near = "not known" if gpu["near_cpus"] is None else gpu["near_cpus"]
        yield "GPU", f"{gpu['name']}, {size(gpu['memory_bytes'])}, CPUs near it: {near}"
    yield "NUMA nodes, CPUs", f"{machine['numa_nodes']}, {machine['cpus']}"
    yield "host memory", f"{size(machine['host_bytes'])}, free {size(machine['free_bytes'])}"
    yield "/dev/shm, free", size(machine["shared_memory_bytes"])
    yield "ulimit -l", _judged(machine["lockable_bytes"], config.get("pinned_by_rank"))
    if findings.link_bytes_per_second is not None:
        speeds = {name: value / 1e9 for name, value in findings.link_bytes_per_second.items()}
        yield "link, GB/s", "D2H {d2h:.1f}, H2D {h2d:.1f}, both at once {duplex:.1f} each".format(**speeds)
    for name, title in (("flag", "offload_optimizer_states"), ("engine", "engine"), ("gpus", "GPUs of the job")):
        if config.get(name) is not None:
            yield title, str(config[name])
    if "pinned_by_rank" not in config:
        return
    yield "states, by stage", ", ".join(map(size, config["state_bytes"]))
    if not config["flag"]:
        yield "pinned by a rank", "nothing, the flag is not set"
        return
    yield "pinned by a rank", f"{size(config['pinned_by_rank'])} at most"
    if (of_node := config["pinned_by_node"]) is not None:
        ranks, share = config["ranks_of_node"], of_node / machine["host_bytes"]
        yield "pinned by a node", f"{size(of_node)} by {ranks} rank(s), {share:.0%} of the host here"
