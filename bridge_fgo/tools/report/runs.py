"""Reads runs that are over: TensorBoard and W&B logs of Bridge, and what `bridge-fgo bench` or `demo --keep` left."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bridge_fgo.tools.arms.runner import ArmRun, EventTail, exact_number
from bridge_fgo.tools.iteration_picture import State, states_of_run
from bridge_fgo.tools.report.wandb_log import read_history

LOSS = "lm loss"
GRAD_NORM = "grad-norm"
SECONDS = "iteration-time"
REWARD = "reward"
OURS = "bridge_fgo/"
"""Names of scalars are Bridge's TensorBoard tags, and this package's begin with this; see `Stats.scalars`."""

EVENTS = ".events.jsonl"
TFEVENTS = "events.out.tfevents*"
WANDB = ".wandb"

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
}
"""Figures of a whole run in bytes: what they are called, and tags, whose largest value a figure is. The first tag that
was logged counts."""

NO_PACKAGE = "needs the package {0}, which is not here: pip install 'bridge-fgo[bench]'"


@dataclass(kw_only=True)
class Run:
    """One training run.

    scalars: by name and step (counted from 1). Seconds; numbers of TensorBoard are as exact as fp32.
    totals: see `TOTALS`; what a run did not log is not in it.
    digests: sha256 of the final parameters, masters and moments, where an arm left them.
    where: device and versions, where known.
    trace: of one step, for the pictures of it.
    note: what of the log does not belong to the run; "" for nothing.
    row: of the bench's table, where there is one; see `bridge_fgo.tools.bench.figures.Row`.
    is_beside: shown for its memory and speed, and not asked to be bitwise equal.
    iteration: of `demo --rl`, the phases of an iteration; see `State`.
    """

    name: str
    is_fp32: bool
    scalars: dict[str, dict[int, float]] = field(default_factory=dict)
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


def load(path: Path) -> list[Run]:
    """Return the runs that `path` holds, a resident one first.

    Args:
        path: a folder or file of TensorBoard events; a folder of W&B's (`wandb/run-...`) or the file in it; a folder
            of `bridge-fgo bench` or `demo --keep`, or its `bench.json`, which without the events beside it has the
            table's figures and no steps; or one arm's `NAME.events.jsonl`.

    Raises:
        ValueError: it holds none, or more than one where one is meant.
    """
    if path.name == "bench.json" and path.is_file():
        path = path.parent
    if path.suffix == WANDB and path.is_file():
        return [_wandb(path, path.parent.name)]
    if path.is_file():
        return [_arm(path)] if path.name.endswith(EVENTS) else [_tensorboard(path, path.parent.name)]
    if not path.is_dir():
        raise ValueError(f"{path}: there is no such file or folder")
    arms = _bench(path)
    folders = sorted({file.parent for file in path.rglob(TFEVENTS)})
    if arms:
        return arms
    of_wandb = sorted(path.rglob(f"*{WANDB}"))
    if not folders and len(of_wandb) == 1:
        return [_wandb(of_wandb[0], path.name)]
    if not folders and of_wandb:
        names = ", ".join(str(file.parent) for file in of_wandb)
        raise ValueError(f"{path} holds {len(of_wandb)} runs of W&B: name one of {names}")
    if len(folders) > 1:
        names = ", ".join(str(folder) for folder in folders)
        raise ValueError(f"{path} holds {len(folders)} TensorBoard logs: name one of {names}")
    if not folders:
        raise ValueError(
            f"{path}: neither TensorBoard events ({TFEVENTS}, from logger.tensorboard_dir), nor a run of W&B "
            f"(*{WANDB}), nor arms of `bridge-fgo bench` (*{EVENTS})"
        )
    return [_tensorboard(folders[0], path.name)]


def _bench(folder: Path) -> list[Run]:
    """Return the arms in the order of the bench's table; with no table the resident one first."""
    file = folder / "bench.json"
    table: dict[str, Any] = {"arms": []}
    if file.exists():
        table = json.loads(file.read_text())
        if not isinstance(table, dict) or not {"arms", "state_bytes", "where"} <= table.keys():
            raise ValueError(f"{file}: not what `bridge-fgo bench` writes")
    rows = {row["arm"]: row for row in table["arms"]}
    names = list(rows) or ["resident"]
    runs = [_arm(events) for events in sorted(folder.glob(f"*{EVENTS}"))]
    if not runs:
        runs = [_row(row, table["state_bytes"], _where(table["where"])) for row in rows.values()]
    for run in runs:
        arm = run.name.rpartition(".")[0]  # the bench adds the number of its round, but to the first
        run.row = rows.get(run.name) or rows.get(arm) or {}

    def place(run: Run) -> int:
        name = run.row.get("arm", run.name)
        return names.index(name) if name in names else len(names)

    return sorted(runs, key=place)


