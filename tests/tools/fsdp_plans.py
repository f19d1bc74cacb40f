"""Plans a CPU training under Megatron-FSDP, and counts what the training holds."""

from __future__ import annotations

import dataclasses
import json

import rank_child
import torch
from rank_child import Job, Rank

import bridge_fgo
from bridge_fgo.config import OffloadConfig
from bridge_fgo.states.fsdp import parameter_groups
from bridge_fgo.tools.arms.cpu_model import microbatches
from bridge_fgo.tools.arms.cpu_training import CpuOptions
from bridge_fgo.tools.job.builder import add_what_fsdp_asks, tensor_of
from bridge_fgo.tools.job.parallel import Parallel
from bridge_fgo.tools.job.tensors import Tensor
from bridge_fgo.tools.plan.fsdp_layout import groups_of, sharding_of
from bridge_fgo.tools.plan.fsdp_state import fsdp_state_bytes, fsdp_weights


def tensors_of(run):
    """Return the tensors of the model as the builder tells them, which has it in no wrapper."""
    (fsdp,) = (chunk.module for chunk in run.model)
    fsdp._replace_param_with_raw_if_needed()
    found = [tensor_of(name, param, False) for name, param in fsdp.module.named_parameters()]
    add_what_fsdp_asks(fsdp.module, found, run.cfg.ddp)
    return [Tensor(**{**one, "dtype": getattr(torch, one["dtype"])}) for one in found]


def planned_and_found(run, rank=0, ranks=1):
    """Return, of a rank that has stepped with and without states away, what is planned, and what is there."""
    cfg, parallel = run.cfg, Parallel(ranks, 1, 1, 1, 1, 1, run.options.instances)
    sharding = sharding_of(cfg.ddp, parallel)
    groups = groups_of(tensors_of(run), True, cfg.ddp, parallel)
    index = sharding.index(parallel, rank, False) if sharding.states else 0
    states = fsdp_state_bytes([groups], (index, index), cfg.optimizer, cfg.ddp, parallel, OffloadConfig())
    weights = fsdp_weights([groups], cfg.optimizer, cfg.ddp, parallel, False)
    stats = bridge_fgo.stats()
    planned = {
        "masters": states.masters,
        "moments": states.moments,
        "offloaded": states.offloaded,
        "parameters": weights.parameters,
        "gradients": weights.gradients,
    }
    real = parameter_groups(run.optimizer)
    padding = sum(group.main_weight_buffer.data.nbytes for group in real) - sum(
        param._local_tensor.nbytes for group in run.optimizer.optimizer.param_groups for param in group["params"]
    )
    kept = {
        name: sum(_nbytes(getattr(group, helper), getattr(group, of)) for group in real)
        for name, of, helper in (
            ("parameters", "model_weight_buffer", "hfsdp_helper_wbuf"),
            ("gradients", "main_grad_buffer", "hfsdp_helper_gbuf"),
        )
    }
    if kept["parameters"] == 0:  # no_shard leaves the model's own parameters alone
        kept["parameters"] = sum(param.nbytes for group in real for param in group.params)
    found = {
        "masters": sum(group.main_weight_buffer.data.nbytes for group in real),
        "moments": stats.state_bytes + padding - sum(group.main_weight_buffer.data.nbytes for group in real),
        "offloaded": stats.offloaded_bytes + padding,
        **kept,
    }
    return planned, found, padding


def _nbytes(helper, buffer):
    """Return the bytes of the buffer that has the memory; the other, where there are both, is a view of it."""
    buffer = helper or buffer
    return 0 if buffer is None else buffer.data.nbytes


def train_and_plan(rank, job: Job):
    """Run as a rank of a training with all states away; leave what is planned and what is there in `<rank>.json`."""
    options = CpuOptions(offload=True, **job.changes)
    config = dataclasses.replace(rank_child.CONFIG, master_remainders=None)
    with bridge_fgo.install(config), Rank(options, rank, job) as run:
        run._batches.iterable = microbatches(dataclasses.replace(options, seed=options.seed + rank))
        for _ in range(job.steps):
            run.step()
        (job.folder / f"{rank}.json").write_text(json.dumps(planned_and_found(run, rank, job.ranks)))
