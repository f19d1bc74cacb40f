"""Bridge's configuration of the policy that the GRPO loop trains: a GPT, on the CPU or on GPUs."""

from __future__ import annotations

from typing import Any

import torch

from bridge_fgo.tools.arms.cpu_model import layer_spec
from bridge_fgo.tools.arms.rl.options import RlOptions
from bridge_fgo.tools.arms.shared_config import ON_THE_CPU, container, gpt


def build_config(options: RlOptions, vocab_size: int, ranks: int) -> Any:
    """Return Bridge's ConfigContainer, not validated yet.

    Args:
        options: sizes and parallelism.
        vocab_size: tokens, with padding.
        ranks: of the job.
    """
    from megatron.bridge.training import config as bridge

    bf16: dict[str, Any] = {"bf16": True, "params_dtype": torch.bfloat16}
    return container(
        model=gpt(
            num_layers=options.layers,
            hidden_size=options.hidden,
            ffn_hidden_size=4 * options.hidden,
            num_attention_heads=options.heads,
            vocab_size=vocab_size,
            seq_length=options.sequence,
            add_bias_linear=False,
            # Dropout would have log-probabilities differ between the policy that samples and the one that is trained.
            hidden_dropout=0.0,
            tensor_model_parallel_size=options.tp,
            pipeline_model_parallel_size=options.pp,
            sequence_parallel=False,  # mcore's static engine has none
            pipeline_dtype=torch.bfloat16,
            autocast_dtype=torch.bfloat16,
            **bf16,
            **(_on_the_cpu() if options.device == "cpu" else _on_a_gpu()),
        ),
        optimizer=bridge.OptimizerConfig(
            optimizer="adam",
            lr=options.lr,
            min_lr=options.lr,
            weight_decay=0.0,
            clip_grad=1.0,
            use_distributed_optimizer=True,
            **bf16,
        ),
        ddp=bridge.DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True, check_for_nan_in_grad=False
        ),
        iterations=options.steps * options.updates,
        micro_batch_size=options.micro_batch_size,
        global_batch_size=options.sequences * (ranks // (options.tp * options.pp)),
        sequence=options.sequence,
        vocab=vocab_size,
        seed=options.seed,  # the mock data are not used: rollouts are the data
        scheduler={
            "lr_decay_style": "constant", "lr_decay_iters": options.steps * options.updates, "lr_warmup_iters": 0,
        },
        weight_decay=0.0,
        rng=bridge.RNGConfig(seed=options.seed),
        dist=bridge.DistributedInitConfig(distributed_backend="gloo" if options.device == "cpu" else "nccl"),
        rerun_state_machine=bridge.RerunStateMachineConfig(rerun_mode="disabled"),
        checkpoint=bridge.CheckpointConfig(),
    )  # fmt: skip


def _on_the_cpu() -> dict[str, Any]:
    """Return the fields that have a model of plain torch built."""
    from megatron.core.transformer.enums import AttnBackend

    return {
        **ON_THE_CPU,
        "transformer_layer_spec": layer_spec,
        "attention_backend": AttnBackend.local,  # the engine makes its attention's mask only for this one
    }


def _on_a_gpu() -> dict[str, Any]:
    """Return the fields of a model of Transformer Engine's layers, which computes the same bits in each run."""
    import torch.nn.functional as F
    from megatron.core.transformer.enums import AttnBackend

    return {
        "normalization": "RMSNorm",
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "cross_entropy_loss_fusion": False,  # compiled by torch it ends in one of two results
        "attention_backend": AttnBackend.unfused,  # does not depend on the cuDNN that is here
        "deterministic_mode": True,
        # torch.compile makes these, and would make them anew for inference mode and for each length of its steps.
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
    }
