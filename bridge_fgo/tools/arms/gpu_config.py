"""The configuration of the GPU arm: a small GPT on mock data, for Bridge's `pretrain()`."""

from __future__ import annotations

import argparse
import importlib.util
import os
from typing import TYPE_CHECKING, Any

from bridge_fgo.tools.arms.shared_config import container, gpt

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer


LAYER_WISE_CHUNK_MIB = 512  # that mcore's step of Muon brings to the GPU at a time, as a part of this package's


def ask_for_offload(optimizer: Any, options: argparse.Namespace) -> None:
    """Set what asks for the offload in an OptimizerConfig; ValueError where this Bridge drives no offload of Muon."""
    if not options.layer_wise:
        optimizer.offload_optimizer_states = True  # a plain attribute where this mcore has no such field
        return
    if importlib.util.find_spec("megatron.bridge.training.optimizer_state_offload") is None:
        raise ValueError(
            "--layer-wise: this Bridge calls no offload of mcore's; apply patches/ to a copy that comes first"
        )
    optimizer.use_layer_wise_distributed_optimizer = True
    optimizer.chunked_optimizer_state_offload = True  # mcore takes its other flag for Adam alone
    optimizer.optimizer_state_offload_chunk_size_mb = LAYER_WISE_CHUNK_MIB


def build_config(options: argparse.Namespace) -> ConfigContainer:
    """Return the configuration that `pretrain()` runs."""
    import torch
    import torch.nn.functional as F
    from megatron.bridge.training import config as bridge
    from megatron.bridge.training.mixed_precision import bf16_mixed
    from megatron.core.transformer.enums import AttnBackend

    model = gpt(
        num_layers=options.layers,
        hidden_size=options.hidden,
        ffn_hidden_size=options.ffn,
        num_attention_heads=options.heads,
        num_query_groups=options.groups,
        seq_length=options.seq,
        normalization="RMSNorm",
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        tensor_model_parallel_size=options.tp,
        pipeline_model_parallel_size=options.pp,
        virtual_pipeline_model_parallel_size=options.vpp,
        # Two interleaved stages would send to each other twice in one batch of calls, which mcore rules out.
        overlap_p2p_comm=options.vpp is not None,
        batch_p2p_comm=options.vpp is None,
        sequence_parallel=options.tp > 1,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        make_vocab_size_divisible_by=128,
        vocab_size=None,
        # Deterministic, and does not depend on the cuDNN that is here.
        attention_backend=AttnBackend.unfused,
        deterministic_mode=options.deterministic,
        # Compiled by torch it ends in one of two results, in one run of an arm and the next.
        cross_entropy_loss_fusion=options.fused_loss,
    )
    if options.te_graphs:
        model.cuda_graph_impl, model.cuda_graph_modules = "transformer_engine", ["mlp"]
        model.use_te_rng_tracker = True
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")  # mcore asks for it where segments are expandable
    if options.full_graphs:
        model.cuda_graph_impl, model.cuda_graph_modules, model.use_te_rng_tracker = "full_iteration", [], True
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    if options.experts is not None:
        model.num_moe_experts, model.moe_router_topk = options.experts, options.topk
        model.moe_ffn_hidden_size, model.expert_model_parallel_size = options.ffn, options.ep
        model.moe_token_dispatcher_type, model.moe_grouped_gemm = "alltoall", options.grouped_experts
        if options.full_graphs:
            # A graph's shapes are fixed: an expert gets as many tokens in every step, and the host waits for no count.
            model.moe_expert_capacity_factor, model.moe_pad_expert_input_to_capacity = 2.0, True
    if options.offload_activations is not None:
        model.fine_grained_activation_offloading, model.offload_modules = True, options.offload_activations
    if options.cpu_offloading_layers is not None:
        model.cpu_offloading, model.cpu_offloading_num_layers = True, options.cpu_offloading_layers
    if options.recompute == "attention":
        model.recompute_granularity, model.recompute_modules = "selective", ["core_attn"]
    elif options.recompute == "full":
        model.recompute_granularity, model.recompute_method, model.recompute_num_layers = "full", "uniform", 1
    optimizer = bridge.OptimizerConfig(
        optimizer=options.optimizer,
        bf16=True,
        use_distributed_optimizer=options.distributed,
        clip_grad=1.0,
        lr=3e-4,
        min_lr=1e-5,
        weight_decay=0.01,
    )
    if options.precision_aware:
        optimizer.use_precision_aware_optimizer = True
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.moments_dtype]
        optimizer.exp_avg_dtype = optimizer.exp_avg_sq_dtype = dtype
    if options.hybrid:
        # Megatron-LM accepts the hybrid optimizer with the precision-aware one only: without
        # it a second set of fp32 masters stays on the GPU.
        optimizer.use_precision_aware_optimizer = True
        optimizer.optimizer_cpu_offload = True
        optimizer.optimizer_offload_fraction = 1.0
        optimizer.overlap_cpu_optimizer_d2h_h2d = True
    if options.offload == "on":
        ask_for_offload(optimizer, options)
    ddp = bridge.DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=options.dp_overlap,
        overlap_param_gather=options.dp_overlap and options.distributed and not options.layer_wise,
        use_distributed_optimizer=options.distributed,
        num_distributed_optimizer_instances=options.instances,
    )
    precision: dict[str, Any] = {}
    if options.fp8_weights is not None:
        mixed = bf16_mixed()
        mixed.fp8, mixed.fp8_recipe, mixed.fp8_param_gather = "hybrid", options.fp8_weights, True
        precision["mixed_precision"] = mixed
    if options.fsdp is not None:
        ddp.use_megatron_fsdp, ddp.data_parallel_sharding_strategy = True, options.fsdp
    return container(
        model,
        optimizer,
        ddp,
        iterations=options.steps + options.extra_steps + (0 if options.trace is None else 2),
        batch=(options.mbs, options.gbs),
        vocab=options.vocab,
        seed=1234,
        scheduler={
            "lr_decay_style": "cosine",
            "lr_warmup_iters": min(2, options.steps - 1),
            "lr_decay_iters": 1000,  # whatever the steps: a short run is the beginning of a long one
            "override_opt_param_scheduler": True,
        },
        dataset={
            "num_dataset_builder_threads": 1, "data_sharding": True, "dataloader_type": "single", "num_workers": 1,
        },
        validation=bridge.ValidationConfig(eval_interval=None, eval_iters=0),
        checkpoint=bridge.CheckpointConfig(
            save=None if options.save is None else str(options.save),
            save_interval=options.save_interval if options.save is not None else None,
            async_save=options.async_save,
            async_strategy="mcore",
            load=None if options.load is None else str(options.load),
            ckpt_step=options.load_step,
            load_optim=options.load_optim,
            ckpt_format="torch_dist" if options.fsdp is None else "fsdp_dtensor",
            dist_ckpt_optim_fully_reshardable=options.fully_reshardable,
        ),
        rng=bridge.RNGConfig(seed=1234),
        **precision,
        # Bridge's validation asks for it where passes are captured whole.
        rerun_state_machine=bridge.RerunStateMachineConfig(check_for_nan_in_loss=not options.full_graphs),
    )  # fmt: skip
