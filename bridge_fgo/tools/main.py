"""The typer application behind `bridge-fgo` and `python -m bridge_fgo`.

Nothing here imports torch or Megatron, so that `--help` answers at once: each command loads what it needs.
"""

import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from bridge_fgo.recipes.catalog import RECIPES
from bridge_fgo.tools import keep, report, run_script
from bridge_fgo.tools.job import table
from bridge_fgo.tools.job.answers import refuse_gpus_at_once
from bridge_fgo.tools.job.names import refuse_overrides_at_once
from bridge_fgo.tools.job.target import refuse_at_once
from bridge_fgo.tools.options import mistake, takes_offload_options
from bridge_fgo.tools.plan.log import of_log
from bridge_fgo.tools.plan.options import Settings as PlanSettings
from bridge_fgo.tools.settings import DoctorSettings, takes_settings
from bridge_fgo.tools.show import spinner


class _RunsScriptsOutsideOfClick(TyperGroup):
    """Starts the script of `run` only after click has returned.

    click turns KeyboardInterrupt, EOFError and broken pipes of what it calls into a message and an exit status of its
    own. A training script has to end as under `python script.py`, so `run` leaves its request in the context.
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
    epilog="Example: bridge-fgo plan llama3_70b_64gpu --system GB200",
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
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


recipes = typer.Typer(no_args_is_help=True, help="Show the recipes of this project and of Bridge.")
app.add_typer(recipes, name="recipes", short_help="List recipes, and which fits on which system.")


@recipes.command("list")
def list_recipes() -> None:
    """Print each recipe's name, GPUs and model, and what it needs."""
    width = max(map(len, RECIPES))
    for recipe in RECIPES.values():
        model = recipe.hf_model or "a small GPT"
        needs = " (needs Megatron-LM's dev branch)" if recipe.mcore_module else ""
        typer.echo(f"{recipe.name:{width}}  {recipe.gpus:3} {recipe.system:5}  {model}{needs}")
    typer.echo("\n`bridge-fgo plan RECIPE` says whether one fits, `python -m bridge_fgo.recipes.launch` trains it.")


@recipes.command("table", epilog="Example: bridge-fgo recipes table llama3_70b gb200")
def print_recipe_table(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[WORD]...", help="Only recipes whose names have each of these.")
    ] = None,
) -> None:
    """Print which recipe fits on which system.

    The table has the recipes of this project and of Bridge, resident and with the offload.
    """
    try:
        typer.echo("\n".join(table.lines(words or ())))
    except ValueError as error:
        raise mistake("bridge-fgo recipes table", error) from None


# Interspersed arguments are off: from SCRIPT on everything is the script's own, also what
# begins with "--" and "--help". Before SCRIPT an unknown option stays an error: passed
# over, a misspelt `--engin native` would be taken for the name of the script.
@app.command(
    "run",
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
    short_help="Run an unmodified training script with the package installed.",
    epilog="Example: bridge-fgo run --offload --gpu-memory-budget-gib auto pretrain.py",
)
@takes_offload_options
def run_command(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="Training script.", show_default=False)],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Passed to SCRIPT verbatim.", show_default=False)
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
        raise mistake("bridge-fgo run", error) from None
    if keep.is_needed(offload):
        raise typer.Exit(keep.keep([sys.executable, "-m", "bridge_fgo", *sys.argv[1:]], keep.RESTARTS))
    context.obj.append(request)


