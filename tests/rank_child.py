"""One rank of a data-parallel training, in a process of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import queue
from collections.abc import Callable
from pathlib import Path

import fused_adam
from saving import load, save

from bridge_fgo.tools.standins.cuda import install_standins

install_standins()

import torch  # noqa: E402

import bridge_fgo  # noqa: E402
from bridge_fgo.memory.storage_slab import StorageSlab  # noqa: E402
from bridge_fgo.tools.arms.cpu_model import microbatches  # noqa: E402
from bridge_fgo.tools.arms.cpu_training import CpuOptions, CpuTraining  # noqa: E402

CONFIG = bridge_fgo.OffloadConfig(engine="native", slab_bytes=2**20, master_remainders=True)


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


class Rank(CpuTraining):
    """A CPU training as one of several ranks; each data-parallel one has data of its own."""

    def __init__(self, options: CpuOptions, rank: int, job: Job, store: str = "store") -> None:
        self.rank, self.job, self._store = rank, job, store
        super().__init__(options)
        own = dataclasses.replace(options, seed=options.seed + self.groups.dp.rank())
        self._batches.iterable = microbatches(own)

    def _join(self) -> None:
        store = torch.distributed.FileStore(str(self.job.folder / self._store), self.job.ranks)
        torch.distributed.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.job.ranks, timeout=self.job.timeout
        )


def train(rank: int, job: Job) -> None:
    """Run as a rank of `job`; leave checkpoints in `loaded` and `trained`, and what was seen in `<rank>.json`."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.Queue()  # mcore's is in a process of its own, which would outlive this one
    fused_adam.have_mcore_take_it(setattr)
    options = CpuOptions(offload=job.offload, **job.changes)
    held, numbers = [], []
    config = CONFIG if options.fsdp is None else dataclasses.replace(CONFIG, master_remainders=None)
    with bridge_fgo.install(config) if job.offload else contextlib.nullcontext(), Rank(options, rank, job) as run:
        if job.loads:
            load(run, job.loads)
            save(run, job.folder / "loaded", job.kind)
        for _ in range(job.steps):
            record = run.step()
            numbers.append((record.loss, record.grad_norm))
            held.append(max(run.live_bytes))
        save(run, job.folder / "trained", job.kind)
        seen = {"numbers": numbers, "held": held, "digests": run.digests()}
        (job.folder / f"{rank}.json").write_text(json.dumps(seen))


def train_and_sleep(rank: int, job: Job, changes: dict) -> None:
    """Run as a rank of a training that, where `job.offload` says so, sleeps after each step; else as `train`.

    changes: options of the training.
    """
    options = CpuOptions(**changes)
    numbers, copied = [], []
    with Rank(options, rank, job) as run:
        res = bridge_fgo.Residency(run.model, run.optimizer) if job.offload else None
        for _ in range(job.steps):
            record = run.step()
            numbers.append((record.loss, record.grad_norm))
            if res is not None:
                for slab in () if "frozen_stage" in changes else res._weights.slabs:
                    assert slab.copied_nbytes == slab.nbytes // run.groups.dp.size()
                out = res.offload()
                alone = res.reload("params")
                whole = res._weights.slabs[0]._bytes.clone()
                again = res.offload("params")
                res.reload()
                assert (res._weights.slabs[0]._bytes == whole).all()
                copied.append([out.copied_by_kind["params"], alone.copied, again.copied])
        for ddp in run.model:
            ddp.start_param_sync(force_sync=True)  # what the next forward would have gathered
        seen = {"numbers": numbers, "copied": copied, "digests": run.digests()}
        (job.folder / f"{rank}.json").write_text(json.dumps(seen))


