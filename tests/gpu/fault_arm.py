"""The GPU arm with a fault planted on one rank: `FAULT=point,step,kill|fail,rank` in the environment."""

from __future__ import annotations

import os
import signal
from typing import Any

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


if __name__ == "__main__":
    point, step, kind, rank = os.environ["FAULT"].split(",")
    if os.environ["RANK"] == rank:
        plant(point, int(step), kind == "kill")
    gpu.main()
