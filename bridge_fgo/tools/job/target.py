"""What can be told of a job's name before torch and Megatron are imported, which takes some 15 s."""

import difflib
import re
from collections.abc import Sequence
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from bridge_fgo.recipes.catalog import RECIPES
from bridge_fgo.recipes.hf_config import fetch

PACKAGES = ("recipes", "perf_recipes", "diffusion/recipes")  # of `megatron.bridge`; a name means the first that has it
BINDING = re.compile(r"^(?:def (\w+)\(|(\w+)(?:: [^=\n]+)? = ).*(?:\n(?:[ \t)\]}].*|#.*|)$)*", re.MULTILINE)
ALIAS = re.compile(r"\b(\w+_config) as (\w+)")
NOT_CODE = re.compile(r'"""(?:.|\n)*?"""|#.*|.*(?:dataset|tokenizer)\w* ?=.*')


def is_saved_config(target: str) -> bool:
    """Return whether `target` can only be the path of a saved run config, and no recipe."""
    return Path(target).suffix in (".yaml", ".yml")


def refuse_at_once(target: str, overrides: Sequence[str] | None = ()) -> None:
    """Raise ValueError if importing `target` need not be tried: there is none, or it cannot be built here."""
    _, folder = without_folder(overrides or ())
    module, _, function = target.rpartition(":")
    package = module.partition(".")[0]
    if is_saved_config(target):
        require_saved_config(Path(target))
    elif target in RECIPES:
        from bridge_fgo.recipes.train import require_mcore

        if find_spec("megatron") is not None:
            require_mcore(RECIPES[target])
        if folder is None and RECIPES[target].hf_model:
            fetch(RECIPES[target].hf_model, planning=True)
    elif module.endswith(".py"):
        if not Path(module).is_file():
            raise ValueError(f"recipe {target!r}: there is no file {module!r}")
    elif ":" in target and (not package or not (find_spec(package) or PathFinder.find_spec(package, [""]))):
        raise ValueError(f"recipe {target!r}: there is no module {package!r}, neither installed nor in this folder")
    elif is_missing_in_bridge(module, function):
        if function in config_functions():
            raise ValueError(f"recipe {target!r}: Megatron-Bridge has no module {module!r}; write {function} alone")
        raise ValueError(no_recipe(function))
    elif target.endswith(".py") and Path(target).is_file():
        functions = re.findall(
            r"^def (\w+)\(", Path(target).read_text(encoding="utf-8", errors="replace"), re.MULTILINE
        )
        has = f"; it has {', '.join(functions)}" if functions else ""
        raise ValueError(f"{target}: name the function that returns the config, {target}:FUNCTION{has}")
    elif not module and target not in (known := config_functions()) and (known or not target.endswith("_config")):
        raise ValueError(no_recipe(target))
    elif package in ("", "megatron") and folder is None and (model := _model_read_by(function)) is not None:
        fetch(model, planning=True)


@cache
def _bound() -> dict[str, dict[str, str]]:
    """Return of each module of `PACKAGES` its names and their texts, an alias's being the name it stands for.

    By reading Bridge's sources, which takes half a second. To import them takes some 10 s.
    """
    found: dict[str, dict[str, str]] = {}
    spec = find_spec("megatron")
    for top in () if spec is None else map(Path, spec.submodule_search_locations or ()):
        for path in (path for package in PACKAGES for path in sorted((top / "bridge" / package).rglob("*.py"))):
            module = ".".join(("megatron", *path.relative_to(top).with_suffix("").parts)).removesuffix(".__init__")
            text = path.read_text(encoding="utf-8")
            bound = {match[1] or match[2]: NOT_CODE.sub("", match[0]) for match in BINDING.finditer(text)}
            found.setdefault(module, {alias: origin for origin, alias in ALIAS.findall(text)} | bound)
    return found


