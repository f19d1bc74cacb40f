"""The parameters of a GPT from the numbers of its config, where Megatron is not installed to build it.

Exact for what mcore's GPT layer specs make of grouped-query or multi-latent attention, dense or expert MLPs, and
tied or untied embeddings, with layers divided evenly over the pipeline (tests hold it against mcore's own model).
What it does not know is an error, so that no figure is silently short.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from bridge_fgo.tools.job.tensors import Chunk, Tensor

UNKNOWN = (
    "hybrid_override_pattern",
    "hybrid_layer_pattern",
    "pipeline_model_parallel_layout",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "mtp_num_layers",
    "experimental_attention_variant",
    "heterogeneous_block_specs",
    "moe_latent_size",
    "attention_output_gate",
    "moe_shared_expert_gate",
)
"""Settings that change the layers in ways that are not written down here."""

QUANTIZED_PARAMETERS = (
    ("mixed_precision", "fp8_param_gather"),
    ("mixed_precision", "fp4_param_gather"),
    ("model", "fp8_param"),
    ("model", "fp4_param"),
    ("ddp", "fp8_param_gather"),
    ("ddp", "fp4_param_gather"),
)
"""Sections and settings that keep parameters in FP8 or FP4."""

SAME_LAYERS = ("default_layer_spec", "transformer_engine_layer_spec", "local_layer_spec")
"""Bridge's specs of one layer for all, which leave `moe_layer_freq` aside."""


def stages_from_numbers(config: SimpleNamespace) -> list[list[Chunk]]:
    """Return the tensors of each model chunk of each pipeline stage.

    Raises:
        ValueError: the model has what this module does not know; names the setting.
    """
    model = config.model
    for name in UNKNOWN:
        if getattr(model, name, None):
            raise ValueError(
                f"model.{name}={getattr(model, name)!r}: not known without Megatron; install megatron-bridge (no GPU "
                "is needed) to have the model built"
            )
    for section, name in QUANTIZED_PARAMETERS:
        if getattr(getattr(config, section, None), name, False):
            raise ValueError(
                f"{section}.{name}=True: which parameters are kept in fewer bits is not known without Megatron; "
                "install megatron-bridge (no GPU is needed) to have the model built"
            )
    if getattr(config, "peft", None) is not None:
        raise ValueError("peft is set: adapters are not known to the plan")
    pipeline = model.pipeline_model_parallel_size
    chunks = model.virtual_pipeline_model_parallel_size or 1
    if model.num_layers % (pipeline * chunks):
        raise ValueError(f"model.num_layers={model.num_layers}: not divisible over {pipeline} x {chunks} model chunks")
    layers = model.num_layers // (pipeline * chunks)
    stages: list[list[Chunk]] = []
    for stage in range(pipeline):
        stages.append([])
        for chunk in range(chunks):
            first = (chunk * pipeline + stage) * layers
            begin, end = stage == chunk == 0, (stage, chunk) == (pipeline - 1, chunks - 1)
            stages[-1].append(list(_chunk(config, range(first, first + layers), begin, end)))
    return stages


