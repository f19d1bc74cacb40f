"""`bridge-fgo report`: compares runs that are over, by their logs in TensorBoard or W&B. Nothing here imports torch."""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from bridge_fgo.tools.arms.comparator import Parity, compare_scalar
from bridge_fgo.tools.settings import option
from bridge_fgo.tools.show import print_table, readable_bytes, readable_number

NOT_EQUAL = 1
LOSS = "lm loss"
GRAD_NORM = "grad-norm"
SECONDS = "iteration-time"
OURS = "bridge_fgo/"  # of scalars, which have Bridge's TensorBoard tags, this package's begin with this
TFEVENTS = "events.out.tfevents*"
WANDB = "wandb:"

NO_SPEED = "CPU: no speed"  # in place of step times of a run on a CPU, whose copies are stand-ins

TOTALS: dict[str, tuple[str, tuple[str, ...]]] = {
    "peak_forward_backward_bytes": ("peak in forward and backward", (f"{OURS}peak_forward_backward_bytes",)),
    "peak_step_bytes": ("peak in the rest of the step", (f"{OURS}peak_step_bytes",)),
    "peak_allocated_bytes": ("peak allocated", ("memory/mem-max-allocated-gigabytes",)),
    "peak_reserved_bytes": ("peak reserved", (f"{OURS}peak_reserved_bytes", "memory/mem-max-reserved-gigabytes")),
    "released_bytes": ("released", (f"{OURS}released_bytes",)),
    "pinned_bytes": ("pinned host memory", (f"{OURS}pinned_bytes",)),
    "bytes_offloaded": ("copied to the host in a step", (f"{OURS}bytes_offloaded",)),
    "bytes_reloaded": ("copied to the GPU in a step", (f"{OURS}bytes_reloaded",)),
    "gradient_bytes": ("gradients allocated in backward", (f"{OURS}gradient_bytes",)),
    "gradient_bytes_offloaded": ("gradients copied to the host in a step", (f"{OURS}gradient_bytes_offloaded",)),
    "gradient_bytes_reloaded": ("gradients copied to the GPU in a step", (f"{OURS}gradient_bytes_reloaded",)),
}
"""Figures of a whole run in bytes: their headings, and tags, of which the first that was logged counts. Its largest
value is the figure."""

COMPARED_PEAKS = {
    "peak_allocated_bytes": "GPU memory",
    "peak_reserved_bytes": "reserved GPU memory",
    "peak_forward_backward_bytes": "GPU memory in forward and backward",
}
"""Peaks that tell what was saved, and of what; the first that both runs have is taken."""

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
    totals: dict[str, float] = field(default_factory=dict)  # see `TOTALS`; what a run did not log is not in it
    note: str = ""  # what of the log does not belong to the run
    is_beside: bool = False  # shown for its memory and speed, and not asked to be bitwise equal

    @property
    def on_cpu(self) -> bool:
        """Whether the run was on a CPU: it has figures of this package, and of these no GPU's peak."""
        logged = {tag.removeprefix(OURS) for tag in self.scalars if tag.startswith(OURS)}
        return bool(logged) and not any(tag.startswith("peak") for tag in logged)


def run(settings: Settings) -> int:
    """Compare runs: GPU memory saved, step time, and whether losses and gradient norms are equal to the last bit.

    The first run is the one that the others are compared with. TensorBoard and W&B draw the curves. Exit status: 0, 1
    where another run's losses are not bitwise equal to its, 2 where a RUN cannot be read.
    """
    found = [(path, load(path)) for path in settings.runs]
    found += [(path, replace(load(path), is_beside=True)) for path in settings.beside or ()]
    runs = _named_apart(found)
    others = [(run, compare_runs(runs[0], run)) for run in runs[1:]]
    for each, parity in others:
        typer.echo(verdict(runs[0], each, parity))
    for each in runs:
        if each.note:
            typer.echo(each.note)
    console = Console(markup=False)
    print_table(console, _overview(runs, others))
    if any(parity for _, parity in others):
        print_table(console, _parity_table(others))
    return 0 if all(run.is_beside or is_bitwise_equal(parity) for run, parity in others) else NOT_EQUAL


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


