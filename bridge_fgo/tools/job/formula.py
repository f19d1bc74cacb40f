"""The parameters of a GPT from the numbers of its config, where Megatron is not installed to build it.

Exact for what mcore's GPT layer specs make of grouped-query or multi-latent attention, dense or expert MLPs, and
tied or untied embeddings, with layers divided evenly over the pipeline (tests hold it against mcore's own model).
What it does not know is an error, so that no figure is silently short.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch

from bridge_fgo.tools.job.held import Chunk, Tensor

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

QUANTIZED_PARAMETERS = {
    "mixed_precision": ("fp8_param_gather", "fp4_param_gather"),
    "model": ("fp8_param", "fp4_param"),
    "ddp": ("fp8_param_gather", "fp4_param_gather"),
}
"""By section, settings that keep parameters in FP8 or FP4."""

SAME_LAYERS = ("default_layer_spec", "transformer_engine_layer_spec", "local_layer_spec")
"""Bridge's specs of one layer for all, which leave `moe_layer_freq` aside."""

INSTALL = "install megatron-bridge (no GPU is needed) to have the model built"

Shapes = list[tuple[str, tuple[int, ...]]]
"""Names and shapes of parameters."""


def stages_from_numbers(config: SimpleNamespace) -> list[list[Chunk]]:
    """Return the tensors of each model chunk of each pipeline stage.

    Raises:
        ValueError: the model has what this module does not know; names the setting.
    """
    model = config.model
    for name in UNKNOWN:
        if getattr(model, name, None):
            raise ValueError(f"model.{name}={getattr(model, name)!r}: not known without Megatron; {INSTALL}")
    for section, names in QUANTIZED_PARAMETERS.items():
        for name in names:
            if getattr(getattr(config, section, None), name, False):
                raise ValueError(
                    f"{section}.{name}=True: which parameters are kept in fewer bits is not known without Megatron; "
                    f"{INSTALL}"
                )
    if getattr(config, "peft", None) is not None:
        raise ValueError("peft is set: adapters are not known to the plan")
    pipeline = model.pipeline_model_parallel_size
    chunks = model.virtual_pipeline_model_parallel_size or 1
    if model.num_layers % (pipeline * chunks):
        raise ValueError(f"model.num_layers={model.num_layers}: not divisible over {pipeline} x {chunks} model chunks")
    layers = model.num_layers // (pipeline * chunks)
    starts = [[(chunk * pipeline + stage) * layers for chunk in range(chunks)] for stage in range(pipeline)]
    return [[_chunk(config, range(start, start + layers)) for start in of_stage] for of_stage in starts]


def _chunk(config: SimpleNamespace, layers: range) -> Chunk:
    model = config.model
    dtype = torch.float16 if model.fp16 else torch.bfloat16 if model.bf16 else torch.float32
    several_stages, tied = model.pipeline_model_parallel_size > 1, model.share_embeddings_and_output_weights
    embedding = padded_vocabulary(config) // model.tensor_model_parallel_size * model.hidden_size
    is_first, is_last = layers.start == 0, layers.stop == model.num_layers

    # Not every rank has every expert as it has other tensors.
    of_experts = getattr(model, "expert_tensor_parallel_size", None) or model.tensor_model_parallel_size
    spread = model.num_moe_experts is not None and (
        model.expert_model_parallel_size > 1 or of_experts != model.tensor_model_parallel_size
    )

    def tensors(shapes: Shapes, prefix: str = "") -> Chunk:
        found = []
        for name, shape in shapes:
            is_spread = spread and name.startswith("mlp.experts.")
            numel = math.prod(shape)
            found.append(Tensor(prefix + name, numel, dtype, expert=is_spread, matrix=len(shape) == 2))
        return found

    found = []
    if is_first:
        found.append(Tensor("embedding", embedding, dtype, own_bucket=tied and several_stages))
        if getattr(model, "position_embedding_type", "rope") == "learned_absolute":
            found += tensors([("position_embedding", (model.seq_length, model.hidden_size))])
    for layer in layers:
        found += tensors(_layer(model, layer), f"decoder.layers.{layer}.")
    if is_last:
        found += tensors(_norm(model, "final_norm", model.hidden_size))
        if not tied or several_stages:
            found.append(Tensor("output", embedding, dtype, own_bucket=tied))
    return found


