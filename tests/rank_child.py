"""One rank of a training, in a process of its own."""

import contextlib
import dataclasses
import datetime
import functools
import importlib
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import both
import children
import fused_adam
import pytest
from saving import load, save
from spies import before
from storage_meter import PART_BYTES, engine, metered, two_parts

from bridge_fgo.tools.standins.cuda import install_standins

install_standins()

import torch  # noqa: E402
from cpu_model import microbatches  # noqa: E402
from cpu_training import CpuOptions, CpuTraining  # noqa: E402

import bridge_fgo  # noqa: E402
from bridge_fgo.bridge import framework_names  # noqa: E402
from bridge_fgo.bridge.session import SESSION  # noqa: E402
from bridge_fgo.memory import layout  # noqa: E402
from bridge_fgo.memory.storage_slab import StorageSlab  # noqa: E402

CONFIG = bridge_fgo.OffloadConfig(engine="native", slab_bytes=2**20)
PACKED = dataclasses.replace(CONFIG, master_remainders=True)


@dataclasses.dataclass(frozen=True)
class Job:
    """What all ranks of a training do: load, save what was loaded, train, save again."""

    folder: Path
    ranks: int
    offload: bool
    loads: Path | None
    steps: int = 2
    changes: dict = dataclasses.field(default_factory=dict)
    """Options of the training."""
    kind: str = "fully_reshardable"
    """What checkpoints have the optimizer's states as."""
    timeout: datetime.timedelta | None = None
    """Of collectives of all ranks; torch's by default."""


def run_both(
    folder: Path, target: Callable, changes: dict | None = None, loads: Sequence = (None, None), steps=2, ranks=2, **how
) -> tuple[list[Path], list[list]]:
    """Run resident ranks and ranks that offload to their ends: each rank's numbers and bits are equal.

    loads: which checkpoint each loads; how: further fields of the jobs.

    Returns the folders of both, and what each rank has returned; of the resident ones first.
    """
    jobs = [
        Job(folder / str(offload), ranks, offload, loads[offload], steps, changes or {}, **how)
        for offload in (False, True)
    ]
    both = children.run_all(target, jobs)
    for resident, offloaded in zip(*both, strict=True):
        assert offloaded["numbers"] == resident["numbers"]
        assert offloaded["digests"] == resident["digests"]
    return [job.folder for job in jobs], both


class Rank(CpuTraining):
    """A CPU training as one of several ranks; each data-parallel one has data of its own."""

    first: list[torch.Tensor]
    """Copies of the first weights."""

    def __init__(self, options: CpuOptions, rank: int, job: Job, store: str = "store") -> None:
        self.rank, self.job, self._store = rank, job, store
        super().__init__(options)
        own = dataclasses.replace(options, seed=options.seed + self.groups.dp.rank())
        self._batches.iterable = microbatches(own)

    def _join(self) -> None:
        children.join_group(self.rank, self.job, self._store, self.job.timeout)


def keep_results_of_saves() -> None:
    """Have mcore keep them in this process: its queue is in another one, which would outlive this one."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.Queue()


@contextlib.contextmanager
def joined(rank: int, job: Job, config: bridge_fgo.OffloadConfig = CONFIG) -> Iterator[Rank]:
    """A rank of a job's training, which offloads by the flag where the job says so."""
    keep_results_of_saves()
    fused_adam.have_mcore_take_it(setattr)
    options = CpuOptions(offload=job.offload, **both.SMALL | job.changes)
    layout.LEAST_PART_BYTES = min(both.PART_BYTES, layout.LEAST_PART_BYTES)
    with bridge_fgo.install(config) if job.offload else contextlib.nullcontext(), Rank(options, rank, job) as run:
        yield run


def step(run: Rank, seen: dict[str, Any]) -> None:
    """Train a step, and note its numbers and the most bytes of state in a forward."""
    record = run.step()
    seen.setdefault("numbers", []).append((record.loss, record.grad_norm, record.skipped))
    seen.setdefault("held", []).append(max(run.live_bytes))


def ended(run: Rank, seen: dict[str, Any]) -> dict[str, Any]:
    """Return what was seen, with the digests of the end."""
    return seen | {"digests": run.digests()}


def gathered(run: Rank, seen: dict[str, Any]) -> dict[str, Any]:
    """As `ended`, with parameters as the next forward would have gathered them."""
    for ddp in run.model:
        ddp.start_param_sync(force_sync=True)
    return ended(run, seen)


