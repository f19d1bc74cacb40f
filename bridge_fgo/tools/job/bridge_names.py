"""Bridge's config functions, and the models whose Hugging Face configs they read, by reading Bridge's sources.

That takes half a second, and to import them half a minute.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("recipes", "perf_recipes", "diffusion/recipes")
"""Folders of `megatron.bridge` that are searched, in this order: a name that several have means the first."""

BINDING = re.compile(r"^(?:def (\w+)\(|(\w+)(?:: [^=\n]+)? = ).*(?:\n(?:[ \t)\]}].*|#.*|)$)*", re.MULTILINE)
ALIAS = re.compile(r"\b(\w+_config) as (\w+)")
NOT_CODE = re.compile(r'"""(?:.|\n)*?"""|#.*|.*(?:dataset|tokenizer)\w* ?=.*')
MODEL = re.compile(r'"([\w.-]+/[\w.-]+)"')


@cache
def _bound() -> dict[str, dict[str, str]]:
    """Return of each module of `PACKAGES` its names and their texts, an alias's being the name it stands for."""
    found: dict[str, dict[str, str]] = {}
    spec = find_spec("megatron")
    for top in () if spec is None else map(Path, spec.submodule_search_locations or ()):
        for path in (path for package in PACKAGES for path in sorted((top / "bridge" / package).rglob("*.py"))):
            text = path.read_text(encoding="utf-8")
            bound = {match[1] or match[2]: NOT_CODE.sub("", match[0]) for match in BINDING.finditer(text)}
            parts = path.relative_to(top).with_suffix("").parts
            name = ".".join(("megatron", *parts)).removesuffix(".__init__")
            found.setdefault(name, {alias: origin for origin, alias in ALIAS.findall(text)} | bound)
    return found


def config_names() -> set[str]:
    """Return the names of Bridge's config functions; none where Bridge is not installed."""
    return {name for bound in _bound().values() for name in bound if re.fullmatch(r"[a-z]\w*_config", name)}


def module_of(name: str) -> str | None:
    """Return the module that has a config function of Bridge's, or another name of its recipes."""
    return next((module for module, bound in _bound().items() if name in bound), None)


def model_read_by(name: str) -> str | None:
    """Return the model whose Hugging Face config a function of Bridge's reads; None for none, or if only a call tells.

    It is the only one that is named in the function and in what that calls.
    """
    seen: dict[tuple[str, str], str] = {}
    names = [(name, module_of(name))]
    while names:
        name, module = names.pop()
        if module is not None and (name, module) not in seen:
            text = seen[name, module] = _bound()[module][name]
            words = set(re.findall(r"\w+", text))
            names += [(word, module if word in _bound()[module] else module_of(word)) for word in words - {name}]
    text = "\n".join(seen.values())
    models = set(MODEL.findall(text))
    return models.pop() if len(models) == 1 and re.search(r"\bfrom_(?:hf_)?pretrained\(", text) else None


def gpus_of(name: str) -> int | None:
    """Return how many GPUs the name of a recipe says that it is for, or that of the function whose alias it is."""
    module = module_of(name)
    alias = None if module is None else re.fullmatch(r"(?:\w+ = )?(\w+)\s*", _bound()[module][name])
    said = re.search(r"_(\d+)gpu(?:_|$)", name) or (alias and re.search(r"_(\d+)gpu_", alias[1]))
    return int(said[1]) if said else None
