"""Which of the optimizers that Bridge builds can be offloaded: chains, MIMO, stubs."""

from __future__ import annotations

from typing import Any

from bridge_fgo.bridge.refusals import FLAG_TEXT
from bridge_fgo.sleep.refusals import described, refusal_of
from bridge_fgo.states.choice import leaves
from bridge_fgo.states.fsdp import BUFFER, is_fsdp


def eligible(optimizer: Any) -> list[Any]:
    """Return the optimizers under `optimizer` whose states can be offloaded, of the classes that `source_of` takes.

    Stub optimizers of frozen sub-models are skipped; a rank on which all are stubs gives an empty list. ValueError
    where one cannot be offloaded, or there is none at all; it says which setting to change.
    """
    found, all_leaves = [], list(leaves(optimizer))
    for leaf in all_leaves:
        if getattr(leaf, "is_stub_optimizer", False):
            continue
        if why := refusal_of(leaf, takes_fsdp=True) or _refusal_of_models(leaf):
            raise ValueError(f"{FLAG_TEXT} with {described(leaf)}: {why}, or leave the flag unset")
        found.append(leaf)
    if not all_leaves and not getattr(optimizer, "is_stub_optimizer", False):
        raise ValueError(
            f"{FLAG_TEXT}, but there is no DistributedOptimizer or Float16OptimizerWithFloat16Params to attach to; set "
            "optimizer.use_distributed_optimizer=True, or leave the flag unset"
        )
    return found


def _refusal_of_models(leaf: Any) -> str:
    for chunk in leaf.model_chunks if is_fsdp(leaf) else ():
        if not hasattr(getattr(chunk, BUFFER, None), "parameter_groups"):
            return (
                f"ddp.use_megatron_fsdp=True and a {type(chunk).__name__} without parameter groups: only the first "
                "version of Megatron-FSDP can be offloaded; use that"
            )
    return ""


def stage_of(distributed: list[Any]) -> int | None:
    """Return this rank's place in its model's pipeline, by DDP's group, or by mcore's global state; None for none."""
    from megatron.core import parallel_state

    for chunk in (chunk for leaf in distributed for chunk in getattr(leaf, "model_chunks", ())):
        group = getattr(chunk, "pp_group", None)
        if group is not None:
            return (group[0] if isinstance(group, list) else group).rank()
    return parallel_state.get_pipeline_model_parallel_rank() if parallel_state.is_initialized() else None
