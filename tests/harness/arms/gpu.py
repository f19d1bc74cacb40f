"""One training arm: a small GPT through Bridge's own `pretrain()`, on mock data.

    PYTHONPATH=tests python -m harness.arms.gpu --steps 50 --offload on --events events.jsonl
    PYTHONPATH=tests torchrun --nproc-per-node 2 -m harness.arms.gpu --tp 2 ...

With --cpu a smaller GPT of plain torch trains without a GPU. Transformer Engine and CUDA stand in
(`bridge_fgo.tools.standins`): it shows whether two arms are bitwise equal and how many bytes go, not how fast. Without
an allocator to ask, peaks are the largest samples of live optimizer state: as a microbatch's forward begins, and after
a step; `peak_allocated_bytes` is the larger one, `peak_reserved_bytes` 0.

Rank 0 writes the events that `harness.demo` and the tests read. Digests cover every rank; bytes and times are
rank 0's. Two runs with the same options are bitwise equal, but experts with `--no-deterministic`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge_fgo.config import OffloadConfig
from bridge_fgo.recipes import process, tiny
from bridge_fgo.tools.job.parallel import STRATEGIES
from bridge_fgo.tools.options import OPTIONS, settings

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer

ON_CPU = {"layers": 2, "hidden": 128, "heads": 4, "vocab": 256, "seq": 32, "gbs": 4}  # defaults of sizes there
LAYER_WISE_CHUNK_MIB = 512  # that mcore's step of Muon brings to the GPU at a time, as a part of this package's


def add_offload_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the options to an argparse parser."""
    for option in OPTIONS:
        if option.is_switch:
            parser.add_argument(option.flag, action=argparse.BooleanOptionalAction, help=option.help)
        else:
            read = option.read if option.words else option.kind
            parser.add_argument(option.flag, type=read, choices=option.choices or None, help=option.help)


def offload_config(namespace: argparse.Namespace) -> OffloadConfig:
    """Return the settings in the namespace of a parser with `add_offload_options`."""
    return OffloadConfig(**settings(vars(namespace)))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options; a combination that makes no sense ends the process with status 2."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.arms.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def switch(group: argparse._ActionsContainer, name: str, default: bool, help: str | None = None) -> None:
        group.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=default, help=help)

    parser.add_argument("--cpu", action="store_true", help="train without a GPU, a smaller model by default")
    size = parser.add_argument_group("size")
    for name, default in (("layers", 8), ("hidden", 2048), ("heads", 16), ("vocab", 32000), ("seq", 1024)):
        size.add_argument(f"--{name}", type=int, default=default)
    size.add_argument("--ffn", type=int, help="default: 4 times hidden")
    size.add_argument("--groups", type=int, help="of heads that share keys and values; default: half of the heads")
    size.add_argument("--mbs", type=int, default=2, help="sequences of a microbatch")
    size.add_argument("--gbs", type=int, default=8, help="sequences of a step, over all ranks")
    size.add_argument("--experts", type=int, help="of a mixture of experts in every layer; default: none")
    size.add_argument("--topk", type=int, default=2, help="experts a token")
    switch(size, "grouped-experts", False, "multiply all experts of a rank at once; else one after another")
    size.add_argument("--steps", type=int, default=20)
    spread = parser.add_argument_group("parallelism")
    for name in ("tp", "pp", "ep"):
        spread.add_argument(f"--{name}", type=int, default=1)
    spread.add_argument("--vpp", type=int, help="model chunks of a pipeline stage; default: one, not interleaved")
    spread.add_argument("--instances", type=int, default=1, help="distributed optimizer instances")
    switch(spread, "dp-overlap", True, "overlap gradient reduction and parameter gathering with computation")
    optimizer = parser.add_argument_group("optimizer")
    optimizer.add_argument(
        "--optimizer",
        choices=("adam", "muon", "adaptive_muon", "dist_muon"),
        default="adam",
        help="Muons need emerging-optimizers, and --no-distributed",
    )
    switch(optimizer, "distributed", True, "DistributedOptimizer; without, each rank updates whole parameters")
    optimizer.add_argument(
        "--layer-wise",
        action="store_true",
        help="the peer arm: Muon's matrices under a layer-wise optimizer, the rest under a DistributedOptimizer, and "
        "mcore's own offload of both. Needs Megatron-LM's dev branch and a Bridge with the patches of patches/",
    )
    optimizer.add_argument("--fsdp", choices=STRATEGIES, help="Megatron-FSDP, and what it shards; default: mcore's DDP")
    optimizer.add_argument("--precision-aware", action="store_true")
    optimizer.add_argument("--moments-dtype", choices=("fp32", "bf16"), default="fp32")
    optimizer.add_argument("--hybrid", action="store_true", help="the peer arm: Adam on the CPU")
    switch(parser, "deterministic", True, "without it two resident runs of a mixture of experts may differ already")
    parser.add_argument(
        "--fp8-weights",
        choices=("delayed", "tensorwise", "blockwise"),
        help="weights of layers in FP8, and how they are scaled; default: bf16",
    )
    parser.add_argument(
        "--fused-wgrad",
        action="store_true",
        help="Transformer Engine's products add to gradients themselves, as by default in a job",
    )
    offload = parser.add_argument_group("offload")
    offload.add_argument("--offload", choices=("on", "off"), default="off")
    offload.add_argument("--no-install", action="store_true", help="set the flag, leave this package out")
    offload.add_argument("--own-loop", action="store_true", help="leave the flag out: by `Residency.training_step`")
    add_offload_options(offload)
    checkpoint = parser.add_argument_group("checkpoints")
    checkpoint.add_argument("--save", type=Path, help="folder to save into every --save-interval steps, and at the end")
    checkpoint.add_argument("--save-interval", type=int, default=4)
    checkpoint.add_argument("--async-save", action="store_true", help="by mcore's persistent worker")
    checkpoint.add_argument(
        "--finish-saves", action="store_true", help="wait for the background writer after a save, in no step's time"
    )
    checkpoint.add_argument("--fully-reshardable", action="store_true", help="default: dp_reshardable")
    checkpoint.add_argument("--load", type=Path, help="folder to resume from")
    checkpoint.add_argument("--load-step", type=int, help="default: the newest")
    switch(checkpoint, "load-optim", True)
    parser.add_argument(
        "--recompute",
        choices=("none", "attention", "full"),
        default="none",
        help="what to recompute in backward: attention scores, or all of a layer",
    )
    parser.add_argument(
        "--offload-activations",
        type=lambda text: text.split(","),
        help="comma-separated modules whose activations mcore offloads; needs NVTE_CPU_OFFLOAD_V1=1 in the environment",
    )
    parser.add_argument(
        "--cpu-offloading-layers",
        type=int,
        help="so many first layers, whose activations Transformer Engine offloads; not with --offload-activations",
    )
    graphs = parser.add_mutually_exclusive_group()
    graphs.add_argument("--te-graphs", action="store_true", help="capture the MLP of each layer into CUDA graphs")
    graphs.add_argument("--full-graphs", action="store_true", help="capture forward and backward of a step into one")
    parser.add_argument(
        "--extra-steps", type=int, default=0, help="so many steps more, which are not among the figures"
    )
    parser.add_argument(
        "--digest-by-parameter",
        action="store_true",
        help="read the final state where it is: it need not fit the GPU; with the package's own engine",
    )
    parser.add_argument("--trace", type=Path, help="profile two steps more, not among the figures, into this file")
    parser.add_argument(
        "--turns", type=Path, help="socket at which to wait for turns on the GPU; see harness.arms.turns"
    )
    parser.add_argument("--events", type=Path, required=True, help="file to append JSON events to")
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--cpu" in arguments:
        parser.set_defaults(**ON_CPU)
    options = parser.parse_args(arguments)
    if why := _contradiction(options):
        parser.error(why)
    if options.ffn is None:
        options.ffn = 4 * options.hidden
    if options.groups is None:
        options.groups = options.heads // 2 if options.heads % 2 == 0 else options.heads
    return options


