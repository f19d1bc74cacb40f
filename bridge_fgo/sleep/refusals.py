"""What a `Residency` cannot move, refused by name before anything moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bridge_fgo.memory.guard import class_of

PLAIN = (torch.Tensor, torch.nn.Parameter)


def refuse_models(chunks: Sequence[torch.nn.Module]) -> None:
    """Raise ValueError where there are no model chunks, or their buffers cannot be emptied; name what to change."""
    if not chunks:
        raise ValueError("Residency(model=[]): pass the model chunks, as get_model returned them")
    for chunk in chunks:
        for refusal in _refusals(chunk):
            raise ValueError(refusal)


def _refusals(chunk: torch.nn.Module) -> Iterator[str]:
    if not isinstance(chunk, torch.nn.Module):
        yield (
            f"Residency(model={type(chunk).__name__}): pass a module, or a list of model chunks, and then the "
            "optimizer: Residency(model, optimizer)"
        )
        return
    for module in chunk.modules():
        if "FullyShardedDataParallel" in type(module).__name__:
            yield (
                f"Residency over a {type(module).__name__}: it manages parameters itself; set "
                "ddp.use_megatron_fsdp=False and dist.use_torch_fsdp2=False"
            )
    implementation = getattr(getattr(chunk, "config", None), "cuda_graph_impl", "none")
    if implementation not in (None, "none"):
        yield (
            f"Residency with model.cuda_graph_impl={implementation!r}: a graph has the addresses of parameters and "
            "gradients baked in, which are others after a wake; set model.cuda_graph_impl='none'"
        )
    ddps = ddp_of(chunk)
    for buffer in (buffer for ddp in ddps for buffer in ddp.buffers + ddp.expert_parallel_buffers):
        yield from buffer_refusals(buffer)
    in_ddp = {id(parameter) for ddp in ddps for parameter in ddp.parameters()}
    for name, parameter in chunk.named_parameters():
        if hasattr(parameter, "main_grad") and id(parameter) not in in_ddp:
            yield (
                f"Residency(model={type(chunk).__name__}): parameter {name!r} is in a DDP that was not "
                "passed, which has its gradients: pass the DDP, as get_model returned it"
            )
        if parameter.numel() and class_of(parameter) in PLAIN and not parameter.untyped_storage().nbytes():
            yield (
                f"Residency over parameter {name!r}, whose memory is away: another Residency, or mcore's "
                "offload_to_cpu, has it; bring it back first, and make one Residency for a model"
            )


def buffer_refusals(buffer: Any) -> Iterator[str]:
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


def ddp_of(chunk: torch.nn.Module) -> list[Any]:
    """Return mcore's DDP wrappers that a chunk is or has inside."""
    return [module for module in chunk.modules() if isinstance(vars(module).get("expert_parallel_buffers"), list)]