@app.command(
    "keep",
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
    short_help="Keep finished steps in host memory, so that a crash of COMMAND costs none.",
    epilog="Example: bridge-fgo keep -- torchrun --nproc-per-node 8 --max-restarts 3 pretrain.py",
)
def keep_command(
    command: Annotated[list[str] | None, typer.Argument(metavar="[COMMAND]...", show_default=False)] = None,
    restarts: Annotated[int, typer.Option(min=0, help="Start COMMAND again so many times if it fails.")] = 0,
    memory_gib: Annotated[
        float | None, typer.Option(min=0, help="Most memory to hold.", show_default="nine tenths of what is free")
    ] = None,
    idle_minutes: Annotated[float, typer.Option(min=0, help="Free memory that no trainer uses.")] = keep.IDLE_MINUTES,
) -> None:
    """Hold the host memory of OffloadConfig(survive_crash=True), on each node, while COMMAND runs.

    A start after a crash goes on from the newest finished step. Without COMMAND it keeps for the job that
    BRIDGE_FGO_KEEPER names, until no trainer has been connected for --idle-minutes. Memory is freed as it ends.
    """
    try:
        status = keep.keep(command or (), restarts, memory_gib, idle_minutes)
    except (ValueError, OSError) as error:
        raise mistake("bridge-fgo keep", error) from None
    raise typer.Exit(status)


def run_of_checkout(context: typer.Context) -> None:
    """Pass a command on to the harness, which lies beside the package in a checkout and in no wheel."""
    name, tests = str(context.info_name), Path(__file__).resolve().parents[2] / "tests"
    if not (tests / "harness").is_dir():
        raise mistake(f"bridge-fgo {name}", f"needs a checkout of bridge_fgo: use `uv run bridge-fgo {name}` there")
    sys.path.insert(0, str(tests))
    importlib.import_module("harness.commands").app([name, *context.args], prog_name="bridge-fgo")


for name, short_help in (
    ("demo", "In a checkout: train twice, resident and offloaded, and compare bit by bit."),
    ("bench", "In a checkout: measure resident training, this package and its peers on GPUs here."),
):
    passed_on = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(name, short_help=short_help, context_settings=passed_on, add_help_option=False)(run_of_checkout)


def plan(settings: PlanSettings) -> int:
    """Compute the memory of each pipeline stage's ranks by component, and what the copies cost.

    mcore itself lays the job out; activations are counted for GPTs. Exit status: 0, 1 if training would refuse the
    config or given settings of the offload, or if with --check it does not fit; 2 if nothing can be estimated. Of a LOG
    it says which rank was short by how much, and with which settings the job fits; 1 if it fits with none.
    """
    settings, log = of_log(settings)
    refuse_at_once(settings.target, settings.overrides)
    refuse_overrides_at_once(settings.target, settings.overrides)
    refuse_gpus_at_once(settings.target, settings.gpus, settings.overrides)
    with spinner("importing torch"):
        from bridge_fgo.tools.plan import command
    return command.run(settings, log)


def doctor(settings: DoctorSettings) -> int:
    """Examine this machine, and what the offload will do with a config.

    The first line is the verdict. Works without a GPU and without Megatron. Exit status: 0, 1 if this machine cannot
    train or training would be refused, 2 if the config cannot be read.
    """
    if settings.target not in (None, *RECIPES):  # of one that this mcore cannot build the machine is examined as well
        refuse_at_once(settings.target, settings.overrides)
    if settings.target is not None:
        refuse_overrides_at_once(settings.target, settings.overrides)
        refuse_gpus_at_once(settings.target, settings.gpus, settings.overrides)
    with spinner("importing torch"):
        from bridge_fgo.tools.doctor import run
    return run(settings)


for name, settings, run, short_help, example in (
    ("report", report.Settings, report.run, "Compare runs that are over: memory saved, step time, bits.",
        "resident/tb_logs offloaded/tb_logs"),
    ("plan", PlanSettings, plan, "Compute a job's memory and copies, with and without the offload. No GPU needed.",
        "llama3_70b_64gpu --system GB200 --recommend"),
    ("doctor", DoctorSettings, doctor, "Say what is installed, what a config will do here, and what is refused.",
        "llama3_70b_64gpu --gpus 64 model.seq_length=4096"),
):  # fmt: skip
    command = takes_settings(settings, run, name)
    app.command(name, short_help=short_help, epilog=f"Example: bridge-fgo {name} {example}")(command)