def compare_runs(first: Run, second: Run) -> list[Parity]:
    """Compare every loss and the gradient norm of two runs."""
    losses = {name for name in first.scalars if name.endswith("loss") and "validation" not in name} | {LOSS, GRAD_NORM}
    names = [name for name in first.scalars if name in second.scalars and name in losses]
    # TensorBoard keeps 32 bits of a number, so that is what can be compared. Bridge's losses have no more.
    as_fp32 = first.is_fp32 or second.is_fp32
    return [compare_scalar(name, first.scalars[name], second.scalars[name], as_fp32) for name in names]


def is_bitwise_equal(parts: list[Parity]) -> bool:
    """Return whether equality was shown: all parts are equal, and a loss of at least one step is among them."""
    return any(part.part == LOSS and part.steps for part in parts) and all(part.equal for part in parts)


def step_seconds(run: Run) -> tuple[float, float, float] | None:
    """Return median, least and most seconds of the steps from the fourth on; None where they tell nothing."""
    logged = {} if run.on_cpu else run.scalars.get(SECONDS, {})
    seconds = [value for step, value in logged.items() if step >= min(logged) + 3]
    return (statistics.median(seconds), min(seconds), max(seconds)) if seconds else None


def verdict(first: Run, second: Run, parity: list[Parity]) -> str:
    """Say in a sentence what `second` saves, how much slower its steps are, and whether it is bitwise equal."""
    told = (_memory(first, second), _speed(first, second), _equality(first, second, parity))
    return f"{second.name} against {first.name}: {'; '.join(told)}"


def _saved(first: Run, second: Run) -> tuple[str, float, float] | None:
    """Return which memory two runs have a peak of in common, and both peaks in bytes; None where they have none."""
    common = next((name for name in COMPARED_PEAKS if name in first.totals and name in second.totals), None)
    return None if common is None else (COMPARED_PEAKS[common], first.totals[common], second.totals[common])


def _slower(first: Run, second: Run) -> float | None:
    """Return by which share the median step of `second` is longer; None where that is not known of both."""
    before, after = step_seconds(first), step_seconds(second)
    return None if before is None or after is None else after[0] / before[0] - 1


def _memory(first: Run, second: Run) -> str:
    saved = _saved(first, second)
    if saved is None:
        return "no peak of memory that both logged"
    what, before, after = saved
    share = f"{abs(before - after) / before:.0%}, " if before else ""
    more = "more" if after > before else "less"
    peaks = f"({share}{readable_bytes(before)} to {readable_bytes(after)})"
    return f"{readable_bytes(abs(before - after))} {more} {what} {peaks}"


def _speed(first: Run, second: Run) -> str:
    if first.on_cpu or second.on_cpu:
        return NO_SPEED
    before, after = step_seconds(first), step_seconds(second)
    share = _slower(first, second)
    if before is None or after is None or share is None:
        return "no step time that both logged"
    return f"steps {abs(share):.1%} {'faster' if share < 0 else 'slower'} ({before[0]:.3f} to {after[0]:.3f} s)"


def _equality(first: Run, second: Run, parity: list[Parity]) -> str:
    different = [(part.first_different, part.part) for part in parity if part.first_different is not None]
    if second.is_beside:
        return "not meant to be bitwise equal."
    if is_bitwise_equal(parity):
        logged = [len(run.scalars.get(LOSS, ())) for run in (first, second)]
        over = f" over {min(part.steps or 0 for part in parity)} steps"
        if len(set(logged)) > 1:
            over += f" (they logged {logged[0]} and {logged[1]})"
        return f"bitwise equal{over}: {', '.join(part.part for part in parity)}."
    if not different:
        return "not shown to be equal, as there is no step of which both logged a loss."
    step, part = min(different)
    return f"NOT bitwise equal, first at step {step} in {part}.{FUSED_LOSS}"


