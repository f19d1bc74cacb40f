"""The peak of activations of a GPT on one rank, by counting what autograd keeps.

The tensors that each part of a layer saves (mcore 0.19 with Transformer Engine 2.17's layers), as in Korthikanti et
al., "Reducing Activation Recomputation in Large Transformer Models" (2022), but for grouped-query and latent
attention, gated MLPs and experts. The dense count was taken from the allocator's trace of a step on an H200 (24
layers, hidden 2048: 8 tensors of the hidden size, one score matrix, one fc1 output and three more of the MLP's size
in each layer), that of experts and latent attention from traces of twelve more (4 layers, hidden 1024); the tests
hold it against the peaks of sixteen measured runs.

mcore's activation offload is counted for the modules that were measured: tensors that its contexts save, but for the
last layer of the first backward, and with the group that is prefetched beside the one whose backward runs. Of layers
that Transformer Engine offloads (its default implementation) nothing stays but tensors that are not contiguous, as in
two runs with unfused attention: halves of a gate's input, and queries, keys and values.

Not counted: the transport buffers of token dispatchers, communication buffers, quantized copies of FP8 training
(its activations are counted as 16-bit), CUDA graphs.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from bridge_fgo.bridge.compat import as_named_in
from bridge_fgo.bridge.refusals import uses_fsdp
from bridge_fgo.memory.host_memory import power_of_two_at_least
from bridge_fgo.tools.job.job import Job
from bridge_fgo.tools.job.recomputation import offloaded_beside_graphs, recomputed_modules

HALF = 2
"""Bytes of an element of bf16 or fp16."""
LOGIT_BYTES = {True: 4, False: 6}
"""Bytes for each logit at the loss, fused or not: the 16-bit logits with, unless it is fused, their fp32 copy."""
WORKSPACES = 97 * 2**20
"""Bytes that cuBLAS and Transformer Engine keep; measured on H200, torch 2.11: 101.7 MB beside weights, gradients and
states, with one GPU and with two."""
GROUPED_WORKSPACES = 4 * 32 * 2**20
"""Bytes that Transformer Engine keeps beside those for the grouped products of experts, which run on four streams."""

DEFAULT_LEAST_NUMEL = 2**20
"""Elements of the least tensor that mcore offloads by default (`min_offloaded_tensor_size`)."""
LEAST_OF_WHOLE = 2**18 * HALF
"""Bytes of the least tensor that Transformer Engine's offload of whole layers copies (`_check_if_offload`, 2.17)."""

NO_GRADIENT = sys.maxsize
"""Number of a tensor that no stage has: no gradient is there yet."""

WITHIN = {False: set[str](), True: {"moe_act", "shared_experts"}}
"""Modules that a recomputed "moe" has within it, by whether it is recomputed."""

OF_A_GPT = {"embedding", "decoder", "output_layer"}
"""How the names of a GPT's tensors begin; a vision model's layers are not of the config's sizes."""

NOT_COUNTED = ("hybrid_override_pattern", "hybrid_layer_pattern", "mtp_num_layers", "experimental_attention_variant")


class LayerBytes(NamedTuple):
    """Bytes that one layer keeps for its backward, of one microbatch.

    input: the layer's input; kept: from the forward to the backward; transient: gradients that the backward needs
    beside what is kept as it begins; spared: what selective recomputation of a module spares, by its name in
    `recompute_modules`; offloaded: what mcore's activation offload of a module has on the host in place of the GPU, by
    its name in `offload_modules`; copies: each host tensor of it, of which one that two operations save has two. whole:
    each host tensor of Transformer Engine's offload of whole layers, which leaves on the GPU what is not contiguous or
    small.
    """

    input: int
    kept: int
    transient: int
    spared: Mapping[str, int]
    offloaded: Mapping[str, int]
    copies: Mapping[str, tuple[int, ...]]
    whole: tuple[int, ...]


Course = list[tuple[int, int]]
"""Bytes of activations at the moments of a microbatch's backward, each with the number of the first of the stage's
tensors that has a gradient by then."""


@dataclass(frozen=True)
class Backward:
    """Activations on a rank of a pipeline stage as backwards run: of that with the most, and of a step's last."""

    most: Course
    last: Course

    @property
    def peak(self) -> int:
        """The most bytes of them."""
        return max(nbytes for nbytes, _ in self.most)


def workspace_bytes(job: Job) -> int:
    """Return the bytes of workspaces on a rank."""
    model: Any = job.config.model
    is_grouped = getattr(model, "num_moe_experts", None) and getattr(model, "moe_grouped_gemm", False)
    return WORKSPACES + (GROUPED_WORKSPACES if is_grouped else 0)