def _chunk(config: SimpleNamespace, layers: range, begin: bool, end: bool) -> Iterator[Tensor]:
    model = config.model
    hidden, tied = model.hidden_size, model.share_embeddings_and_output_weights
    dtype = torch.float16 if model.fp16 else torch.bfloat16 if model.bf16 else torch.float32

    def tensor(name: str, *shape: int, **kind: bool) -> Tensor:
        return Tensor(name, math.prod(shape), dtype, **{"matrix": len(shape) == 2, **kind})

    embedding = (padded_vocabulary(config) // model.tensor_model_parallel_size, hidden)
    several_stages = model.pipeline_model_parallel_size > 1
    if begin:
        yield tensor("embedding", *embedding, matrix=False, own_bucket=tied and several_stages)
        if getattr(model, "position_embedding_type", "rope") == "learned_absolute":
            yield tensor("position_embedding", model.seq_length, hidden)
    for layer in layers:
        for of_layer in _layer(model, layer, tensor):
            yield replace(of_layer, name=f"decoder.layers.{layer}.{of_layer.name}")
    if end:
        yield from _norm(model, "final_norm", hidden, tensor)
        if not tied or several_stages:
            yield tensor("output", *embedding, matrix=False, own_bucket=tied)


def _layer(model: Any, layer: int, tensor: Any) -> Iterator[Tensor]:
    attention = _latent_attention if getattr(model, "multi_latent_attention", False) else _attention
    yield from attention(model, tensor)
    frequency = getattr(model, "moe_layer_freq", 1)
    if getattr(model, "transformer_layer_spec", None) in SAME_LAYERS:
        frequency = 1
    has_experts = model.num_moe_experts is not None and (
        bool(frequency[layer]) if isinstance(frequency, list) else layer % frequency == 0
    )
    yield from _norm(model, "mlp_norm", model.hidden_size, tensor)
    if not has_experts:
        yield from _mlp(model, "mlp", model.ffn_hidden_size, model.tensor_model_parallel_size, tensor)
        return
    yield tensor("mlp.router", model.num_moe_experts, model.hidden_size)
    shared = model.moe_shared_expert_intermediate_size
    if shared:
        yield from _mlp(model, "mlp.shared_experts", shared, model.tensor_model_parallel_size, tensor)
    expert_tensor = model.expert_tensor_parallel_size or model.tensor_model_parallel_size
    spread = model.expert_model_parallel_size > 1 or expert_tensor != model.tensor_model_parallel_size
    size = model.moe_ffn_hidden_size or model.ffn_hidden_size
    for index in range(model.num_moe_experts // model.expert_model_parallel_size):
        yield from _mlp(model, f"mlp.experts.{index}", size, expert_tensor, tensor, expert=spread)


def _norm(model: Any, name: str, size: int, tensor: Any) -> Iterator[Tensor]:
    yield tensor(f"{name}.weight", size)
    if model.normalization == "LayerNorm":
        yield tensor(f"{name}.bias", size)


def _attention(model: Any, tensor: Any) -> Iterator[Tensor]:
    hidden, ranks = model.hidden_size, model.tensor_model_parallel_size
    head = model.kv_channels or hidden // model.num_attention_heads
    query = model.num_attention_heads * head // ranks
    groups = model.num_query_groups or model.num_attention_heads
    key_value = 2 * groups * head // ranks
    yield tensor("self_attention.proj.weight", hidden, query)
    if model.add_bias_linear:
        yield tensor("self_attention.proj.bias", hidden)
    yield from _norm(model, "self_attention.norm", hidden, tensor)
    yield tensor("self_attention.qkv.weight", query + key_value, hidden)
    if model.add_bias_linear or model.add_qkv_bias:
        yield tensor("self_attention.qkv.bias", query + key_value)
    if model.qk_layernorm:
        for name in ("self_attention.q_norm", "self_attention.k_norm"):
            yield from _norm(model, name, head, tensor)


def _latent_attention(model: Any, tensor: Any) -> Iterator[Tensor]:
    hidden, ranks = model.hidden_size, model.tensor_model_parallel_size
    heads = model.num_attention_heads // ranks
    query = heads * (model.qk_head_dim + model.qk_pos_emb_head_dim)
    yield tensor("self_attention.proj.weight", hidden, heads * model.v_head_dim)
    yield from _norm(model, "self_attention.norm", hidden, tensor)
    if model.q_lora_rank is None:
        yield tensor("self_attention.q.weight", query, hidden)
    else:
        yield tensor("self_attention.q_down.weight", model.q_lora_rank, hidden)
        yield tensor("self_attention.q_up.weight", query, model.q_lora_rank)
    yield tensor("self_attention.kv_down.weight", model.kv_lora_rank + model.qk_pos_emb_head_dim, hidden)
    yield tensor("self_attention.kv_up.weight", heads * (model.qk_head_dim + model.v_head_dim), model.kv_lora_rank)
    if model.qk_layernorm:
        if model.q_lora_rank is not None:
            yield from _norm(model, "self_attention.q_norm", model.q_lora_rank, tensor)
        yield from _norm(model, "self_attention.kv_norm", model.kv_lora_rank, tensor)


def _mlp(model: Any, name: str, size: int, ranks: int, tensor: Any, expert: bool = False) -> Iterator[Tensor]:
    rows = size * (2 if model.gated_linear_unit else 1) // ranks
    yield tensor(f"{name}.fc1.weight", rows, model.hidden_size, expert=expert)
    if model.add_bias_linear:
        yield tensor(f"{name}.fc1.bias", rows, expert=expert)
    yield tensor(f"{name}.fc2.weight", model.hidden_size, size // ranks, expert=expert)
    if model.add_bias_linear:
        yield tensor(f"{name}.fc2.bias", model.hidden_size, expert=expert)


def padded_vocabulary(config: SimpleNamespace) -> int:
    """Return the rows of the embedding, over all tensor-parallel ranks."""
    model = config.model
    size = model.vocab_size or getattr(config.tokenizer, "vocab_size", None)
    if size is None:
        raise ValueError("model.vocab_size and tokenizer.vocab_size are None: set one of them")
    if model.vocab_size is not None and not getattr(model, "should_pad_vocab", True):
        return size
    multiple = model.make_vocab_size_divisible_by * model.tensor_model_parallel_size
    return math.ceil(size / multiple) * multiple
