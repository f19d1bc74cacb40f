"""Which of the optimizers that Bridge builds can be offloaded: chains, MIMO, stubs."""

from typing import Any

from bridge_fgo.bridge.refusals import FLAG_TEXT
from bridge_fgo.sleep.refusals import accepted
from bridge_fgo.states.choice import leaves


def eligible(optimizer: Any) -> list[Any]:
    """Return the optimizers under `optimizer` whose states can be offloaded.

    Stub optimizers of frozen sub-models are skipped; a rank on which all are stubs gets an empty list.

    Raises:
        ValueError: one cannot be offloaded, or there is none at all; says which setting to change.
    """
    found = list(leaves(optimizer))
    if not found and not getattr(optimizer, "is_stub_optimizer", False):
        raise ValueError(
            f"{FLAG_TEXT}, but there is no DistributedOptimizer or Float16OptimizerWithFloat16Params to attach to; set "
            "optimizer.use_distributed_optimizer=True, or leave the flag unset"
        )
    return accepted(found, FLAG_TEXT, "leave the flag unset", takes_fsdp=True)


def stage_of(distributed: list[Any]) -> int | None:
    """Return this rank's place in its model's pipeline, by DDP's group, or by mcore's global state; None for none."""
    from megatron.core import parallel_state

    for chunk in (chunk for leaf in distributed for chunk in getattr(leaf, "model_chunks", ())):
        group = getattr(chunk, "pp_group", None)
        if group is not None:
            return (group[0] if isinstance(group, list) else group).rank()
    return parallel_state.get_pipeline_model_parallel_rank() if parallel_state.is_initialized() else None
