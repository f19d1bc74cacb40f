"""Sets up an arm's process before `pretrain()`, and makes a GPT on made-up data and every section but the model's."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ATTENTION_VARIABLES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
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


def have_the_cpu_stand_in() -> None:
    """Have a CPU stand in for the GPU in this process, which has not asked for one yet."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks: nothing may take a GPU that is there
    from bridge_fgo.tools.standins.cuda import install_standins

    install_standins()


def forget_attention_backend() -> None:
    """Remove Transformer Engine's choice of an attention kernel from the environment.

    mcore compares it with the model's `attention_backend`, and ends the build where they differ. A container may have
    set it, or a model that was built earlier in this process.
    """
    for name in ATTENTION_VARIABLES:
        os.environ.pop(name, None)


def use_one_rank_by_default() -> None:
    """Set what Bridge's initialization reads, where unset, so that one process runs without torchrun."""
    if "RANK" in os.environ:
        return
    # Port 0: the store takes one that is free. One that was free a moment ago may be taken by now.
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")


def make_deterministic() -> None:
    """Set what Bridge's deterministic mode asks of the environment, where unset."""
    import torch

    os.environ.setdefault("NCCL_ALGO", "Ring")
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Filling new memory only shows reads of what nobody wrote, and takes time in every arm.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def skip_building_what_is_built() -> None:
    """Keep Bridge from running `make`, for which mcore's wheel has no Makefile, where the helpers are built."""
    from megatron.bridge.training import initialize
    from megatron.core import datasets

    folder = Path(datasets.__path__[0])
    built = importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None
    if built and not (folder / "Makefile").exists():
        initialize.compile_helpers = lambda: None


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
