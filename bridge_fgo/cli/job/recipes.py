"""Finds the recipe or the saved run config that a user names, and makes Bridge's ConfigContainer of it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def load_config(target: str) -> Any:
    """Return the ConfigContainer that `target` names.

    Args:
        target: the path of a saved run config; or the name of a recipe, looked up in `recipes.RECIPES` (the recipes
            of this project, where they can be imported), as `module:function`, and among Megatron-Bridge's own.

    Raises:
        ValueError: nothing of that name, or the recipe could not be built (most of Bridge's read the model's
            Hugging Face config, and need network or a filled cache).
    """
    if Path(target).suffix in (".yaml", ".yml"):
        from megatron.bridge.training.config import ConfigContainer

        if not Path(target).is_file():
            raise ValueError(f"{target}: there is no such file")
        return ConfigContainer.from_yaml(target)
    builder = find_builder(target)
    try:
        return builder()
    except Exception as error:  # whatever a recipe raises, the user is told which recipe and why
        hint = ""
        if "huggingface" in f"{type(error).__module__} {error!r} {error.__cause__!r}".lower():
            hint = "; it reads the model's Hugging Face config: give it network or a filled HF_HOME"
        raise ValueError(f"recipe {target!r} could not be built: {type(error).__name__}: {error}{hint}") from error


def find_builder(name: str) -> Callable[[], Any]:
    """Return the function that builds the recipe `name`; see `load_config`."""
    ours, why_not = _own_recipes()
    if name in ours:
        return ours[name]
    if ":" in name:
        module, _, function = name.partition(":")
        try:
            return getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"recipe {name!r}: {error}") from None
    upstream = importlib.import_module("megatron.bridge.recipes")
    builder = getattr(upstream, name, None)
    if callable(builder):
        return builder
    known = ", ".join(sorted(ours)) or f"none ({why_not})"
    raise ValueError(
        f"there is no recipe {name!r}: it is no function of megatron.bridge.recipes, and this project's are: {known}; "
        "a function of your own is module:function, a saved config the path of a run_config.yaml"
    )


def _own_recipes() -> tuple[dict[str, Callable[[], Any]], str]:
    try:
        module = importlib.import_module("recipes")
        return dict(module.RECIPES), ""
    except (ImportError, AttributeError) as error:
        return {}, f"no module recipes with RECIPES here: {error}"
