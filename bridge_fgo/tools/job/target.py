"""What can be told of a job's name before torch and Megatron are imported, which takes half a minute."""

from __future__ import annotations

import difflib
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from bridge_fgo.recipes.catalog import RECIPES


def is_saved_config(target: str) -> bool:
    """Return whether `target` can only be the path of a saved run config, and no recipe."""
    return Path(target).suffix in (".yaml", ".yml")


def refuse_at_once(target: str) -> None:
    """Raise ValueError where nothing of the name `target` can be there, or the installed mcore cannot build it.

    What passes may still not be there: only importing it tells.
    """
    if is_saved_config(target):
        require_saved_config(Path(target))
    elif target in RECIPES:
        from bridge_fgo.recipes.train import require_mcore

        if find_spec("megatron") is not None:
            require_mcore(RECIPES[target])
    elif ":" in target:
        package = target.partition(":")[0].partition(".")[0]
        if not package or find_spec(package) is None:
            raise ValueError(f"recipe {target!r}: there is no module {package!r}")
    else:
        words, _ = names_of_bridge()
        if words and target not in words:
            raise ValueError(no_recipe(target))


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
    known = [*RECIPES, *names_of_bridge()[1]]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6) or [one for one in known if name.lower() in one][:3]
    meant = f"; did you mean {' or '.join(near)}?" if near else ""
    return (
        f"there is no recipe {name!r}{meant} `bridge-fgo recipes list` lists this project's; others are functions of "
        "megatron.bridge.recipes, module:function of your own, or the path of a run_config.yaml"
    )


def names_of_bridge() -> tuple[set[str], list[str]]:
    """Return the words in the sources of `megatron.bridge.recipes`, and the functions that make configs.

    Both are empty where Bridge is not installed. A name that is none of the words cannot be imported from there.
    """
    spec = find_spec("megatron")
    tops = [] if spec is None else spec.submodule_search_locations or []
    words: set[str] = set()
    functions: set[str] = set()
    for path in (path for top in tops for path in (Path(top) / "bridge/recipes").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        words.update(re.findall(r"\w+", text))
        functions.update(re.findall(r"^def ([a-z]\w*_config)\(", text, re.MULTILINE))
    return words, sorted(functions)
