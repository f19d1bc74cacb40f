"""What is refused before a model is built, by the name of the setting.

Each `..._refusals` yields all that is wrong, for `bridge-fgo doctor`; the `refuse_...` beside it raises the first,
as training does. All read attributes only, of Bridge's configs or of a saved run config's plain namespaces.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from typing import Any

import torch

from bridge_fgo.bridge.compat import Choice, check_flag, choose_engine, flag_is_set
from bridge_fgo.bridge.fsdp_refusals import fsdp_refusals, fsdp_setting_refusals, uses_fsdp
from bridge_fgo.config import OffloadConfig
from bridge_fgo.memory.host_memory import ranks_of_this_node
from bridge_fgo.memory.shared_host_buffer import OTHER_FILES, hands_out_descriptors
from bridge_fgo.states.megatron import MOMENTS

FLAG_TEXT = "optimizer.offload_optimizer_states=True"
MUONS = ("muon", "dist_muon", "adaptive_muon", "dist_adaptive_muon")
"""What mcore calls Muon; with "dist_" over a LayerWiseDistributedOptimizer."""
LAYER_WISE = tuple(name for name in MUONS if name.startswith("dist_"))
SHARED_MEMORY = "/dev/shm"


def refuse_config(cfg: Any, settings: OffloadConfig | None = None) -> None:
    """Check a Bridge ConfigContainer whose flag may be set, after Bridge's own validation.

    Args:
        cfg: the config.
        settings: what `install` was given; None leaves out what depends on the engine.

    Raises:
        ValueError: a setting cannot be combined with the offload; names it, its value and what to do.
    """
    _raise_first(config_refusals(cfg) if settings is None else all_refusals(cfg, settings))


def config_refusals(cfg: Any) -> Iterator[str]:
    """Yield why a config whose flag may be set is refused, whatever engine serves it."""
    try:
        check_flag(cfg.optimizer)
    except ValueError as error:
        yield str(error)
        return
    if not flag_is_set(cfg.optimizer):
        return
    yield from optimizer_refusals(cfg.optimizer, uses_fsdp(cfg))
    if getattr(getattr(cfg, "dist", None), "use_torch_fsdp2", False) is True:
        yield (
            f"dist.use_torch_fsdp2=True with {FLAG_TEXT}: torch FSDP2 shards the optimizer state itself; set "
            "dist.use_torch_fsdp2=False or leave the flag unset"
        )
    if uses_fsdp(cfg):
        yield from fsdp_refusals(cfg)
    elif not cfg.optimizer.use_distributed_optimizer and _is_fp32(cfg):
        yield (
            f"optimizer.use_distributed_optimizer=False with {FLAG_TEXT}, model.bf16=False and model.fp16=False: "
            "mcore's FP32Optimizer cannot be offloaded; set optimizer.use_distributed_optimizer=True and "
            "ddp.use_distributed_optimizer=True, or train in bf16"
        )


def _is_fp32(cfg: Any) -> bool:
    """Return whether the weights are fp32; a recipe that Bridge has not validated tells by `mixed_precision` alone."""
    bf16, fp16 = (getattr(cfg.model, name, None) for name in ("bf16", "fp16"))
    return bf16 is False and fp16 is False and getattr(cfg, "mixed_precision", None) is None


def all_refusals(cfg: Any, settings: OffloadConfig) -> Iterator[str]:
    """Yield why a config whose flag may be set is refused, by anything that is known before training."""
    yield from config_refusals(cfg)
    if flag_is_set(cfg.optimizer):
        try:
            engine = choose_engine(settings, cfg.optimizer)
        except ValueError as error:
            yield str(error)
        else:
            yield from _graph_refusals(cfg.model, engine)
            yield from _checkpoint_refusals(cfg.checkpoint, engine)
        yield from master_refusals(cfg, settings)


def master_refusals(cfg: Any, settings: OffloadConfig) -> Iterator[str]:
    """Yield why settings of the masters cannot be honoured: there are none, or no weight is the rounding of one."""
    model, optimizer, ddp = cfg.model, cfg.optimizer, getattr(cfg, "ddp", None)
    bf16, fp16 = (getattr(model, name, None) for name in ("bf16", "fp16"))
    is_fp32 = _is_fp32(cfg)  # what decides is the weights' dtype
    if uses_fsdp(cfg):
        yield from fsdp_setting_refusals(cfg, settings)
        return
    if not settings.moments and is_fp32:
        yield (
            "OffloadConfig.moments=False with model.bf16=False and model.fp16=False: fp32 weights have no masters, so "
            "that nothing would be offloaded; set moments=True or leave the flag unset"
        )
    is_mxfp8 = getattr(model, "fp8_recipe", None) == "mxfp8" and (
        getattr(ddp, "fp8_param_gather", False) is True or getattr(model, "fp8_param", False) is True
    )
    overlaps = getattr(ddp, "overlap_param_gather", False) is True
    if settings.master_weights and is_mxfp8 and overlaps and optimizer.optimizer in LAYER_WISE:
        yield (
            f"ddp.overlap_param_gather=True with {FLAG_TEXT}, optimizer.optimizer={optimizer.optimizer!r} and MXFP8 "
            "weights (model.fp8_recipe='mxfp8', ddp.fp8_param_gather=True): mcore gathers these from the masters in "
            "forward, where they are away; set ddp.overlap_param_gather=False, or "
            "OffloadConfig(master_weights=False), which offloads the moments alone"
        )
    if not settings.master_remainders:
        return
    if is_fp32 or fp16 is True:
        yield (
            f"OffloadConfig.master_remainders=True with model.bf16={bf16} and model.fp16={fp16}: only masters of bf16 "
            "weights can be copied in part; leave it at None"
        )
    if getattr(optimizer, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False) is True:
        yield (
            "OffloadConfig.master_remainders=True with optimizer.use_precision_aware_optimizer=True: Transformer "
            "Engine's FusedAdam keeps the masters, which mcore does not round; leave it at None"
        )
    for section, owner, name in (
        ("optimizer", optimizer, "reuse_grad_buf_for_mxfp8_param_ag"),
        ("ddp", ddp, "fp8_param_gather"),
        ("ddp", ddp, "fp4_param_gather"),
    ):
        if getattr(owner, name, False) is True:
            yield (
                f"OffloadConfig.master_remainders=True with {section}.{name}=True: quantized weights are no roundings "
                "of their masters; leave it at None"
            )


def _checkpoint_refusals(checkpoint: Any, engine: Choice) -> Iterator[str]:
    for refuse in (refuse_checkpoint_format, refuse_async_save):
        try:
            refuse(checkpoint, engine)
        except ValueError as error:
            yield str(error)


def _raise_first(refusals: Iterator[str]) -> None:
    for refusal in refusals:
        raise ValueError(refusal)


def refuse_async_save(checkpoint: Any, engine: Choice) -> None:
    """Raise ValueError where a background writer would be given states that mcore's offloader moves.

    The writer gets the tensors as CUDA IPC handles, or as host memory by reference, and reads them while the
    next step releases, reloads and overwrites that memory (NeMo-RL #3312, MLM #6544). The native engine hands
    out copies; see `bridge_fgo.offload.snapshot`.
    """
    if engine != "native" and _saves_states(checkpoint) and checkpoint.async_save:
        raise ValueError(
            f"checkpoint.async_save=True with {FLAG_TEXT} and OffloadConfig.engine='mcore': the background writer "
            "could read memory that mcore's offloader has given away; use OffloadConfig(engine='native'), or set "
            "checkpoint.async_save=False or checkpoint.save_optim=False"
        )


def refuse_small_shared_memory(checkpoint: Any, copies: list[int], ranks: int | None = None) -> None:
    """Raise ValueError where a persistent checkpoint worker could not be handed the copies of the states.

    It is a process of its own and gets each host tensor as an open file under PyTorch's sharing strategy
    "file_descriptor", and as a file in /dev/shm under "file_system". Where either runs out, the thread that sends
    them prints an error, and training waits for the worker without end. (On the GPU states go as CUDA handles. In the
    formats that mcore gathers on the host it is the same without offload.)

    Args:
        checkpoint: Bridge's CheckpointConfig.
        copies: bytes of each host tensor that this rank's checkpoint gets.
        ranks: of this node; `ranks_of_this_node` when None.
    """
    if not (copies and copies_go_to_a_worker(checkpoint)):
        return
    if ranks is None:
        ranks = ranks_of_this_node()
    shared = os.statvfs(SHARED_MEMORY)
    keeps_files_open = hands_out_descriptors()
    has_limit = not keeps_files_open and shared.f_blocks > 0  # a tmpfs without one says 0
    free, needed = shared.f_bavail * shared.f_frsize, ranks * sum(copies) if has_limit else 0
    files = len(copies) + OTHER_FILES if keeps_files_open else 0
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    of_files = "raise the limit, call torch.multiprocessing.set_sharing_strategy('file_system')"
    for what, there, wanted, how in (
        ("bytes of /dev/shm", free, needed, "start the container with a larger one (--shm-size, or --ipc=host)"),
        ("open files a process (ulimit -n)", limit, files, of_files),
    ):
        if there < wanted:
            raise ValueError(
                f"checkpoint.async_save=True with {FLAG_TEXT}: the checkpoint worker gets the states of this node's "
                f"{ranks} rank(s) through shared memory and needs up to {wanted} {what}, but there are {there}: {how}, "
                "or set checkpoint.async_save=False"
            )


def copies_go_to_a_worker(checkpoint: Any) -> bool:
    """Return whether tensors that a checkpoint gets go to a process that is there already, by shared memory.

    One that is forked for the save has the memory; of a `fully_reshardable` checkpoint mcore gathers copies of its own.
    """
    takes_tensors = not getattr(checkpoint, "dist_ckpt_optim_fully_reshardable", False)
    saves = _saves_states(checkpoint) and checkpoint.async_save
    return bool(saves and takes_tensors and checkpoint.use_persistent_ckpt_worker)


def refuse_checkpoint_format(checkpoint: Any, engine: Choice) -> None:
    """Raise ValueError where generation 2, whose states are host tensors, would be saved in another format.

    Megatron-LM's own loop has the same check (its `save_checkpoint`).
    """
    if engine == "mcore generation 2" and _saves_states(checkpoint) and checkpoint.ckpt_format != "torch_dist":
        raise ValueError(
            f"checkpoint.ckpt_format={checkpoint.ckpt_format!r} with {FLAG_TEXT} and mcore's chunked offloader: set "
            "checkpoint.ckpt_format='torch_dist', or use OffloadConfig(engine='native')"
        )


def _saves_states(checkpoint: Any) -> bool:
    return checkpoint.save is not None and checkpoint.save_optim


def refuse_full_iteration_graph(model_config: Any, engine: Choice) -> None:
    """Raise ValueError where the model asks for a full-iteration CUDA graph, which the engine cannot serve.

    mcore calls `finalize_model_grads_func` inside the schedule, so inside such a graph the reload of mcore's offloader
    is captured once and its Python never runs again.
    """
    _raise_first(_graph_refusals(model_config, engine))


def _graph_refusals(model_config: Any, engine: Choice) -> Iterator[str]:
    if captures_full_iteration(model_config) and engine != "native":
        yield (
            f"a full-iteration CUDA graph (model.cuda_graph_impl={getattr(model_config, 'cuda_graph_impl', None)!r}) "
            f"with {FLAG_TEXT} and mcore's offloader: the reload would be captured and never run again; use "
            "OffloadConfig(engine='native'), set model.cuda_graph_impl='none' or capture per-layer modules, or leave "
            "the flag unset"
        )


def captures_full_iteration(model_config: Any) -> bool:
    """Return what Bridge's `is_full_iteration_cuda_graph` does, also where Bridge is not installed."""
    implementation = getattr(model_config, "cuda_graph_impl", "none")
    if implementation != "local":
        return implementation == "full_iteration"
    return any(
        "full_iteration" in _member_names(getattr(model_config, name, None))
        for name in ("cuda_graph_modules", "cuda_graph_scope")
    )


def _member_names(value: Any) -> list[str]:
    """Return the names in a setting of CUDA graphs: an enum member, a list of them, or names joined by commas."""
    items = value if isinstance(value, list | tuple) else str(value).split(",")
    return [str(getattr(item, "name", item)).rpartition(".")[2] for item in items]


def refuse_optimizer_config(config: Any) -> None:
    """Check an OptimizerConfig whose flag is set.

    Raises:
        ValueError: as `refuse_config`.
    """
    _raise_first(optimizer_refusals(config))


def optimizer_refusals(config: Any, fsdp: bool = False) -> Iterator[str]:
    """Yield why an OptimizerConfig whose flag is set is refused; with `fsdp`, as that of a model in Megatron-FSDP."""
    if config.optimizer not in ("adam", *MUONS):
        yield (
            f"optimizer.optimizer={config.optimizer!r} with {FLAG_TEXT}: only the states of Adam and Muon can be "
            f"offloaded; set optimizer.optimizer='adam' (or one of {', '.join(MUONS)}) or leave the flag unset"
        )
    if config.optimizer in MUONS and (scalar := getattr(config, "muon_scalar_optimizer", "adam")) != "adam":
        yield (
            f"optimizer.muon_scalar_optimizer={scalar!r} with {FLAG_TEXT}: only the states of Adam and Muon can be "
            "offloaded; set optimizer.muon_scalar_optimizer='adam' or leave the flag unset"
        )
    distributed = getattr(config, "use_distributed_optimizer", False)
    if distributed is True and config.optimizer in LAYER_WISE:
        yield (
            f"optimizer.use_distributed_optimizer=True with optimizer.optimizer={config.optimizer!r} and {FLAG_TEXT}: "
            "mcore then asks for DDP buffers laid out by layers, which Bridge does not make, so that no optimizer can "
            "be built, with the flag or without; set optimizer.use_distributed_optimizer=False and "
            "ddp.use_distributed_optimizer=False"
        )
    if getattr(config, "optimizer_cpu_offload", False) is True:
        yield hybrid_refusal(config, fsdp)
    if getattr(config, "optimizer_cuda_graph", False) is True:
        yield (
            f"optimizer.optimizer_cuda_graph=True with {FLAG_TEXT}: the graph has the states' addresses baked in; set "
            "optimizer.optimizer_cuda_graph=False or leave the flag unset"
        )
    for key in MOMENTS:
        try:
            refuse_fp8_moment(key, getattr(config, f"{key}_dtype", None))
        except ValueError as error:
            yield str(error)


def hybrid_refusal(config: Any, fsdp: bool = False) -> str:
    """Say why HybridDeviceOptimizer is refused, and which setting of this package offloads the share that it was given.

    Both take whole parameters in the optimizer's order until their share is reached, HybridDeviceOptimizer of the
    elements and this package of the bytes. Under Megatron-FSDP this package takes whole parameter groups, and
    HybridDeviceOptimizer leaves the masters where they are: its copies on the CPU are beside these.

    Args:
        config: an OptimizerConfig; one without `optimizer_offload_fraction` is told of everything.
        fsdp: whether Megatron-FSDP shards the model.
    """
    fraction = getattr(config, "optimizer_offload_fraction", None)
    share = f"optimizer.optimizer_offload_fraction={fraction!r}"
    if not isinstance(fraction, int | float) or fraction >= 1:
        instead = "optimizer.optimizer_cpu_offload=False: the flag alone offloads every state"
    elif fraction > 0:
        instead = f"optimizer.optimizer_cpu_offload=False and OffloadConfig(fraction={fraction!r}) in place of {share}"
    else:
        instead = f"optimizer.optimizer_cpu_offload=False: {share} moves nothing, and the flag alone every state"
    if fsdp:
        return (
            f"optimizer.optimizer_cpu_offload=True with {FLAG_TEXT} and ddp.use_megatron_fsdp=True: "
            "HybridDeviceOptimizer updates copies on the CPU, and Megatron-FSDP's masters stay on the GPU beside them; "
            f"set {instead}; the masters leave too, and parameter groups as a whole (with "
            "OffloadConfig.master_weights=False moments alone, which is what HybridDeviceOptimizer frees here)"
        )
    return (
        f"optimizer.optimizer_cpu_offload=True with {FLAG_TEXT}: HybridDeviceOptimizer keeps and updates the states on "
        f"the CPU already; set {instead}; or leave the flag unset"
    )


def refuse_fp8_moment(key: str, dtype: Any) -> None:
    """Raise ValueError where a moment's dtype is an 8-bit one; anything that is no dtype passes."""
    if isinstance(dtype, torch.dtype) and not (dtype.is_floating_point and dtype.itemsize >= 2):
        raise ValueError(
            f"optimizer.{key}_dtype={dtype} with {FLAG_TEXT}: FP8 moments carry scales of their own and cannot be "
            f"offloaded; set optimizer.{key}_dtype=torch.bfloat16 or leave the flag unset"
        )
