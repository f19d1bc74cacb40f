"""What a `Residency` cannot move, refused by name before anything moves."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bridge_fgo.engines.gradients import buckets_of
from bridge_fgo.engines.lease import EngineLease, lease_of, shareable_leases
from bridge_fgo.engines.native import NativeEngine
from bridge_fgo.memory.guard import class_of
from bridge_fgo.states.choice import leaves
from bridge_fgo.states.distributed import MOMENTS, is_adam
from bridge_fgo.states.float16 import is_muon
from bridge_fgo.states.fsdp import BUFFER, is_fsdp

PLAIN = (torch.Tensor, torch.nn.Parameter)


def refuse_models(chunks: Sequence[torch.nn.Module]) -> None:
    """Raise ValueError if there are no model chunks, or their buffers cannot be emptied; name what to change."""
    if not chunks:
        raise ValueError("Residency(model=[]): pass the model chunks, as get_model returned them")
    for chunk in chunks:
        for refusal in _refusals(chunk):
            raise ValueError(refusal)


def _refusals(chunk: torch.nn.Module) -> Iterator[str]:
    for module in chunk.modules():
        if any(name in type(module).__name__ for name in ("FullyShardedDataParallel", "MegatronFSDP")):
            yield (
                f"Residency over a {type(module).__name__}: it manages parameters itself; set "
                "ddp.use_megatron_fsdp=False and dist.use_torch_fsdp2=False"
            )
        config = getattr(module, "config", None)  # a vision model inside has one of its own
        implementation = getattr(config, "cuda_graph_impl", None)
        if implementation not in (None, "none"):
            yield (
                f"Residency over a {type(module).__name__} with model.cuda_graph_impl={implementation!r} (of a vision "
                "model, model.vision_cuda_graph_impl): a graph has the addresses of parameters and gradients baked in, "
                "which are others after a wake; set it to 'none'"
            )
        for kind in ("", "expert_"):
            if (ranks := getattr(config, f"{kind}gtp_weight_remat_size", 1)) > 1:
                yield (
                    f"Residency with model.{kind}gtp_weight_remat_size={ranks}: Generalized Tensor Parallelism caches "
                    f"weights that it has gathered; set it to 1 and model.{kind}tensor_parallel_num_weight_shards=None"
                )
    ddps = ddp_of(chunk)
    for settings in (ddp.ddp_config for ddp in ddps):
        if settings.overlap_param_gather and not settings.use_distributed_optimizer:
            yield (
                "Residency with ddp.overlap_param_gather=True under a layer-wise optimizer (its "
                "ddp.use_distributed_optimizer=False): until the forward after a step this rank has the old weights of "
                "other ranks, and the new ones come by the gradients' memory; set ddp.overlap_param_gather=False"
            )
    for buffer in (buffer for ddp in ddps for buffer in ddp.buffers + ddp.expert_parallel_buffers):
        yield from _buffer_refusals(buffer)
    in_ddp = {id(parameter) for ddp in ddps for parameter in ddp.parameters()}
    for name, parameter in chunk.named_parameters():
        if id(parameter) not in in_ddp and hasattr(parameter, "main_grad"):  # to ask allocates it, if it is managed
            yield (
                f"Residency(model={type(chunk).__name__}): parameter {name!r} is in a DDP that was not "
                "passed, which has its gradients: pass the DDP, as get_model returned it"
            )
        if parameter.numel() and class_of(parameter) in PLAIN and not parameter.untyped_storage().nbytes():
            yield (
                f"Residency over parameter {name!r}, whose memory is away: another Residency, or mcore's "
                "offload_to_cpu, has it; bring it back first, and make one Residency for a model"
            )


def _buffer_refusals(buffer: Any) -> Iterator[str]:
    """Yield why one of mcore's `_ParamAndGradBuffer`s cannot be emptied."""
    if getattr(buffer, "nccl_ub", False):
        yield (
            "Residency with ddp.nccl_ub=True: the buffers are registered with NCCL, and memory that is taken on a "
            "wake would not be; set ddp.nccl_ub=False"
        )
    if getattr(buffer, "shared_buffer", None) is not None:
        yield (
            "Residency with MXFP8 parameters in a buffer that gradients share (ddp.fp8_param_gather=True, "
            "optimizer.reuse_grad_buf_for_mxfp8_param_ag): the real weights lie in Transformer Engine's tensors, which "
            "are not offloaded yet; set ddp.fp8_param_gather=False"
        )
    if not buckets_of(buffer) and not buffer.grad_data.untyped_storage().nbytes():
        yield (
            "Residency over gradients whose memory is away: mcore's offload_to_cpu, or a framework's own function, has "
            "it; bring it back first"
        )


def ddp_of(chunk: torch.nn.Module) -> list[Any]:
    """Return mcore's DDP wrappers that a chunk is or has inside."""
    return [module for module in chunk.modules() if isinstance(vars(module).get("expert_parallel_buffers"), list)]


# Optimizers.


