"""Lists the functions of the installed Megatron-Bridge that make a whole training config."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

PACKAGES = ("megatron.bridge.recipes", "megatron.bridge.perf_recipes", "megatron.bridge.diffusion.recipes")


def config_functions() -> dict[Callable[..., Any], set[str]]:
    """Return the config functions of `PACKAGES`, each with the public names that its modules give it.

    A config function is public, is annotated to return a ConfigContainer, and can be called without arguments. Bridge
    names one function several times: by its GPUs and precision where it is defined, and by a short alias.

    Raises:
        ImportError: a module of Bridge's recipes cannot be imported, so that what it holds is not known.
    """
    names: dict[Callable[..., Any], set[str]] = {}
    for package_name in PACKAGES:
        package = importlib.import_module(package_name)
        modules = [package_name, *_modules_of(package)]
        for module in map(importlib.import_module, modules):
            for name, value in vars(module).items():
                if not name.startswith("_") and _makes_config(value):
                    names.setdefault(value, set()).add(name)
    return names


def _modules_of(package: Any) -> list[str]:
    def cannot_be_imported(name: str) -> None:
        raise ImportError(f"{name}: a package of Bridge's recipes could not be imported")

    walked = pkgutil.walk_packages(package.__path__, f"{package.__name__}.", onerror=cannot_be_imported)
    return [module.name for module in walked]


def _makes_config(value: Any) -> bool:
    if not inspect.isfunction(value) or not value.__module__.startswith(PACKAGES) or value.__name__.startswith("_"):
        return False
    signature = inspect.signature(value)
    returned = signature.return_annotation
    name = returned.strip("'\"") if isinstance(returned, str) else getattr(returned, "__name__", "")
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    callable_as_it_is = all(
        parameter.kind in optional or parameter.default is not parameter.empty
        for parameter in signature.parameters.values()
    )
    return name == "ConfigContainer" and callable_as_it_is
