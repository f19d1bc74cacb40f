"""What every rank of a recipe's job runs: `python -m bridge_fgo.recipes.train RECIPE [SECTION.FIELD=VALUE ...]`.

Under torchrun, or one process a GPU under srun: Bridge finds its rank in either's environment.
"""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from bridge_fgo.bridge.compat import source_of
from bridge_fgo.config import OffloadConfig, needing_offload
from bridge_fgo.memory import max_connections
from bridge_fgo.recipes import catalog, hf_config, process
from bridge_fgo.recipes.hf_config import Choice
from bridge_fgo.recipes.overrides import refuse_without_value
from bridge_fgo.tools.options import mistake, takes_offload_options

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(epilog="Example: python -m bridge_fgo.recipes.train tiny --fraction 0.5 train.train_iters=10")
@takes_offload_options
def main(
    name: Annotated[str, typer.Argument(metavar="RECIPE", help="Name of a recipe.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SECTION.FIELD=VALUE]...", help="Overrides of Bridge's config.", show_default=False),
    ] = None,
    is_on: Annotated[bool, typer.Option("--offload/--no-offload", help="Offload the optimizer's states.")] = True,
    hf_config: Annotated[
        str, typer.Option(help="Hugging Face config: auto, hub, kept (in the project), or the folder of a config.json.")
    ] = "auto",
    *,
    offload: dict[str, Any],
) -> None:
    """Train one of the recipes of `bridge_fgo.recipes.catalog`."""
    try:
        train = prepare(name, is_on, offload, hf_config, overrides or ())
    except ValueError as error:  # the user's; what training raises keeps its traceback
        raise mistake("bridge_fgo.recipes.train", error) from None
    end_on_sigurg()
    train()


def end_on_sigurg() -> None:
    """Have SIGURG do in this process alone what SIGTERM does in it: with Bridge's exit handler, save and end.

    Slurm signals all processes of a step. SIGTERM would end the process that writes a checkpoint in the background,
    and the save with it. A process that handles no SIGURG ignores it.
    """
    rank = os.getpid()

    def end(*_: object) -> None:
        if os.getpid() == rank:  # not in what is forked from it
            signal.raise_signal(signal.SIGTERM)

    signal.signal(signal.SIGURG, end)


def prepare(
    name: str, offload: bool, settings: dict[str, Any], hf: str, overrides: Sequence[str]
) -> Callable[[], None]:
    """Set the recipe's environment, build what Bridge is given, and return the function that trains.

    `settings` are OffloadConfig's keyword arguments, `hf` is one of `Choice` or a folder, `overrides` are of Bridge's
    config.

    Raises:
        ValueError: a setting makes no sense, or the recipe cannot be trained here; see `prepare_pretrain`.
    """
    recipe = catalog.find(name)
    if hf not in get_args(Choice) and not (Path(hf) / "config.json").is_file():
        raise ValueError(f"--hf-config {hf}: use auto, hub, kept, or the folder of the model's config.json")
    source = cast("Choice", hf) if hf in get_args(Choice) else Path(hf)
    of_offload = needing_offload(settings)
    if of_offload and not offload:
        raise ValueError(f"--no-offload with {', '.join(of_offload)}: leave out one or the other")
    refuse_without_value(overrides)
    if source_of("megatron.bridge") is None:
        raise ValueError(f"recipe={name!r} needs megatron-bridge: pip install 'megatron-bridge>=0.6,<0.7'")
    config = OffloadConfig(**settings) if offload or settings else None
    # Before torch is imported. What is set already stays, as in Bridge's own `apply_environment_variables`.
    for variable, value in recipe.environment.items():
        os.environ.setdefault(variable, value)
    if config is not None:
        max_connections.keep_enough()  # `install` is too late: `is_available` has CUDA read it
    import torch

    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        if recipe.builder:
            raise ValueError(f"recipe={name!r} needs GPUs and torch sees none: run it in a job, or try recipe='tiny'")
        from bridge_fgo.tools.standins.cuda import install_standins

        install_standins()
    return prepare_pretrain(recipe, config, source, overrides, offload, on_cpu)


def prepare_pretrain(
    recipe: catalog.Recipe,
    settings: OffloadConfig | None,
    hf: Choice | Path,
    overrides: Sequence[str],
    offload: bool = True,
    on_cpu: bool = False,
) -> Callable[[], None]:
    """Build the recipe's configuration for Bridge's `pretrain()`, and return that.

    `settings` are those to install the package with, None leaves it out; the rest is as for `prepare`.

    Raises:
        ValueError: the installed mcore cannot build the model; Bridge would ask the network for a tokenizer, and the
            user said that there is none; or as `bridge_fgo.recipes.config.build`.
    """
    require_mcore(recipe)
    from megatron.bridge.training.pretrain import pretrain as bridge_pretrain
    from megatron.bridge.utils.common_utils import print_rank_0

    import bridge_fgo
    from bridge_fgo.recipes.config import build

    if settings is not None:
        bridge_fgo.install(settings)
    built = build(recipe, offload=offload and settings is not None, hf=hf, overrides=overrides, on_cpu=on_cpu)
    for note in built.notes:
        print_rank_0(f"recipe {recipe.name}: {note}")
    if hf == "kept" and (model := hf_config.tokenizer_to_fetch(built.config)) is not None:
        raise ValueError(
            f"--hf-config kept: recipe {recipe.name} takes the tokenizer of {model} from Hugging Face "
            "(tokenizer.tokenizer_type='HuggingFaceTokenizer'), which is neither kept here nor in the cache: give "
            f"{hf_config.without_tokenizer(built.config, recipe.hf_model)} to train on made-up data without it, or "
            "tokenizer.tokenizer_model=FOLDER, or fill HF_HOME where there is network"
        )
    if "SLURM_NTASKS" not in os.environ:
        process.use_one_rank_by_default()
    process.skip_building_what_is_built()
    step = importlib.import_module(f"megatron.bridge.{recipe.step}")
    return partial(bridge_pretrain, built.config, step.forward_step)


def require_mcore(recipe: catalog.Recipe) -> None:
    """Raise ValueError where the installed mcore lacks the module that the recipe's model is made of."""
    module = recipe.mcore_module
    if module is not None and source_of(module) is None:
        raise ValueError(
            f"recipe={recipe.name!r} needs Megatron-LM's dev branch: the installed megatron-core has no {module}; put "
            "a checkout of dev (Megatron-Bridge names the commit in its .dev.commit) on PYTHONPATH"
        )


if __name__ == "__main__":
    app()