def _contradiction(options: argparse.Namespace) -> str | None:
    """Return which options do not go together, and what to do; None where all do."""
    is_layer_wise = (
        options.optimizer == "muon" and options.distributed and options.offload == "on" and options.no_install
    )
    if options.moments_dtype != "fp32" and not options.precision_aware:
        return "--moments-dtype bf16 needs --precision-aware"
    if options.layer_wise and not is_layer_wise:
        return "--layer-wise goes with --optimizer muon --offload on --no-install alone"
    if options.optimizer != "adam" and options.distributed and not options.layer_wise:
        return f"--optimizer {options.optimizer} is not distributed by its elements: give --no-distributed"
    if options.fsdp is not None and not options.distributed:
        return "--fsdp has a distributed optimizer: leave out --no-distributed"
    if options.fp8_weights is not None and not options.distributed:
        return "--fp8-weights are quantized by the distributed optimizer: leave out --no-distributed"
    if options.fsdp is not None and options.digest_by_parameter:
        return "--digest-by-parameter does not know the states of --fsdp"
    if options.own_loop and options.offload == "on":
        return "--own-loop offloads without the flag: leave out --offload on"
    if options.hybrid and options.offload == "on":
        return "--hybrid keeps the states on the CPU for good: it does not go with --offload on"
    return None


def ask_for_offload(optimizer: Any, options: argparse.Namespace) -> None:
    """Set what asks for the offload in an OptimizerConfig; ValueError where this Bridge drives no offload of Muon."""
    if not options.layer_wise:
        optimizer.offload_optimizer_states = True  # a plain attribute where this mcore has no such field
        return
    if importlib.util.find_spec("megatron.bridge.training.optimizer_state_offload") is None:
        raise ValueError(
            "--layer-wise: this Bridge does not use mcore's own offload: apply patches/ to a copy, first in PYTHONPATH"
        )
    optimizer.use_layer_wise_distributed_optimizer = True
    optimizer.chunked_optimizer_state_offload = True  # mcore takes its other flag for Adam alone
    optimizer.optimizer_state_offload_chunk_size_mb = LAYER_WISE_CHUNK_MIB


