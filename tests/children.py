"""Processes of a test that have Bridge imported already: each is forked from one that has run nothing else."""

import json
import multiprocessing
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import NamedTuple

import forked
from forked import Server, join

RANKS = Server("fault_child", "rank_child", "frozen", server=forkserver._forkserver)
"""multiprocessing's own fork server, which also forks the processes that Bridge and NVRx start by multiprocessing."""
start, run_python, Program = RANKS.start, RANKS.run, partial(forked.Program, RANKS)


def context() -> multiprocessing.context.ForkServerContext:
    """The context whose processes are forked from that of `RANKS`."""
    with RANKS.running() as context:
        return context


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
