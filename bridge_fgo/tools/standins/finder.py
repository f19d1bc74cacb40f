"""The import finder that puts a stand-in in the place of a package, as a table says."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, override


@dataclass(frozen=True, kw_only=True)
class Table:
    """What stands in.

    packages: top-level names that stand in, whether they are installed or not.
    modules: those of their modules that exist; None for all but `hidden`. Whoever asks for another takes the path for
    its absence.
    hidden: modules that do not exist where `modules` is None.
    submodules: names that are submodules when they are asked for as attributes.
    attribute: makes any other attribute from the names of the module and of the attribute; None for none of that name.
    version: `__version__` of every module.
    """

    packages: frozenset[str]
    modules: frozenset[str] | None = None
    hidden: frozenset[str] = frozenset()
    submodules: frozenset[str]
    attribute: Callable[[str, str], Any]
    version: str

    def has(self, module: str) -> bool:
        """Return whether a module of one of the packages exists."""
        return module not in self.hidden and (self.modules is None or module in self.modules)


class StandInModule(types.ModuleType):
    """A module whose attributes are made when they are first asked for."""

    def __init__(self, name: str, table: Table) -> None:
        super().__init__(name)
        self.__version__ = table.version
        self._table = table

    def __getattr__(self, name: str) -> Any:
        # importlib and inspect probe for dunder names and rely on AttributeError.
        value = None if name.startswith("__") else self._make(name)
        if value is None:
            raise AttributeError(f"stand-in module {self.__name__!r} has no {name!r}")
        setattr(self, name, value)
        return value

    def _make(self, name: str) -> Any:
        full = f"{self.__name__}.{name}"
        if name in self._table.submodules and self._table.has(full):
            return importlib.import_module(full)
        return self._table.attribute(self.__name__, name)


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers for the packages of a table, before the finders that may know the real ones.

    Args:
        table: what stands in.
        is_hiding: whether the packages are missing altogether for now.
    """

    def __init__(self, table: Table, is_hiding: bool = False) -> None:
        self.table = table
        self.is_hiding = is_hiding

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] not in self.table.packages:
            return None
        if self.is_hiding or not self.table.has(fullname):
            # Raised here, because the finders after this one might know the real package.
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    @override
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandInModule(spec.name, self.table)

    @override
    def exec_module(self, module: types.ModuleType) -> None:
        pass  # attributes are made when they are asked for