def train(rank: int, job: Job) -> dict[str, Any]:
    """Run as a rank of `job`; leave checkpoints in `loaded` and `trained`."""
    seen: dict[str, Any] = {}
    with joined(rank, job, CONFIG if "fsdp" in job.changes else PACKED) as run:
        if job.loads:
            load(run, job.loads)
            save(run, job.folder / "loaded", job.kind)
        for _ in range(job.steps):
            step(run, seen)
        save(run, job.folder / "trained", job.kind)
        return ended(run, seen)


def load_with_few_parts(rank: int, job: Job) -> dict[str, Any]:
    """Load as a rank of a training and train on; return also the peak of the load, and what was allowed."""
    layout.LEAST_PART_BYTES = PART_BYTES
    with joined(rank, job, bridge_fgo.OffloadConfig(engine="native")) as run:
        with metered(run) as meter:
            load(run, job.loads)
        seen = {"peak": meter.peak, "left": run.live_state_bytes()}
        if job.offload:
            seen |= {"allowed": two_parts(), "state_bytes": engine().state_bytes}
        for _ in range(job.steps):
            step(run, seen)
        return ended(run, seen)


def train_with_gradients(rank: int, job: Job, gradients: bool | str, configured: dict) -> dict[str, Any]:
    """Run as a rank of a training whose gradients come and go, where `job.offload` says so.

    gradients: `OffloadConfig.gradients`.
    configured: what Bridge's config has otherwise, by "section.name".
    """
    both.configure_trainings(setattr, configured)
    seen: dict[str, Any] = {}
    with joined(rank, job, dataclasses.replace(PACKED, gradients=gradients)) as run:
        for _ in range(job.steps):
            step(run, seen)
        if job.offload:
            own = vars(run.optimizer)[SESSION].gradients
            seen["gradients"] = {"buckets": len(own.buckets), "moving": own.moving_bytes, "out": own.traffic.out}
        return gathered(run, seen) if job.changes.get("overlap_param_gather") else ended(run, seen)


# Ranks that sleep.


def asleep(act: Callable[[Rank, bridge_fgo.Residency, dict], None]) -> Callable[..., dict[str, Any]]:
    """Make what a rank does after each step, if `job.offload` says so, a function of `run_ranks`, which returns `seen`.

    It takes also the arguments of each rank's Residency.
    """

    @functools.wraps(act)
    def run_rank(rank: int, job: Job, own: Sequence[dict] = ()) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        with Rank(CpuOptions(**job.changes), rank, job) as run:
            how = own[rank] if own else {}
            res = bridge_fgo.Residency(run.model, run.optimizer, **how) if job.offload else None
            for _ in range(job.steps):
                step(run, seen)
                if res is not None:
                    act(run, res, seen)
            return gathered(run, seen)

    return run_rank


@asleep
def train_and_sleep(run: Rank, res: bridge_fgo.Residency, seen: dict) -> None:
    """Sleep, and reload parameters alone; note the bytes of weights that were copied."""
    for slab in () if run.options.frozen_stage is not None else res._memory.weights.slabs:
        assert slab.copied_nbytes == slab.nbytes // run.groups.dp.size()
    out = res.offload()
    alone = res.reload("params")
    whole = res._memory.weights.slabs[0]._bytes.clone()
    again = res.offload("params")
    res.reload()
    assert (res._memory.weights.slabs[0]._bytes == whole).all()
    seen.setdefault("copied", []).append([out.copied_by_kind["params"], alone.copied, again.copied])


@asleep
def wake_adapters(run: Rank, res: bridge_fgo.Residency, seen: dict) -> None:
    """Reload adapters for which rank 0 alone asks; note what came back on this rank though it had not asked."""
    (ddp,) = run.model
    ddp.start_param_sync(force_sync=True)
    before = [p.detach().clone() for p in ddp.parameters()]
    res.offload()
    woken = res.reload("params", where=lambda _, param: param.requires_grad and run.rank == 0)
    for param, was in zip(ddp.parameters(), before, strict=True):
        assert torch.equal(param.detach(), was) if param.requires_grad else not param.untyped_storage().nbytes()
    seen.setdefault("woke", []).append(woken.woke)
    with pytest.raises(ValueError, match="where= holds for no parameter on any rank"):
        res.reload(where=lambda name, _: name == "none")
    with res.only("params", where=lambda _, param: not param.requires_grad):
        here = [bool(param.untyped_storage().nbytes()) for param in ddp.parameters()]
        assert here == [not param.requires_grad for param in ddp.parameters()]
    res.reload()


