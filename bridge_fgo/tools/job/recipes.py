"""Makes Bridge's ConfigContainer of the recipe or the saved run config that a user names."""

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import Any

import yaml

from bridge_fgo.recipes import hf_config
from bridge_fgo.recipes.catalog import RECIPES, Recipe
from bridge_fgo.recipes.overrides import overridden
from bridge_fgo.tools.job.target import (
    config_functions,
    gpus_of,
    is_saved_config,
    no_recipe,
    require_saved_config,
    without_folder,
)

NOT_THE_USERS = ("<", str(Path(__file__).parents[2]), str(Path(hf_config.__file__).parent), importlib.__file__)
"""How the files of this package begin in a traceback, and those of an import."""

OF_TRAINING = ("tokenizer", "timers")
"""Bridge's `setup()` sets objects under these names; a checkpoint saves the class alone."""


def load_config(target: str, overrides: Sequence[str] = ()) -> tuple[Any, int | None]:
    """Return the ConfigContainer that `target` names, and how many GPUs it is for, where its recipe says so.

    A target is the path of a saved run config; or the name of a recipe: one of this project's (`bridge_fgo.recipes`,
    with the offload on), a `module:function` or `path.py:function`, or a config function of Bridge's. Overrides are in
    Bridge's own syntax (Hydra's), as training takes them; `hf_config=DIR` is a folder whose config.json is the model's.

    Raises:
        ValueError: there is no such recipe or config.json, it cannot be built or trains adapters, an override is wrong.
    """
    overrides, folder = without_folder(overrides)
    gpus = None
    if not is_saved_config(target):
        config, gpus = _built(target, folder)
    elif folder is None:
        config = _saved(target)
    else:
        raise ValueError(f"hf_config={folder}: {target} reads no Hugging Face config; leave it out")
    if overrides:
        config = overridden(config, overrides)
    if not all(hasattr(config, section) for section in ("model", "optimizer", "ddp")):
        raise ValueError(f"{target}: returned {type(config).__name__}, not Bridge's ConfigContainer")
    return config, gpus


def _saved(target: str) -> Any:
    sections = require_saved_config(Path(target))
    from megatron.bridge.training.config import ConfigContainer
    from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix

    register_allowed_target_prefix("bridge_fgo")  # the layers of the recipe tiny on a CPU
    for section, name in product(("model", "optimizer", "dataset"), OF_TRAINING):
        if isinstance(found := sections.get(section), dict):
            found.pop(name, None)
    try:
        with NamedTemporaryFile("w", suffix=".yaml") as file:
            yaml.safe_dump(sections, file)
            file.flush()
            return ConfigContainer.from_yaml(file.name)
    except Exception as error:  # OmegaConf's, Hydra's, and an assert on what is no run config
        why = f": {type(error).__name__}: {' '.join(str(error).split())}" if str(error) else ""
        raise ValueError(f"{target}: no run config as Megatron-Bridge saves it (a run_config.yaml){why}") from error


def _built(name: str, folder: Path | None) -> tuple[Any, int | None]:
    if name not in RECIPES and ":" not in name and name not in config_functions():
        raise ValueError(no_recipe(name))
    kept = hf_config.kept_configs(planning=True)
    is_kept = name in RECIPES and RECIPES[name].hf_model in kept
    try:
        with hf_config.served(folder or ("kept" if is_kept else "auto"), planning=True) as read:
            if name in RECIPES:
                config, gpus = _own(RECIPES[name]), RECIPES[name].gpus
            else:
                function = _function(name)
                # A recipe of Bridge's has its number of GPUs in its name, also where an alias leads to it.
                is_bridges = getattr(function, "__module__", "").startswith("megatron.")
                config, gpus = function(), gpus_of(function.__name__) if is_bridges else None
    except hf_config.MissingError as error:
        raise ValueError(f"recipe {name!r}: {error}") from None
    except Exception as error:  # whatever a recipe raises, the user is told which recipe, why and where
        hint = ""
        if "huggingface" in f"{type(error).__module__} {error!r} {error.__cause__!r}".lower():
            hint = "; it asks Hugging Face for more than a config: give it network or a filled HF_HOME"
        raise ValueError(
            f"recipe {name!r} could not be built: {type(error).__name__}: {error}{_place(error)}{hint}"
        ) from error
    if folder is not None and not read:
        raise ValueError(f"hf_config={folder}: recipe {name!r} reads no Hugging Face config; leave it out")
    if hasattr(config, "tokenizer") and getattr(config.model, "vocab_size", 0) is None:
        # Training takes it from the model's own tokenizer, which is not loaded here.
        numbers = kept.get(str(config.tokenizer.tokenizer_model), {"config": {}})["config"]
        if config.tokenizer.vocab_size is None:
            config.tokenizer.vocab_size = getattr(read[-1] if read else SimpleNamespace(**numbers), "vocab_size", None)
    return config, gpus


def _function(name: str) -> Callable[[], Any]:
    module, _, function = name.rpartition(":")
    if not module.endswith(".py"):
        return getattr(importlib.import_module(module or config_functions()[name]), function)
    path = Path(module).resolve()
    sys.path.insert(0, str(path.parent))  # as `python path.py` does
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    loaded = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return getattr(loaded, function)


def _place(error: Exception) -> str:
    """Return file and line of an error: the deepest in the folder of the function that was called."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(NOT_THE_USERS)
    ]
    if not frames:
        return ""
    folder = Path(frames[0].filename).parent
    own = [
        frame
        for frame in frames
        if Path(frame.filename).is_relative_to(folder)
        and "site-packages" not in Path(frame.filename).relative_to(folder).parts
    ]
    return f" ({os.path.relpath(own[-1].filename)}:{own[-1].lineno}, in {own[-1].name})"


def _own(recipe: Recipe) -> Any:
    from bridge_fgo.recipes.config import build
    from bridge_fgo.recipes.train import require_mcore

    require_mcore(recipe)
    return build(recipe, offload=True, hf="hub").config  # "hub" is what `served` has in its place
