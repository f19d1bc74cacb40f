"""Trainings by Bridge's own `pretrain()` that are ended at any instruction and started again, and one that never is."""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import pickle
import random
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import async_worker
import children
import fused_adam
import torch

from bridge_fgo.memory.keeper import VARIABLE, Keeper

GIB = 2**30
OF_KEPT = (
    "kept_steps.py", "buddies.py", "slab.py", "host_buffer.py", "transfers.py", "slab_queue.py", "schedule.py",
    "crash.py",
)  # fmt: skip
"""Files whose calls are counted to end a process at one of them."""


MOST_CALLS = 4000


class Ended(RuntimeError):
    """What an attempt ends by, where that is an exception."""


@dataclasses.dataclass(frozen=True)
class End:
    """How a rank of an attempt ends: "SIGKILL", "raise" or "abort", at its so manieth call in `OF_KEPT`.

    With `seconds` by SIGKILL, so long after its first step has begun: at any instruction. Both are counted from the
    start of Bridge's setup if it `is_early`, or from the begin of a later step, `after` so many of the attempt. With
    `step` by SIGKILL, before that step begins.
    """

    rank: int
    how: str = "SIGKILL"
    call: int = 0
    seconds: float = 0.0
    is_early: bool = False
    after: int = 0
    step: int | None = None


@dataclasses.dataclass(frozen=True)
class Job:
    """A training: `arm` has options of `harness.arms.gpu`, {} in them is its folder; the rest is in the fields."""

    folder: Path = Path()
    keeper: str = ""
    """Name of the keeper, with {rank} if each rank is to be a node of its own."""
    ranks: int = 1
    steps: int = 6
    arm: tuple[str, ...] = ()
    changes: tuple[tuple[str, object], ...] = ()
    """Settings of Bridge's config, by "section.name"."""
    is_late: int = 0
    """Where not 0, the seed of copies that are as late as a GPU's (`debug_transfers`)."""
    end: End | None = None
    tries: int = 1000
    """Of starts from one step."""
    other_code: bool = False
    is_on_gpu: bool = False
    most_after: int = 0
    """Steps of an attempt after which the latest of its random ends is counted: where a step has many calls."""
    slow_copies: float = 0.0
    """Seconds that each part of a copy to another node takes more."""
    energon_workers: int | None = None
    """Worker processes of Energon's loader, if that reads the data."""
    is_fused: bool = False
    """Whether Adam is Transformer Engine's (a stand-in), whose states mcore can save."""


ON_GLOO = (("model.sequence_parallel", False), ("model.moe_token_dispatcher_type", "allgather"))
"""Settings with which a model of plain torch trains on several ranks by gloo."""
DROPOUT = (("model.hidden_dropout", 0.1), ("model.attention_dropout", 0.1))
OPTIONS = (
    "--cpu",
    "--offload",
    "on",
    "--slab-bytes",
    "1048576",
    "--hidden",
    "64",
    "--seq",
    "16",
    "--mbs",
    "1",
    "--gbs",
    "4",
)
"""Options of every job, of a model that trains fast and has several slabs."""


