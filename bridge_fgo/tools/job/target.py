"""What can be told of a job's name before torch and Megatron are imported, which takes half a minute."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

import yaml

from bridge_fgo.recipes.catalog import RECIPES

PACKAGES = ("recipes", "perf_recipes", "diffusion/recipes")
"""Folders of `megatron.bridge` that are searched, in this order: a name that several have means the first."""
FUNCTION = re.compile(
    r"^def ([a-z]\w*_config)\(|^([a-z]\w*_config)(?:: [^=\n]+)? = |\b\w+_config as ([a-z]\w*_config)", re.MULTILINE
)


def is_saved_config(target: str) -> bool:
    """Return whether `target` can only be the path of a saved run config, and no recipe."""
    return Path(target).suffix in (".yaml", ".yml")


def refuse_at_once(target: str, overrides: Sequence[str] | None = ()) -> None:
    """Raise ValueError where nothing of the name `target` can be there, or it cannot be built here.

    What passes may still not be there: only importing it tells.
    """
    without_folder(overrides or ())
    module = target.rpartition(":")[0]
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
    elif not module and (known := config_functions()) and target not in known:
        raise ValueError(no_recipe(target))


@cache
def config_functions() -> dict[str, str]:
    """Return the names of Bridge's config functions and aliases, each with its module; none where Bridge is not here.

    By reading Bridge's sources, which takes half a second. To import them takes half a minute.
    """
    found: dict[str, str] = {}
    spec = find_spec("megatron")
    for top in () if spec is None else map(Path, spec.submodule_search_locations or ()):
        for path in (path for package in PACKAGES for path in sorted((top / "bridge" / package).rglob("*.py"))):
            module = ".".join(("megatron", *path.relative_to(top).with_suffix("").parts)).removesuffix(".__init__")
            for names in FUNCTION.findall(path.read_text(encoding="utf-8")):
                found.setdefault("".join(names), module)
    return found


def gpus_of(name: str) -> int | None:
    """Return how many GPUs the name of a recipe says that it is for."""
    said = re.search(r"_(\d+)gpu(?:_|$)", name)
    return int(said[1]) if said else None


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


def require_saved_config(path: Path) -> None:
    """Raise ValueError where a file is not there, is no YAML, or is no saved ConfigContainer."""
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


def no_recipe(name: str) -> str:
    """Return the error of a name that is no recipe: what it may have meant, and where the names are."""
    said = gpus_of(name)
    known = [one for one in (*RECIPES, *sorted(config_functions())) if said in (None, gpus_of(one))]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6) or [one for one in known if name.lower() in one][:3]
    meant = f"; did you mean {' or '.join(near)}?" if near else ""
    return (
        f"there is no recipe {name!r}{meant} `bridge-fgo recipes list` lists this project's; others are Bridge's "
        "config functions (of recipes and perf_recipes), module:function or path.py:function of your own, or the path "
        "of a run_config.yaml"
    )
