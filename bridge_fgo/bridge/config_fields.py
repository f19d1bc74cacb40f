"""Makes `offload_optimizer_states` and `offload` real fields of OptimizerConfig.

On released mcore the constructor raises TypeError on the flag, a command-line override OverridesError, and a saved run
config is loaded with a warning and without the setting. As dataclass fields with constructor parameters, the flag and
the settings of the offload are reachable by every road that Bridge offers, and are saved with the run config.
"""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, override

from bridge_fgo.bridge.compat import FLAG, home_of
from bridge_fgo.bridge.patch import Patch
from bridge_fgo.bridge.settings import SETTINGS, nothing_set


def _own_fields() -> dict[str, dataclasses.Field[Any]]:
    flag: Any = (FLAG, bool, dataclasses.field(default=False, kw_only=True))
    settings: Any = (SETTINGS, dict[str, Any], dataclasses.field(default_factory=nothing_set, kw_only=True))
    return {field.name: field for field in dataclasses.fields(dataclasses.make_dataclass("_Holder", [flag, settings]))}


def _class_default(name: str) -> Any:
    """Return the class attribute that serves instances made before the package was installed.

    Each gets a dict of its own: `optimizer.offload` is made to be written to.
    """
    if name == FLAG:
        return False
    default = functools.cached_property(lambda _: nothing_set())
    default.__set_name__(object, name)
    return default


class ConfigFieldsPatch(Patch):
    """Adds the fields to mcore's OptimizerConfig and to every dataclass derived from it so far.

    Why in place: recipes, YAML files and checkpoints name these classes, and would not find one of our own. Waits for
    Bridge's config module, which makes the last of them. If mcore has the flag, adds the settings alone.
    """

    module = home_of("megatron.bridge.training.config")
    name = f"megatron.core.optimizer.optimizer_config.OptimizerConfig.{FLAG}"

    @staticmethod
    def _classes(module: ModuleType) -> list[type]:
        """Return mcore's class, then every one derived from it, each once."""
        found = [next(cls for cls in module.OptimizerConfig.__mro__ if cls.__module__.startswith("megatron.core"))]
        for cls in found:
            found += [sub for sub in cls.__subclasses__() if sub not in found]
        return found

    @override
    def check(self, module: ModuleType) -> None:
        if not dataclasses.is_dataclass(getattr(module, "OptimizerConfig", None)):
            raise RuntimeError(f"bridge_fgo cannot patch {self.name}: OptimizerConfig is not a dataclass any more")

    @override
    def apply(self, module: ModuleType) -> None:
        for position, cls in enumerate(self._classes(module)):
            fields = vars(cls).get("__dataclass_fields__")
            added = {name: field for name, field in _own_fields().items() if fields is not None and name not in fields}
            if fields is None or not added:
                continue
            self.replace(cls, "__dataclass_fields__", {**fields, **added})
            if position == 0:
                types = {name: field.type for name, field in added.items()}
                self.replace(cls, "__annotations__", {**cls.__annotations__, **types})
                for name in added:
                    self.replace(cls, name, _class_default(name))
            for name, wrap in (("__init__", _with_parameters), ("__repr__", _with_repr), ("__eq__", _with_eq)):
                if name in vars(cls):
                    self.replace(cls, name, wrap(vars(cls)[name], list(added)))


def _with_parameters(init: Callable[..., None], names: list[str]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = {name: kwargs.pop(name) for name in names if name in kwargs}
        settings = given.get(SETTINGS)
        if isinstance(settings, Mapping):  # with every name, because Bridge's overrides change what is there alone
            given[SETTINGS] = nothing_set() | dict(settings)
        elif settings is None:
            given.pop(SETTINGS, None)
        for name, value in given.items():
            setattr(self, name, value)
        init(self, *args, **kwargs)

    signature, fields, kind = inspect.signature(init), _own_fields(), inspect.Parameter.KEYWORD_ONLY
    defaults: dict[str, Any] = {FLAG: False, SETTINGS: None}
    added = [inspect.Parameter(name, kind, default=defaults[name], annotation=fields[name].type) for name in names]
    parameters = [*signature.parameters.values(), *added]
    parameters.sort(key=lambda parameter: parameter.kind)  # `**kwargs` of a class's own constructor comes last
    vars(__init__)["__signature__"] = signature.replace(parameters=parameters)
    return __init__


def _with_repr(original: Callable[[Any], str], names: list[str]) -> Callable[[Any], str]:
    @functools.wraps(original)
    def __repr__(self: Any) -> str:
        text = original(self)
        for name in names:
            # Unless a class's own text has it, perhaps in that of its base.
            if not re.search(rf"\b{name}=", text) and text.endswith(")"):
                text = f"{text[:-1]}, {name}={getattr(self, name)!r})"
        return text

    return __repr__


def _with_eq(original: Callable[[Any, Any], Any], names: list[str]) -> Callable[[Any, Any], Any]:
    @functools.wraps(original)
    def __eq__(self: Any, other: Any) -> Any:
        result = original(self, other)
        if result is NotImplemented:
            return result
        return result and all(getattr(self, name) == getattr(other, name) for name in names)

    return __eq__
