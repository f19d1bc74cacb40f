"""The import finder that puts a stand-in in the place of a package."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, override


class StandInModule(types.ModuleType):
    """A module whose attributes are made when they are first asked for."""

    def __init__(self, name: str, finder: StandInFinder) -> None:
        super().__init__(name)
        self.__version__ = finder.version
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        full, value = f"{self.__name__}.{name}", None
        if name in self._finder.submodules and self._finder.has(full):
            value = importlib.import_module(full)
        elif not name.startswith("__"):  # importlib and inspect probe for those and rely on AttributeError
            value = self._finder.attribute(self.__name__, name)
        if value is None:
            raise AttributeError(f"stand-in module {self.__name__!r} has no {name!r}")
        setattr(self, name, value)
        return value


@dataclass(kw_only=True, eq=False)
class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers for packages before the finders that may know the real ones."""

    packages: frozenset[str]
    """Top-level names that stand in, whether they are installed or not."""
    modules: frozenset[str] | None = None
    """Those of their modules that exist; None for all but `hidden`. mcore takes the path for the absence of others."""
    hidden: frozenset[str] = frozenset()
    submodules: frozenset[str]
    """Names that are submodules when they are asked for as attributes."""
    attribute: Callable[[str, str], Any]
    """Makes any other attribute from the names of the module and of the attribute; None for none of that name."""
    version: str
    """`__version__` of every module."""
    is_hiding: bool = False
    """Whether the packages are missing altogether for now."""

    def has(self, module: str) -> bool:
        """Return whether a module of one of the packages exists."""
        return module not in self.hidden and (self.modules is None or module in self.modules)

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] not in self.packages:
            return None
        if self.is_hiding or not self.has(fullname):
            # Raised here, because the finders after this one might know the real package.
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    @override
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandInModule(spec.name, self)

    @override
    def exec_module(self, module: types.ModuleType) -> None:
        pass  # attributes are made when they are asked for
