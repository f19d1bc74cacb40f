"""A training in a process of its own that is killed or interrupted, or has an operation fail, at a chosen point."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import queue
import shutil
import signal
from pathlib import Path

import fused_adam
from saving import load, save, send_all_away

from bridge_fgo.standins.cuda import install_standins

install_standins()

from megatron.bridge.training import checkpointing  # noqa: E402
from megatron.bridge.training.config import ConfigContainer  # noqa: E402
from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: E402
from megatron.core.num_microbatches_calculator import get_num_microbatches  # noqa: E402
from rank_child import Job, Rank  # noqa: E402
from torch.distributed.checkpoint import filesystem  # noqa: E402
from torch.distributed.checkpoint.utils import _DistWrapper  # noqa: E402

import bridge_fgo  # noqa: E402
from bridge_fgo.core.remainders import Remainders  # noqa: E402
from bridge_fgo.core.snapshot import Snapshot  # noqa: E402
from bridge_fgo.core.transfers import HostTransfers  # noqa: E402
from bridge_fgo.harness.cpu_model import microbatches  # noqa: E402
from bridge_fgo.harness.cpu_training import CpuOptions, CpuTraining  # noqa: E402
from bridge_fgo.sources.inner_step import InnerStep  # noqa: E402
from bridge_fgo.sources.master_copy import MasterCopy  # noqa: E402
from bridge_fgo.wiring.session import Session  # noqa: E402

POINTS = {
    "the offload begins": (Session, "begin_pass"),
    "memory goes": (Session, "release"),
    "a forward": (CpuTraining, "_forward_step"),
    "the reload begins": (Session, "reload"),
    "the update of a part": (InnerStep, "update"),
    "a part's copy to the model": (MasterCopy, "copy_part"),
    "the packing of masters": (Remainders, "encode"),
    "the unpacking of masters": (Remainders, "decode"),
    "a copy out": (HostTransfers, "copy_out"),
    "a release": (HostTransfers, "release"),
    "a copy in": (HostTransfers, "copy_in"),
    "a state is handed to a checkpoint": (Snapshot, "hand_out"),
}
FSDP_SAVE = {
    "the entries are made": (checkpointing, "generate_state_dict"),
    "a state is handed to a checkpoint": (Snapshot, "hand_out"),
    "an entry is written": (filesystem, "_write_item"),
    "ranks gather": (_DistWrapper, "gather_object"),  # first their plans, and when shards are written, their results
    "the metadata is written": (filesystem.FileSystemWriter, "finish"),
    "the checkpoint is named": (shutil, "copy"),
    "the config is written": (ConfigContainer, "to_yaml"),
}
"""The points of a save of an `fsdp_dtensor` checkpoint, in the order in which they come."""

TORCH_DIST_SAVE = {"an entry of torch_dist is written": (filesystem_async, "_write_item")}

FSDP_OPTIONS = {"fsdp": "optim_grads_params", "swiglu": True}
STEPS, SAVED_AFTER_EACH = 5, (2, 3)
SAVED_AFTER = 3
CONFIG = bridge_fgo.OffloadConfig(engine="native", slab_bytes=2**20, master_remainders=True)


class Injected(RuntimeError):
    """What a failing operation raises."""


def break_at(point: str, call: int, how: str, set_attribute=setattr) -> None:
    """Have the `call`-th call of an operation from now on fail, or get a signal.

    how: "failed", or the name of a signal that the process sends to itself.
    set_attribute: `setattr`, or a monkeypatch's.
    """
    owner, name = (POINTS | FSDP_SAVE | TORCH_DIST_SAVE)[point]
    original = getattr(owner, name)
    left = call

    @functools.wraps(original)  # mcore looks at the signature of what writes an entry
    def broken(*args, **kwargs):
        nonlocal left
        left -= 1
        if left == 0:
            if how == "failed":
                raise Injected(point)
            os.kill(os.getpid(), getattr(signal, how))
        return original(*args, **kwargs)

    set_attribute(owner, name, broken)


def train(folder: str, point: str | None, call: int, how: str) -> None:
    """Save after three steps, then train one step more and save again; break in between.

    Exit status: 0 where nothing broke, 3 where the failure came out as itself.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
    filesystem_async._results_queue = queue.Queue()  # mcore's is in a process of its own, which would outlive this one
    offload = point is not None
    if offload:
        bridge_fgo.install(CONFIG)
    with CpuTraining(CpuOptions(offload=offload)) as run:
        for _ in range(SAVED_AFTER):
            run.step()
        save(run, folder, "dp_reshardable")
        if point is None:
            return
        break_at(point, call, how)
        try:
            run.step()
            save(run, folder, "dp_reshardable")
        except Injected as error:
            assert str(error) == point
            os._exit(3)


def train_under_fsdp(folder: str, offload: bool, point: str | None = None, call: int = 1) -> None:
    """Train gated layers under Megatron-FSDP as `_train_on` says; leave numbers and digests in `seen.json`."""
    fused_adam.have_mcore_take_it(setattr)
    config = bridge_fgo.OffloadConfig(engine="native", slab_bytes=2**20)
    options = CpuOptions(offload=offload, **FSDP_OPTIONS)
    with bridge_fgo.install(config) if offload else contextlib.nullcontext(), CpuTraining(options) as run:
        seen = _train_on(run, Path(folder), point, call)
        (Path(folder) / "seen.json").write_text(json.dumps(seen))


def train_as_rank(rank: int, job: Job, saves: Path, killed: tuple[int, str, int] | None = None) -> None:
    """Train as a rank of `job`, with data of its own, as `_train_on` says; leave numbers and digests in `RANK.json`.

    killed: the rank that is killed in the second save, the point, and at which of its calls there. What ends another
    rank comes out, and is in `RANK.error`.
    """
    filesystem_async._results_queue = queue.Queue()
    fused_adam.have_mcore_take_it(setattr)
    config = bridge_fgo.OffloadConfig(engine="native", slab_bytes=2**20)
    options = CpuOptions(offload=job.offload, **job.changes)
    point, call = (None, 0) if killed is None or killed[0] != rank else killed[1:]
    with bridge_fgo.install(config) if job.offload else contextlib.nullcontext(), Rank(options, rank, job) as run:
        run._batches.iterable = microbatches(dataclasses.replace(options, seed=options.seed + rank))
        try:
            seen = _train_on(run, saves, point, call)
        except BaseException as error:
            (job.folder / f"{rank}.error").write_text(repr(error))
            raise
        (job.folder / f"{rank}.json").write_text(json.dumps(seen))


def _train_on(run: CpuTraining, folder: Path, point: str | None, call: int) -> dict:
    """Train from the newest checkpoint in `folder`, where there is one, to the last step; return numbers and digests.

    Saves after two of the steps. With a point, is killed in the second save.
    """
    if list(folder.iterdir()):
        load(run, folder)
    before, numbers = run.state.train_state.step, {}
    for _ in range(before * get_num_microbatches()):
        next(run._batches)
    for number in range(before + 1, STEPS + 1):
        record = run.step()
        numbers[number] = (record.loss, record.grad_norm)
        if number in SAVED_AFTER_EACH:
            send_all_away()
            if point is not None and number == SAVED_AFTER_EACH[1]:
                break_at(point, call, "SIGKILL")
            save(run, folder)
    return {"numbers": numbers, "digests": run.digests()}