def activation_bytes(job: Job, stage: int) -> int | None:
    """Return the peak of activations on a rank of a pipeline stage, in bytes; None if the model is not known."""
    backward = backward_of(job, stage)
    return None if backward is None else backward.peak


def backward_of(job: Job, stage: int) -> Backward | None:
    """Return the activations of a pipeline stage's backwards; None if the model is not known.

    The moments are the loss, with no gradient yet, the output layer, and each layer, or layers that are recomputed
    together, as their backward begins; last the embedding.
    """
    model: Any = job.config.model
    layers = layers_of_stage(job, stage)
    granularity, is_block, number = recomputation(model)
    names = {tensor.name.removeprefix("module.").partition(".")[0] for tensor in job.tensors(stage)}
    if not layers or uncounted(job.config) or names - OF_A_GPT:
        return None
    whole = [_layer(job, layer.has_experts) for layer in layers]
    chunks = chunks_of(model)
    per_chunk = max(1, len(whole) // chunks)
    again = recomputed_modules(model)
    # Layers that are recomputed at once, from the input of the first.
    group = min(number if granularity == "full" and not is_block else 1, per_chunk)
    kept, away = [], [0] * len(whole)
    for index, of_layer in enumerate(whole):
        if granularity == "full" and not is_block:
            kept.append(of_layer.input // group)
        elif granularity == "full":
            kept.append(of_layer.input if index % per_chunk < number else of_layer.kept)
        else:
            kept.append(of_layer.kept - sum(of_layer.spared.get(name, 0) for name in again - WITHIN["moe" in again]))
            # mcore does not offload what is recomputed: neither is on the GPU.
            away[index] = sum(of_layer.offloaded.get(name, 0) for name in {*offload_modules(model)} - again)
            kept[index] -= away[index]
            if index < offloaded_layers(model):
                # The model's input is referred to until its forward ends.
                kept[index] = of_layer.kept - sum(of_layer.whole) + (of_layer.input if index == 0 else 0)

    def of_layers(start: int, stop: int, behind: int) -> Course:
        """Return what a chunk's layers have, beside the bytes of what runs backward after them."""
        found = []
        for end in range(stop, start, -group):
            first = max(start, end - group)
            # Those that are recomputed together, whole again, as their backward begins.
            back = sum(layer.kept for layer in whole[first:end]) - sum(kept[first:end])
            back += away[first - 1] if first > start else 0  # prefetched for the next backward
            # As many layers come back beside it as those behind it that are gone.
            ahead = range(max(0, first - len(whole) + offloaded_layers(model) + 1), min(first, offloaded_layers(model)))
            back += sum(whole[index].kept - kept[index] for index in ahead)
            found.append((behind + sum(kept[start:end]) + back + whole[end - 1].transient, layers[first].first))
        return found

    starts = [min(chunk * per_chunk, len(whole) - 1) for chunk in range(chunks)]
    stops = [*starts[1:], len(whole)]
    logits = 0
    if stage == job.parallel.pipeline - 1:
        # The rows are those of the rank's output layer, or of the embedding that it shares.
        sizes = {tensor.name.rpartition(".")[0]: tensor.numel for tensor in job.tensors(stage)}
        own = [size for name, size in sizes.items() if name.endswith("output_layer")]
        shared = [size for name, size in sizes.items() if name.endswith("word_embeddings")]
        logits = tokens_of(job) * ((own or shared)[0] // model.hidden_size)

    def of_loss(beside: int) -> Course:
        after = max(layer.last for layer in layers) + 1
        at_loss = logits * LOGIT_BYTES[bool(model.cross_entropy_loss_fusion)]
        return [(beside + at_loss, NO_GRADIENT), (beside + logits * HALF, after)]

    # mcore keeps the last layer of the first backward on the GPU.
    in_flight = sum(kept) * _microbatches_in_flight(job, stage) // chunks + away[-1]
    most = of_loss(in_flight) + of_layers(starts[-1], len(whole), in_flight - sum(kept[starts[-1] :]) - away[-1])
    # As a chunk's last backward runs, those before it hold a group of microbatches.
    behind = [sum(kept[:start]) * min(job.parallel.pipeline, job.microbatches) for start in starts]
    last = of_loss(behind[-1] + sum(kept[starts[-1] :]))
    for chunk in reversed(range(chunks)):
        last += of_layers(starts[chunk], stops[chunk], behind[chunk])
    return Backward(most, [*last, (whole[0].input, 0)])


def uncounted(config: Any) -> str:
    """Return the setting with which activations are not counted, and its value; "" if they are."""
    model = config.model
    for name in NOT_COUNTED:
        if value := getattr(model, name, None):
            return as_named_in(model, f"model.{name}={value!r}")
    if getattr(model, "num_layers", None) is None:
        return "model.num_layers=None"
    if adapters := adapters_of(config):
        return f"peft={adapters}"
    # The layers that these offload were not held against runs, and planned peaks were above what such recipes run on.
    if offloaded_layers(model) and (getattr(model, "fp8", None) or uses_fsdp(config)):
        return as_named_in(model, "model.cpu_offloading=True and FP8 or Megatron-FSDP")
    if not offload_modules(model) or _offload_is_counted(model):
        return ""
    text = f"model.fine_grained_activation_offloading=True and model.offload_modules={model.offload_modules!r}"
    return as_named_in(model, text)


def adapters_of(config: Any) -> str | None:
    """Return the kind of adapters that are trained beside frozen parameters; None for none."""
    return getattr(getattr(config, "peft", None), "kind", None)


def pinned_bytes(job: Job, stage: int) -> int | None:
    """Return the host bytes that are pinned for activations on a rank of a pipeline stage; None if not known.

    In its first iteration mcore offloads every layer, the last too, of all microbatches in flight. Transformer Engine's
    layers are those of the one microbatch that it offloads at a time. Both copy each saved tensor by itself, into a
    block of PyTorch's allocator, whose sizes are powers of two.
    """
    if not (copies := _copies(job, stage)):
        return 0
    if activation_bytes(job, stage) is None:
        return None
    blocks = sum(power_of_two_at_least(size) for of_layer in copies for size in of_layer)
    return blocks * _microbatches_in_flight(job, stage) // chunks_of(job.config.model)


def copied_bytes(job: Job, stage: int) -> list[int]:
    """Return the bytes of a microbatch's activations that are copied each way, of each layer of a stage.

    Those of modules that mcore offloads, of all layers but the last; or of layers that Transformer Engine offloads.
    """
    sizes = [*map(sum, _copies(job, stage))]
    return sizes if offloaded_layers(job.config.model) else [*sizes[:-1], 0]


def _copies(job: Job, stage: int) -> list[list[int]]:
    """Return the bytes of each host copy of each layer's activations on a rank."""
    model: Any = job.config.model
    count, away = offloaded_layers(model), {*offload_modules(model)} - recomputed_modules(model)
    of_layers = [_layer(job, layer.has_experts) for layer in (layers_of_stage(job, stage) if count or away else [])]
    if count:
        return [[*of_layer.whole] if place < count else [] for place, of_layer in enumerate(of_layers)]
    sizes = ([nbytes for name in away for nbytes in of_layer.copies.get(name, ())] for of_layer in of_layers)
    return [[size for size in each if size >= model.min_offloaded_tensor_size * HALF] for each in sizes]


def tokens_of(job: Job) -> int:
    """Return the tokens of a microbatch on a rank."""
    return job.config.model.seq_length * job.config.train.micro_batch_size // job.parallel.context


def chunks_of(model: Any) -> int:
    """Return the model chunks of a rank."""
    return getattr(model, "virtual_pipeline_model_parallel_size", None) or 1


def recomputation(model: Any) -> tuple[str | None, bool, int]:
    """Return a config's granularity of recomputation, whether it is of the first layers alone, and of how many."""
    is_block = getattr(model, "recompute_method", None) == "block"
    return getattr(model, "recompute_granularity", None), is_block, getattr(model, "recompute_num_layers", None) or 1


def offload_modules(model: Any) -> list[str]:
    """Return the modules whose activations mcore offloads."""
    is_on = getattr(model, "fine_grained_activation_offloading", False)
    return offloaded_beside_graphs(model, model.offload_modules if is_on else [])


def offloaded_layers(model: Any) -> int:
    """Return how many of a model's layers, from the first on, have their activations offloaded whole."""
    is_on = getattr(model, "cpu_offloading", False) and model.cpu_offloading_activations
    return model.cpu_offloading_num_layers if is_on else 0


def _offload_is_counted(model: Any) -> bool:
    """Return whether what mcore offloads is known: of the modules that have been measured, and everything of them."""
    known = {"core_attn", "attn_proj", "mlp_norm", "qkv_linear", "expert_fc1", "moe_act"}
    known -= {"core_attn"} if "mla_up_proj" in recomputed_modules(model) else set()  # the same tensors
    is_whole = model.activation_offload_fraction == 1.0 and not model.delta_offload_bytes_across_pp_ranks
    is_whole = is_whole and model.min_offloaded_tensor_size <= DEFAULT_LEAST_NUMEL
    of_latent = getattr(model, "multi_latent_attention", False) and "qkv_linear" in model.offload_modules
    return {*offload_modules(model)} <= known and is_whole and not of_latent and recomputation(model)[0] != "full"


@dataclass(frozen=True)
class Layer:
    """A transformer layer of a stage: whether it has experts; the numbers of its first and last tensor on the stage."""

    has_experts: bool
    first: int
    last: int


def layers_of_stage(job: Job, stage: int) -> list[Layer]:
    """Return each transformer layer of a stage, from the names of its tensors."""
    names = [f"{i}.{tensor.name}" for i, chunk in enumerate(job.stages[stage]) for tensor in chunk]
    layers: dict[str, list[int]] = {}
    for name in names:
        if ".self_attention." in name:
            layers[name.split(".self_attention.")[0]] = []
    for number, name in enumerate(names):
        for end in (place for place, letter in enumerate(name) if letter == "."):
            if name[:end] in layers:
                layers[name[:end]].append(number)
    with_experts = {name.split(".mlp.experts.")[0] for name in names if ".mlp.experts." in name}
    return [Layer(layer in with_experts, numbers[0], numbers[-1]) for layer, numbers in layers.items()]


def _microbatches_in_flight(job: Job, stage: int) -> int:
    """Return how many microbatches' activations of its model chunks a rank holds at most, of all chunks together.

    The warm-up of mcore's schedules: one stage less for each stage further on; with several chunks a rank, two less,
    after all but the last chunk of each microbatch of a group.
    """
    stages, chunks = job.parallel.pipeline, chunks_of(job.config.model)
    if chunks == 1:
        return min(stages - stage, job.microbatches)
    return min((stages - stage - 1) * 2 + (chunks - 1) * stages + 1, job.microbatches * chunks)


def _layer(job: Job, has_experts: bool) -> LayerBytes:
    model: Any = job.config.model
    tokens, ranks = tokens_of(job), job.parallel.tensor
    hidden = tokens * model.hidden_size * HALF // (ranks if model.sequence_parallel else 1)
    rest, scores, projected_up, output, core, whole = _attention(model, tokens, ranks)
    offloaded = {"core_attn": scores + rest - output, "attn_proj": output, "qkv_linear": 2 * hidden}
    copies = {"core_attn": core, "attn_proj": (output,), "qkv_linear": (hidden, hidden)}
    spared = {"core_attn": scores, "layernorm": 2 * hidden, "mla_up_proj": projected_up}
    if has_experts:
        mlp, of_shared, of_routed = _experts(job, tokens)
        spared |= {"moe": mlp.kept, "moe_act": mlp.activation, "shared_experts": of_shared}
        offloaded |= {"mlp_norm": hidden, **{name: nbytes for name, (nbytes, _) in of_routed.items()}}
        copies |= {"mlp_norm": (hidden,), **{name: of_each for name, (_, of_each) in of_routed.items()}}
    else:
        mlp = _mlp(model, tokens, model.ffn_hidden_size, ranks)
        spared["mlp"] = mlp.kept
    of_mlp = 2 * hidden + mlp.kept  # the residual and the norm's output
    return LayerBytes(
        input=hidden,
        kept=2 * hidden + rest + scores + of_mlp,  # the layer's input, and the norm's output
        transient=max(mlp.transient, rest + scores - of_mlp),
        spared=spared,
        offloaded=offloaded,
        copies=copies,
        # Inputs and outputs of two norms first.
        whole=tuple(size for size in (*(hidden,) * 4, *whole, *mlp.whole) if size >= LEAST_OF_WHOLE),
    )


def is_unfused(model: Any) -> bool:
    """Return whether attention makes its score matrix."""
    return str(getattr(model, "attention_backend", "auto")).rpartition(".")[2] in ("unfused", "local")


def _attention(model: Any, tokens: int, ranks: int) -> tuple[int, int, int, int, tuple[int, ...], tuple[int, ...]]:
    """Return the bytes that attention keeps.

    All beside the matrix of scores; that matrix, where it makes one; of the rest what latent attention projects up; and
    what attention puts out. Then of each tensor that core attention saves, and of each that is contiguous, once.
    """
    heads = model.num_attention_heads // ranks
    unfused = is_unfused(model)
    scores = heads * tokens * model.seq_length * HALF if unfused else 0
    if getattr(model, "multi_latent_attention", False):
        query = heads * (model.qk_head_dim + model.qk_pos_emb_head_dim)
        up = heads * (model.qk_head_dim + model.v_head_dim)
        compressed = (*2 * (model.q_lora_rank or 0, model.kv_lora_rank), model.qk_pos_emb_head_dim)
        projected = tokens * HALF * (2 * query + up)
        output = tokens * HALF * heads * model.v_head_dim
        core = (tokens * HALF * query, tokens * HALF * query, output, *(2 * (scores,) if unfused else (output,)))
        whole = (*(tokens * HALF * size for size in (up, *compressed)), *((scores,) if unfused else core[:3]))
        return projected + output + tokens * HALF * sum(compressed), scores, projected, output, core, whole
    head = model.kv_channels or model.hidden_size // model.num_attention_heads
    query = heads * head
    output = tokens * HALF * query
    if unfused:
        # Queries, keys and values for every head, the output. The softmax and the product after it save the scores.
        return 4 * output, scores, 0, output, (output, output, output, scores, scores), (output, scores)
    key = (model.num_query_groups or model.num_attention_heads) * head // ranks
    projected = query + 2 * key  # the values are a view of it
    softmax = 4 * heads * tokens
    core = (output, tokens * HALF * key, tokens * HALF * key, output, softmax)
    whole = (*(tokens * HALF * size for size in (query, key, projected)), output, softmax)
    return sum(whole), scores, 0, output, core, whole


class MLPBytes(NamedTuple):
    """Bytes of an MLP, or of a layer's experts.

    kept: for the backward; transient: what the backward needs beside; activation: of what is kept, what the activation
    function makes; whole: each tensor of what is kept, but a gate's input where it is saved as two halves of a tensor.
    """

    kept: int
    transient: int
    activation: int
    whole: tuple[int, ...]


def _mlp(model: Any, tokens: int, size: int, ranks: int) -> MLPBytes:
    one = tokens * size * HALF // ranks
    if not model.gated_linear_unit:
        return MLPBytes(2 * one, 2 * one, one, (one, one))
    # Not fused: the activation's output and the other half, shifted, are tensors of their own.
    if _is_fused(model):
        return MLPBytes(3 * one, 3 * one, one, (2 * one, one))
    return MLPBytes(5 * one, 3 * one, 3 * one, (one,) * 3)


def _is_fused(model: Any) -> bool:
    """Return whether one kernel makes the activation function and what follows it."""
    return getattr(model, "bias_activation_fusion", False) or getattr(model, "use_te_activation_func", False)


def _experts(job: Job, tokens: int) -> tuple[MLPBytes, int, dict[str, tuple[int, tuple[int, ...]]]]:
    """Return the bytes of a layer of experts, with tokens spread evenly over them.

    Also those of them that shared experts keep, and by the name of the module what mcore's activation offload frees,
    and each tensor that it copies.
    """
    model: Any = job.config.model
    routed, ranks = tokens * model.moe_router_topk, job.parallel.expert_tensor
    size = model.moe_ffn_hidden_size or model.ffn_hidden_size
    kept, transient, activation, whole = _mlp(model, routed, size, ranks)
    one = routed * size * HALF // ranks
    if not _is_fused(model):  # the product with the router's probabilities is a tensor of its own
        kept, activation, whole = kept + one, activation + one, (*whole, one)
    # Sequence parallelism gives each tensor-parallel rank its own tokens to route.
    share = max(1, job.parallel.tensor // ranks) if model.sequence_parallel else 1
    # The experts' input; their output too, where PyTorch's own indexing puts tokens back in order.
    permuted = (routed * model.hidden_size * HALF // share,) * (1 if model.moe_permute_fusion else 2)
    shared = _mlp(model, tokens, model.moe_shared_expert_intermediate_size or 0, job.parallel.tensor)
    # The activation's input, and all that it makes but its output.
    act = (kept - one) // share
    # Fused, the activation saves its input alone; else each of its operations saves a tensor, of a gate's input a half.
    each = (act,) if _is_fused(model) else (one // share,) * (4 if model.gated_linear_unit else 2)
    whole = (*(size // share for size in whole), *permuted, *shared.whole)
    of_all = MLPBytes(kept // share + sum(permuted) + shared.kept, transient // share, activation // share, whole)
    return of_all, shared.kept, {"expert_fc1": (permuted[0], permuted[:1]), "moe_act": (act, each)}
