"""`bridge-fgo report`: compares runs that are over, by their logs in TensorBoard or W&B. Nothing here imports torch.

TensorBoard and W&B show the figures of each run. This says what one run saves against another, and at what price.
"""

import ctypes
import os
import statistics
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from bridge_fgo.tools.settings import option
from bridge_fgo.tools.show import readable_bytes, readable_number

NOT_EQUAL = 1
LOSS = "lm loss"
GRAD_NORM = "grad-norm"
SECONDS = "iteration-time"
OURS = "bridge_fgo/"  # of scalars, which have Bridge's TensorBoard tags, this package's begin with this
TFEVENTS = "events.out.tfevents*"
WANDB = "wandb:"

PEAKS = {
    "GPU memory": ("memory/mem-max-allocated-gigabytes",),
    "reserved GPU memory": (f"{OURS}peak_reserved_bytes", "memory/mem-max-reserved-gigabytes"),
    "GPU memory in forward and backward": (f"{OURS}peak_forward_backward_bytes",),
}
"""Peaks that tell what was saved, of which the first that both runs logged is taken. By what to call each, its tags, of
which the first that a run logged counts."""

FUSED_LOSS = (
    " Two runs alike may differ, too: the fused cross-entropy, compiled by torch, ends in one of two results. To "
    "compare bits set model.cross_entropy_loss_fusion=False in both, or TORCH_COMPILE_DISABLE=1 in their environment."
)
"""A line for two jobs that differ. Measured on H200: without these settings two runs of one job differed from the
gradients of step 1 on, with either of the two none did."""

Scalars = dict[str, dict[int, float]]


@dataclass(frozen=True)
class Settings:
    """Which runs to compare."""

    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN [RUN]...", help="TensorBoard log, or wandb:ENTITY/PROJECT/RUN.", show_default=False
        ),
    ]
    beside: Annotated[
        list[str] | None,
        option("A run that need not be equal, as with another optimizer; may be repeated.", metavar="RUN"),
    ] = None


@dataclass(kw_only=True)
class Run:
    """One training run."""

    name: str
    is_fp32: bool  # whether the log keeps 32 bits of each number, as TensorBoard does
    scalars: Scalars = field(default_factory=dict)  # by name and step (counted from 1), in seconds where they are times
    note: str = ""  # what of the log does not belong to the run
    is_beside: bool = False  # compared by its memory and speed, and not asked to be bitwise equal

    @property
    def on_cpu(self) -> bool:
        """Whether the run was on a CPU: it has figures of this package, and of these no GPU's peak."""
        logged = {tag.removeprefix(OURS) for tag in self.scalars if tag.startswith(OURS)}
        return bool(logged) and not any(tag.startswith("peak") for tag in logged)

    def peak(self, tags: tuple[str, ...]) -> float | None:
        """Return the highest value in bytes of the first tag that was logged; None without one."""
        tag = next((tag for tag in tags if tag in self.scalars), None)
        return None if tag is None else max(self.scalars[tag].values()) * (1e9 if tag.endswith("gigabytes") else 1.0)


def run(settings: Settings) -> int:
    """Compare runs: GPU memory saved, step time, and whether losses and gradient norms are equal to the last bit.

    The first run is the one that the others are compared with. TensorBoard and W&B show the figures of each. Exit
    status: 0, 1 if another run's losses are not bitwise equal to its, 2 if a RUN cannot be read.
    """
    found = [(path, load(path)) for path in settings.runs]
    found += [(path, replace(load(path), is_beside=True)) for path in settings.beside or ()]
    first, *others = _named_apart(found)
    if not others:
        raise ValueError(f"{found[0][0]}: a run is compared with another; name that too")
    parities = [compare_runs(first, each) for each in others]
    for each, parity in zip(others, parities, strict=True):
        typer.echo(verdict(first, each, parity))
    for each in (first, *others):
        if each.note:
            typer.echo(each.note)
    pairs = zip(others, parities, strict=True)
    return 0 if all(each.is_beside or is_bitwise_equal(parity) for each, parity in pairs) else NOT_EQUAL