def _row(row: dict[str, Any], state_bytes: int, where: str) -> Run:
    totals = {name: row[name] for name in TOTALS if row.get(name) is not None}
    return Run(name=row["arm"], is_fp32=False, totals={"state_bytes": state_bytes, **totals}, where=where)


def _where(start: dict[str, str]) -> str:
    versions = [f"{name} {start[name]}" for name in ("bridge", "mcore", "torch") if name in start]
    return ", ".join([start.get("device", "?"), *versions])


def _arm(path: Path) -> Run:
    arm = ArmRun(path.name.removesuffix(EVENTS))
    for event in EventTail(path).new_events():
        arm.add(event)
    if not arm.steps:
        raise ValueError(f"{path} holds no training step")
    trace = path.with_name(f"{arm.name}.trace.gz")
    return Run(
        name=arm.name.removesuffix(".0"),  # the bench's first round, and mostly the only one
        is_fp32=False,
        scalars={
            tag: {event["step"]: value for event in arm.steps if (value := exact_number(event, name)) is not None}
            for tag, name in ((LOSS, "loss"), (GRAD_NORM, "grad_norm"), (SECONDS, "seconds"), (REWARD, "reward"))
            if tag != REWARD or REWARD in arm.steps[-1]
        },
        totals={name: arm.result[name] for name in TOTALS if arm.result.get(name) is not None},
        digests=arm.result.get("digests", {}),
        where=_where(arm.start),
        trace=trace if trace.exists() else None,
        iteration=states_of_run(arm) if "phases" in arm.steps[-1] else [],
    )


def _begun(file: Path) -> tuple[str, int]:
    """Return when a file of TensorBoard's was begun: the seconds in its name, then the time on disk."""
    parts = file.name.split(".")
    return parts[3] if len(parts) > 3 else "", file.stat().st_mtime_ns


def _tensorboard(path: Path, name: str) -> Run:
    """Return the run of a TensorBoard log. A step that was run again after a resume has its last values."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        raise ValueError(f"{path} {NO_PACKAGE.format('tensorboard')}") from None
    scalars: dict[str, dict[int, float]] = {}
    end = None  # of the newest file with losses
    for file in sorted(path.glob(TFEVENTS), key=_begun) if path.is_dir() else [path]:
        log = EventAccumulator(str(file), size_guidance={"scalars": 0})  # 0: all of them
        log.Reload()
        for tag in log.Tags()["scalars"]:
            if not tag.endswith(" vs samples"):
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
        scalars = {tag: {step: v for step, v in values.items() if step <= end} for tag, values in scalars.items()}
        scalars = {tag: values for tag, values in scalars.items() if values}
    run = Run(name=name, is_fp32=True, scalars=scalars, note=note)
    _add_totals(run)
    return run


def _wandb(file: Path, name: str) -> Run:
    """Return the run of a W&B log, which has numbers as exactly as they were logged."""
    history = read_history(file)
    scalars = {tag: values for tag, values in history.items() if not tag.endswith(" vs samples")}
    run = Run(name=name, is_fp32=False, scalars=scalars)
    _add_totals(run)
    return run


def _add_totals(run: Run) -> None:
    """Work out the figures of a whole run from those of its steps."""
    scalars = run.scalars
    for total, (_, tags) in TOTALS.items():
        for tag in [tag for tag in tags if tag in scalars][:1]:
            unit = 1e9 if tag.endswith("gigabytes") else 1.0
            run.totals[total] = max(scalars[tag].values()) * unit
