"""The GPU arm with something changed in it, by the environment; see `CHANGES`.

ALLOWED_BYTES=20000000000 python -m changed_arm --steps 20 --offload on --events FILE
"""

import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import bridge_fgo
from bridge_fgo.bridge.session import Session
from bridge_fgo.memory.auto_budget import LEAST_MARGIN
from bridge_fgo.memory.transfers import CudaTransfers, Lane
from bridge_fgo.offload.policy import HoldPolicy
from bridge_fgo.offload.snapshot import Snapshot
from bridge_fgo.states.distributed import McoreSource
from bridge_fgo.states.inner_step import InnerStep
from harness.arms import gpu

POINTS = {
    "the_offload_begins": (Session, "begin_pass"),
    "memory_goes": (Session, "release"),
    "the_reload_begins": (Session, "reload"),
    "the_update_of_a_part": (InnerStep, "update"),
    "a_part's_copy_to_the_model": (McoreSource, "copy_part"),
    "a_piece_of_a_copy": (Lane, "copy"),
    "a_copy_out": (CudaTransfers, "copy_out"),
    "a_copy_in": (CudaTransfers, "copy_in"),
    "a_release": (CudaTransfers, "release"),
    "a_state_is_handed_to_a_checkpoint": (Snapshot, "hand_out"),
}


def plant(fault: str) -> None:
    """Have an operation of one rank kill the process, or fail, when it is called in a training step or later.

    fault: "point,step,kill|fail,rank".
    """
    point, step, kind, rank = fault.split(",")
    if os.environ["RANK"] != rank:
        return
    owner, name = POINTS[point]
    original, training_step = getattr(owner, name), Session.training_step
    steps = 0

    def counting(*args: Any) -> Any:
        nonlocal steps
        steps += 1
        return training_step(*args)

    def broken(*args: Any, **kwargs: Any) -> Any:
        if steps >= int(step):
            if kind == "kill":
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


def take_out_a_wait(race: str) -> None:
    """Take out a wait that upholds the arm's bits, by a name of `RACES`."""
    for name, without in RACES[race].items():
        setattr(CudaTransfers, name, without)


def allow(nbytes: str) -> None:
    """Have PyTorch take no more than so many bytes, and the margin that "auto" keeps free, of whatever GPU it is."""
    whole = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((int(nbytes) + whole // LEAST_MARGIN) / whole)


FIRST_TOUCHED = 3
"""Steps before the first access: in those everything is offloaded and the memory beside is measured."""


def brief(found: Any) -> Any:
    """Returns what an access has found, of tensors a sum and the first elements, as exact values."""
    if isinstance(found, torch.Tensor):
        return [float(found.double().sum()), found.flatten()[:4].tolist()]
    if isinstance(found, (list, tuple, dict)):
        return [brief(each) for each in (found.values() if isinstance(found, dict) else found)]
    return found


def touch(file: str) -> None:
    """Touch optimizer state after each step, as `tests/test_touches.py` does on the CPU; a file gets what is found."""
    from harness.arms import gpu_recorder

    sys.path.append(str(Path(__file__).parents[1]))

    class Toucher(gpu_recorder.ArmRecorder):
        def on_train_step_end(self, context: Any) -> None:
            from test_touches import ACCESSES

            super().on_train_step_end(context)
            name = dict(enumerate(ACCESSES, FIRST_TOUCHED)).get(self.step)
            if name is None:
                return
            new = SimpleNamespace(model=context.model, optimizer=context.optimizer, cfg=context.state.cfg)
            training = context.user_state.setdefault("touched", new)
            with torch.no_grad():
                found = brief(ACCESSES[name](training))
            with open(file, "a") as lines:
                lines.write(json.dumps([name, found]) + "\n")

    gpu_recorder.ArmRecorder = Toucher  # type: ignore[misc]


def sleep(first: str) -> None:
    """After each step from the `first` on, have the training sleep, overwrite what is free, and wake it."""
    from phases_arm import spoil

    from harness.arms import gpu_recorder

    class Sleeper(gpu_recorder.ArmRecorder):
        def on_train_step_end(self, context: Any) -> None:
            super().on_train_step_end(context)
            if self.step < int(first):
                return
            known = context.user_state
            if "residency" not in known:
                known["residency"] = bridge_fgo.Residency(context.model, context.optimizer)
            known["residency"].offload()
            spoil(2 * int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))  # the resident arm may run beside
            known["residency"].reload()

    gpu_recorder.ArmRecorder = Sleeper  # type: ignore[misc]


def turn(lengths: str) -> None:
    """Have sequences take these lengths in turn, in steps and within them."""
    from lengths import in_turn

    from harness.arms import gpu_recorder

    timed, each = gpu_recorder.ArmRecorder.timed, [int(length) for length in lengths.split(",")]
    gpu_recorder.ArmRecorder.timed = lambda recorder, step: timed(recorder, in_turn(step, each))  # type: ignore[method-assign]


def release_throughout(_: str) -> None:
    """Have the engine measure, but go by no plan."""
    HoldPolicy.plans_for = lambda policy, kind: []  # type: ignore[method-assign]


def spread_sequences(ranks: str) -> None:
    """Train with context parallelism, by an attention that needs no cuDNN."""
    from gathered_attention import gathered_attention_spec

    build = gpu.build_config

    def spread(options: Any) -> Any:
        config = build(options)
        config.model.context_parallel_size, config.model.transformer_layer_spec = int(ranks), gathered_attention_spec
        return config

    gpu.build_config = spread


CHANGES = {
    "FAULT": plant, "RACE": take_out_a_wait, "ALLOWED_BYTES": allow, "TOUCHED": touch,
    "SLEEP_FROM_STEP": sleep, "LENGTHS": turn, "RELEASED_THROUGHOUT": release_throughout,
    "CONTEXT_PARALLEL": spread_sequences,
}  # fmt: skip
"""The change that each environment variable asks for; it is called with the variable's value."""


if __name__ == "__main__":
    for variable, change in CHANGES.items():
        if variable in os.environ:
            change(os.environ[variable])
    gpu.main()
