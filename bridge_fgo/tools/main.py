"""The typer application behind `bridge-fgo` and `python -m bridge_fgo`.

Nothing here imports torch or Megatron: each command loads what it needs when it
runs, so that `--help` answers at once and on any machine.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from bridge_fgo.options import takes_offload_options
from bridge_fgo.tools import demo as demo_command
from bridge_fgo.tools import job_commands, recipe_commands, rl_demo, run_script
from bridge_fgo.tools.bench import command as bench_command
from bridge_fgo.tools.bench.options import Settings as BenchSettings
from bridge_fgo.tools.settings import takes_settings


class Device(StrEnum):
    """Where the demo runs."""

    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"


class MomentsDtype(StrEnum):
    """dtype of Adam's moments under `--precision-aware`."""

    fp32 = "fp32"
    bf16 = "bf16"


class _RunsScriptsOutsideOfClick(TyperGroup):
    """Starts the script of `run` only after click has returned.

    click catches KeyboardInterrupt, EOFError and broken pipes of whatever it calls
    and turns them into a short message and its own exit status. A training script
    has to end here as it ends under `python script.py`, so `run` only leaves its
    request in the context and the script starts once click is off the stack.
    """

    def main(self, *args: Any, **kwargs: Any) -> Any:
        requests: list[run_script.Request] = []
        try:
            outcome = super().main(*args, obj=requests, **kwargs)
        except SystemExit:
            if not requests:
                raise
            outcome = None
        if requests:
            run_script.run(requests[0])
            raise SystemExit(0)
        return outcome