def load(given: str) -> Run:
    """Return the run of TensorBoard events, in a folder or a file, or of `wandb:ENTITY/PROJECT/RUN`.

    Raises:
        ValueError: there is none, or more than one.
    """
    if str(given).startswith(WANDB):
        return _wandb(str(given).removeprefix(WANDB))
    path = Path(given)
    if path.suffix == ".wandb":
        path = path.parent
    if path.is_file():
        return _tensorboard(path, path.parent.name)
    if not path.is_dir():
        raise ValueError(f"{path}: there is no such file or folder")
    folders = sorted({file.parent for file in path.rglob(TFEVENTS)})
    if len(folders) > 1:
        names = ", ".join(str(folder) for folder in folders)
        raise ValueError(f"{path} holds {len(folders)} TensorBoard logs: name one of {names}")
    if folders:
        return _tensorboard(folders[0], path.name)
    if any(path.rglob("*.wandb")):
        raise ValueError(f"{path}: only W&B reads its files: `wandb sync` them, then name {WANDB}ENTITY/PROJECT/RUN")
    raise ValueError(
        f"{path}: no TensorBoard events ({TFEVENTS}, from logger.tensorboard_dir); a run of W&B is named "
        f"{WANDB}ENTITY/PROJECT/RUN"
    )


def _named_apart(found: list[tuple[str, Run]]) -> list[Run]:
    """Return the runs; those of one name are called by their paths from the folder that these have in common."""
    names = [run.name for _, run in found]
    alike = [(os.path.abspath(path), run) for path, run in found if names.count(run.name) > 1]
    common = os.path.commonpath([os.path.dirname(path) for path, _ in alike]) if alike else ""
    for path, run in alike:
        run.name = os.path.relpath(path, common)
    if len({run.name for _, run in found}) < len(found):
        raise ValueError(f"the same run was given twice: {', '.join(path for path, _ in found)}")
    return [run for _, run in found]


@dataclass(frozen=True)
class Parity:
    """A scalar of two runs, over the steps that both logged: the first that differs, and both values there."""

    part: str
    steps: int
    first_different: int | None
    values: tuple[float, float] | None


def bits(value: float | None, as_fp32: bool = False) -> bytes:
    """Return the bits of a number, none for None: by `==` 0.0 would equal -0.0, and a NaN would differ from itself."""
    if value is None:
        return b""
    return struct.pack("<d", ctypes.c_float(value).value if as_fp32 else value)


def compare_runs(first: Run, second: Run) -> list[Parity]:
    """Compare every loss and the gradient norm of two runs."""
    losses = {name for name in first.scalars if name.endswith("loss") and "validation" not in name} | {LOSS, GRAD_NORM}
    # TensorBoard keeps 32 bits of a number, so that is what can be compared. Bridge's losses have no more.
    as_fp32 = first.is_fp32 or second.is_fp32
    found = []
    for name in (name for name in first.scalars if name in second.scalars and name in losses):
        ours, theirs = first.scalars[name], second.scalars[name]
        steps = sorted(ours.keys() & theirs.keys())
        step = next((step for step in steps if bits(ours[step], as_fp32) != bits(theirs[step], as_fp32)), None)
        found.append(Parity(name, len(steps), step, None if step is None else (ours[step], theirs[step])))
    return found


def is_bitwise_equal(parts: list[Parity]) -> bool:
    """Return whether equality was shown: nothing differs, and a loss of at least one step is among what is compared."""
    return any(part.part == LOSS and part.steps for part in parts) and not any(part.values for part in parts)


def step_seconds(run: Run) -> float | None:
    """Return the median seconds of the steps from the fourth on; None if they tell nothing."""
    logged = run.scalars.get(SECONDS, {})
    seconds = [value for step, value in logged.items() if step >= min(logged) + 3]
    return statistics.median(seconds) if seconds else None


def verdict(first: Run, second: Run, parity: list[Parity]) -> str:
    """Say in a sentence what `second` saves, how much slower its steps are, and whether it is bitwise equal."""
    told = (_memory(first, second), _speed(first, second), _equality(first, second, parity))
    return f"{second.name} against {first.name}: {'; '.join(told)}"


def _memory(first: Run, second: Run) -> str:
    peaks = {what: (first.peak(tags), second.peak(tags)) for what, tags in PEAKS.items()}
    for what, (before, after) in peaks.items():
        if before is not None and after is not None:
            share = f"{abs(before - after) / before:.0%}, " if before else ""
            more = "more" if after > before else "less"
            told = f"({share}{readable_bytes(before)} to {readable_bytes(after)})"
            return f"{readable_bytes(abs(before - after))} {more} {what} {told}"
    return "no peak of memory that both logged"


