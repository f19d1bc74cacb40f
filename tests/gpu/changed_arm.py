"""The GPU arm with something changed in it, by the environment.

- `FAULT=point,step,kill|fail,rank`: a fault is planted on one rank.
- `RACE`, a name of `RACES`: a wait is taken out that upholds its bits.
- `ALLOWED_BYTES`: PyTorch may take no more.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import torch

from bridge_fgo.bridge.session import Session
from bridge_fgo.memory.transfers import CudaTransfers, Lane
from bridge_fgo.offload.snapshot import Snapshot
from bridge_fgo.states.inner_step import InnerStep
from bridge_fgo.states.masters import MasterCopy
from bridge_fgo.tools.arms import gpu

POINTS = {
    "the_offload_begins": (Session, "begin_pass"),
    "memory_goes": (Session, "release"),
    "the_reload_begins": (Session, "reload"),
    "the_update_of_a_part": (InnerStep, "update"),
    "a_part's_copy_to_the_model": (MasterCopy, "copy_part"),
    "a_piece_of_a_copy": (Lane, "copy"),
    "a_copy_out": (CudaTransfers, "copy_out"),
    "a_copy_in": (CudaTransfers, "copy_in"),
    "a_release": (CudaTransfers, "release"),
    "a_state_is_handed_to_a_checkpoint": (Snapshot, "hand_out"),
}


def plant(point: str, step: int, kill: bool) -> None:
    """Have an operation kill the process, or fail, when it is called in the given training step or later."""
    owner, name = POINTS[point]
    original, training_step = getattr(owner, name), Session.training_step
    steps = 0

    def counting(*args: Any) -> Any:
        nonlocal steps
        steps += 1
        return training_step(*args)

    def broken(*args: Any, **kwargs: Any) -> Any:
        if steps >= step:
            if kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError(f"injected: {point}")
        return original(*args, **kwargs)

    Session.training_step = counting
    setattr(owner, name, broken)


def no_wait(transfers: CudaTransfers, slab: Any) -> None:
    """Let the current stream go on."""


def release_at_once(transfers: CudaTransfers, slab: Any) -> None:
    """Give memory back that a copy may still read."""
    slab.free()


RACES = {
    "states_are_used_before_they_landed": {"wait_in": no_wait},
    "memory_goes_before_its_copy": {"wait_out": no_wait, "release": release_at_once},
}


if __name__ == "__main__":
    if "FAULT" in os.environ:
        point, step, kind, rank = os.environ["FAULT"].split(",")
        if os.environ["RANK"] == rank:
            plant(point, int(step), kind == "kill")
    if "RACE" in os.environ:
        for name, without in RACES[os.environ["RACE"]].items():
            setattr(CudaTransfers, name, without)
    if "ALLOWED_BYTES" in os.environ:
        whole = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(int(os.environ["ALLOWED_BYTES"]) / whole)
    gpu.main()