def sleep_with_errors(rank: int, job: Job, packs: bool) -> None:
    """Run as a rank of a training in which rank 1 alone fails to sleep and to wake, and alone packs its masters.

    packs: whether it packs them.

    Leaves the numbers, the digests and the errors that were caught; `job.offload` says whether anything sleeps.
    """
    options, errors, numbers = CpuOptions(), [], []
    with Rank(options, rank, job) as run:
        own = bridge_fgo.OffloadConfig(engine="native", slab_bytes=2**20, master_remainders=packs and rank == 1)
        res = bridge_fgo.Residency(run.model, run.optimizer, own) if job.offload else None
        for _ in range(job.steps):
            record = run.step()
            numbers.append((record.loss, record.grad_norm))
            if res is None:
                continue
            res._backwards.pending.update([1] if rank == 1 else [])
            errors.append(_error(lambda: res.offload()))
            assert not res.away
            res._backwards.used()
            res.offload("params", "grads")
            res.offload("optimizer")  # with masters packed the weights have to come and go once more
            assert res.away == {"params", "grads", "optimizer"}
            fill = StorageSlab.fill
            if rank == 1:
                StorageSlab.fill = _no_memory
            errors.append(_error(lambda: res.reload("params")))
            StorageSlab.fill = fill
            assert res.away == {"params", "grads", "optimizer"}
            res.reload("optimizer")
            errors.append(sorted(res.away))
            res.offload()
            transfers = type(res._states.engine.schedule.transfers)
            copy_in = transfers.copy_in
            if rank == 1:
                transfers.copy_in = _no_memory
            errors.append(_error(lambda: res.reload()))
            transfers.copy_in = copy_in
            res.reload()
            assert not res.away
        for ddp in run.model:
            ddp.start_param_sync(force_sync=True)
        seen = {"numbers": numbers, "errors": errors, "digests": run.digests()}
        (job.folder / f"{rank}.json").write_text(json.dumps(seen))


def _no_memory(*_: object, **__: object) -> int:
    raise torch.OutOfMemoryError("no memory for it")


def _error(act: Callable[[], object]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error")


def save_and_load(rank: int, job: Job) -> None:
    """Run as a rank of a training that is saved, steps once more, loads what was saved, and trains on.

    Saved and loaded asleep where `job.offload` says so; leaves the numbers and the digests.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.Queue()
    fused_adam.have_mcore_take_it(setattr)
    options, folder, seen = CpuOptions(), job.folder / "saved", []
    config = bridge_fgo.OffloadConfig(engine="native")
    with bridge_fgo.install(config), Rank(options, rank, job) as run:
        res = bridge_fgo.Residency(run.model, run.optimizer)
        for act in (lambda: save(run, folder), lambda: load(run, folder), lambda: None):
            for _ in range(job.steps):
                record = run.step()
                seen.append((record.loss, record.grad_norm))
            if not job.offload:
                act()
                continue
            res.offload()
            with res.checkpointing():
                act()
            assert res.away == {"params", "grads", "optimizer"} and run.live_state_bytes() == 0
            res.reload()
        for ddp in run.model:
            ddp.start_param_sync(force_sync=True)
        (job.folder / f"{rank}.json").write_text(json.dumps({"numbers": seen, "digests": run.digests()}))


def train_in_context(rank: int, job: Job, changes: dict) -> None:
    """Run as a rank of a training that, where `job.offload` says so, steps in `Residency.training_step` and sleeps.

    changes: options of the training. Leaves the numbers, the digests, and the most bytes of state in a forward.
    """
    options, numbers, held = CpuOptions(**changes), [], []
    config = bridge_fgo.OffloadConfig(engine="native", slab_bytes=2**20)
    with bridge_fgo.install(config), Rank(options, rank, job) as run:
        res = bridge_fgo.Residency(run.model, run.optimizer) if job.offload else None
        for _ in range(job.steps):
            with contextlib.nullcontext() if res is None else res.training_step(options.microbatches):
                record = run.step()
            numbers.append((record.loss, record.grad_norm, record.skipped))
            held.append(max(run.live_bytes))
            if res is not None:
                with res.asleep():
                    assert run.live_state_bytes() == 0
        for ddp in run.model:
            ddp.start_param_sync(force_sync=True)
        seen = {"numbers": numbers, "held": held, "digests": run.digests()}
        (job.folder / f"{rank}.json").write_text(json.dumps(seen))
