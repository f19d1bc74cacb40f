"""What training left behind on a GPU rank: parameters, master weights and moments, and their digests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from bridge_fgo.harness.record import digest

if TYPE_CHECKING:
    import torch


def distributed_optimizers(optimizer: Any) -> Iterator[Any]:
    """Yield every DistributedOptimizer that an optimizer is or chains, in order."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if isinstance(optimizer, DistributedOptimizer):
        yield optimizer
    for child in getattr(optimizer, "chained_optimizers", ()):
        yield from distributed_optimizers(child)


def final_state(model: Sequence[Any], optimizer: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Return this rank's parameters, master weights and moments, each by name.

    Masters are the inner optimizer's parameters, or their `master_param` states (fp32,
    or int16 remainders) where the precision-aware optimizer holds them. Looks for them
    itself instead of asking the package: what is compared should not depend on what is
    being tested.

    Raises:
        RuntimeError: a tensor's memory is released, or there are no masters or moments: equal digests of nothing would
            prove nothing.
    """
    state: dict[str, dict[str, torch.Tensor]] = {"params": {}, "masters": {}, "moments": {}}
    for chunk, module in enumerate(model):
        for name, parameter in module.named_parameters():
            state["params"][f"{chunk}.{name}"] = parameter
    for number, distributed in enumerate(distributed_optimizers(optimizer)):
        if hasattr(distributed, "synchronize_optimizer_state_for_checkpoint"):
            distributed.synchronize_optimizer_state_for_checkpoint()  # mcore generation 2
        inner = distributed.optimizer
        if inner is None:  # a rank with nothing to train
            continue
        for group, parameters in enumerate(inner.param_groups):
            for index, parameter in enumerate(parameters["params"]):
                name = f"{number}.{group}.{index}"
                states = inner.state.get(parameter, {})
                state["masters"][name] = states.get("master_param", parameter)
                for key in ("exp_avg", "exp_avg_sq"):
                    if key in states:
                        state["moments"][f"{name}.{key}"] = states[key]
    for part, tensors in state.items():
        if not tensors:
            raise RuntimeError(f"found no {part} to compare after training")
        for name, tensor in tensors.items():
            end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
            if tensor.untyped_storage().nbytes() < end:
                raise RuntimeError(f"{part} {name} has no memory after training: it is still released")
    return state


def of_ranks(mine: Any) -> list[Any]:
    """Gather an object of each rank; return them in the order of ranks. Collective; all ranks get them."""
    import torch

    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, mine)
    return every


def joined_digests(state: dict[str, dict[str, torch.Tensor]]) -> dict[str, str]:
    """Return one digest for each part of the state, over all ranks. Collective; all ranks get it."""
    mine = {part: digest(tensors) for part, tensors in state.items()}
    every = of_ranks(mine)
    if len(every) == 1:
        return mine
    return {part: hashlib.sha256("".join(rank[part] for rank in every).encode()).hexdigest() for part in mine}
