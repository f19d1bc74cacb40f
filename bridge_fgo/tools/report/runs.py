"""Reads runs that are over: logs in TensorBoard or W&B, and what `bridge-fgo bench` or `demo --keep` left."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from bridge_fgo.tools.arms.runner import read_arm
from bridge_fgo.tools.iteration_picture import State, states_of_run
from bridge_fgo.tools.show import reading

LOSS = "lm loss"
GRAD_NORM = "grad-norm"
SECONDS = "iteration-time"
OURS = "bridge_fgo/"
"""Names of scalars are Bridge's TensorBoard tags, and this package's begin with this; see `Stats.scalars`."""

EVENTS = ".events.jsonl"
TFEVENTS = "events.out.tfevents*"
WANDB = "wandb:"
OF_ARMS = {LOSS: "loss", GRAD_NORM: "grad_norm", SECONDS: "seconds"}
"""What the events of an arm call these scalars."""

TOTALS: dict[str, tuple[str, tuple[str, ...]]] = {
    "state_bytes": ("optimizer state", ()),
    "peak_forward_backward_bytes": ("peak in forward and backward", (f"{OURS}peak_forward_backward_bytes",)),
    "peak_step_bytes": ("peak in the rest of the step", (f"{OURS}peak_step_bytes",)),
    "peak_allocated_bytes": ("peak allocated", ("memory/mem-max-allocated-gigabytes",)),
    "peak_reserved_bytes": (
        "peak reserved",
        (f"{OURS}peak_reserved_bytes", "memory/mem-max-reserved-gigabytes"),
    ),
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

Scalars = dict[str, dict[int, float]]


@dataclass(kw_only=True)
class Run:
    """One training run.

    scalars: by name and step (counted from 1), in seconds where they are times.
    is_fp32: whether the log keeps 32 bits of each number, as TensorBoard does.
    totals: see `TOTALS`; what a run did not log is not in it.
    digests: sha256 of the final parameters, masters and moments, where an arm wrote them.
    where: device and versions, where known.
    trace: of one step, for the pictures of it.
    note: what of the log does not belong to the run; "" for nothing.
    row: of the bench's table, where there is one; see `bridge_fgo.tools.bench.figures`.
    is_beside: shown for its memory and speed, and not asked to be bitwise equal.
    iteration: of `demo --rl`, the phases of an iteration; see `State`.
    """

    name: str
    is_fp32: bool
    scalars: Scalars = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    where: str = ""
    note: str = ""
    trace: Path | None = None
    row: dict[str, Any] = field(default_factory=dict)
    is_beside: bool = False
    iteration: list[State] = field(default_factory=list)

    @property
    def on_cpu(self) -> bool:
        """Whether the run was on a CPU: by its device, or by figures of this package that have no GPU's peak."""
        logged = {tag.removeprefix(OURS) for tag in self.scalars if tag.startswith(OURS)}
        return self.where.startswith("cpu") or (bool(logged) and not any(tag.startswith("peak") for tag in logged))

    @property
    def may_differ(self) -> bool:
        """Whether nobody asks this run to be equal to the first: the user, or the bench, as its Adam is another."""
        by_the_bench = bool(self.row) and self.row["bitwise_equal"] is None and self.row["arm"] != "resident"
        return self.is_beside or by_the_bench


def load(given: str | Path) -> list[Run]:
    """Return the runs that an argument of `bridge-fgo report` names, a resident one first.

    Args:
        given: a folder or file of TensorBoard events; `wandb:ENTITY/PROJECT/RUN`; a folder of `bridge-fgo bench` or
            `demo --keep`, or its `bench.json`, which without the events beside it has the table's figures and no
            steps; or one arm's `NAME.events.jsonl`.

    Raises:
        ValueError: it names none, or more than one where one is meant.
    """
    if str(given).startswith(WANDB):
        return [_wandb(str(given).removeprefix(WANDB))]
    path = Path(given)
    if path.is_file() and (path.name == "bench.json" or path.suffix == ".wandb"):
        path = path.parent
    elif path.is_file():
        return [_arm(path) if path.name.endswith(EVENTS) else _tensorboard(path, path.parent.name)]
    if not path.is_dir():
        raise ValueError(f"{path}: there is no such file or folder")
    if arms := _bench(path):
        return arms
    folders = sorted({file.parent for file in path.rglob(TFEVENTS)})
    if len(folders) > 1:
        names = ", ".join(str(folder) for folder in folders)
        raise ValueError(f"{path} holds {len(folders)} TensorBoard logs: name one of {names}")
    if folders:
        return [_tensorboard(folders[0], path.name)]
    if any(path.rglob("*.wandb")):
        raise ValueError(f"{path}: only W&B reads its files: `wandb sync` them, then name {WANDB}ENTITY/PROJECT/RUN")
    raise ValueError(
        f"{path}: neither TensorBoard events ({TFEVENTS}, from logger.tensorboard_dir), nor arms of "
        f"`bridge-fgo bench` (*{EVENTS}); a run of W&B is named {WANDB}ENTITY/PROJECT/RUN"
    )


def _bench(folder: Path) -> list[Run]:
    """Return the arms: the resident one, the offloaded one, and others in the order of the bench's table."""
    file = folder / "bench.json"
    table: dict[str, Any] = {"arms": []}
    if file.exists():
        with reading(file, "`bridge-fgo bench`"):
            table = json.loads(file.read_text())
            for row in table["arms"]:
                itemgetter("arm", "bitwise_equal", "step_seconds", "step_seconds_min", "step_seconds_max")(row)
            itemgetter("state_bytes", "where")(table)
    rows = {row["arm"]: row for row in table["arms"]}
    names = ["resident", "native", "offloaded", *rows]
    runs = [_arm(events) for events in sorted(folder.glob(f"*{EVENTS}"))]
    for row in [] if runs else rows.values():
        totals = {name: row[name] for name in TOTALS if row.get(name) is not None}
        totals["state_bytes"] = table["state_bytes"]
        runs.append(Run(name=row["arm"], is_fp32=False, totals=totals, where=_where(table["where"])))
    for run in runs:
        arm = run.name.rpartition(".")[0]  # the bench adds the number of its round, but to the first
        run.row = rows.get(run.name) or rows.get(arm) or {}

    def place(run: Run) -> int:
        name = run.row.get("arm", run.name)
        return names.index(name) if name in names else len(names)

    return sorted(runs, key=place)


def _where(start: dict[str, str]) -> str:
    versions = [f"{name} {start[name]}" for name in ("bridge", "mcore", "torch") if name in start]
    return ", ".join([start.get("device", "?"), *versions])


def _arm(path: Path) -> Run:
    with reading(path, "an arm of `bridge-fgo bench`"):
        arm = read_arm(path)
        scalars = {tag: arm.numbers(name) for tag, name in OF_ARMS.items()}
    if not arm.steps:
        raise ValueError(f"{path} holds no training step")
    trace = path.with_name(f"{arm.name}.trace.gz")
    return Run(
        name=arm.name.removesuffix(".0"),  # the bench's first round, and mostly the only one
        is_fp32=False,
        scalars=scalars,
        totals={name: arm.result[name] for name in TOTALS if arm.result.get(name) is not None},
        digests=arm.result.get("digests", {}),
        where=_where(arm.start),
        trace=trace if trace.exists() else None,
        iteration=states_of_run(arm) if "phases" in arm.steps[-1] else [],
    )


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