def build_config(options: argparse.Namespace) -> ConfigContainer:
    """Return the configuration that `pretrain()` runs."""
    import torch
    from megatron.bridge.training import config as bridge
    from megatron.bridge.training.mixed_precision import bf16_mixed
    from megatron.core.transformer.enums import AttnBackend

    config = tiny.small_gpt(
        options.steps + options.extra_steps + (0 if options.trace is None else 2),
        (options.mbs, options.gbs),
        options.vocab,
        num_layers=options.layers,
        hidden_size=options.hidden,
        ffn_hidden_size=options.ffn,
        num_attention_heads=options.heads,
        num_query_groups=options.groups,
        seq_length=options.seq,
        tensor_model_parallel_size=options.tp,
        pipeline_model_parallel_size=options.pp,
        virtual_pipeline_model_parallel_size=options.vpp,
        # Two interleaved stages would send to each other twice in one batch of calls, which mcore rules out.
        overlap_p2p_comm=options.vpp is not None,
        batch_p2p_comm=options.vpp is None,
        sequence_parallel=options.tp > 1,
        deterministic_mode=options.deterministic,
        # Compiled by torch it ends in one of two results, in one run of an arm and the next.
        cross_entropy_loss_fusion=False,
    )
    model, optimizer, ddp = config.model, config.optimizer, config.ddp
    config.scheduler.lr_warmup_iters = min(2, options.steps - 1)
    config.logger.log_interval = 1  # mcore's timers wait for the device, as in most recipes
    model.attention_backend = AttnBackend.unfused  # deterministic, and needs no cuDNN
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
    optimizer.optimizer, optimizer.use_distributed_optimizer = options.optimizer, options.distributed
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
    ddp.use_distributed_optimizer, ddp.num_distributed_optimizer_instances = options.distributed, options.instances
    ddp.overlap_grad_reduce = options.dp_overlap
    ddp.overlap_param_gather = options.dp_overlap and options.distributed and not options.layer_wise
    if options.fp8_weights is not None:
        mixed = bf16_mixed()
        mixed.fp8, mixed.fp8_recipe, mixed.fp8_param_gather = "hybrid", options.fp8_weights, True
        config.mixed_precision = mixed
    if options.fsdp is not None:
        ddp.use_megatron_fsdp, ddp.data_parallel_sharding_strategy = True, options.fsdp
    config.checkpoint = bridge.CheckpointConfig(
        save=None if options.save is None else str(options.save),
        save_interval=options.save_interval if options.save is not None else None,
        async_save=options.async_save,
        async_strategy="mcore",
        load=None if options.load is None else str(options.load),
        ckpt_step=options.load_step,
        load_optim=options.load_optim,
        ckpt_format="torch_dist" if options.fsdp is None else "fsdp_dtensor",
        dist_ckpt_optim_fully_reshardable=options.fully_reshardable,
    )
    # Bridge's validation asks for it where passes are captured whole.
    config.rerun_state_machine.check_for_nan_in_loss = not options.full_graphs
    return config


def drive_steps(config: OffloadConfig) -> None:
    """Put `Residency.training_step` around each of Bridge's steps, as in a loop of one's own."""
    import bridge_fgo

    bridge_fgo.install()
    from megatron.bridge.training import train
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    step = train.train_step

    def driven(forward_step: Any, data: Any, model: Any, optimizer: Any, *others: Any) -> Any:
        residency = bridge_fgo.Residency.of(model) or bridge_fgo.Residency(model, optimizer, config)
        with residency.training_step(get_num_microbatches()):
            return step(forward_step, data, model, optimizer, *others)

    train.train_step = driven  # type: ignore[assignment]


def have_the_cpu_stand_in() -> None:
    """Have a CPU stand in for the GPU in this process, which has not asked for one yet."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks: nothing may take a GPU that is there
    from bridge_fgo.tools.standins.cuda import install_standins

    install_standins()


def make_deterministic() -> None:
    """Set what Bridge's deterministic mode asks of the environment, where unset."""
    import torch

    os.environ.setdefault("NCCL_ALGO", "Ring")
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Filling new memory only shows reads of what nobody wrote, and takes time in every arm.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one arm. What goes wrong ends the process with a traceback and a status other than 0."""
    options = parse(arguments)
    if options.cpu:
        have_the_cpu_stand_in()
    process.use_one_rank_by_default()
    if options.deterministic:
        make_deterministic()
    import bridge_fgo

    if (options.offload == "on" or options.activation_waits) and not options.no_install:
        bridge_fgo.install(offload_config(options))
    if options.own_loop:
        drive_steps(offload_config(options))
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    from harness.arms.gpu_recorder import ArmRecorder, CpuRecorder

    process.skip_building_what_is_built()
    process.forget_attention_backend()
    config, recorder = build_config(options), (CpuRecorder if options.cpu else ArmRecorder)(options)
    if options.cpu:
        tiny.put_on_cpu(config)
    config.model.register_post_wrap_hook(recorder.model_is_built)
    # Events that are captured tell no time, and a replay calls no forward step.
    pretrain(config, forward_step if options.full_graphs else recorder.timed(forward_step), callbacks=[recorder])


if __name__ == "__main__":
    main()
