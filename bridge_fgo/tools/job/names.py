"""What can be said of the name of a recipe before Megatron is imported, which takes half a minute."""

from __future__ import annotations

import difflib
import re
from importlib.util import find_spec
from pathlib import Path

from bridge_fgo.recipes.catalog import RECIPES
from bridge_fgo.recipes.train import require_mcore
from bridge_fgo.tools.job.target import is_saved_config, require_saved_config


def refuse_at_once(target: str) -> None:
    """Raise ValueError where nothing of the name `target` can be there, or the installed mcore cannot build it.

    What passes may still not be there: only importing it tells.
    """
    if is_saved_config(target):
        require_saved_config(Path(target))
    elif target in RECIPES:
        if find_spec("megatron") is not None:
            require_mcore(RECIPES[target])
    elif ":" in target:
        package = target.partition(":")[0].partition(".")[0]
        if not package or find_spec(package) is None:
            raise ValueError(f"recipe {target!r}: there is no module {package!r}")
    else:
        there, functions = names_of_bridge()
        if there and target not in there:
            raise ValueError(no_recipe(target, functions))


def no_recipe(name: str, functions: list[str]) -> str:
    """Return the error of a name that is no recipe: what it may have meant, and where the names are.

    Args:
        name: what the user gave.
        functions: of Bridge's recipes.
    """
    near = difflib.get_close_matches(name, [*RECIPES, *functions], n=3, cutoff=0.6)
    near = near or [known for known in (*RECIPES, *functions) if name.lower() in known][:3]
    meant = f"; did you mean {' or '.join(near)}?" if near else ""
    return (
        f"there is no recipe {name!r}{meant} `bridge-fgo recipes list` lists this project's; others are functions of "
        "megatron.bridge.recipes, module:function of your own, or the path of a run_config.yaml"
    )


def names_of_bridge() -> tuple[set[str], list[str]]:
    """Return the words in the sources of `megatron.bridge.recipes`, and the functions that make configs.

    Both are empty where Bridge is not installed. A name that is none of the words cannot be imported from there.
    """
    words: set[str] = set()
    functions: set[str] = set()
    for folder in _folders("megatron/bridge/recipes"):
        for path in folder.rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            words.update(re.findall(r"\w+", text))
            functions.update(re.findall(r"^def ([a-z]\w*_config)\(", text, re.MULTILINE))
    return words, sorted(functions)


def _folders(package: str) -> list[Path]:
    """Return where the package megatron/... is, in the order in which Python looks."""
    spec = find_spec("megatron")
    tops = [] if spec is None else spec.submodule_search_locations or []
    return [folder for top in tops if (folder := Path(top).parent / package).is_dir()]
