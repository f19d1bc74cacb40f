"""One training arm on GPUs: a small GPT through Bridge's own `pretrain()`, on mock data.

    python -m bridge_fgo.tools.arms.gpu --steps 50 --offload on --events events.jsonl
    torchrun --nproc-per-node 2 -m bridge_fgo.tools.arms.gpu --tp 2 ...

Rank 0 writes the events that `bridge_fgo.tools.demo` and the tests read. Digests cover every rank; bytes and times are
rank 0's. Two runs with the same options are bitwise equal, but with `--fused-loss`, and experts with
`--no-deterministic`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bridge_fgo.config import STRATEGIES
from bridge_fgo.tools.arms.clocks import PhaseClock
from bridge_fgo.tools.arms.gpu_config import build_config
from bridge_fgo.tools.arms.process_setup import (
    forget_attention_backend,
    make_deterministic,
    skip_building_what_is_built,
    use_one_rank_by_default,
)
from bridge_fgo.tools.arms.shared_config import put_on_cpu
from bridge_fgo.tools.options import add_offload_options, offload_config


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options; a combination that makes no sense ends the process with status 2."""
    parser = argparse.ArgumentParser(
        prog="python -m bridge_fgo.tools.arms.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def switch(group: argparse._ActionsContainer, name: str, default: bool, help: str | None = None) -> None:
        group.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=default, help=help)

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
    parser.add_argument("--fused-loss", action="store_true", help="two resident runs may differ already")
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
        "--turns", type=Path, help="socket at which to wait for turns on the GPU; see bridge_fgo.tools.arms.turns"
    )
    parser.add_argument("--events", type=Path, required=True, help="file to append JSON events to")
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
    if options.fused_loss and options.deterministic:
        return "--fused-loss is not deterministic: give --no-deterministic too"
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
    if options.hybrid and options.offload == "on":
        return "--hybrid keeps the states on the CPU for good: it does not go with --offload on"
    return None


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one arm. What goes wrong ends the process with a traceback and a status other than 0."""
    train(parse(arguments))


def train(options: argparse.Namespace, on_cpu: bool = False) -> None:
    """Train as the options say, with the package installed where they say so; on the CPU stand-ins are in place."""
    use_one_rank_by_default()
    if options.deterministic:
        make_deterministic()
    import bridge_fgo

    if (options.offload == "on" or options.activation_waits) and not options.no_install:
        bridge_fgo.install(offload_config(options))
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    from bridge_fgo.tools.arms.gpu_recorder import ArmRecorder, CpuRecorder

    skip_building_what_is_built()
    forget_attention_backend()
    clock = PhaseClock(options.steps)
    config, recorder = build_config(options), (CpuRecorder if on_cpu else ArmRecorder)(options, clock)
    if on_cpu:
        put_on_cpu(config)
    config.model.register_post_wrap_hook(recorder.model_is_built)
    # Events that are captured tell no time, and a replay calls no forward step.
    pretrain(config, forward_step if options.full_graphs else recorder.timed(forward_step), callbacks=[recorder])


if __name__ == "__main__":
    main()
