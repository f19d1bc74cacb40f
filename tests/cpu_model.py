"""What the CPU arm trains: options, Bridge's config, a small GPT in mcore's DDP, data, and a schedule."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from lengths import cut, length_of

from bridge_fgo.recipes.tiny import ON_THE_CPU, container, gpt, layer_spec

Precision = Literal["bf16", "fp16", "fp32_params"]
Optimizer = Literal["adam", "muon", "adaptive_muon", "dist_muon"]
Sharding = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]

CONSTANT_LOSS_SCALE = 128.0
"""Gives bf16 the grad scaler without which mcore does not look for infs; a power of two, so that scaling and
unscaling are exact."""


@dataclass(frozen=True, kw_only=True)
class CpuOptions:
    """Chooses the model and the faults of a training. Steps count from 1, faults are possible from 2 on."""

    offload: bool = False
    """`cfg.optimizer.offload_optimizer_states`."""
    chunks: int = 1
    """Model chunks (virtual pipeline stages) on the one rank: 1 or 2."""
    experts: bool = False
    """Mixture of experts, so that the ChainedOptimizer has a DistributedOptimizer for dense parameters and
    another for expert parameters."""
    frozen: bool = False
    """Train the attention's output projections only, as PEFT trains adapters."""
    precision: Precision = "bf16"
    """"fp16" scales the loss dynamically, from so high that the first steps overflow and are skipped.
    "fp32_params" is bf16 with native fp32 layer norms, whose "masters" are views of DDP's buffers."""
    optimizer: Optimizer = "adam"
    """`cfg.optimizer.optimizer`. Muons need emerging-optimizers, and `distributed=False`."""
    distributed: bool = True
    """`use_distributed_optimizer`; without it each rank updates whole parameters, under mcore's
    Float16OptimizerWithFloat16Params."""
    fsdp: Sharding | None = None
    """Megatron-FSDP, and what it shards; None for mcore's DDP."""
    instances: int = 1
    """Distributed optimizer instances: groups of ranks among which the states are sharded."""
    outer_sharding: Literal["no_shard", "optim"] = "no_shard"
    """Megatron-FSDP's sharding between the instances."""
    swiglu: bool = False
    """Gated layers, whose first matrix `fsdp_dtensor` checkpoints split in two."""
    tp: int = 1
    """Ranks of tensor parallelism."""
    pp: int = 1
    """Pipeline stages."""
    frozen_stage: int | None = None
    """The pipeline stage of which nothing trains."""
    muon_tp_mode: Literal["blockwise", "duplicated", "distributed"] = "blockwise"
    """How those orthogonalize a matrix that they share; all but the first have collectives in the update."""
    moment2: Literal["adamuon", "normuon"] = "adamuon"
    """Second moments of AdaptiveMuon: of each element, or of each row or column."""
    overlap_grad_reduce: bool = False
    """Reduce gradients during backward, as soon as they are ready."""
    bucket_size: int | None = None
    """Elements of a DDP bucket; None is mcore's, which has all of this model in one. Needs `overlap_grad_reduce`."""
    overlap_param_gather: bool = False
    """Gather parameters in the next forward, by hooks before each module; needs `overlap_grad_reduce`."""
    found_inf_steps: frozenset[int] = frozenset()
    """Steps whose gradients are infinite, so that the optimizer skips them."""
    grad_norm_skip_steps: frozenset[int] = frozenset()
    """Steps that the optimizer skips because of `grad_norm_skip_threshold`."""
    rerun_steps: frozenset[int] = frozenset()
    """Steps with a transient fault in the first forward-backward pass, so that there is a second one."""
    checkpoint_exit_step: int | None = None
    """Step with a fault in both passes, after which Bridge's loop would save a checkpoint and exit."""
    layers: int = 2
    """Transformer layers of each chunk: mcore does not divide them on a single pipeline rank."""
    hidden: int = 128
    vocab: int = 256
    sequence: int = 32
    lengths: tuple[int, ...] = ()
    """Lengths up to `sequence` that sequences take in turn, in steps and within them; see `lengths`."""
    microbatches: int = 2
    micro_batch_size: int = 2
    seed: int = 1234


