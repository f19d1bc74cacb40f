"""What can be told of a job's name before torch and Megatron are imported, which takes half a minute."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from bridge_fgo.recipes.catalog import RECIPES
from bridge_fgo.recipes.hf_config import fetch
from bridge_fgo.tools.job.bridge_names import config_names, gpus_of, model_read_by, module_of


def is_saved_config(target: str) -> bool:
    """Return whether `target` can only be the path of a saved run config, and no recipe."""
    return Path(target).suffix in (".yaml", ".yml")


def refuse_at_once(target: str, overrides: Sequence[str] | None = ()) -> None:
    """Raise ValueError where nothing of the name `target` can be there, or it cannot be built here.

    What passes may still not be there: only importing it tells.
    """
    _, folder = without_folder(overrides or ())
    module, _, function = target.rpartition(":")
    package = module.partition(".")[0]
    if is_saved_config(target):
        require_saved_config(Path(target))
    elif target in RECIPES:
        from bridge_fgo.recipes.train import require_mcore

        if find_spec("megatron") is not None:
            require_mcore(RECIPES[target])
    elif module.endswith(".py"):
        if not Path(module).is_file():
            raise ValueError(f"recipe {target!r}: there is no file {module!r}")
    elif ":" in target and (not package or not (find_spec(package) or PathFinder.find_spec(package, [""]))):
        raise ValueError(f"recipe {target!r}: there is no module {package!r}, neither installed nor in this folder")
    elif not module and (known := config_names()) and target not in known and module_of(target) is None:
        raise ValueError(no_recipe(target))
    elif package in ("", "megatron") and folder is None and (model := model_read_by(function)) is not None:
        fetch(model)


def without_folder(overrides: Sequence[str]) -> tuple[list[str], Path | None]:
    """Return overrides without `hf_config=DIR`, and that folder.

    Raises:
        ValueError: it has no config.json.
    """
    given = [override for override in overrides if override.startswith("hf_config=")]
    folders = [Path(one.removeprefix("hf_config=")) for one in given]
    for one, folder in zip(given, folders, strict=True):
        if not (folder / "config.json").is_file():
            raise ValueError(f"{one}: there is no {folder / 'config.json'}; give the folder of a model's config.json")
    return [one for one in overrides if one not in given], folders[-1] if folders else None


def require_saved_config(path: Path) -> dict[str, Any]:
    """Return the content of a saved run config.

    Raises:
        ValueError: the file is not there, is no YAML, or is no saved ConfigContainer.
    """
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"{path}: cannot be read as a run config: {said}") from None
    if content is None:
        raise ValueError(f"{path}: is empty; give the run_config.yaml that Megatron-Bridge has saved")
    if not isinstance(content, dict) or not str(content.get("_target_", "")).endswith("ConfigContainer"):
        raise ValueError(f"{path}: is not a saved run config (what Bridge writes as run_config.yaml)")
    return content


def no_recipe(name: str) -> str:
    """Return the error of a name that is no recipe: what it may have meant, and where the names are."""
    said = gpus_of(name)
    known = [one for one in (*RECIPES, *sorted(config_names())) if said in (None, gpus_of(one))]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6) or [one for one in known if name.lower() in one][:3]
    meant = f"; did you mean {' or '.join(near)}?" if near else ""
    return (
        f"there is no recipe {name!r}{meant} `bridge-fgo recipes list` lists this project's; others are Bridge's "
        "config functions (of recipes and perf_recipes), module:function or path.py:function of your own, or the path "
        "of a run_config.yaml"
    )