def _speed(first: Run, second: Run) -> str:
    if first.on_cpu or second.on_cpu:
        return "CPU: no speed"  # copies are stand-ins there
    before, after = step_seconds(first), step_seconds(second)
    if before is None or after is None:
        return "no step time that both logged"
    share = after / before - 1
    return f"steps {abs(share):.1%} {'faster' if share < 0 else 'slower'} ({before:.3f} to {after:.3f} s)"


def _equality(first: Run, second: Run, parity: list[Parity]) -> str:
    if second.is_beside:
        return "not meant to be bitwise equal."
    if is_bitwise_equal(parity):
        logged = [len(run.scalars.get(LOSS, ())) for run in (first, second)]
        over = f" over {min(part.steps for part in parity)} steps"
        if len(set(logged)) > 1:
            over += f" (they logged {logged[0]} and {logged[1]})"
        return f"bitwise equal{over}: {', '.join(part.part for part in parity)}."
    different = [(part.first_different, part.part, part.values) for part in parity if part.values is not None]
    if not different:
        return "not shown to be equal, as there is no step of which both logged a loss."
    step, part, values = min(different)
    told = " and ".join(map(readable_number, values))
    return f"NOT bitwise equal, first at step {step} in {part}: {told}.{FUSED_LOSS}"


def _of_log(name: str, scalars: Scalars, **others: Any) -> Run:
    """Return the run of a log."""
    scalars = {tag: values for tag, values in scalars.items() if not tag.endswith(" vs samples") and values}
    return Run(name=name, scalars=scalars, **others)


def _tensorboard(path: Path, name: str) -> Run:
    """Return the run of a TensorBoard log. A step that was run again after a resume has its last values."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        raise ValueError(f"{path} needs the package tensorboard: pip install tensorboard") from None

    def begun(file: Path) -> tuple[str, int]:
        """Return when a file was begun: the seconds in its name, then the time on disk."""
        parts = file.name.split(".")
        return parts[3] if len(parts) > 3 else "", file.stat().st_mtime_ns

    scalars: Scalars = {}
    end = None  # of the newest file with losses
    for file in sorted(path.glob(TFEVENTS), key=begun) if path.is_dir() else [path]:
        log = EventAccumulator(str(file), size_guidance={"scalars": 0})  # 0: all of them
        log.Reload()
        if log.file_version is None and file.stat().st_size:  # which tensorboard does not tell
            raise ValueError(f"{file}: broken, or no TensorBoard log")
        for tag in log.Tags()["scalars"]:
            scalars.setdefault(tag, {}).update({event.step: event.value for event in log.Scalars(tag)})
        if LOSS in log.Tags()["scalars"]:
            end = max(event.step for event in log.Scalars(LOSS))
    if not scalars:
        raise ValueError(f"{path}: no scalar in it; is it a TensorBoard log of Megatron-Bridge?")
    note = ""
    stale = [step for step in scalars.get(LOSS, ()) if end is not None and step > end]
    if end is not None and stale:
        note = (
            f"{name}: steps {min(stale)} to {max(stale)} are of an earlier file of this folder and left out; the "
            f"newest ends at step {end}"
        )
        for tag, values in scalars.items():
            scalars[tag] = {step: value for step, value in values.items() if step <= end}
    return _of_log(name, scalars, is_fp32=True, note=note)


def _wandb(address: str) -> Run:
    """Return the run ENTITY/PROJECT/RUN of W&B's server, whose numbers are as exact as they were logged."""
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError(f"{WANDB}{address} needs the package wandb: pip install wandb") from None
    scalars: Scalars = {}
    try:
        for row in wandb.Api().run(address).scan_history():
            for tag, value in row.items():
                # JSON has no NaN and no infinity: W&B writes them as words.
                value = float(value) if value in ("NaN", "Infinity", "-Infinity") else value
                if isinstance(value, int | float) and not isinstance(value, bool) and not tag.startswith("_"):
                    scalars.setdefault(tag, {})[row["_step"]] = float(value)
    except wandb.errors.Error as error:
        raise ValueError(f"{WANDB}{address}: {error}") from None
    if not scalars:
        raise ValueError(f"{WANDB}{address}: has no number in its history")
    return _of_log(address.rpartition("/")[2], scalars, is_fp32=False)
