"""Processes of a test that have Bridge imported already: each is forked from one that has run nothing else."""

import json
import multiprocessing
import os
import subprocess
import tempfile
from multiprocessing import forkserver
from pathlib import Path
from typing import NamedTuple

import forked
import pytest

from bridge_fgo.tools.arms.process_setup import ATTENTION_VARIABLES

PRELOADED = ["fault_child", "rank_child", "restart_child", "rl_child", "frozen"]

PATIENCE = 300
"""Seconds after which something hangs: what takes some five may import Megatron first, on a busy machine."""


def context() -> multiprocessing.context.ForkServerContext:
    """The context whose processes are forked from one that has no threads and has Bridge imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:  # the process that forks is started on the first call
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("OMP_NUM_THREADS", "1")
        for name in ATTENTION_VARIABLES:  # of a model that an earlier test built
            patch.delenv(name, raising=False)
        forkserver.ensure_running()
    return context


def start(target, *args) -> multiprocessing.Process:
    """Start `target(*args)`, a function of one of the preloaded modules, in a child."""
    child = context().Process(target=target, args=args)
    child.start()
    return child


class Program:
    """A Python program in a child, as `subprocess.Popen` of a command that begins with this Python."""

    def __init__(self, command, stdout, stderr=None, env=None, cwd=None, **_) -> None:
        files = [stdout.name, (stderr if hasattr(stderr, "name") else stdout).name]
        environment = dict(os.environ if env is None else env)
        asked = {"program": [str(word) for word in command[1:]], "environment": environment, "files": files}
        self._child = start(forked.end_as, asked | {"folder": str(cwd or Path.cwd())})

    returncode = property(lambda self: self._child.exitcode)

    def wait(self, timeout: float | None = None) -> int | None:
        self._child.join(timeout)
        return self.returncode

    def poll(self) -> int | None:
        return self.wait(0)

    def terminate(self) -> None:
        self._child.terminate()


def run_python(command, cwd=None, env=None, **_) -> subprocess.CompletedProcess:
    """Do as `subprocess.run` does with a command that begins with this Python, in a child; capture what it prints."""
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        status = join(Program(command, out, err, env, cwd)._child, f"as {command}")
        return subprocess.CompletedProcess(command, status, out.read(), err.read())


class Ranks(NamedTuple):
    """A job of ranks, for those that are no training's (`rank_child.Job`)."""

    folder: Path
    ranks: int


def join_group(rank, job, name="store", timeout=None) -> None:
    """Make torch's process group, of all ranks of a job."""
    import torch

    store = torch.distributed.FileStore(str(job.folder / name), job.ranks)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=job.ranks, timeout=timeout)


def run_ranks(target, job) -> list:
    """Run `target(rank, job)` in a process a rank to their ends; return what each has returned or left as RANK.json."""
    return run_all(target, [job])[0]


def run_all(target, jobs) -> list[list]:
    """As `run_ranks`, of several jobs at once: ranks wait for each other most of the time."""
    started = []
    for job in jobs:
        job.folder.mkdir(parents=True)
        started += [start(leave_what, target, rank, job) for rank in range(job.ranks)]
    assert [join(child, f"as one of {len(started)} ranks") for child in started] == [0] * len(started)
    return [[json.loads((job.folder / f"{rank}.json").read_text()) for rank in range(job.ranks)] for job in jobs]


def leave_what(target, rank, job, *args) -> None:
    """Write what `target(rank, job, *args)` returns to RANK.json, or what ends it to RANK.error."""
    try:
        seen = target(rank, job, *args)
    except BaseException as error:
        (job.folder / f"{rank}.error").write_text(repr(error))
        raise
    if seen is not None:
        (job.folder / f"{rank}.json").write_text(json.dumps(seen))


def join(child, what: str) -> int:
    """Return the child's exit status, negative where a signal ended it; fail the test after PATIENCE."""
    child.join(PATIENCE)
    if child.exitcode is None:
        child.kill()
        pytest.fail(f"a child hung {what}")
    return child.exitcode
