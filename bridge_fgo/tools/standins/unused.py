"""What the model builder imports and never uses, hollow: to import it takes a third of the builder's time.

Hollow packages have a class for each name that is asked for. To derive from one, or to name it in an annotation, is no
use of it. `torch.compile` compiles nothing: it would import the compiler as it decorates mcore's functions.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import version
from types import ModuleType
from typing import Any, NoReturn

import torch

PACKAGES = ("datasets", "diffusers", "modelopt", "pandas", "peft", "scipy")


def install(on_use: Callable[[], NoReturn]) -> None:
    """Have those of `PACKAGES` that are not imported yet be hollow; whatever is used of them calls `on_use`."""

    class HollowClass(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            on_use()

        def __getattr__(cls, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            on_use()

    class HollowModule(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name == "__version__":
                return version(self.__name__)
            if name.startswith("__"):
                raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
            vars(self)[name] = made = HollowClass(name, (), {"__module__": self.__name__})
            return made

    class Finder:
        """Finds modules of the packages where they are, and makes hollow ones."""

        def __init__(self) -> None:
            self._packages = {name for name in PACKAGES if name not in sys.modules}

        def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
            found = PathFinder.find_spec(name, path) if name.partition(".")[0] in self._packages else None
            if found is not None:
                found.loader = self  # pyright: ignore[reportAttributeAccessIssue]
            return found

        def create_module(self, spec: ModuleSpec) -> ModuleType:
            return HollowModule(spec.name)

        def exec_module(self, module: ModuleType) -> None:
            pass

    sys.meta_path.insert(0, Finder())  # pyright: ignore[reportArgumentType]
    torch.compile = lambda function=None, **how: (lambda it: it) if function is None else function