def attempt(rank: int, job: Job, port: int) -> None:
    """Train as a rank, until the training is over or `job.end` ends this process. Leaves its events in RANK.jsonl."""
    os.setpgid(0, 0)
    file = os.open(job.folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1), os.dup2(file, 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(WORLD_SIZE=str(job.ranks), LOCAL_WORLD_SIZE=str(job.ranks))
    if job.keeper:
        os.environ[VARIABLE] = job.keeper.format(rank=rank)
    status = 1
    try:
        _train(rank, job)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.last_exc = sys.exception()  # as the interpreter has it
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if status != 0:
        os._exit(status)
    from bridge_fgo.bridge import crash

    crash._end()  # as at exit
    os._exit(0)


def _train(rank: int, job: Job) -> None:
    import debug_transfers
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.checkpointing import DefaultCheckpointManager
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    import bridge_fgo
    from bridge_fgo.bridge import crash
    from bridge_fgo.memory import layout
    from bridge_fgo.recipes import process, tiny
    from harness.arms import gpu

    if job.is_late:
        os.environ[debug_transfers.VARIABLE] = str(job.is_late)
        debug_transfers.put_in_place()
    layout.LEAST_PART_BYTES, crash.MOST_TRIES = 2**16, job.tries
    if job.slow_copies:
        receive = torch.distributed.recv
        torch.distributed.recv = lambda *args: (time.sleep(job.slow_copies), receive(*args))
    if job.is_fused:
        fused_adam.have_mcore_take_it(setattr)
    if not job.is_on_gpu:
        async_worker.have_bridge_use("mcore", setattr, quickly=True)
    if job.other_code:
        crash.version_of = lambda name: "another"
    sizes, arm = ["--offload", "on"] if job.is_on_gpu else OPTIONS, [each.format(job.folder) for each in job.arm]
    options = gpu.parse([*sizes, "--steps", str(job.steps), *arm, "--events", os.devnull])
    gpu.make_deterministic()
    install = bridge_fgo.install(gpu.offload_config(options)) if options.offload == "on" else None
    process.skip_building_what_is_built()
    process.forget_attention_backend()
    config = gpu.build_config(options)
    if not job.is_on_gpu:
        tiny.put_on_cpu(config)
    if job.energon_workers is not None:
        import energon_data

        path = energon_data.prepare(job.folder / f"data{rank}", options.vocab, options.seq)
        sizes = {"seq_length": options.seq, "micro_batch_size": options.mbs}
        config.dataset = energon_data.EnergonData(path=str(path), **sizes)
    config.dataset.num_workers = job.energon_workers or 0
    for path, value in (*(() if job.is_on_gpu else ON_GLOO), *job.changes):
        section, name = path.split(".")
        assert hasattr(getattr(config, section), name), path
        setattr(getattr(config, section), name, value)
    events = (job.folder / f"{rank}.jsonl").open("a", buffering=1)

    def tell(**event) -> None:
        print(json.dumps({**event, "at": time.time()}), file=events)

    class Watcher(Callback):
        def on_train_start(self, context) -> None:
            tell(event="begin", step=context.state.train_state.step)
            self.ending = job.end if job.end is not None and job.end.rank == rank and not job.end.is_early else None
            self.begun = 0

        def on_train_step_start(self, context) -> None:
            end, step = self.ending, context.state.train_state.step
            if end is not None and (self.begun >= end.after if end.step is None else step == end.step):
                self.ending = None
                end_this_process(end, tell)
            self.begun += 1
            self.started = time.perf_counter()

        def on_train_step_end(self, context) -> None:
            losses = {name: exact(value) for name, value in (context.loss_dict or {}).items()}
            step = context.state.train_state.step
            stats, seconds = bridge_fgo.stats(), time.perf_counter() - self.started
            told = {"parts": dict(stats.restore_seconds) if stats else {}, "seconds": seconds}
            tell(event="step", step=step, numbers=[losses, exact(context.grad_norm)], **told)

        def on_train_end(self, context) -> None:
            sys.setprofile(None)
            tell(event="end", **everything(context))

    load = DefaultCheckpointManager.load

    def timed_load(*args):
        started = time.perf_counter()
        loaded = load(*args)
        tell(event="load", seconds=time.perf_counter() - started)
        return loaded

    DefaultCheckpointManager.load = timed_load
    tell(event="setup")
    if job.end is not None and job.end.rank == rank and job.end.is_early:
        end_this_process(job.end, tell)
    pretrain(config, forward_step, callbacks=[Watcher()])
    tell(event="over")
    events.close()
    del install


def end_this_process(end: End, tell) -> None:
    """Have this process end as it says."""
    if end.seconds or end.step is not None:

        def kill() -> None:
            time.sleep(end.seconds)
            tell(event="ended", where="after a time")
            os.kill(os.getpid(), signal.SIGKILL)

        return kill() if end.step is not None else threading.Thread(target=kill, daemon=True).start()
    left = end.call

    def count(frame, event, _) -> None:
        nonlocal left
        if event != "call" or not frame.f_code.co_filename.endswith(OF_KEPT):
            return
        left -= 1
        if left:
            return
        sys.setprofile(None)
        tell(event="ended", where=frame.f_code.co_qualname)
        if end.how == "raise":
            raise Ended(frame.f_code.co_qualname)
        if end.how == "abort":
            os.abort()
        os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)