def make_config(options: CpuOptions) -> Any:
    """Return Bridge's ConfigContainer, not validated yet.

    Nothing in it depends on how many steps will run, so that a shorter run is the beginning of a longer one.
    """
    from megatron.bridge.training import config as bridge

    half = torch.float16 if options.precision == "fp16" else torch.bfloat16
    is_fp16 = half == torch.float16
    precision = {"fp16": is_fp16, "bf16": not is_fp16, "params_dtype": half}
    variants: dict[str, Any] = {}
    if options.experts:
        variants.update(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=options.hidden)
    if options.swiglu:
        variants.update(gated_linear_unit=True, activation_func=torch.nn.functional.silu)
    if options.fsdp is not None:
        variants.update(calculate_per_token_loss=True)  # else gradients are averaged by a reduction that gloo lacks
    optimizer: Any = bridge.OptimizerConfig(
        optimizer=options.optimizer, muon_tp_mode=options.muon_tp_mode, adaptive_muon_moment2_method=options.moment2,
        lr=2e-3, min_lr=1e-4, clip_grad=1.0, use_distributed_optimizer=options.distributed,
        loss_scale=CONSTANT_LOSS_SCALE if options.found_inf_steps and not is_fp16 else None, initial_loss_scale=2.0**20,
        loss_scale_window=4, hysteresis=1, **precision,
    )  # fmt: skip
    # An attribute and no argument: mcore releases without an offloader have no such field.
    optimizer.offload_optimizer_states = options.offload
    fsdp: dict[str, Any] = {}
    if options.fsdp is not None:
        fsdp.update(
            use_megatron_fsdp=True,
            data_parallel_sharding_strategy=options.fsdp,
            outer_dp_sharding_strategy=options.outer_sharding,
        )
    validates = options.rerun_steps or options.checkpoint_exit_step is not None
    rerun_mode = "validate_results" if validates else "disabled"
    return container(
        gpt(
            num_layers=options.layers,
            hidden_size=options.hidden,
            ffn_hidden_size=4 * options.hidden,
            num_attention_heads=4,
            tensor_model_parallel_size=options.tp,
            pipeline_model_parallel_size=options.pp,
            vocab_size=options.vocab,
            seq_length=options.sequence,
            virtual_pipeline_model_parallel_size=options.chunks if options.chunks > 1 else None,
            hidden_dropout=0.1,  # so that a rerun that did not restore the random state would differ
            add_bias_linear=not options.experts,  # mcore's plain-torch experts cannot differentiate a bias
            pipeline_dtype=half,
            autocast_dtype=half,
            transformer_layer_spec=layer_spec,
            **precision,
            **ON_THE_CPU,
            **variants,
        ),
        optimizer,
        bridge.DistributedDataParallelConfig(
            use_distributed_optimizer=options.distributed,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=options.overlap_grad_reduce,
            bucket_size=options.bucket_size,
            overlap_param_gather=options.overlap_param_gather,
            check_for_nan_in_grad=False,  # would raise where the optimizer is to find the infs
            num_distributed_optimizer_instances=options.instances,
            **fsdp,
        ),
        iterations=1000,
        batch=(options.micro_batch_size, options.micro_batch_size * options.microbatches),
        vocab=options.vocab,
        seed=options.seed,
        # With a warm-up the first step's learning rate is 0 and updates nothing.
        scheduler={"lr_decay_style": "cosine", "lr_decay_iters": 1000, "lr_warmup_iters": 0},
        rerun_state_machine=bridge.RerunStateMachineConfig(rerun_mode=rerun_mode),
        checkpoint=bridge.CheckpointConfig(ckpt_format="torch_dist" if options.fsdp is None else "fsdp_dtensor"),
    )


