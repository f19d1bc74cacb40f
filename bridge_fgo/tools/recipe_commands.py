"""`bridge-fgo recipes`: the recipes of this project."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.callback()
def recipes() -> None:
    """Show the recipes of this project."""


@app.command("list")
def list_recipes() -> None:
    """Print each recipe's name, GPUs and model, and what it needs."""
    from bridge_fgo.recipes.catalog import RECIPES

    width = max(map(len, RECIPES))
    for recipe in RECIPES.values():
        needs = " (needs Megatron-LM's dev branch)" if recipe.mcore_module else ""
        typer.echo(f"{recipe.name:{width}}  {recipe.gpus:3} GPUs  {recipe.hf_model or 'a small GPT'}{needs}")
    typer.echo("\n`bridge-fgo plan RECIPE` says whether one fits, `python -m bridge_fgo.recipes.launch` trains it.")
