"""Read a job's log: each rank's error "CUDA out of memory", and which job it was. Nothing here imports torch.

The error's text is PyTorch's (`c10/cuda/CUDACachingAllocator.cpp`). The settings are those that Megatron-Bridge prints
as "Configuration Summary".
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bridge_fgo.bridge.compat import FLAG, as_named_in, settings_in
from bridge_fgo.config import MIB, readable
from bridge_fgo.recipes.catalog import RECIPES
from bridge_fgo.tools.job.answers import config_at_once
from bridge_fgo.tools.job.target import config_functions, is_saved_config
from bridge_fgo.tools.plan.options import Settings
from bridge_fgo.tools.plan.systems import SYSTEMS

SIZE = r"[\d.]+ (?:bytes|[KMG]iB)"
ERROR = re.compile(
    rf"CUDA out of memory\. Tried to allocate (?P<asked>{SIZE})\. GPU (?P<gpu>\d+) has a total capacity of "
    rf"(?P<capacity>{SIZE}) of which (?P<free>{SIZE}) is free\.(?:.*?(?P<allowed>{SIZE}) allowed; )?.*?Of the "
    rf"allocated memory (?P<allocated>{SIZE}) is allocated by PyTorch,.*? and (?P<unallocated>{SIZE}) is reserved"
)
OTHER_ERROR = re.compile(r".*(?:out of memory|oom[-_ ]kill|can't allocate memory|ALLOC_FAILED).*", re.IGNORECASE)
SUFFIXES = (".log", ".out", ".err", ".txt")
"""How the names of the files end that are read as logs where a folder is given."""
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": MIB, "GiB": 2**30}
RANK = re.compile(r"\[rank(\d+)\]|^\s*(\d+): ")
"""How a line names its rank: PyTorch writes the first, `srun --label` the second (its tasks are the ranks)."""
FRAME = re.compile(r", line \d+, in (\w+)")
BEFORE_AN_ERROR = 30_000
"""Characters of a log before an error that its traceback is looked for in."""
PHASES = {
    "in the optimizer step": {"step_with_ready_grads", "prepare_grads"},
    "in backward": {"backward", "backward_step", "custom_backward"},
    "in forward": {"forward_step", "forward"},
    "in a training step": {"train_step"},
    "while training was set up": {"setup"},
}
"""By functions of a traceback, the first that fits."""

WORLD = re.compile(r"\bWORLD_SIZE[=: ]+(\d+)|\bworld[ _]size[=: ]+(\d+)|\bnranks (\d+)")
LAUNCHED = re.compile(r"--nproc[-_]per[-_]node[= ](\d+)")
NODES = re.compile(r"--nnodes[= ](\d+)")
RECIPE = re.compile(r"(?:--recipe|--factory|\brecipe|\bRECIPE|bridge_fgo\.recipes\.train)[= ]['\"]?(\w+)")
RUN_CONFIG = re.compile(r"save_config_filepath: '(.+?)'|([\w./~-]*run_config\.ya?ml)")
CHECKPOINTS = re.compile(r"\b(?:save|load): '(.+?)'")
SECTION = re.compile(r"\[(\w+)\](?: Non-default values.*|:)$")
FIELD = re.compile(r"  (\w+): (.+?)(?:  \(Mcore default: .*\))?$")
TRAIN = ("micro_batch_size", "global_batch_size")
MODEL: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "sequence_parallel": False,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
}
"""Settings that decide memory, with mcore's defaults, which Bridge does not print."""
SHAPE = ("num_layers", "hidden_size", "num_attention_heads", "num_moe_experts")
"""Settings that tell a model from another."""
RAN = "bridge_fgo: optimizer-state offload on"
"""How rank 0's line begins where states are offloaded."""
STEP = re.compile(r"\biteration +\d+/ *\d+ \|.*elapsed time", re.MULTILINE)
LIKE = 0.02
"""By what share a system's memory may exceed what PyTorch reports: an H200's 140.4 GiB are 139.8 to CUDA."""