@asleep
def sleep_within(run: Rank, res: bridge_fgo.Residency, seen: dict) -> None:
    """Sleep with a limit of host memory; note what stays on the GPU, and what has host memory."""
    res.offload()
    seen["stays"] = res._memory.unhosted
    memory = res._memory
    assert memory.states is not None
    seen["taken"] = memory.states.engine.host_bytes + sum(slab.host.tensor.numel() for slab in memory.weights.slabs)
    res.reload("params")
    res.reload()


@asleep
def read_asleep(run: Rank, res: bridge_fgo.Residency, seen: dict) -> None:
    """Read weights asleep; note the share of all that was read."""
    res.offload()
    read = [each._replace(values=each.values.clone()) for each in res.host_params()]
    res.reload()
    for _, param, first, values in read:
        assert torch.equal(param.detach().view(-1)[first : first + values.numel()], values)
    weights = sum(param.numel() for param in run.model[0].parameters())
    seen.setdefault("shares", []).append(sum(each.values.numel() for each in read) / weights)


@asleep
def sleep_in_parts(run: Rank, res: bridge_fgo.Residency, seen: dict) -> None:
    """Sleep weights first, and wake states first; masters that are packed, on any rank, bring weights on all."""
    res.offload("params", "grads")
    res.offload("optimizer")  # with masters packed the weights have to come and go once more
    assert res.away == {"params", "grads", "optimizer"}
    res.reload("optimizer")
    seen.setdefault("away", []).append(sorted(res.away))
    res.offload()
    res.reload()


def sleep_by_two_threads(rank: int, job: Job) -> dict[str, Any]:
    """Run as a rank two of whose models sleep by a thread each: on rank 0 the second begins amid the first's move.

    On others it begins after it. Returns the errors, and what is away.
    """
    children.join_group(rank, job, timeout=job.timeout)
    first, second = (bridge_fgo.Residency(torch.nn.Linear(2, 2)) for _ in range(2))
    is_amid, has_slept = threading.Event(), threading.Event()

    def be_amid(slab: StorageSlab) -> None:
        if rank == 0 and slab in first._memory.weights.slabs:
            is_amid.set()
            has_slept.wait(0.5)

    errors = []

    def sleep_second() -> None:
        is_amid.wait(60)
        errors.append(error_of(second.offload))
        has_slept.set()

    thread = threading.Thread(target=sleep_second)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        before(patch, StorageSlab, "empty", be_amid)
        errors.append(error_of(first.offload))
        is_amid.set()
        thread.join()
    return {"errors": errors, "away": [sorted(res.away) for res in (first, second)]}


def error_of(act: Callable[[], object]) -> str | None:
    """Return the error of `act` in words; None where there was none."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def save_by_verl(rank: int, job: Job, modules: str) -> dict[str, Any]:
    """Run as a rank of a training that is saved asleep by verl's engine; return the sums of weights, and what is away.

    modules: the folder of the stand-ins.
    """
    sys.path.insert(0, modules)
    with bridge_fgo.install(frameworks="verl"), Rank(CpuOptions(**job.changes), rank, job) as run:
        engine = importlib.import_module(framework_names.VERL[1]).MegatronEngine()
        engine.module, engine.optimizer = run.model, run.optimizer
        run.step()
        awake = [float(param.detach().double().sum()) for chunk in run.model for param in chunk.parameters()]
        engine.to("cpu")
        engine.save_checkpoint("a folder")
        res = bridge_fgo.Residency.of(run.model)
        assert res is not None
        seen = {
            "awake": awake,
            "saved": [float(saved.double().sum()) for saved in engine.saved],
            "away": sorted(res.away),
        }
        engine.to("cuda")
        run.step()
        return seen


@asleep
def train_and_swap(run: Rank, res: bridge_fgo.Residency, seen: dict) -> None:
    """Swap the first weights in; note the bytes that crossed. Then a block fails, and a wake brings what has left."""
    ddp = run.model[0]
    if run.steps == 1:
        ddp.start_param_sync(force_sync=True)
        run.first = [param.detach().clone() for param in ddp.parameters()]
        res.keep("first")
    for away in ((), ("params", "optimizer")):
        res.offload(away)
        with res.weights("first") as moved:
            assert all(map(torch.equal, ddp.parameters(), run.first))
        seen.setdefault("swapped", []).append(moved.copied)
    res.reload()
    with contextlib.suppress(ZeroDivisionError), res.weights("first"):
        _ = 1 / 0
    res.reload()
    assert not res.away
