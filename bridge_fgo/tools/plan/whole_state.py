"""The optimizer states of a rank that updates whole parameters: Muon, and Adam without a DistributedOptimizer.

mcore makes an optimizer of the matrices that Muon updates, and an Adam of the rest, and one more of each for experts.
Under a LayerWiseDistributedOptimizer each rank keeps some of the parameters; without it every rank keeps all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from bridge_fgo.bridge.refusals import LAYER_WISE, MUONS
from bridge_fgo.config import OffloadConfig
from bridge_fgo.states.float16 import Float16Source
from bridge_fgo.tools.job.parallel import Parallel
from bridge_fgo.tools.job.tensors import Tensor
from bridge_fgo.tools.plan.state import StateBytes, sum_of


class TensorParallelMuon:
    """Has what the engine's layout reads of mcore's Muon, which it knows by the name of the class."""

    step = None

    def __init__(self, params: list[torch.Tensor], moment2_method: str | None) -> None:
        self.param_groups = [{"params": params}]
        self.state: dict[torch.Tensor, Any] = {}
        self.moment2_method = moment2_method


def updates_whole_parameters(optimizer: Any, ddp: Any) -> bool:
    """Return whether a job's states are of whole parameters.

    Raises:
        ValueError: they are of an optimizer that is neither Adam nor Muon.
    """
    name, scalar = getattr(optimizer, "optimizer", "adam"), getattr(optimizer, "muon_scalar_optimizer", "adam")
    if name not in ("adam", *MUONS):
        raise ValueError(f"optimizer.optimizer={name!r}: the plan knows the states of Adam and Muon alone")
    if name != "adam" and scalar != "adam":
        raise ValueError(
            f"optimizer.muon_scalar_optimizer={scalar!r}: the plan knows the states of Adam and Muon alone"
        )
    return name != "adam" or not ddp.use_distributed_optimizer


def is_layer_wise(optimizer: Any) -> bool:
    """Return whether each rank keeps some of the parameters, by mcore's LayerWiseDistributedOptimizer."""
    named = getattr(optimizer, "optimizer", "adam") in LAYER_WISE
    return named or getattr(optimizer, "use_layer_wise_distributed_optimizer", False) is True


def kept_by(rank: int, tensors: list[Tensor], optimizer: Any, parallel: Parallel) -> list[Tensor]:
    """Return the parameters of a stage that one of its ranks updates.

    Layer-wise, mcore deals them out from the smallest to the largest, to the ranks forth and back. It sorts parameters
    of one size in an order that is not known here, so that matrices come first.
    """
    trainable = [tensor for tensor in tensors if tensor.trainable]
    if not is_layer_wise(optimizer) or parallel.shards(expert=False) == 1:
        return trainable
    kept = []
    for expert in (False, True):
        shards, index = parallel.shards(expert), parallel.shard_index(rank, expert)
        dealt = itertools.cycle([*range(shards), *reversed(range(shards))])
        ordered = sorted(
            (tensor for tensor in trainable if tensor.expert is expert),
            key=lambda tensor: (tensor.numel, not tensor.matrix),
        )
        kept += [tensor for tensor, to in zip(ordered, dealt, strict=False) if to == index]
    return kept


def whole_state_bytes(tensors: list[Tensor], optimizer: Any, config: OffloadConfig) -> StateBytes:
    """Return the states of the rank that updates the given parameters.

    Args:
        tensors: trainable ones.
        optimizer: Bridge's OptimizerConfig.
        config: what is offloaded.
    """
    sources = [Float16Source(of_mcore) for of_mcore in _optimizers(tensors, optimizer)]
    return sum_of(((source.states(), source.writes_back_by_part) for source in sources), config)


def _optimizers(tensors: list[Tensor], config: Any) -> Iterator[SimpleNamespace]:
    """Yield what the engine's layout reads of each Float16OptimizerWithFloat16Params, as mcore would build them."""
    has_muon = config.optimizer != "adam"
    groups: dict[tuple[bool, bool], list[Tensor]] = {}
    for tensor in tensors:
        # A layer-wise optimizer has one of each for dense and expert parameters alike.
        key = (has_muon and tensor.matrix, tensor.expert and not is_layer_wise(config))
        groups.setdefault(key, []).append(tensor)
    is_adaptive = config.optimizer.endswith("adaptive_muon")
    for (by_muon, _), of_group in groups.items():
        params, masters, models = [], [], []
        for tensor in of_group:
            model = torch.empty(tensor.numel, dtype=tensor.dtype, device="meta")
            params.append(model if tensor.dtype == torch.float32 else model.float())
            if tensor.dtype != torch.float32:
                masters.append(params[-1])
                models.append(model.to(torch.uint8) if tensor.quantized else model)
        method = getattr(config, "adaptive_muon_moment2_method", "adamuon") if is_adaptive else None
        adam = SimpleNamespace(param_groups=[{"params": params}], state={}, step=None)
        yield SimpleNamespace(
            optimizer=TensorParallelMuon(params, method) if by_muon else adam,
            fp32_from_float16_groups=[masters],
            float16_groups=[models],
        )
