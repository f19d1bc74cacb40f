"""Imports a framework's own files, whatever of the rest is missing: what they import beside them is stood in for.

A stand-in is a class that has every attribute, returns what it decorates, and disappears from the bases of a class that
derives from it. Real are the files that are asked for, PyTorch, Megatron, and all that is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


class _StandInType(type):
    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> type:
        if bases:  # a real class that derives from stand-ins
            real = tuple(base for base in bases if not isinstance(base, _StandInType))
            return type(name, real, namespace)
        return super().__new__(mcs, name, bases, namespace)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        decorates = len(args) == 1 and not kwargs and (inspect.isfunction(args[0]) or inspect.isclass(args[0]))
        return args[0] if decorates and not isinstance(args[0], _StandInType) else cls

    def __getitem__(cls, key: Any) -> Any:
        return cls


def _stand_in(name: str) -> type:
    return _StandInType(name, (), {})


def _importer() -> str:
    """Return the name of the module that an import is called from."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").startswith(("importlib", "_frozen", "wrapt", __name__)):
        assert frame.f_back is not None
        frame = frame.f_back
    return frame.f_globals.get("__name__", "")


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(name)


class _Finder:
    """Finds a framework's modules, or all that nobody else has found of what those import.

    package: the framework's package. root: the folder that contains it; None for the last finder. files: paths below
    `root` of the files that are imported as they are.
    """

    def __init__(self, package: str, root: Path | None = None, files: tuple[str, ...] = ()) -> None:
        self._package, self._root = package, root
        self._files = {file.removesuffix(".py").replace("/", "."): file for file in files}
        self.stood_in: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if (self._root is not None) != (name.partition(".")[0] == self._package):
            return None
        if self._root is None and _importer().partition(".")[0] != self._package:
            return None  # another's optional import
        if self._root is not None and name in self._files:
            return importlib.util.spec_from_file_location(name, self._root / self._files[name])
        self.stood_in.add(name)
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def import_real(root: Path, files: tuple[str, ...], given: dict[str, dict[str, Any]] | None = None) -> list[ModuleType]:
    """Return the modules of a framework's files, imported by their names.

    Args:
        root: the folder that holds the framework's package.
        files: paths below it, of one package. Others of the package are stood in for.
        given: for modules that are stood in for, by name, what is in them.
    """
    missing = [file for file in files if not (root / file).is_file()]
    assert not missing, f"{root}: no {', '.join(missing)}"
    package = files[0].partition("/")[0]
    own, last = _Finder(package, root, files), _Finder(package)
    lent: list[tuple[ModuleType, str]] = []
    sys.meta_path.insert(1, own)  # type: ignore[arg-type]  # behind wrapt's, by which patches wait for an import
    sys.meta_path.append(last)  # type: ignore[arg-type]
    try:
        for name, members in (given or {}).items():
            vars(importlib.import_module(name)).update(members)
        modules = []
        for file in files:
            name = file.removesuffix(".py").replace("/", ".")
            while True:
                try:
                    modules.append(importlib.import_module(name))
                    break
                except ImportError as error:  # of another release of what is installed
                    wanted = getattr(error, "name_from", None)
                    if error.name not in sys.modules or wanted is None or (sys.modules[error.name], wanted) in lent:
                        raise
                    setattr(sys.modules[error.name], wanted, _stand_in(wanted))
                    lent.append((sys.modules[error.name], wanted))
        return modules
    finally:
        sys.meta_path.remove(last)  # type: ignore[arg-type]
        for module, name in lent:
            delattr(module, name)
        for name in last.stood_in:  # nobody else may take one for what is installed
            sys.modules.pop(name, None)
        outer = {name for name in last.stood_in if name.rpartition(".")[0] not in last.stood_in}
        others = sorted(outer | {f"{module.__name__}.{name}" for module, name in lent})
        print(f"stand-ins: {len(own.stood_in)} modules of {package}; {', '.join(others) or 'nothing else'}", flush=True)
