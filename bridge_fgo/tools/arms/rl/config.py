"""Bridge's configuration of the policy that the GRPO loop trains: a GPT, on the CPU or on GPUs."""

from __future__ import annotations

from typing import Any

import torch

from bridge_fgo.tools.arms.cpu_model import layer_spec
from bridge_fgo.tools.arms.rl.options import RlOptions


def build_config(options: RlOptions, vocab_size: int, ranks: int) -> Any:
    """Return Bridge's ConfigContainer, not validated yet.

    Args:
        options: sizes and parallelism.
        vocab_size: tokens, with padding.
        ranks: of the job.
    """
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.training import config as bridge

    model = GPTModelProvider(
        num_layers=options.layers,
        hidden_size=options.hidden,
        ffn_hidden_size=4 * options.hidden,
        num_attention_heads=options.heads,
        vocab_size=vocab_size,
        seq_length=options.sequence,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        add_bias_linear=False,
        # Dropout would have log-probabilities differ between the policy that samples and the one that is trained.
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=options.tp,
        pipeline_model_parallel_size=options.pp,
        sequence_parallel=False,  # mcore's static engine has none
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        autocast_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False,  # needs Apex
        cross_entropy_loss_fusion=False,  # compiled by torch it ends in one of two results
        **(_on_the_cpu() if options.device == "cpu" else _on_a_gpu()),
    )
    data_parallel = ranks // (options.tp * options.pp)
    return bridge.ConfigContainer(
        model=model,
        train=bridge.TrainingConfig(
            train_iters=options.steps * options.updates,
            micro_batch_size=options.micro_batch_size,
            global_batch_size=options.sequences * data_parallel,
        ),
        optimizer=bridge.OptimizerConfig(
            optimizer="adam",
            lr=options.lr,
            min_lr=options.lr,
            weight_decay=0.0,
            clip_grad=1.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
        ),
        scheduler=bridge.SchedulerConfig(
            lr_decay_style="constant",
            lr_decay_iters=options.steps * options.updates,
            lr_warmup_iters=0,
            start_weight_decay=0.0,
            end_weight_decay=0.0,
            weight_decay_incr_style="constant",
        ),
        ddp=bridge.DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True, check_for_nan_in_grad=False
        ),
        dataset=bridge.MockGPTDatasetConfig(  # not used: rollouts are the data
            seq_length=options.sequence,
            random_seed=options.seed,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
        ),
        rng=bridge.RNGConfig(seed=options.seed),
        dist=bridge.DistributedInitConfig(distributed_backend="gloo" if options.device == "cpu" else "nccl"),
        rerun_state_machine=bridge.RerunStateMachineConfig(rerun_mode="disabled"),
        logger=bridge.LoggerConfig(),
        tokenizer=bridge.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=vocab_size),
        checkpoint=bridge.CheckpointConfig(),
    )


def _on_the_cpu() -> dict[str, Any]:
    """Return the fields that have a model of plain torch built: everything fused is a CUDA kernel."""
    from megatron.core.transformer.enums import AttnBackend

    return {
        "transformer_layer_spec": layer_spec,
        "attention_backend": AttnBackend.local,  # the engine makes its attention's mask only for this one
        "use_cpu_initialization": True,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
    }


def _on_a_gpu() -> dict[str, Any]:
    """Return the fields of a model of Transformer Engine's layers, which computes the same bits in each run."""
    import torch.nn.functional as F
    from megatron.core.transformer.enums import AttnBackend

    return {
        "normalization": "RMSNorm",
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "attention_backend": AttnBackend.unfused,  # does not depend on the cuDNN that is here
        "deterministic_mode": True,
        # torch.compile makes these, and would make them anew for inference mode and for each length of its steps.
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
    }