def movable_optimizers(optimizer: Any) -> list[Any]:
    """Return mcore's optimizers with states under an optimizer, for a `Residency`; stubs are skipped.

    Raises:
        ValueError: as `accepted`, or something is no optimizer of mcore's.
    """
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    found = list(leaves(optimizer)) if hasattr(optimizer, "__dict__") else [optimizer]
    otherwise = "pass optimizer=None to move parameters and gradients alone"
    for leaf in found:
        if not isinstance(leaf, MegatronOptimizer):
            raise ValueError(
                f"Residency(optimizer={type(leaf).__name__}): pass mcore's optimizer, which get_megatron_optimizer "
                f"returned and the training loop steps, or {otherwise}"
            )
    return accepted(found, "Residency", otherwise)


def accepted(optimizers: Sequence[Any], asker: str, otherwise: str, takes_fsdp: bool = False) -> list[Any]:
    """Return the optimizers that are no stubs.

    Raises:
        ValueError: the states of one cannot be offloaded (see `refusal_of`). The text begins with `asker`, and ends
            with `otherwise`, what else to do.
    """
    found = [leaf for leaf in optimizers if not getattr(leaf, "is_stub_optimizer", False)]
    for leaf in found:
        if why := refusal_of(leaf, takes_fsdp):
            classes = f"a {type(leaf).__name__} over a {type(getattr(leaf, 'optimizer', None)).__name__}"
            raise ValueError(f"{asker} with {classes}: {why}, or {otherwise}")
    return found


def refusal_of(leaf: Any, takes_fsdp: bool = False) -> str:
    """Return why the states of an optimizer cannot be offloaded, and what to change; empty if they can be.

    They can be of a DistributedOptimizer over Adam, and of a Float16OptimizerWithFloat16Params over Adam or Muon; with
    Megatron-FSDP only if `takes_fsdp`.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    if not isinstance(leaf, (DistributedOptimizer, Float16OptimizerWithFloat16Params)):
        return (
            "only mcore's DistributedOptimizer and Float16OptimizerWithFloat16Params can be offloaded; set "
            "optimizer.use_distributed_optimizer=True and optimizer.optimizer='adam', or train in bf16"
        )
    inner = leaf.optimizer
    if is_fsdp(leaf) and not takes_fsdp:
        return "Megatron-FSDP manages its states itself; set ddp.use_megatron_fsdp=False"
    if type(inner).__name__ == "HybridDeviceOptimizer":
        return "it keeps states on the CPU already; set optimizer.optimizer_cpu_offload=False"
    if not (is_adam(inner) or (is_muon(inner) and not isinstance(leaf, DistributedOptimizer))):
        return (
            "only the states of Adam and Muon can be offloaded; set optimizer.optimizer='adam' (of Muon's scalar "
            "parameters optimizer.muon_scalar_optimizer='adam')"
        )
    dtypes = getattr(inner, "name_to_dtype_map", {})
    for name in MOMENTS:
        if name in dtypes and dtypes[name].itemsize < 2:
            return (
                f"optimizer.{name}_dtype={dtypes[name]}: FP8 moments have scales of their own and cannot be offloaded; "
                f"set optimizer.{name}_dtype=torch.bfloat16"
            )
    if getattr(inner, "capturable", False) or getattr(leaf.config, "optimizer_cuda_graph", False):
        return (
            "it steps in a CUDA graph (optimizer.optimizer_cuda_graph=True, or capturable=True of its own), which has "
            "the states' addresses baked in; set optimizer.optimizer_cuda_graph=False, or make it with capturable=False"
        )
    for chunk in getattr(leaf, "model_chunks", ()) if is_fsdp(leaf) else ():
        if not hasattr(getattr(chunk, BUFFER, None), "parameter_groups"):
            return (
                f"ddp.use_megatron_fsdp=True and a {type(chunk).__name__} without parameter groups: only the first "
                "version of Megatron-FSDP can be offloaded; use that"
            )
    return ""


def shared_lease(optimizers: Sequence[Any]) -> EngineLease | None:
    """Return the lease of the optimizers of this rank that training steps own, if there is one.

    Raises:
        ValueError: its engine is of another kind, or it has a `Residency` already; or there are several leases; or the
            flag is set, and none was made yet.
    """
    leases = shareable_leases(optimizers, "Residency(model, optimizer)")
    if not leases:
        if any(getattr(leaf.config, "offload_optimizer_states", False) for leaf in optimizers):
            raise ValueError(
                "optimizer.offload_optimizer_states=True, but no engine is attached to the optimizer: in a loop of "
                "your own unset the flag and use `res.training_step()` of this Residency; in Bridge's call "
                "bridge_fgo.install() before its setup, and make Residency after it"
            )
        return None
    if len(leases) > 1 or any(lease_of(leaf) is None for leaf in optimizers):
        raise ValueError("the optimizers under one Residency have several engines: make one Residency for each")
    if not isinstance(leases[0].engine, NativeEngine):
        raise ValueError(
            f"Residency cannot offload optimizer state that engine {leases[0].engine.name!r} moves: use "
            "OffloadConfig(engine='native')"
        )
    return leases[0]
