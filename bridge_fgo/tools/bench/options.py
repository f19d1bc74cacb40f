"""The options of `bridge-fgo bench`. Nothing here imports torch or Megatron before the bench runs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Preset(StrEnum):
    """Models and batches that the bench trains with."""

    short = "short"
    long = "long"
    moe = "moe"
    slabs = "slabs"
    tight = "tight"


class BenchOptimizer(StrEnum):
    """Optimizers that the bench trains with."""

    adam = "adam"
    muon = "muon"
    dist_muon = "dist_muon"


class Sharding(StrEnum):
    """Sharding strategies of the bench's arms with Megatron-FSDP."""

    no_shard = "no_shard"
    optim = "optim"
    optim_grads = "optim_grads"
    optim_grads_params = "optim_grads_params"


def bench(
    arms: Annotated[
        str | None,
        typer.Option(
            help="Which arms, resident first: resident,native,half,hybrid by default, mcore with --megatron-lm, "
            "fsdp_resident,fsdp with --fsdp. "
            "native:NAME=VALUE is one with a variable of its own, compared with resident:NAME=VALUE if that is there."
        ),
    ] = None,
    preset: Annotated[Preset, typer.Option(help="What to train.")] = Preset.short,
    steps: Annotated[
        int | None,
        typer.Option(min=8, help="Steps of each arm, 16 by default; from the 7th on they count. Not with --in-turn."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each arm runs, or with --in-turn has its turn.")] = 1,
    in_turn: Annotated[
        bool,
        typer.Option(
            "--in-turn",
            help="Have all arms alive at once, and train a few steps in turn. All must fit on the GPUs side by side.",
        ),
    ] = False,
    turn_steps: Annotated[
        int, typer.Option(min=2, help="With --in-turn: steps of a turn, of which the first does not count.")
    ] = 5,
    time_limit: Annotated[
        float | None,
        typer.Option(help="With --in-turn: seconds after which no further round begins; those that are done count."),
    ] = None,
    half_budget_gib: Annotated[
        float | None, typer.Option(help="Budget of the half arm; by default half of the saving.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="How many GPUs; all by default.")] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel GPUs, with sequence parallelism.")] = 1,
    microbatches: Annotated[
        int | None,
        typer.Option(min=1, help="Microbatches of a step on each data-parallel rank; default: the preset's."),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(min=1, help="Layers of the model; default: the preset's. Fewer let arms fit side by side."),
    ] = None,
    optimizer: Annotated[
        BenchOptimizer,
        typer.Option(
            help="Muons need emerging-optimizers; their mcore arm also a patched Bridge, see the bench's page."
        ),
    ] = BenchOptimizer.adam,
    fsdp: Annotated[
        Sharding | None,
        typer.Option(help="Two arms more, with Megatron-FSDP that shards this: E beside that of DistributedOptimizer."),
    ] = None,
    full_graphs: Annotated[
        bool,
        typer.Option("--full-graphs", help="Capture forward and backward of a step into one CUDA graph, in every arm."),
    ] = False,
    megatron_lm: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Checkout of Megatron-LM's dev branch for an mcore arm; may be repeated."),
    ] = None,
    keep: Annotated[Path, typer.Option(metavar="DIR", help="Where all files go.")] = Path("bench"),
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
    traces: Annotated[
        bool, typer.Option(help="Profile two steps more an arm, and draw them (needs matplotlib).")
    ] = True,
    alone_steps: Annotated[
        int, typer.Option(min=0, help="Steps more an arm, for the host's time to enqueue copies by itself.")
    ] = 3,
    saves: Annotated[
        bool,
        typer.Option(
            "--saves",
            help="Have each arm but mcore save twice in the background, and measure how long the second save stalls "
            "training. DIR needs room for two checkpoints, and the host for one more in memory.",
        ),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print every figure and what it tells, not only the main ones.")
    ] = False,
    arm_timeout: Annotated[float, typer.Option(help="Seconds after which an arm is given up.")] = 1800.0,
) -> None:
    """Train the same model through Bridge's own `pretrain()` once an arm, in turn, and compare.

    Step times are of steps in which the host was equally fast: each arm times a short loop of Python before each step,
    and a step counts if that took at most 1.25 times the first quartile of all arms.

    Exit status: 0, 1 where an arm is not bitwise equal to the resident one, 2 where an arm failed.
    """
    from bridge_fgo.tools.bench import command, presets

    by_default = ["resident", "native", *([] if in_turn or fsdp else ["half"]), *(["mcore"] if megatron_lm else [])]
    by_default += ["fsdp_resident", "fsdp"] if fsdp else []
    by_default += ["hybrid"] if optimizer == BenchOptimizer.adam else []
    names = by_default if arms is None else arms.split(",")
    checkouts = [str(path.resolve()) for path in megatron_lm or ()]
    try:
        # Refused before torch is imported and the GPU is touched.
        presets.arms(names, checkouts, preset.value, optimizer.value, fsdp)
    except ValueError as error:
        typer.echo(f"bridge-fgo bench: {error}", err=True)
        raise typer.Exit(2) from None
    if in_turn and steps is not None:
        typer.echo("bridge-fgo bench: --steps with --in-turn: --rounds and --turn-steps say how many", err=True)
        raise typer.Exit(2)

    import torch

    here = torch.cuda.device_count()
    if here == 0:
        typer.echo("bridge-fgo bench: torch sees no CUDA device here", err=True)
        raise typer.Exit(2)
    if gpus is not None and gpus > here:
        typer.echo(f"bridge-fgo bench: --gpus {gpus}: torch sees {here} CUDA devices here", err=True)
        raise typer.Exit(2)
    settings = command.Settings(
        arms=names,
        preset=preset.value,
        steps=steps or 16,
        rounds=rounds,
        in_turn=in_turn,
        turn_steps=turn_steps,
        time_limit=time_limit,
        half_budget_gib=half_budget_gib,
        tp=tp,
        microbatches=microbatches,
        layers=layers,
        optimizer=optimizer.value,
        fsdp=fsdp,
        full_graphs=full_graphs,
        gpus=gpus or here,
        folder=keep,
        megatron_lm=checkouts,
        json_output=json_output,
        traces=traces,
        arm_timeout=arm_timeout,
        alone_steps=alone_steps,
        saves=saves,
        verbose=verbose,
    )
    try:
        raise typer.Exit(command.run(settings))
    except (ValueError, OSError) as error:
        typer.echo(f"bridge-fgo bench: {error}", err=True)
        raise typer.Exit(2) from None
