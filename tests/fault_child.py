"""A training in a process of its own that is killed or interrupted, or has an operation fail, at a chosen point."""

import contextlib
import functools
import gc
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from both import PACKED, SMALL, session_of, steps, training
from fake_meter import have_sessions_take_it
from saving import load, save, send_all_away, skip_data_of

from bridge_fgo.tools.standins.cuda import install_standins

install_standins()

from cpu_training import CpuOptions, CpuTraining  # noqa: E402
from megatron.bridge.training import checkpointing  # noqa: E402
from megatron.bridge.training.config import ConfigContainer  # noqa: E402
from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: E402
from rank_child import Job, Rank, ended, error_of, joined, keep_results_of_saves, step  # noqa: E402
from torch.distributed.checkpoint import filesystem  # noqa: E402
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner  # noqa: E402
from torch.distributed.checkpoint.utils import _DistWrapper  # noqa: E402

import bridge_fgo  # noqa: E402
from bridge_fgo.bridge.session import Session  # noqa: E402
from bridge_fgo.engines.native import NativeEngine  # noqa: E402
from bridge_fgo.engines.ranks import gather  # noqa: E402
from bridge_fgo.figures import Figures  # noqa: E402
from bridge_fgo.memory.remainders import Remainders  # noqa: E402
from bridge_fgo.memory.slab import StillShared  # noqa: E402
from bridge_fgo.memory.transfers import Transfers  # noqa: E402
from bridge_fgo.offload.snapshot import Snapshot  # noqa: E402
from bridge_fgo.sleep.moved import KINDS  # noqa: E402
from bridge_fgo.states.distributed import McoreSource  # noqa: E402
from bridge_fgo.states.inner_step import InnerStep  # noqa: E402

