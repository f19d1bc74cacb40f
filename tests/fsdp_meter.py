"""Measures the device memory of a load under Megatron-FSDP, without weights and gradients, on each rank."""

from __future__ import annotations

import contextlib
import dataclasses
import json

import fused_adam
import rank_child
import torch
from saving import load
from storage_meter import StorageMeter

import bridge_fgo
from bridge_fgo.bridge.session import all_sessions
from bridge_fgo.memory import layout
from bridge_fgo.memory.state import local
from bridge_fgo.states.fsdp import parameter_groups
from bridge_fgo.tools.arms.cpu_model import microbatches
from bridge_fgo.tools.arms.cpu_training import CpuOptions
from bridge_fgo.tools.arms.final_state import mcore_optimizers

SMALL = {"fsdp": "optim_grads_params", "layers": 8, "hidden": 64}
"""A part is a layer: ten of them and more, of which no two are a fifth of the states."""
PART_BYTES = 64 * 1024
SCALARS = 4 * 1024
"""Bytes for counts, sums and norms."""


@contextlib.contextmanager
def metered(run):
    """Context in which the most bytes of states on the device, and of what is made beside them, are counted."""
    known, states = [], []
    for leaf in mcore_optimizers(run.optimizer):
        for group in parameter_groups(leaf):
            for name, value in vars(group).items():
                data = getattr(value, "data", None)
                if not isinstance(value, torch.Tensor) and isinstance(data, torch.Tensor):
                    (states if name == "main_weight_buffer" else known).append(data)
        moments = [value for of_param in leaf.optimizer.state.values() for value in of_param.values()]
        states += [local(value) for value in moments if isinstance(value, torch.Tensor)]
    masters = {tensor.untyped_storage()._cdata for tensor in states}
    weights = [local(parameter) for chunk in run.model for parameter in chunk.parameters()]
    known += [weight for weight in weights if weight.untyped_storage()._cdata not in masters]
    with StorageMeter(known, states) as meter:
        meter.look()
        yield meter


def engine():
    """The engine of the one session there is."""
    (session,) = all_sessions()
    return session.engine


def two_parts():
    """Most bytes of states that a load may have on the device."""
    return 2 * max(part.nbytes for part in engine().schedule.parts) + SCALARS


def load_on_rank(rank: int, job: rank_child.Job) -> None:
    """Load as a rank of a training and train on; leave the peak, what was allowed, numbers and digests."""
    fused_adam.have_mcore_take_it(setattr)
    layout.LEAST_PART_BYTES = PART_BYTES
    options = CpuOptions(offload=job.offload, **job.changes)
    config = bridge_fgo.OffloadConfig(engine="native")
    installed = bridge_fgo.install(config) if job.offload else contextlib.nullcontext()
    with installed, rank_child.Rank(options, rank, job) as run:
        run._batches.iterable = microbatches(dataclasses.replace(options, seed=options.seed + rank))
        with metered(run) as meter:
            load(run, job.loads)
        seen = {"peak": meter.peak, "allowed": two_parts() if job.offload else 0, "held": run.live_state_bytes()}
        seen["state_bytes"] = engine().state_bytes if job.offload else 0
        records = [run.step() for _ in range(job.steps)]
        seen |= {"numbers": [(r.loss, r.grad_norm) for r in records], "digests": run.digests()}
        (job.folder / f"{rank}.json").write_text(json.dumps(seen))