@cache
def config_functions() -> dict[str, str]:
    """Return the names of Bridge's config functions and aliases, each with its module; none without Bridge."""
    bindings = ((name, module) for module, bound in reversed(_bound().items()) for name in bound)
    return {name: module for name, module in bindings if re.fullmatch(r"[a-z]\w*_config", name)}


def is_missing_in_bridge(module: str, function: str) -> bool:
    """Return whether a module of Bridge's recipes is not there, or no such module has the function."""
    is_recipes = module.startswith(tuple(f"megatron.bridge.{package.replace('/', '.')}" for package in PACKAGES))
    bound = _bound() if is_recipes else {}
    return bool(bound) and (module not in bound or all(function not in names for names in bound.values()))


def _model_read_by(name: str) -> str | None:
    """Return the model whose Hugging Face config a function of Bridge's reads; None for none, or if only a call tells.

    It is the only one that is named in the function and in what that calls.
    """
    seen: dict[tuple[str, str], str] = {}
    names = [(name, config_functions().get(name))]
    while names:
        name, module = names.pop()
        if module is not None and (name, module) not in seen:
            bound = _bound()[module]
            text = seen[name, module] = bound[name]
            others = set(re.findall(r"\w+", text)) - {name}
            names += [(word, module if word in bound else config_functions().get(word)) for word in others]
    text = "\n".join(seen.values())
    models = set(re.findall(r'"([\w.-]+/[\w.-]+)"', text))
    return models.pop() if len(models) == 1 and re.search(r"\bfrom_(?:hf_)?pretrained\(", text) else None


def gpus_of(name: str) -> int | None:
    """Return how many GPUs the name of a recipe says that it is for."""
    said = re.search(r"_(\d+)gpu(?:_|$)", name)
    return int(said[1]) if said else None


def without_folder(overrides: Sequence[str]) -> tuple[list[str], Path | None]:
    """Return overrides without `hf_config=DIR`, and that folder; ValueError if it has no config.json."""
    given = [override for override in overrides if override.startswith("hf_config=")]
    folders = [Path(one.removeprefix("hf_config=")) for one in given]
    for one, folder in zip(given, folders, strict=True):
        if not (folder / "config.json").is_file():
            raise ValueError(f"{one}: there is no {folder / 'config.json'}; give the folder of a model's config.json")
    return [one for one in overrides if one not in given], folders[-1] if folders else None


def require_saved_config(path: Path) -> dict[str, Any]:
    """Return a saved ConfigContainer; raise ValueError if a file is not there, is no YAML, or is none."""
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"{path}: cannot be read as a run config: {said}") from None
    if content is None:
        raise ValueError(f"{path}: is empty; give the run_config.yaml that Megatron-Bridge has saved")
    is_container = isinstance(content, dict) and str(content.get("_target_", "")).endswith("ConfigContainer")
    if not is_container or not all(isinstance(content.get(name), dict | None) for name in ("model", "ddp")):
        raise ValueError(f"{path}: is not a saved run config (what Bridge writes as run_config.yaml)")
    return content


def no_recipe(name: str) -> str:
    """Return the error of a name that is no recipe: what it may have meant, and where the names are."""
    said = gpus_of(name)
    known = [one for one in (*RECIPES, *sorted(config_functions())) if said in (None, gpus_of(one))]
    near = sorted(
        (one for one in known if name and one.startswith(name.lower())),
        key=lambda one: (one not in RECIPES, "_pretrain_" not in one, len(one)),
    )[:3]
    near = near or difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.6)
    near = near or [one for one in known if name.lower() in one][:3]
    what = "recipe" if name.isidentifier() or Path(name).exists() else "recipe and no file"
    meant = f"; did you mean {' or '.join(near)}?" if near else "."
    return (
        f"there is no {what} {name!r}{meant} `bridge-fgo recipes list` lists this project's; others are Bridge's "
        "config functions (of recipes and perf_recipes), module:function or path.py:function of your own, or the path "
        "of a run_config.yaml or a job's log"
    )
