"""Which of the optimizers that Bridge builds can be offloaded: chains, MIMO, stubs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from bridge_fgo.bridge.refusals import FLAG_TEXT, FP8_MOMENTS, HYBRID, STEP_IN_GRAPH, Asked, refuse, told
from bridge_fgo.states.choice import leaves
from bridge_fgo.states.distributed import MOMENTS, is_adam
from bridge_fgo.states.float16 import is_muon
from bridge_fgo.states.fsdp import BUFFER, is_fsdp


def eligible(optimizer: Any) -> list[Any]:
    """Return the optimizers under `optimizer` whose states can be offloaded, of the classes that `source_of` takes.

    Stub optimizers of frozen sub-models are skipped; a rank on which all are stubs gives an empty list.

    Raises:
        ValueError: an optimizer cannot be offloaded, or there is none at all; says which setting to change.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    found, all_leaves = [], list(leaves(optimizer))
    for leaf in all_leaves:
        if getattr(leaf, "is_stub_optimizer", False):
            continue
        if not isinstance(leaf, (DistributedOptimizer, Float16OptimizerWithFloat16Params)):
            raise ValueError(
                f"{FLAG_TEXT} with a {type(leaf).__name__}: only mcore's DistributedOptimizer and "
                "Float16OptimizerWithFloat16Params can be offloaded; set optimizer.use_distributed_optimizer=True and "
                "optimizer.optimizer='adam', or train in bf16"
            )
        check_inner(leaf)
        found.append(leaf)
    if not all_leaves and not getattr(optimizer, "is_stub_optimizer", False):
        raise ValueError(
            f"{FLAG_TEXT}, but there is no DistributedOptimizer or Float16OptimizerWithFloat16Params to attach to; set "
            "optimizer.use_distributed_optimizer=True, or leave the flag unset"
        )
    return found


def check_inner(leaf: Any) -> None:
    """Raise ValueError where the optimizer inside of one is not an Adam on the GPU, nor one of mcore's Muons."""
    from megatron.core.optimizer import distrib_optimizer

    chunks = leaf.model_chunks if is_fsdp(leaf) else []
    if not all(hasattr(getattr(chunk, BUFFER, None), "parameter_groups") for chunk in chunks):
        raise ValueError(
            f"{FLAG_TEXT} with ddp.use_megatron_fsdp=True and a {type(chunks[0]).__name__} without parameter groups: "
            "only the first version of Megatron-FSDP can be offloaded; use that, or leave the flag unset"
        )
    inner = leaf.optimizer
    sections = SimpleNamespace(optimizer=leaf.config, ddp=getattr(leaf, "ddp_config", None))
    refuse(told([HYBRID, STEP_IN_GRAPH], Asked(sections)))
    if is_muon(inner) and not isinstance(leaf, distrib_optimizer.DistributedOptimizer):
        return
    if not is_adam(inner):
        raise ValueError(
            f"{FLAG_TEXT} with {type(inner).__name__}: only the states of Adam and Muon can be offloaded; set "
            "optimizer.optimizer='adam' (of Muon's scalar parameters optimizer.muon_scalar_optimizer='adam') or leave "
            "the flag unset"
        )
    dtypes = getattr(inner, "name_to_dtype_map", {})
    built = SimpleNamespace(**{f"{moment}_dtype": dtypes.get(moment) for moment in MOMENTS})
    refuse(told(FP8_MOMENTS, Asked(SimpleNamespace(optimizer=built))))
    if getattr(inner, "capturable", False):
        raise ValueError(
            f"{FLAG_TEXT} with a {type(inner).__name__} of capturable=True: a graph would have the states' addresses "
            "baked in; make it with capturable=False (optimizer.optimizer_cuda_graph=False)"
        )


def stage_of(distributed: list[Any]) -> int | None:
    """Return this rank's place in the pipeline of the model that its optimizers train; None where none says it.

    By DDP's own group: with `dist.use_decentralized_pg` mcore's global state is never set up.
    """
    from megatron.core import parallel_state

    for chunk in (chunk for leaf in distributed for chunk in getattr(leaf, "model_chunks", ())):
        group = getattr(chunk, "pp_group", None)
        if group is not None:
            return (group[0] if isinstance(group, list) else group).rank()
    return parallel_state.get_pipeline_model_parallel_rank() if parallel_state.is_initialized() else None
