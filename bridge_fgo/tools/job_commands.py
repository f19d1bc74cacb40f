"""The commands about a job that is not running yet, `plan` and `doctor`. They import what they need when they run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from bridge_fgo.options import takes_offload_options
from bridge_fgo.recipes.catalog import RECIPES
from bridge_fgo.tools.show import spinner

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[SECTION.FIELD=VALUE]...", help="Overrides of Bridge's config.")
]
Gpus = Annotated[int | None, typer.Option(min=1, help="GPUs of the job; the fewest it can have by default.")]
Vocabulary = Annotated[int | None, typer.Option("--vocab-size", min=1, help="Where neither model nor tokenizer says.")]
GpusPerNode = Annotated[int | None, typer.Option(min=1, help="GPUs of a node; the system's own by default.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object only.")]


def in_a_folder(path: Path | None) -> Path | None:
    """Refuse a file to write whose folder is not there, before the work whose result it is to hold."""
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"{path}: there is no folder {path.parent}")
    return path


def _exit_with(command: str, run: Callable[[], int]) -> None:
    """Exit with what `run` returns, or with 2 and its message where it cannot be done."""
    try:
        status = run()
    except (ValueError, RuntimeError, OSError) as error:
        raise _refused(command, error) from None
    raise typer.Exit(status)


def _check_target(command: str, target: str | None) -> None:
    """Exit with 2 where `target` can be told to be no job without torch and Megatron, which take long to import."""
    from bridge_fgo.tools.job.names import refuse_at_once

    try:
        if target is not None:
            refuse_at_once(target)
    except ValueError as error:
        raise _refused(command, error) from None


def _refused(command: str, error: Exception) -> typer.Exit:
    typer.echo(f"bridge-fgo {command}: {error}", err=True)
    return typer.Exit(2)


@takes_offload_options
def plan(
    target: Annotated[
        str, typer.Argument(metavar="RECIPE|CONFIG", help="A recipe, module:function, or run_config.yaml.")
    ],
    overrides: Overrides = None,
    gpus: Gpus = None,
    gpus_per_node: GpusPerNode = None,
    vocab_size: Vocabulary = None,
    system: Annotated[
        str | None, typer.Option(help="GB200, GB300, B200, B300, GH200, H200 or H100; all by default.")
    ] = None,
    link_gbs: Annotated[float | None, typer.Option(help="Measured link speed of a GPU, GB/s each way.")] = None,
    forward_seconds: Annotated[float | None, typer.Option(help="A microbatch's forward on a rank.")] = None,
    backward_seconds: Annotated[float | None, typer.Option(help="The same; twice the forward by default.")] = None,
    activations_gb: Annotated[
        float | None, typer.Option(help="Peak of a rank's activations in GB, instead of counting them.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Status 1 where the job does not fit --system with the flag as it is.")
    ] = False,
    recommend: Annotated[
        bool, typer.Option("--recommend", help="Say with which settings the job runs fastest on --system.")
    ] = False,
    phases: Annotated[
        bool, typer.Option("--phases", help="For reinforcement learning: what a sleep and a wake copy, and how long.")
    ] = False,
    json_output: Json = False,
    picture: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", callback=in_a_folder, help="Draw the components, with --phases an iteration (matplotlib)."
        ),
    ] = None,
    *,
    offload: dict[str, Any],
) -> None:
    """Compute the memory of each pipeline stage's ranks by component, and what the copies cost.

    States are exact where mcore can lay the job out, else upper bounds, as a note says; activations are counted for
    GPTs. Exit status: 0, 1 where training would refuse the config or, with --check, it does not fit; 2 where nothing
    can be estimated.
    """
    _check_target("plan", target)
    with spinner("importing torch"):
        from bridge_fgo.tools.plan import command

    settings = command.Settings(
        target=target,
        overrides=tuple(overrides or ()),
        gpus=gpus,
        gpus_per_node=gpus_per_node,
        vocab_size=vocab_size,
        system=system,
        link_gbs=link_gbs,
        forward_seconds=forward_seconds,
        backward_seconds=backward_seconds,
        activations_gb=activations_gb,
        check=check,
        recommend=recommend,
        phases=phases,
        offload=offload,
        json_output=json_output,
        picture=picture,
    )
    _exit_with("plan", lambda: command.run(settings))


@takes_offload_options
def doctor(
    target: Annotated[
        str | None, typer.Argument(metavar="[RECIPE|CONFIG]", help="A recipe, module:function, or run_config.yaml.")
    ] = None,
    overrides: Overrides = None,
    gpus: Gpus = None,
    gpus_per_node: GpusPerNode = None,
    vocab_size: Vocabulary = None,
    probe: Annotated[bool, typer.Option(help="Measure the links of the GPUs here.")] = True,
    json_output: Json = False,
    *,
    offload: dict[str, Any],
) -> None:
    """Examine this machine, and what the offload will do with a config.

    The first line is the verdict. Works without a GPU and without Megatron. Exit status: 0, 1 where this machine cannot
    train or training would be refused, 2 where the config cannot be read.
    """
    if target not in RECIPES:  # of one that this mcore cannot build the machine is examined all the same
        _check_target("doctor", target)
    with spinner("importing torch"):
        from bridge_fgo.tools.doctor import command

    settings = command.Settings(
        target=target,
        overrides=tuple(overrides or ()),
        gpus=gpus,
        gpus_per_node=gpus_per_node,
        vocab_size=vocab_size,
        offload=offload,
        probe=probe,
        json_output=json_output,
    )
    _exit_with("doctor", lambda: command.run(settings))