@dataclass(frozen=True)
class OutOfMemory:
    """An error of a rank, in bytes; rank: None if the log does not say. phase: of training, or ""."""

    rank: int | None
    gpu: int
    asked: int
    free: int
    capacity: int
    allocated: int
    unallocated: int
    allowed: int | None
    phase: str

    @property
    def needed(self) -> int:
        """Bytes that the rank's tensors would have taken together."""
        return self.allocated + self.asked

    @property
    def usable(self) -> int:
        """Bytes that they could take: less than needed."""
        free = min(self.free, self.asked - 1)
        limit = self.capacity if self.allowed is None else self.allowed
        return min(self.allocated + free, limit - self.unallocated)

    @property
    def told(self) -> str:
        """The error in a sentence."""
        who = f"GPU {self.gpu} (of an unnamed rank)" if self.rank is None else f"rank {self.rank}"
        phase = f" {self.phase}" if self.phase else ""
        return (
            f"{who} was short by {readable(self.needed - self.usable)}{phase}: it asked for {readable(self.asked)} "
            f"with {readable(self.free)} of {readable(self.capacity)} free, {readable(self.allocated)} allocated"
        )

    @property
    def hint(self) -> str:
        """Advise an allocator setting if memory that PyTorch held unused would have been enough; else ""."""
        if self.unallocated < self.asked - self.free:
            return ""
        return (
            f"{readable(self.unallocated)} were reserved but unallocated, which would do: also set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        )


@dataclass(frozen=True)
class Log:
    """The errors of a log, the one that needed the most first.

    notes: what it does not say, and what it says. lacks_offload: the recipe asks for the offload, and it did not run.
    has_steps: a step was over before the error.
    """

    errors: list[OutOfMemory]
    notes: list[str]
    lacks_offload: bool
    has_steps: bool


def of_log(settings: Settings) -> tuple[Settings, Log | None]:
    """Return the settings of a plan of a log's job, and what the log says; the settings and None for no log.

    A folder is a checkpoint's, with a run_config.yaml, or has logs.

    Raises:
        ValueError: the log has no such error, or does not say which job or which GPU it was, and nor do the settings.
    """
    target = settings.target
    is_name = target in RECIPES or re.search(r"^\w+_config$|^$|:|\.py$", target) or is_saved_config(target)
    if is_name or not Path(target).exists():
        if settings.job is not None:
            raise ValueError(f"--job {settings.job}: says of which job a log is, and {settings.target} is no log")
        return settings, None
    path = Path(settings.target)
    if path.is_dir() and settings.job is None and (config := _newest_config(path)):
        return replace(settings, target=str(config)), None
    if settings.check:
        raise ValueError(f"--check: {path} is the log of a job that did not fit; check what is advised for it")
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)
        if not files:
            raise ValueError(f"{path}: has no run_config.yaml and no log (*{', *'.join(SUFFIXES)})")
    text = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    errors = list(_errors(text))
    if not errors:
        other = OTHER_ERROR.search(text)
        said = f"; it has {other[0].strip()[:200]!r}, which does not say how much" if other else ""
        raise ValueError(f"{path}: has no error of PyTorch's, 'CUDA out of memory. Tried to allocate ...'{said}")
    first = errors[0]
    notes = []
    if first.rank is None:
        notes.append("the log does not say which rank it was (torchrun's say [rank0]:): the fullest stage is taken")
    recipes = (match[1] for match in RECIPE.finditer(text) if match[1] in RECIPES or match[1] in config_functions())
    target = settings.job or _config_named(text, path.parent) or next(recipes, None)
    if target is None:
        said = "It does not say which job it is of"
        if named := RECIPE.search(text):
            said = f"It names {named[1]}, which the installed Megatron-Bridge lacks"
        raise ValueError(
            f"{path}: {first.told}. {said}: add --job RECIPE or --job run_config.yaml (Bridge writes one before "
            "training with logger.save_config_filepath=run_config.yaml)"
        )
    system = _system(first, settings.system)
    gpus = settings.gpus or _gpus(text, max(error.rank or 0 for error in errors))
    given = {override.partition("=")[0] for override in settings.overrides or ()}
    printed = _printed(text)
    if not printed:
        notes.append(f"the log has no Configuration Summary of Bridge's (of rank 0): settings are those of {target}")
    overrides = _different(printed, target, given)
    lacks_offload = target in RECIPES and RAN not in text
    if lacks_offload:
        overrides.append(f"optimizer.{FLAG}=false")  # the recipe sets it, and the log is of a run without this package
    overrides = [one for one in overrides if one.partition("=")[0] not in given]
    if overrides:
        notes.append(f"it ran otherwise than {target}, by the log: {' '.join(overrides)}")
    overrides += settings.overrides or ()
    of_job = {"target": target, "job": None, "system": system, "gpus": gpus, "overrides": overrides}
    return replace(settings, **of_job, recommend=True), Log(errors, notes, lacks_offload, bool(STEP.search(text)))