def make_model(options: CpuOptions, cfg: Any, groups: Any) -> list[torch.nn.Module]:
    """Return the model chunks, each as DDP(Float16Module(GPTModel)), or in Megatron-FSDP, like Bridge's `get_model`.

    Not through `get_model`, because it makes several chunks only on several pipeline ranks.
    """
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.transformer.module import Float16Module

    provider = cfg.model
    provider._pg_collection = groups
    model = []
    for chunk in range(options.chunks):
        module = Float16Module(provider, provider.provide(vp_stage=chunk if options.chunks > 1 else None))
        for name, parameter in module.named_parameters():
            if ".experts." in name:
                # mcore says so itself only where expert parallelism spans several ranks.
                parameter.allreduce = False  # type: ignore[reportAttributeAccessIssue]
            if options.frozen:
                parameter.requires_grad_(".linear_proj." in name)
            if options.frozen_stage == groups.pp.rank():
                parameter.requires_grad_(False)
        if options.precision == "fp32_params":
            for layer in module.modules():
                if isinstance(layer, torch.nn.LayerNorm):
                    layer.float()
        wrapper: Any = DistributedDataParallel
        if options.fsdp is not None:
            wrapper = partial(FullyShardedDataParallel, device=torch.device("cpu"))
        how = {"disable_bucketing": chunk > 0, "pg_collection": groups}
        model.append(wrapper(config=provider, ddp_config=cfg.ddp, module=module, **how))
    return model


def microbatches(options: CpuOptions) -> Iterator[dict[str, torch.Tensor]]:
    """Yield microbatches for ever: "tokens" and "labels", int64 of (micro_batch_size, sequence).

    Each row counts up by a stride of its own, which a small model can learn.
    """
    generator = torch.Generator().manual_seed(options.seed)
    rows = (options.micro_batch_size, 1)
    for number in itertools.count():
        start = torch.randint(options.vocab, rows, generator=generator)
        stride = torch.randint(1, 4, rows, generator=generator)
        row = (start + stride * torch.arange(options.sequence + 1)) % options.vocab
        length = length_of(*divmod(number, options.microbatches), options.lengths or (options.sequence,))
        yield cut({"tokens": row[:, :-1], "labels": row[:, 1:]}, length)


def forward_backward_chunks(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: list[Iterator[dict[str, torch.Tensor]]],
    model: list[torch.nn.Module],
    num_microbatches: int,
    pg_collection: Any,
    forward_only: bool = False,
    force_all_reduce: bool = False,
    **unused: Any,
) -> list[dict[str, torch.Tensor]]:
    """Run forward and backward of several model chunks that lie on one rank; return the microbatches' losses.

    mcore's interleaved schedule cannot do this: with one pipeline rank it plans no warm-up, so that its first
    backward comes before the last chunk's first forward. This one is built of the same parts: mcore's
    forward_step and backward_step for one chunk, and one call of `finalize_model_grads_func` for all chunks.
    Each microbatch goes forward through all chunks and back before the next.
    """
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.utils import get_model_config

    assert not forward_only, "this schedule is for training"
    config = get_model_config(model[0])
    last = len(model) - 1
    losses: list[dict[str, torch.Tensor]] = []
    tokens = torch.zeros([], dtype=torch.int)
    for microbatch in range(num_microbatches):
        with contextlib.ExitStack() as no_sync:
            if config.no_sync_func is not None and microbatch < num_microbatches - 1:
                for chunk_no_sync in config.no_sync_func:
                    no_sync.enter_context(chunk_no_sync())
            inputs: list[torch.Tensor | None] = [None]
            outputs: list[Any] = []
            for chunk, module in enumerate(model):
                output: Any
                output, count = schedules.forward_step(
                    forward_step_func, data_iterator[chunk], module, num_microbatches, inputs[chunk], losses, config,
                    pg_collection.cp.size(), is_first_microbatch=microbatch == 0, current_microbatch=microbatch,
                    vp_stage=chunk, is_last_stage=chunk == last,
                )  # fmt: skip
                tokens += count
                outputs.append(output)
                if chunk < last:
                    # What the next stage would receive: the values, without the graph.
                    inputs.append(output.detach().clone().requires_grad_())
                    schedules.deallocate_output_tensor(output, config.deallocate_pipeline_outputs)
            gradient = None
            for chunk in reversed(range(len(model))):
                gradient = schedules.backward_step(inputs[chunk], outputs[chunk], gradient, config)
    if config.finalize_model_grads_func is not None:
        counted = tokens if config.calculate_per_token_loss else None
        how = {"pg_collection": pg_collection, "force_all_reduce": force_all_reduce}
        config.finalize_model_grads_func(model, counted, **how)
    return losses
