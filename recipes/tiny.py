"""`tiny`: a small GPT on made-up data, on one GPU of any kind or on the CPU, to try a launch from end to end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer

ON_THE_CPU: dict[str, Any] = {
    "use_cpu_initialization": True,
    # Everything fused is a CUDA kernel.
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "cross_entropy_loss_fusion": False,
    "persist_layer_norm": False,
}
"""Fields of a model of plain torch."""


def tiny_config(on_cpu: bool) -> ConfigContainer:
    """Return Bridge's configuration, of 4 layers of 256 and 10 steps; on a CPU for `tools.standins.cuda`."""
    size = {"num_layers": 4, "hidden_size": 256, "ffn_hidden_size": 1024, "seq_length": 256}
    heads = {"num_attention_heads": 8, "num_query_groups": 4}
    config = small_gpt(10, (2, 8), 1024, **size, **heads)
    return put_on_cpu(config) if on_cpu else config


def small_gpt(iterations: int, batch: tuple[int, int], vocab: int, **fields: Any) -> Any:
    """Return Bridge's configuration, as `container` does, of a GPT like Llama; `fields` are of the model's provider."""
    import torch
    import torch.nn.functional as F
    from megatron.bridge.training import config as bridge
    from megatron.core.transformer.enums import AttnBackend

    model = gpt(
        normalization="RMSNorm",
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        make_vocab_size_divisible_by=128,
        vocab_size=None,
        # Deterministic, and does not depend on the cuDNN that is here.
        attention_backend=AttnBackend.unfused,
        **fields,
    )
    optimizer = bridge.OptimizerConfig(
        optimizer="adam",
        bf16=True,
        use_distributed_optimizer=True,
        clip_grad=1.0,
        lr=3e-4,
        min_lr=1e-5,
        weight_decay=0.01,
    )
    ddp = bridge.DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        use_distributed_optimizer=True,
    )
    scheduler = {
        "lr_decay_style": "cosine",
        "lr_warmup_iters": min(2, iterations - 1),
        "lr_decay_iters": 1000,  # whatever the iterations: a short run is the beginning of a long one
        "override_opt_param_scheduler": True,
    }
    dataset = {
        "num_dataset_builder_threads": 1, "data_sharding": True, "dataloader_type": "single", "num_workers": 1,
    }  # fmt: skip
    return container(
        model,
        optimizer,
        ddp,
        iterations=iterations,
        batch=batch,
        vocab=vocab,
        seed=1234,
        scheduler=scheduler,
        dataset=dataset,
        validation=bridge.ValidationConfig(eval_interval=None, eval_iters=0),
        checkpoint=bridge.CheckpointConfig(),
        rng=bridge.RNGConfig(seed=1234),
    )


def layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Return mcore's layers of plain torch for one model chunk."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    stage = config._pg_collection.pp.rank()
    return get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage, pp_rank=stage)


def put_on_cpu(config: Any) -> Any:
    """Return a config for a GPU, changed so that it trains where `bridge_fgo.tools.standins.cuda` is installed."""
    from megatron.core.transformer.enums import AttnBackend

    model = config.model
    for name, value in ON_THE_CPU.items():
        setattr(model, name, value)
    model.transformer_layer_spec, model.attention_backend = layer_spec, AttnBackend.local
    model.normalization = "LayerNorm"  # mcore's own has no RMSNorm
    config.dist.distributed_backend = "gloo"
    config.logger.log_interval = 1
    return config


def gpt(**fields: Any) -> Any:
    """Return the provider of a GPT with rotary embeddings and an output layer of its own."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    return GPTModelProvider(
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,  # needs Apex
        **fields,
    )


def container(
    model: Any,
    optimizer: Any,
    ddp: Any,
    *,
    iterations: int,
    batch: tuple[int, int],
    vocab: int,
    seed: int,
    scheduler: Mapping[str, Any],
    dataset: Mapping[str, Any] | None = None,
    **sections: Any,
) -> Any:
    """Return Bridge's ConfigContainer, not validated yet; `sections` are those that are not made here, by name.

    `batch` is the sequences of a microbatch, and of a step over all ranks; `vocab` the tokens; `seed` the data's.
    `scheduler` has fields of the learning rate's schedule, `dataset` those of the mock dataset beside its sizes.
    """
    from megatron.bridge.training import config as bridge

    return bridge.ConfigContainer(
        model=model,
        train=bridge.TrainingConfig(train_iters=iterations, micro_batch_size=batch[0], global_batch_size=batch[1]),
        optimizer=optimizer,
        scheduler=bridge.SchedulerConfig(
            start_weight_decay=optimizer.weight_decay,
            end_weight_decay=optimizer.weight_decay,
            weight_decay_incr_style="constant",
            **scheduler,
        ),
        ddp=ddp,
        dataset=bridge.MockGPTDatasetConfig(
            seq_length=model.seq_length,
            random_seed=seed,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            **(dataset or {}),
        ),
        logger=bridge.LoggerConfig(),
        tokenizer=bridge.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=vocab),
        **sections,
    )