def exact(value) -> object:
    """Return a value in which every bit counts, as JSON has it."""
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return [str(value.dtype), list(value.shape), hashlib.sha256(data).hexdigest()]
    if isinstance(value, dict):
        return {str(name): exact(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [exact(each) for each in value]
    if isinstance(value, float):
        return value.hex()
    if value is None or isinstance(value, bool | int | str):
        return value
    if hasattr(value, "data") and type(value).__name__ in ("ShardedTensor", "ShardedObject"):
        return exact(value.data)
    return hashlib.sha256(pickle.dumps(value)).hexdigest()


def everything(context) -> dict:
    """Return all that `generate_state_dict` would save of this rank, and beside it buffers and counts of steps."""
    from megatron.bridge.training import checkpointing
    from megatron.bridge.training.utils.pg_utils import get_pg_collection
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    import bridge_fgo
    from harness.arms.final_state import mcore_optimizers, state_tensors

    bridge_fgo.reload_states()
    for chunk in context.model:
        if chunk.ddp_config.use_distributed_optimizer:
            chunk.start_param_sync(force_sync=True)
    state = context.state
    groups = get_pg_collection(context.model)
    inner = [leaf.optimizer for leaf in mcore_optimizers(context.optimizer) if leaf.optimizer is not None]
    scalers = [getattr(leaf, "grad_scaler", None) for leaf in mcore_optimizers(context.optimizer)]
    machine = get_rerun_state_machine().state_dict(None, "torch_dist")
    return exact(
        {
            "tensors": state_tensors(context.model, context.optimizer),
            "buffers": [dict(chunk.named_buffers()) for chunk in context.model],
            "model": [chunk.module.state_dict_for_save_checkpoint() for chunk in context.model],
            "groups": [[{k: v for k, v in g.items() if k != "params"} for g in each.param_groups] for each in inner],
            "steps": [
                [each.state[p].get("step") for g in each.param_groups for p in g["params"] if p in each.state]
                for each in inner
            ],
            "scalers": [None if scaler is None else scaler.state_dict() for scaler in scalers],
            "train_state": state.train_state.state_dict(),
            "scheduler": context.scheduler.state_dict(),
            "rng": checkpointing.get_rng_state(False, "torch", pg_collection=groups),
            "rerun": machine and {**machine, "mode": str(machine["mode"]), "state": str(machine["state"])},
        }
    )


# The test's side.


@dataclasses.dataclass
class Seen:
    """What the attempts of a training showed, of each rank."""

    events: list[list[dict]]
    logs: list[str]

    def of(self, kind: str, rank: int = 0) -> list[dict]:
        """Return the events of a kind, in their order."""
        return [event for event in self.events[rank] if event["event"] == kind]


def seen(job: Job) -> Seen:
    """Return what all attempts of a job have left so far."""
    events, logs = [], []
    for rank in range(job.ranks):
        file, log = job.folder / f"{rank}.jsonl", job.folder / f"{rank}.log"
        lines = file.read_text().splitlines() if file.exists() else []
        events.append([json.loads(line) for line in lines])
        logs.append(log.read_text() if log.exists() else "")
    return Seen(events, logs)


def run(job: Job, start=children.start, patience: float = 300.0) -> list[int]:
    """Run an attempt in children of `start`; if a rank fails, kill the others, as torchrun does."""
    job.folder.mkdir(parents=True, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = [start(attempt, rank, job, port) for rank in range(job.ranks)]
    end = time.monotonic() + patience
    while any(rank.exitcode is None for rank in ranks):
        if any(rank.exitcode for rank in ranks) or time.monotonic() > end:
            for rank in ranks:
                rank.kill()
        for rank in ranks:
            rank.join(0.02)
    for rank in ranks:  # what a save of a killed rank has started waits for ever: the server of a queue, of 0.6 GB
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)
    return [rank.exitcode for rank in ranks]


class Kept:
    """A keeper of this process's user, in a thread."""

    def __init__(self, name: str, limit: int = GIB, idle_seconds: float = 600.0) -> None:
        self.name = name
        self._read, self._write = os.pipe()
        self.keeper = Keeper(name, limit, idle_seconds)
        self._thread = threading.Thread(target=self.keeper.serve, args=(self._read,), daemon=True)
        self._thread.start()

    def __enter__(self) -> "Kept":
        return self

    def __exit__(self, *error: object) -> None:
        os.write(self._write, b"x")
        self._thread.join()
        self.keeper.close()
        os.close(self._read), os.close(self._write)


def require_same(killed: Seen, whole: Seen, most_again: int = 2) -> None:
    """Fail where anything of any rank differs from the training that nothing ended, or more was done again."""
    for rank, events in enumerate(killed.events):
        expected = {event["step"]: event["numbers"] for event in whole.of("step", rank)}
        for event in killed.of("step", rank):
            assert event["numbers"] == expected[event["step"]], f"rank {rank}, step {event['step']}"
        (end,), newest = whole.of("end", rank), killed.of("end", rank)
        assert newest, f"rank {rank} did not end: {killed.logs[rank][-3000:]}"
        for name, value in end.items():
            assert name == "at" or newest[-1][name] == value, f"rank {rank}: {name}"
        last = -1
        for event in events:
            if event["event"] == "step":
                last = event["step"]
            elif event["event"] == "begin" and last >= 0:
                assert last + 1 - event["step"] <= most_again - 1, f"{last + 1 - event['step']} finished steps again"


def survivors(job: Job, whole: Seen, deaths: int, seed: str, start=children.start, limit: int = GIB) -> list[Seen]:
    """Train by `job` in its folder, by one training after another, until so many random deaths are over.

    Fail where one that goes on after its deaths differs from `whole`. Return what each has shown.
    """
    generator, trainings = random.Random(seed), []
    while deaths or not trainings:
        number = str(len(trainings))
        with Kept(f"{os.getpid()}.{number}", limit) as kept:
            arm = (*job.arm, "--survive-crash")
            training = dataclasses.replace(job, folder=job.folder / number, keeper=kept.name, arm=arm)
            ends = (random_end(generator, job.ranks, job.most_after) if deaths else None for _ in itertools.count())
            while any(run(dataclasses.replace(training, end=next(ends)), start)):
                assert deaths, seen(training).logs
                deaths -= 1
                if all(seen(training).of("end", rank) for rank in range(job.ranks)):
                    break  # it died as it ended
        trainings.append(seen(training))
        require_same(trainings[-1], whole)
    return trainings


def random_end(generator: random.Random, ranks: int, most_after: int = 0) -> End:
    """Return an end of a rank by any means, at any instruction of its first steps, or of its start."""
    rank, is_early = generator.randrange(ranks), generator.random() < 0.25
    after = generator.randint(0, most_after) if most_after and not is_early else 0
    how = generator.choice(("SIGKILL", "raise", "abort", "after a time"))
    if how == "after a time":
        return End(rank, seconds=generator.uniform(0.0, 2.0 if is_early else 0.5), is_early=is_early, after=after)
    return End(rank, how, call=generator.randint(1, 2000 if is_early else MOST_CALLS), is_early=is_early, after=after)
