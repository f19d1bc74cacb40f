"""Makes Bridge's ConfigContainer of the recipe or the saved run config that a user names."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bridge_fgo.recipes.catalog import RECIPES, Recipe
from bridge_fgo.recipes.hf_config import kept_configs
from bridge_fgo.recipes.overrides import overridden
from bridge_fgo.tools.job.target import is_saved_config, no_recipe, require_saved_config


def load_config(target: str, overrides: Sequence[str] = ()) -> tuple[Any, int | None]:
    """Return the ConfigContainer that `target` names, and how many GPUs it is for, where its recipe says so.

    A target is the path of a saved run config; or the name of a recipe: one of this project's (`bridge_fgo.recipes`,
    with the offload on), a `module:function`, or a function of `megatron.bridge.recipes`. Overrides are in Bridge's own
    syntax (Hydra's), as training takes them.

    Raises:
        ValueError: nothing of that name, or the recipe could not be built (most of Bridge's read the model's
            Hugging Face config, and need network or a filled cache), an override is wrong, or it trains adapters.
    """
    config = _saved(target) if is_saved_config(target) else _built(target)
    if overrides:
        config = overridden(config, overrides)
    if getattr(config, "peft", None) is not None:
        raise ValueError(f"{target}: peft is set, and how many parameters its adapters have is not known here")
    if not all(hasattr(config, section) for section in ("model", "optimizer", "ddp")):
        raise ValueError(f"{target} is a {type(config).__name__}, and no ConfigContainer of Bridge's")
    return config, RECIPES[target].gpus if target in RECIPES else None


def _saved(target: str) -> Any:
    require_saved_config(Path(target))
    from megatron.bridge.training.config import ConfigContainer

    try:
        return ConfigContainer.from_yaml(target)
    except Exception as error:  # OmegaConf's, Hydra's, and an assert on what is no run config
        why = f": {type(error).__name__}: {error}" if str(error) else ""
        raise ValueError(f"{target}: no run config as Megatron-Bridge saves it (a run_config.yaml){why}") from error


def _built(name: str) -> Any:
    builder: Any
    if name in RECIPES:
        builder = partial(_own, RECIPES[name])
    elif ":" in name:
        module, _, function = name.partition(":")
        try:
            builder = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"recipe {name!r}: {error}") from None
    else:
        builder = getattr(importlib.import_module("megatron.bridge.recipes"), name, None)
        if not callable(builder):
            raise ValueError(no_recipe(name))
    try:
        return builder()
    except Exception as error:  # whatever a recipe raises, the user is told which recipe and why
        hint = ""
        if "huggingface" in f"{type(error).__module__} {error!r} {error.__cause__!r}".lower():
            hint = "; it reads the model's Hugging Face config: give it network or a filled HF_HOME"
        raise ValueError(f"recipe {name!r} could not be built: {type(error).__name__}: {error}{hint}") from error


def _own(recipe: Recipe) -> Any:
    from bridge_fgo.recipes.config import build
    from bridge_fgo.recipes.train import require_mcore

    require_mcore(recipe)
    config: Any = build(recipe, offload=True, hf="kept").config
    if recipe.hf_model and config.model.vocab_size is None and getattr(config.tokenizer, "vocab_size", None) is None:
        # Training takes it from the model's own tokenizer, which is not loaded here.
        config.tokenizer.vocab_size = kept_configs()[recipe.hf_model]["config"]["vocab_size"]
    return config
