"""What the ranks of a pipeline stage hold, by mcore's own wrapper and optimizer on torch's meta device.

Bridge wraps the model chunks and builds their optimizer as `pretrain()` does; the engine's own sources say which states
there are. Runs in the builder, whose process groups do nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from copy import copy
from typing import Any
from unittest import mock

import torch

from bridge_fgo.bridge.compat import FLAG
from bridge_fgo.states.choice import leaves
from bridge_fgo.tools.job.held import FP8_BYTES, MXFP8_BYTES, Held, OptimizerStates, states_of
from bridge_fgo.tools.job.parallel import Parallel
from bridge_fgo.tools.standins import te_shapes


def held_in_ddp(config: Any, chunks: list[Any], groups: Any, parallel: Parallel) -> Held:
    """Return what the ranks of a pipeline stage hold.

    Args:
        config: Bridge's.
        chunks: the stage's model chunks, which are wrapped in place.
        groups: the process groups that they were built with.
        parallel: how many ranks share what.
    """
    from megatron.bridge.models.model_provider import _ddp_wrap
    from megatron.bridge.training.optim import setup_optimizer

    ddp, settings = copy(config.ddp), copy(config.optimizer)  # both are changed
    setattr(settings, FLAG, False)
    early = settings.overlap_param_gather_with_optimizer_step
    wrapped = _ddp_wrap(chunks, False, ddp, early, pg_collection=groups)
    optimizers: list[OptimizerStates] = []
    known: dict[tuple[int, int], list[int]] = {}
    ranks = []
    for rank in range(parallel.stage_ranks):
        shards = parallel.shard_index(rank, expert=False), parallel.shard_index(rank, expert=True)
        if shards not in known:
            with as_shards(groups, *shards):
                optimizer, _ = setup_optimizer(settings, config.scheduler, wrapped)
            known[shards] = [_number(optimizers, states) for states in states_of_leaves(optimizer)]
        ranks.append(known[shards])
    return held_of(config.model, wrapped, optimizers, ranks)


def held_of(model: Any, wrapped: list[Any], optimizers: list[OptimizerStates], ranks: list[list[int]]) -> Held:
    """Return what ranks hold of model chunks in DDP.

    Args:
        model: Bridge's config of the model.
        wrapped: the model chunks.
        optimizers: the states of their optimizers, each once.
        ranks: which of them each rank has.
    """
    buffers = [buffer for chunk in wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    shares = [
        (itemsize, buffer.numel * itemsize, _shard_numel(buffer) * itemsize)
        for buffer in buffers
        for itemsize in [buffer.param_dtype.itemsize]
    ]
    gradients = sum(buffer.grad_data.nbytes for buffer in buffers)
    return Held(_parameter_bytes(model, wrapped, buffers), gradients, 0, 0, shares, optimizers, ranks)


def states_of_leaves(optimizer: Any) -> Iterator[OptimizerStates]:
    """Yield the states of each optimizer within one of mcore's."""
    from bridge_fgo.states.choice import source_of

    for leaf in leaves(optimizer):
        if leaf.optimizer is not None and not getattr(leaf, "is_stub_optimizer", False):
            source = source_of(leaf)
            yield states_of(source.writes_back_by_part, source.states())


def _number(known: list[OptimizerStates], states: OptimizerStates) -> int:
    if states not in known:
        known.append(states)
    return known.index(states)


@contextlib.contextmanager
def as_shards(groups: Any, dense: int, expert: int) -> Iterator[None]:
    """Context in which this process is a certain rank of the groups over which optimizers spread states.

    What ranks gather of each other is alike: they have the same parameters.

    Args:
        groups: Megatron's ProcessGroupCollection.
        dense: the rank in those of dense parameters.
        expert: the rank in those of experts.
    """
    spread = {groups.dp_cp: dense, groups.intra_dp_cp: dense, groups.expt_dp: expert, groups.intra_expt_dp: expert}
    own_rank = torch.distributed.ProcessGroup.rank

    def rank(group: torch.distributed.ProcessGroup) -> int:
        return spread[group] if group in spread else own_rank(group)

    def gather(answers: list[Any], own: Any, group: Any = None) -> None:
        answers[:] = [own] * len(answers)

    with (
        mock.patch.object(torch.distributed.ProcessGroup, "rank", rank),
        mock.patch.object(torch.distributed, "all_gather_object", gather),
    ):
        yield


def _parameter_bytes(model: Any, wrapped: list[Any], buffers: list[Any]) -> int:
    """Return the bytes of a rank's parameters: DDP's buffers, and those that do not train."""
    params = [param for chunk in wrapped for param in chunk.parameters()]
    found = sum(param.nbytes for param in params if not param.requires_grad)
    for buffer in buffers:
        if not any(map(te_shapes.is_quantized, buffer.params)):
            found += buffer.numel * buffer.params[0].dtype.itemsize
        elif getattr(model, "fp8_recipe", None) == "mxfp8":
            found += int(sum(param.numel() for param in buffer.params) * MXFP8_BYTES)  # in no buffer
        else:
            found += buffer.numel * FP8_BYTES
    return found


def _shard_numel(buffer: Any) -> int:
    """Return the elements of a rank's share of each bucket, padding included."""
    return sum(bucket.grad_data.numel() // buffer.data_parallel_world_size for bucket in buffer.buckets)