app = typer.Typer(
    cls=_RunsScriptsOutsideOfClick,
    help="Fine-grained optimizer-state offload for Megatron-Bridge.",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: "[...]" in these texts is no markup
    pretty_exceptions_enable=False,  # a script's traceback is shown as Python shows it
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from bridge_fgo import __version__

        typer.echo(f"bridge-fgo {__version__}")
        raise typer.Exit


@app.callback()
def bridge_fgo(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Fine-grained optimizer-state offload for Megatron-Bridge."""


app.add_typer(recipe_commands.app, name="recipes", short_help="List this project's recipes.")


# Interspersed arguments are off: from SCRIPT on everything is the script's own, also what
# begins with "--" and "--help". Before SCRIPT an unknown option stays an error: passed
# over, a misspelt `--engin native` would be taken for the name of the script.
@app.command(
    "run",
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
    short_help="Run an unmodified training script with the package installed.",
)
@takes_offload_options
def run_command(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="Training script.", show_default=False)],
    args: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGS", help="Passed to SCRIPT verbatim.", show_default=False),
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module, as with python -m.")] = False,
    set_flag: Annotated[
        bool, typer.Option("--offload", help="Set optimizer.offload_optimizer_states in the script's config.")
    ] = False,
    *,
    offload: dict[str, Any],
) -> None:
    """Run SCRIPT as `python SCRIPT ARGS...` would, with bridge_fgo installed.

    Offload itself is switched on by the script's own `cfg.optimizer.offload_optimizer_states = True`, or by
    --offload. Options of this command come before SCRIPT. On several GPUs:
    `torchrun ... -m bridge_fgo run SCRIPT ARGS...`.
    """
    request = run_script.Request(script=script, args=tuple(args or ()), config=offload, module=module, offload=set_flag)
    try:
        run_script.prepare(request)
    except ValueError as error:
        typer.echo(f"bridge-fgo run: {error}", err=True)
        raise typer.Exit(2) from None
    context.obj.append(request)


@app.command("demo", short_help="Train twice, resident and offloaded, and compare bit by bit.")
def demo(
    rl: Annotated[
        bool, typer.Option("--rl", help="Train by GRPO, once asleep between updates, and compare with one awake.")
    ] = False,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps of each arm: 20; with --rl 200, on a GPU 300.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
    device: Annotated[Device, typer.Option(help="Where to run; auto takes the GPU if it can.")] = Device.auto,
    keep: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep logs and events here.")] = None,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", callback=job_commands.in_a_folder, help="--rl: draw an iteration's memory."),
    ] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="--rl: processes of an arm, a GPU each.")] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="--rl: tensor-parallel ranks.")] = None,
    pp: Annotated[int | None, typer.Option(min=1, help="--rl: pipeline stages.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="GPU, --rl: layers.")] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="GPU, --rl: hidden size.")] = None,
    ffn: Annotated[int | None, typer.Option(min=1, help="GPU: size of the MLP.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="GPU, --rl: attention heads.")] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="GPU: tokens of a sequence.")] = None,
    mbs: Annotated[int | None, typer.Option(min=1, help="GPU: sequences of a microbatch.")] = None,
    gbs: Annotated[int | None, typer.Option(min=1, help="GPU: sequences of a step.")] = None,
    lr: Annotated[float | None, typer.Option(min=0.0, help="--rl: learning rate.")] = None,
    crowd: Annotated[
        bool,
        typer.Option("--crowd", help="--rl on a GPU of one's own: a second process holds all but what training needs."),
    ] = False,
    precision_aware: Annotated[
        bool, typer.Option("--precision-aware", help="GPU: the precision-aware optimizer.")
    ] = False,
    moments_dtype: Annotated[
        MomentsDtype | None, typer.Option(help="GPU: moments of the precision-aware optimizer.")
    ] = None,
) -> None:
    """Train a small model twice through Megatron-Bridge's own loop and compare.

    Exit status: 0 where the two runs are bitwise equal and the offloaded one released
    memory, 1 where not, 2 where a run failed.
    """
    sizes = dict(layers=layers, hidden=hidden, ffn=ffn, heads=heads, seq=seq, mbs=mbs, gbs=gbs)
    gpu_options = [part for name, size in sizes.items() if size for part in (f"--{name}", str(size))]
    if precision_aware:
        gpu_options.append("--precision-aware")
    if moments_dtype is not None:
        gpu_options += ["--moments-dtype", moments_dtype.value]
    of_rl = {"picture": picture, "ranks": ranks, "tp": tp, "pp": pp, "lr": lr, "crowd": crowd or None}
    if not rl:
        if given := [f"--{name}" for name, value in of_rl.items() if value is not None]:
            raise typer.BadParameter(f"{', '.join(given)}: only of --rl")
        settings = demo_command.Settings(
            steps=steps or 20,
            json_output=json_output,
            device=device.value,
            keep=keep,
            gpu_options=tuple(gpu_options),
        )
        raise typer.Exit(demo_command.run(settings))
    shared = {"layers": layers, "hidden": hidden, "heads": heads}
    if others := [option for option in gpu_options[::2] if option.removeprefix("--") not in shared]:
        raise typer.BadParameter(f"{', '.join(others)}: not of --rl")
    options = {"steps": steps, "tp": tp, "pp": pp, "lr": lr, "crowd": crowd or None, **shared}
    raise typer.Exit(
        rl_demo.run(
            rl_demo.Settings(
                options={name: value for name, value in options.items() if value is not None},
                json_output=json_output,
                device=device.value,
                keep=keep,
                picture=picture,
                ranks=ranks or 1,
            )
        )
    )


app.command("bench", short_help="Measure resident training, this package and its peers on the GPUs here.")(
    takes_settings(BenchSettings, bench_command.run, "bench")
)


@app.command("report", short_help="Compare runs that are over: memory saved, step time, bits; one HTML page.")
def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN [RUN]...",
            help="TensorBoard log, wandb:ENTITY/PROJECT/RUN, or a folder of bench or of demo --keep.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path, typer.Option(metavar="FILE", callback=job_commands.in_a_folder, help="The page to write.")
    ] = Path("report.html"),
    beside: Annotated[
        list[str] | None,
        typer.Option(metavar="RUN", help="A run that need not be equal, as with another optimizer; may be repeated."),
    ] = None,
) -> None:
    """Compare runs bit by bit, in one page that opens from disk with no network. TensorBoard and W&B draw their curves.

    The first run is the one that the others are compared with. Exit status: 0, 1 where another
    run's losses are not bitwise equal to its, 2 where a RUN cannot be read.
    """
    from bridge_fgo.tools.report import command

    try:
        raise typer.Exit(command.run(runs, output, beside))
    except (ValueError, OSError) as error:
        typer.echo(f"bridge-fgo report: {error}", err=True)
        raise typer.Exit(2) from None


app.command("plan", short_help="Compute a job's memory and copies, with and without the offload. No GPU needed.")(
    job_commands.plan
)
app.command("doctor", short_help="Say what is installed, what a config will do here, and what is refused.")(
    job_commands.doctor
)