def _layer(model: Any, layer: int) -> Shapes:
    attention = _latent_attention if getattr(model, "multi_latent_attention", False) else _attention
    shapes = attention(model) + _norm(model, "mlp_norm", model.hidden_size)
    frequency = getattr(model, "moe_layer_freq", 1)
    if getattr(model, "transformer_layer_spec", None) in SAME_LAYERS:
        frequency = 1
    has_experts = frequency[layer] if isinstance(frequency, list) else layer % frequency == 0
    if model.num_moe_experts is None or not has_experts:
        return shapes + _mlp(model, "mlp", model.ffn_hidden_size, model.tensor_model_parallel_size)
    shapes.append(("mlp.router", (model.num_moe_experts, model.hidden_size)))
    if shared := model.moe_shared_expert_intermediate_size:
        shapes += _mlp(model, "mlp.shared_experts", shared, model.tensor_model_parallel_size)
    size = model.moe_ffn_hidden_size or model.ffn_hidden_size
    ranks = model.expert_tensor_parallel_size or model.tensor_model_parallel_size
    for index in range(model.num_moe_experts // model.expert_model_parallel_size):
        shapes += _mlp(model, f"mlp.experts.{index}", size, ranks)
    return shapes


def _linear(name: str, rows: int, columns: int, bias: bool = False) -> Shapes:
    weight = (f"{name}.weight", (rows, columns))
    return [weight, (f"{name}.bias", (rows,))] if bias else [weight]


def _norm(model: Any, name: str, size: int) -> Shapes:
    parts = ("weight", "bias") if model.normalization == "LayerNorm" else ("weight",)
    return [(f"{name}.{part}", (size,)) for part in parts]


def _attention(model: Any) -> Shapes:
    hidden, ranks = model.hidden_size, model.tensor_model_parallel_size
    head = model.kv_channels or hidden // model.num_attention_heads
    query = model.num_attention_heads * head // ranks
    key_value = 2 * (model.num_query_groups or model.num_attention_heads) * head // ranks
    has_bias = model.add_bias_linear or model.add_qkv_bias
    shapes = _linear("self_attention.proj", hidden, query, model.add_bias_linear)
    shapes += _norm(model, "self_attention.norm", hidden)
    shapes += _linear("self_attention.qkv", query + key_value, hidden, has_bias)
    if model.qk_layernorm:
        shapes += _norm(model, "self_attention.q_norm", head) + _norm(model, "self_attention.k_norm", head)
    return shapes


def _latent_attention(model: Any) -> Shapes:
    hidden, heads = model.hidden_size, model.num_attention_heads // model.tensor_model_parallel_size
    query = heads * (model.qk_head_dim + model.qk_pos_emb_head_dim)
    shapes = _linear("self_attention.proj", hidden, heads * model.v_head_dim)
    shapes += _norm(model, "self_attention.norm", hidden)
    if model.q_lora_rank is None:
        shapes += _linear("self_attention.q", query, hidden)
    else:
        shapes += _linear("self_attention.q_down", model.q_lora_rank, hidden)
        shapes += _linear("self_attention.q_up", query, model.q_lora_rank)
    shapes += _linear("self_attention.kv_down", model.kv_lora_rank + model.qk_pos_emb_head_dim, hidden)
    shapes += _linear("self_attention.kv_up", heads * (model.qk_head_dim + model.v_head_dim), model.kv_lora_rank)
    if model.qk_layernorm:
        if model.q_lora_rank is not None:
            shapes += _norm(model, "self_attention.q_norm", model.q_lora_rank)
        shapes += _norm(model, "self_attention.kv_norm", model.kv_lora_rank)
    return shapes


def _mlp(model: Any, name: str, size: int, ranks: int) -> Shapes:
    rows = size * (2 if model.gated_linear_unit else 1) // ranks
    shapes = _linear(f"{name}.fc1", rows, model.hidden_size, model.add_bias_linear)
    return shapes + _linear(f"{name}.fc2", model.hidden_size, size // ranks, model.add_bias_linear)


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
