"""Makes `offload_optimizer_states` a real field of OptimizerConfig where mcore has none.

On released mcore the constructor raises TypeError, a command-line override OverridesError, and a saved run
config is loaded with a warning and without the setting. As a dataclass field with a constructor parameter,
the flag is reachable by every road that Bridge offers, and is saved with the run config.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, override

from bridge_fgo.wiring.compat import FLAG
from bridge_fgo.wiring.patch import Patch

_ABSENT = object()


def _flag_field() -> dataclasses.Field[bool]:
    """Return the field as `dataclasses` itself makes it."""
    holder = dataclasses.make_dataclass("_FlagHolder", [(FLAG, bool, dataclasses.field(default=False, kw_only=True))])
    return dataclasses.fields(holder)[0]


class FlagFieldPatch(Patch):
    """Adds the field to mcore's OptimizerConfig and to every dataclass derived from it so far.

    Why in place: recipes, YAML files and checkpoints name these classes, so a class of our own would not be
    found by them. Waits for Bridge's config module, where the last class of interest is made. Does nothing
    where mcore has the field.
    """

    module = "megatron.bridge.training.config"
    name = f"megatron.core.optimizer.optimizer_config.OptimizerConfig.{FLAG}"

    def __init__(self) -> None:
        self._undo: list[tuple[type, str, Any, Any]] = []  # class, attribute, before, ours
        self._field_owners: list[type] = []

    @staticmethod
    def _classes(module: ModuleType) -> Iterator[type]:
        base = next(cls for cls in module.OptimizerConfig.__mro__ if cls.__module__.startswith("megatron.core"))
        pending = [base]
        while pending:
            cls = pending.pop()
            yield cls
            pending += cls.__subclasses__()

    @override
    def check(self, module: ModuleType) -> None:
        if not dataclasses.is_dataclass(getattr(module, "OptimizerConfig", None)):
            raise RuntimeError(f"bridge_fgo cannot patch {self.name}: OptimizerConfig is not a dataclass any more")

    @override
    def apply(self, module: ModuleType) -> None:
        for position, cls in enumerate(dict.fromkeys(self._classes(module))):
            fields = vars(cls).get("__dataclass_fields__")
            if fields is None or FLAG in fields:
                continue
            fields[FLAG] = _flag_field()
            self._field_owners.append(cls)
            if position == 0:
                self._set(cls, FLAG, False)
                cls.__annotations__[FLAG] = bool
            for name, wrap in (("__init__", _with_parameter), ("__repr__", _with_repr), ("__eq__", _with_eq)):
                if name in vars(cls):
                    self._set(cls, name, wrap(vars(cls)[name]))

    def _set(self, cls: type, name: str, value: Any) -> None:
        self._undo.append((cls, name, vars(cls).get(name, _ABSENT), value))
        setattr(cls, name, value)

    @override
    def check_undo(self, module: ModuleType) -> None:
        for cls, name, _, ours in self._undo:
            if vars(cls).get(name, _ABSENT) is not ours:
                raise RuntimeError(
                    f"bridge_fgo cannot uninstall: {cls.__module__}.{cls.__qualname__}.{name} was replaced after "
                    "bridge_fgo.install(); undo that first"
                )

    @override
    def undo(self, module: ModuleType) -> None:
        for cls, name, before, _ in reversed(self._undo):
            if before is _ABSENT:
                delattr(cls, name)
            else:
                setattr(cls, name, before)
        for cls in self._field_owners:
            del vars(cls)["__dataclass_fields__"][FLAG]
            vars(cls).get("__annotations__", {}).pop(FLAG, None)
        self._undo.clear()
        self._field_owners.clear()


def _with_parameter(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if FLAG in kwargs:
            setattr(self, FLAG, kwargs.pop(FLAG))
        init(self, *args, **kwargs)

    signature = inspect.signature(init)
    flag = inspect.Parameter(FLAG, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool)
    parameters = [*signature.parameters.values(), flag]
    parameters.sort(key=lambda parameter: parameter.kind)  # `**kwargs` of a class's own constructor comes last
    vars(__init__)["__signature__"] = signature.replace(parameters=parameters)
    return __init__


def _with_repr(original: Callable[[Any], str]) -> Callable[[Any], str]:
    @functools.wraps(original)
    def __repr__(self: Any) -> str:
        text = original(self)
        if FLAG in text or not text.endswith(")"):  # a class's own, perhaps with that of its base in it
            return text
        return f"{text[:-1]}, {FLAG}={getattr(self, FLAG)!r})"

    return __repr__


def _with_eq(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    @functools.wraps(original)
    def __eq__(self: Any, other: Any) -> Any:
        result = original(self, other)
        return result and getattr(self, FLAG) == getattr(other, FLAG) if result is not NotImplemented else result

    return __eq__