POINTS = {
    "the offload begins": (Session, "begin_pass"),
    "memory goes": (Session, "release"),
    "a forward": (CpuTraining, "_forward_step"),
    "the reload begins": (Session, "reload"),
    "the update of a part": (InnerStep, "update"),
    "a part's copy to the model": (McoreSource, "copy_part"),
    "the packing of masters": (Remainders, "encode"),
    "the unpacking of masters": (Remainders, "decode"),
    "a copy out": (Transfers, "copy_out"),
    "a release": (Transfers, "release"),
    "a copy in": (Transfers, "copy_in"),
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
LOAD = {"a tensor is loaded": (DefaultLoadPlanner, "commit_tensor")}

FSDP_OPTIONS = {"fsdp": "optim_grads_params", "swiglu": True}
STEPS, SAVED_AFTER_EACH = 5, (2, 3)
SAVED_AFTER = 3


class Injected(RuntimeError):
    """What a failing operation raises."""


def break_at(point: str, call: int, how: str, set_attribute=setattr) -> None:
    """Have the `call`-th call of an operation from now on fail, or get a signal.

    how: "failed", or the name of a signal that the process sends to itself.
    set_attribute: `setattr`, or a monkeypatch's.
    """
    owner, name = (POINTS | FSDP_SAVE | TORCH_DIST_SAVE | LOAD)[point]
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
    keep_results_of_saves()
    with training(point is not None) as run:
        steps(run, SAVED_AFTER)
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


def train_as_rank(rank: int, job: Job, saves: Path, killed: tuple[int, str, int] | None = None) -> dict:
    """Train as a rank of `job`, with data of its own, from the newest checkpoint in `saves` to the last step.

    Saves after two of the steps. killed: the rank that is killed in the second save, the point, and at which of its
    calls there.
    """
    seen: dict = {}
    with joined(rank, job) as run:
        if list(saves.iterdir()):
            load(run, saves)
        before = run.state.train_state.step
        skip_data_of(run, before)
        for number in range(before + 1, STEPS + 1):
            step(run, seen)
            if number in SAVED_AFTER_EACH:
                send_all_away()
                if number == SAVED_AFTER_EACH[1] and killed is not None and killed[0] == rank:
                    break_at(*killed[1:], "SIGKILL")
                save(run, saves)
        return ended(run, seen | {"began": before})


# Ranks of which one fails beside the others: at each place of each verb, in each context's block, with the flag.

PARALLEL = {"DP": {}, "TP": {"tp": 2}, "PP": {"pp": 2}}


def _keep_another(res) -> None:
    """Keep weights under a name that the model's own are not like."""
    with res.weights("first"):
        res.keep("again")


VERBS = {
    "offload": ((), lambda res: res.offload()),
    "offload, gradients kept": ((), lambda res: res.offload("grads", "optimizer", grads="keep")),
    "reload": (KINDS, lambda res: res.reload()),
    "reload of parameters": (KINDS, lambda res: res.reload("params")),
    "reload of states and gradients": (KINDS, lambda res: res.reload("optimizer", "grads")),
    "only, asleep": (KINDS, lambda res: _enter(res.only("params"))),
    "only, awake": ((), lambda res: _enter(res.only("optimizer"))),
    "asleep": (("grads",), lambda res: _enter(res.asleep())),
    "checkpointing": (KINDS, lambda res: _enter(res.checkpointing())),
    "keep": ((), lambda res: res.keep("new")),
    "keep, again": (_keep_another, lambda res: res.keep("again")),
    "weights, awake": ((), lambda res: _enter(res.weights("first"))),
    "weights, asleep": (KINDS, lambda res: _enter(res.weights("first"))),
    "drop": (_keep_another, lambda res: res.drop("again")),
    "close": (KINDS, lambda res: res.close()),
}
"""For each name: the kinds that are offloaded before, or a function that prepares, and the verb."""

LOCAL = ("drop",)
"""Verbs in which no other rank takes part."""

PACKED_TOO = ("offload", "reload", "reload of states and gradients")
"""Verbs that do something else where masters are packed."""

FALLIBLE = ("sleep", "bridge/residency.py", "memory/storage_slab.py", "memory/transfers.py", "memory/host_buffer.py")
"""Files of the package with the functions that a verb calls, each of which may fail."""

OF_CLOSE = ("engines/native.py", "memory/slab.py")
"""Files with more functions that `close` calls."""

VERBS_OWN = {
    *(f"Residency.{name}" for name in ("__init__", "offload", "reload", "only", "asleep", "checkpointing", "close")),
    *(f"Residency.{name}" for name in ("keep", "weights", "_selection")),
    *(f"TrainerMemory.{name}" for name in ("__init__", "_make")),
    *("offload", "reload", "only", "as_before"),
    *(f"WeightSets.{name}" for name in ("__init__", "keep", "swapped", "_find", "_swap_in", "_swap_out")),
    "HostBudget.__init__",
    "offloader_of",
    "WeightOffloader.reload",
    "WeightSlab.gather",
    "WeightSlab.forget_masters",
    "require_match",
    "verb.<locals>.run",
}
"""Functions that have the collectives in them or call those that do; and between them some that set attributes alone,
or look at what all ranks were told."""


def _enter(context) -> None:
    with context:
        pass


def _is_fallible(code, others=()) -> bool:
    name = Path(code.co_filename).as_posix().partition("bridge_fgo/")[2]
    is_there = name.startswith((*FALLIBLE, *others))
    return is_there and code.co_qualname not in VERBS_OWN and not code.co_name.startswith("<")


def places_of(act, others) -> list:
    """Return the code of each function that `act` calls and that may fail, in their order; `others`: also there."""
    found = {}

    def note(frame, event, _) -> None:
        if event == "call" and _is_fallible(frame.f_code, others):
            found[frame.f_code] = None

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return list(found)


@contextlib.contextmanager
def failing_at(place):
    """Context in which the first call of a function fails; None for none."""

    def fail(frame, event, _) -> None:
        if event == "call" and frame.f_code is place:
            sys.setprofile(None)
            raise StillShared(f"in {place.co_qualname}")  # the error that each move leaves its slab whole at

    sys.setprofile(None if place is None else fail)
    try:
        yield
    finally:
        sys.setprofile(None)


class OneFails:
    """A training as one of several ranks of which the last fails, while the others do what it was about to do."""

    def __init__(self, run: Rank, job: Job) -> None:
        self.run, self.fails = run, run.rank == job.ranks - 1
        self.seen: list[tuple[str, str | None, str | None]] = []
        """Of each attempt: of what, at which place, and the error that came out on this rank."""
        self.every = 3 if job.changes else 1
        """Data parallelism tries all places; the others a third of each verb's, which takes turns."""
        self.turn = 0

    def _change_moments(self) -> None:
        for _, moment in self.run.state_tensors()["moments"]:
            moment.neg_()  # the host has it no more as it is, so that it is copied

    def _bytes(self) -> list[bytes]:
        # Of copies: of the tensors themselves numpy would keep the memory from leaving.
        found = [tensor for pairs in self.run.state_tensors().values() for _, tensor in pairs]
        return [tensor.detach().clone().view(torch.uint8).numpy().tobytes() for tensor in found]

    def at_each_place(self, name: str, act, prepare=lambda: None, recover=lambda: None) -> None:
        """Have each place of `act` fail, after `prepare`, and `recover`: all is bitwise what it was."""
        self._change_moments()
        prepare()
        places = places_of(act, OF_CLOSE if name == "close" else ())
        recover()
        self.turn += 1
        for number in range(self.turn % self.every, gather(len(places))[-1], self.every):
            self._change_moments()
            before = self._bytes()
            prepare()
            place = places[number] if self.fails else None
            with failing_at(place):
                error = error_of(act)
            self.seen.append((name, place and place.co_qualname, error))
            recover()
            assert self._bytes() == before
            assert len(set(gather(len(self.seen)))) == 1, f"a rank is a collective ahead of another: {self.seen[-1]}"


def fail_at_each_place(rank: int, job: Job) -> list:
    """Run as a rank of which the last one fails at each place of each verb of a Residency; all of them go on.

    Returns what was seen, as `OneFails` has it.
    """
    with Rank(CpuOptions(**SMALL, **job.changes), rank, job) as run:
        run.step()
        gc.freeze()  # each of a thousand sleeps looks for aliases among all objects that Python's collector lists
        one = OneFails(run, job)
        for packs in (False, True):
            made: list[bridge_fgo.Residency] = []

            def make(packs=packs, made=made) -> None:
                config = bridge_fgo.OffloadConfig(engine="native", master_remainders=packs)
                made[:] = [bridge_fgo.Residency(run.model, run.optimizer, config)]

            def let_go(made=made) -> None:
                while made:
                    made.pop().close()

            if not packs:
                one.at_each_place("making one", make, recover=let_go)
            make()
            made[0].keep("first")
            first = _weights(run)
            for _, moment in run.state_tensors()["moments"]:
                moment.abs_()  # as `OneFails` may have left a square root of what is negative to the next step
            run.step()
            for name, (away, verb) in VERBS.items():
                if packs and name not in PACKED_TOO:
                    continue

                def prepare(away=away, made=made) -> None:
                    if callable(away):
                        away(made[0])
                    elif away:
                        made[0].offload(*away)

                def recover(name=name, make=make, made=made, first=first) -> None:
                    if name == "close":
                        made[0].close()
                        make()
                    made[0].reload()
                    assert not made[0].away
                    for kept in ("new", "again") if name in (*LOCAL, "keep", "keep, again") else ():
                        _require_whole_or_refused(run, made[0], kept, first)

                one.at_each_place(name, lambda verb=verb, made=made: verb(made[0]), prepare, recover)
                if name == "weights, asleep":
                    with made[0].weights("first"):
                        assert _weights(run) == first
            made[0].close()
        return one.seen


def _weights(run: Rank) -> list[bytes]:
    return [param.detach().clone().view(torch.uint8).numpy().tobytes() for param in run.model[0].parameters()]


def _require_whole_or_refused(run: Rank, res: bridge_fgo.Residency, name: str, first: list[bytes]) -> None:
    """Have every rank find the first weights or the model's own under a name, or none there; drop them."""
    own, found = _weights(run), None
    try:
        with res.weights(name):
            found = [_weights(run) == each for each in (first, own)]
    except ValueError as error:
        assert "call keep(" in str(error)
    assert found is None or any(found)
    assert len(set(map(str, gather(found)))) == 1
    res.drop(name)


CONTEXTS = {
    "only": (KINDS, lambda res: res.only("params")),
    "asleep": (("grads",), lambda res: res.asleep()),
    "checkpointing": (KINDS, lambda res: res.checkpointing()),
    "training_step": ((), lambda res: res.training_step()),
    "weights": ((), lambda res: res.weights("first")),
}
"""What is away before a context, and the context."""


def fail_in_a_block(rank: int, job: Job, context: str, alone: bool) -> dict:
    """Run as a rank of a training in which the block of a context raises: on the last rank, or on all of them.

    alone: the others do in the block what ranks do together, and end by its error. Else all go on: they wake and train.

    Returns what came out last, its notes, what is away after it, and the seconds since the block began; of all that go
    on the numbers and digests of the steps, too.
    """
    away, enter = CONTEXTS[context]
    seen: dict = {}
    with bridge_fgo.install(PACKED), Rank(CpuOptions(**SMALL, **job.changes), rank, job) as run:
        res = bridge_fgo.Residency(run.model, run.optimizer) if job.offload else None
        if res is not None and context == "weights":
            res.keep("first")
        for _ in range(job.steps):
            step(run, seen)
            if res is None:
                continue
            if away:
                res.offload(*away)
            try:
                with enter(res):
                    began = time.monotonic()
                    if not alone or rank == job.ranks - 1:
                        raise Injected("in the block")
                    if context == "training_step":
                        run.step()
                    torch.distributed.all_reduce(torch.zeros(1))
            except Exception as error:
                notes = getattr(error, "__notes__", [])
                took = time.monotonic() - began
                seen |= {"error": repr(error), "notes": notes, "away": sorted(res.away), "took": took}
            if alone:
                (job.folder / f"{rank}.json").write_text(json.dumps(seen))
                os._exit(0)
            res.reload()
        return ended(run, seen)


ATTACHING = [(NativeEngine, "__init__"), (NativeEngine, "pin"), (NativeEngine, "offload_now")]
ENDING = [(NativeEngine, "settle"), (Figures, "end_step")]
"""Where one rank can fail with the flag, before all attach, and before all choose what stays on the GPU."""


def fail_with_the_flag(rank: int, job: Job) -> dict:
    """Run as a rank of a training with the flag and a budget, of which the last one fails where all attach and choose.

    Then that rank alone says of a step that it was skipped. Returns the errors that came out, the numbers of the steps
    that none did of, the digests, and which parts stay on the GPU.
    """
    have_sessions_take_it(setattr)
    fails, seen = rank == job.ranks - 1, {"errors": []}
    options = CpuOptions(offload=job.offload, **SMALL, **job.changes)
    config = bridge_fgo.OffloadConfig(engine="native", gpu_memory_budget_gib=1.0)

    def attempt(owner, name: str, act) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if fails:
                patch.setattr(owner, name, functools.partial(_fail, name))
            seen["errors"].append(error_of(act))

    with bridge_fgo.install(config) if job.offload else contextlib.nullcontext():
        for owner, name in ATTACHING if job.offload else ():
            attempt(owner, name, lambda name=name: Rank(options, rank, job, name))
        with Rank(options, rank, job) as run:
            run.cfg.train.check_optimizer_step_success = False  # so that each rank believes its own optimizer
            step(run, seen)
            for owner, name in ENDING:
                attempt(owner, name, lambda: step(run, seen)) if job.offload else run.step()
            with pytest.MonkeyPatch.context() as patch:
                if fails:
                    update = run.optimizer.step
                    patch.setattr(run.optimizer, "step", lambda: (False, *update()[1:]))
                step(run, seen)
            for _ in range(job.steps):
                step(run, seen)
            if job.offload:
                seen["stays"] = [part.stays for part in session_of(run).engine.schedule.parts]
            return ended(run, seen)


def _fail(name: str, *args: object, **kwargs: object) -> None:
    raise Injected(f"in {name}")