def _errors(text: str) -> Iterator[OutOfMemory]:
    """Yield the first error of each rank, the one that needed the most first."""
    found: dict[tuple[int | None, int], OutOfMemory] = {}
    for match in ERROR.finditer(text):
        start = text.rfind("\n", 0, match.start()) + 1
        named = RANK.search(text[start : match.start()])
        rank = int(named[1] or named[2]) if named else None
        sizes = {name: _bytes(match[name]) for name in ("asked", "free", "capacity", "allocated", "unallocated")}
        allowed = None if match["allowed"] is None else _bytes(match["allowed"])
        before = text[max(0, start - BEFORE_AN_ERROR) : start].splitlines()
        if named:
            before = [line for line in before if named[0] in line]
        before = before[max((at for at, line in enumerate(before) if "Traceback (most" in line), default=0) :]
        frames = set(FRAME.findall("\n".join(before)))
        phase = next((phase for phase, functions in PHASES.items() if frames & functions), "")
        error = OutOfMemory(rank, int(match["gpu"]), **sizes, allowed=allowed, phase=phase)
        found.setdefault((rank, error.gpu), error)
    yield from sorted(found.values(), key=lambda error: -error.needed)


def _bytes(size: str) -> int:
    number, unit = size.split()
    return int(float(number) * UNITS[unit])


def _newest_config(folder: Path) -> Path | None:
    found = [path for pattern in ("run_config.yaml", "*/run_config.yaml") for path in folder.glob(pattern)]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _config_named(text: str, beside: Path) -> str | None:
    """Return the run config that a log names, or that is in the folder of its checkpoints, where it is there."""
    for match in RUN_CONFIG.finditer(text):
        for path in (Path(match[1] or match[2]).expanduser(), beside / (match[1] or match[2])):
            if path.is_file() and is_saved_config(str(path)):
                return str(path)
    folders = (folder / match[1] for match in CHECKPOINTS.finditer(text) for folder in (Path(), beside))
    return next((str(path) for folder in folders if (path := _newest_config(folder))), None)


def _system(error: OutOfMemory, given: str | None) -> str:
    """Return the system of the GPU, by its memory, or the given one."""
    near = {
        name: system.gpu_bytes - error.capacity
        for name, system in SYSTEMS.items()
        if 0 <= system.gpu_bytes - error.capacity <= LIKE * system.gpu_bytes
    }
    if given is not None:
        if near and given not in near:
            raise ValueError(
                f"--system {given}: the log's GPU has {readable(error.capacity)}, that of {' or '.join(near)}: leave "
                "--system out here, and change it in the command that is printed"
            )
        return given
    if not near:
        raise ValueError(
            f"{error.told}. No known system has {readable(error.capacity)}: add --system, for its speed and its host, "
            f"one of {', '.join(SYSTEMS)}"
        )
    return min(near, key=lambda name: near[name])


def _gpus(text: str, rank: int) -> int | None:
    """Return how many GPUs the job had, where the log says it; there was a GPU of that rank."""
    sizes = [int(next(filter(None, match.groups()))) for match in WORLD.finditer(text)]
    if launched := LAUNCHED.search(text):
        sizes.append(int(launched[1]) * int(nodes[1] if (nodes := NODES.search(text)) else 1))
    most = max(sizes, default=0)  # a process group of NCCL's may have fewer ranks
    return most if most > rank else None


def _printed(text: str) -> dict[str, dict[str, Any]]:
    """Return the settings of the model and of training that Bridge has printed; {} for none."""
    found: dict[str, dict[str, Any]] = {}
    section = ""
    summary = text.partition("Configuration Summary (Non-Default")[2]
    for line in summary.splitlines():
        if head := SECTION.search(line):
            section = head[1]
        elif (field := FIELD.search(line)) and section in ("model", "train"):
            try:
                found.setdefault(section, {})[field[1]] = ast.literal_eval(field[2])
            except (ValueError, SyntaxError):  # an enum, a dtype or a function, none of which is asked for
                continue
    return found


def _different(printed: dict[str, dict[str, Any]], target: str, given: set[str]) -> list[str]:
    """Return as overrides what was printed of the settings that decide memory, but for what the target says alike.

    Raises:
        ValueError: the target's model has another shape; `given` names the settings that the user gave.
    """
    if not printed:
        return []
    model = MODEL | {name: value for name, value in printed.get("model", {}).items() if name in MODEL}
    train = {name: value for name, value in printed.get("train", {}).items() if name in TRAIN}
    there = config_at_once(target)
    known = {section: settings_in(there.get(section, {})) for section in ("model", "train")}
    for name in SHAPE:
        ran, of_target = printed.get("model", {}).get(name), known["model"].get(name)
        if ran is not None and of_target is not None and ran != of_target and f"model.{name}" not in given:
            raise ValueError(
                f"the log's job has {name}={ran}, and {target} has {of_target}: give its own recipe or "
                f"run_config.yaml with --job, or model.{name}={ran} too"
            )
    return [
        as_named_in(SimpleNamespace(**known["model"]), f"{section}.{name}={'null' if value is None else value}")
        for section, settings in (("model", model), ("train", train))
        for name, value in settings.items()
        if name not in known[section] or known[section][name] != value
    ]
