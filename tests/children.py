"""Processes of a test that have Bridge imported already: each is forked from one that has run nothing else."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

PRELOADED = ["fault_child", "rank_child", "restart_child"]


def start(target, *args) -> multiprocessing.Process:
    """Start `target(*args)`, a function of one of the preloaded modules, in a child."""
    context = multiprocessing.get_context("forkserver")  # forks from a process that has no threads
    context.set_forkserver_preload(PRELOADED)
    child = context.Process(target=target, args=args)
    with pytest.MonkeyPatch.context() as patch:  # the process that forks is started with the first child
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("OMP_NUM_THREADS", "1")
        child.start()
    return child


def join(child, patience: float, what: str) -> int:
    """Return the child's exit status, negative where a signal ended it; fail the test after `patience` seconds."""
    child.join(patience)
    if child.exitcode is None:
        child.kill()
        pytest.fail(f"a child hung {what}")
    return child.exitcode