def _overview(runs: list[Run], others: list[tuple[Run, list[Parity]]]) -> list[list[str]]:
    """Return the cells of the table of figures, a run a column: its head first, then what differs from the first."""
    rows = [["", *(run.name for run in runs)]]
    if others:
        first = runs[0]
        saved, slower, equal = [f"saved against {first.name}", "-"], ["steps slower", "-"], ["bitwise equal", "-"]
        for run, parity in others:
            peaks, share = _saved(first, run), _slower(first, run)
            saved.append("-" if peaks is None else readable_bytes(peaks[1] - peaks[2]))
            unknown = NO_SPEED if first.on_cpu or run.on_cpu else "-"
            slower.append(unknown if share is None else f"{share:+.1%}")
            different = any(not part.equal for part in parity)
            equal.append("yes" if is_bitwise_equal(parity) else "NO" if different else "-")
        rows += [saved, slower, equal]
    rows.append(["steps logged", *(str(max(map(len, run.scalars.values()), default=0)) for run in runs)])
    seconds = ["step, median (min-max), from the fourth on"]
    for run in runs:
        figures = step_seconds(run)
        unknown = NO_SPEED if run.on_cpu else "-"
        seconds.append(unknown if figures is None else "{:.3f} s ({:.3f}-{:.3f})".format(*figures))
    rows.append(seconds)
    rows.append(["peak after the first steps, planned / measured", *map(_planned_and_measured, runs)])
    for name, (label, _) in TOTALS.items():
        if any(run.totals.get(name) for run in runs):
            rows.append([label, *(readable_bytes(run.totals.get(name)) for run in runs)])
    return [rows[0], *(row for row in rows[1:] if set(row[1:]) - {"-", NO_SPEED})]


def _planned_and_measured(run: Run) -> str:
    """Return the highest peak that the engine planned, and the highest of the steps that had a plan."""
    planned = run.scalars.get(f"{OURS}planned_peak_bytes", {})
    measured = [
        value
        for tag in ("peak_forward_backward_bytes", "peak_step_bytes")
        for step, value in run.scalars.get(f"{OURS}{tag}", {}).items()
        if step in planned
    ]
    return f"{readable_bytes(max(planned.values()))} / {readable_bytes(max(measured))}" if measured else "-"


def _parity_table(others: list[tuple[Run, list[Parity]]]) -> list[list[str]]:
    rows = [["run", "part", "steps of both", "bitwise equal", "first different", "largest difference"]]
    for run, parity in others:
        for part in parity:
            at = "-"
            if part.first_different is not None and part.values is not None:
                at = f"step {part.first_different}: {' / '.join(map(readable_number, part.values))}"
            equal = "yes" if part.equal and part.steps != 0 else "NO" if not part.equal else "-"
            rows.append([run.name, part.part, str(part.steps), equal, at, readable_number(part.largest)])
    return rows


def _of_log(name: str, scalars: Scalars, **others: Any) -> Run:
    """Return the run of a log, and work out the figures of the whole run from those of its steps."""
    scalars = {tag: values for tag, values in scalars.items() if not tag.endswith(" vs samples") and values}
    run = Run(name=name, scalars=scalars, **others)
    for total, (_, tags) in TOTALS.items():
        for tag in [tag for tag in tags if tag in scalars][:1]:
            unit = 1e9 if tag.endswith("gigabytes") else 1.0
            run.totals[total] = max(scalars[tag].values()) * unit
    return run


def _tensorboard(path: Path, name: str) -> Run:
    """Return the run of a TensorBoard log. A step that was run again after a resume has its last values."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        raise ValueError(f"{path} needs the package tensorboard: pip install 'bridge-fgo[bench]'") from None

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
