"""What a patch is: one binding, what it is replaced by, and how it is put back."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol, override

import wrapt

from bridge_fgo.bridge.compat import release, version_of
from bridge_fgo.bridge.settings import is_installed

Wrapper = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
"""A wrapt wrapper: (wrapped, instance, args, kwargs) -> result."""

_ABSENT = object()
_TAKE_ANY = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


_warned: set[tuple[str, str]] = set()
"""Newer releases of which it has been said that they were not tested, as (distribution, version)."""


def _warn_of_newer(distribution: str, version: str, end: tuple[int, int]) -> None:
    if (distribution, version) in _warned:
        return
    _warned.add((distribution, version))
    warnings.warn(
        f"bridge_fgo: {distribution} {version} is newer than what this bridge-fgo was tested with, which is below "
        f"{end[0]}.{end[1]}. Every function that it wraps has the parameters that it relies on, so it goes on: compare "
        "the first losses with a run without the flag, or install a newer bridge-fgo",
        stacklevel=2,
    )


class Patch(Protocol):
    """One entry of the table."""

    module: str
    """Module whose import the patch waits for."""
    name: str
    """The binding, for messages."""

    def check(self, module: ModuleType) -> None:
        """Raise RuntimeError where the binding is not the one that the patch was written for."""

    def apply(self, module: ModuleType) -> None:
        """Replace the binding."""

    def check_undo(self, module: ModuleType) -> None:
        """Raise RuntimeError where someone patched on top."""

    def undo(self, module: ModuleType) -> None:
        """Put back what was there."""


@dataclass(eq=False)
class FunctionPatch(Patch):
    """Wraps a function of a module, or a method of a class in it.

    The wrapper is skipped where nothing is installed, as in a function that somebody holds after an uninstall.

    Args:
        module: the module whose import the patch waits for.
        target: "function" or "Class.method".
        wrapper: what is called in its place.
        parameters: the names that the wrapper relies on; each must be a parameter of the function.
        why: why this is the one binding to replace.
        distribution: what the module comes with.
        series: its releases that the patch was written for, as (first, end) of (major, minor). On a newer one its
            signature decides, and a warning says that it was not tested.
        optional: the target may be missing (another generation of mcore).
        order: names of its first parameters, in the order of a call. With them the wrapper understands a function of
            `*args` or `**kwargs`, which somebody has wrapped around the target without `functools.wraps`. Empty where
            it does not.
    """

    module: str
    target: str
    wrapper: Wrapper
    parameters: tuple[str, ...]
    why: str
    distribution: str = "megatron-bridge"
    series: tuple[tuple[int, int], tuple[int, int]] = ((0, 6), (0, 7))
    optional: bool = False
    order: tuple[str, ...] = ()
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = f"{self.module}.{self.target}"
        self._original: Any = _ABSENT  # what vars(owner) held; absent where it was inherited
        self._installed: Any = None

    def _owner(self, module: ModuleType) -> tuple[Any, str]:
        *path, attribute = self.target.split(".")
        owner: Any = module
        for part in path:
            owner = getattr(owner, part, None)
        return owner, attribute

    @override
    def check(self, module: ModuleType) -> None:
        version = version_of(self.distribution)
        first, _ = self.series
        # A checkout on the path has no distribution; then the signature alone decides.
        if version != "unknown" and release(version) < first:
            raise RuntimeError(
                f"bridge_fgo supports {self.distribution} from {first[0]}.{first[1]} on, found {version}: install "
                "a newer one"
            )
        owner, attribute = self._owner(module)
        function = getattr(owner, attribute, None)
        if function is None and self.optional:
            return
        if not callable(function):
            raise RuntimeError(f"bridge_fgo cannot patch {self.name}: it is not there in {version}")
        parameters = inspect.signature(function).parameters
        missing = set(self.parameters) - set(parameters)
        takes_any = any(parameter.kind in _TAKE_ANY for parameter in parameters.values())
        if missing and not (self.order and takes_any):
            what_to_do = "; where it is a wrapper of yours, have it take *args and **kwargs" if self.order else ""
            raise RuntimeError(
                f"bridge_fgo cannot patch {self.name} of {self.distribution} {version}: it has no parameter "
                f"{', '.join(sorted(missing))} any more{what_to_do}"
            )

    @override
    def apply(self, module: ModuleType) -> None:
        owner, attribute = self._owner(module)
        current = getattr(owner, attribute, None)
        if current is None and self.optional:
            return
        version, end = version_of(self.distribution), self.series[1]
        if version != "unknown" and release(version) >= end:
            _warn_of_newer(self.distribution, version, end)
        # vars, not getattr: a method that is inherited must be inherited again after the undo.
        self._original = vars(owner).get(attribute, _ABSENT)
        wrapped = current if self._original is _ABSENT else self._original
        assert wrapped is not None
        self._installed = wrapt.FunctionWrapper(wrapped, self.wrapper, enabled=is_installed)
        setattr(owner, attribute, self._installed)

    @override
    def check_undo(self, module: ModuleType) -> None:
        if self._installed is None:
            return
        owner, attribute = self._owner(module)
        if vars(owner).get(attribute) is not self._installed:
            raise RuntimeError(
                f"bridge_fgo cannot uninstall: {self.name} was patched again after bridge_fgo.install(); undo that "
                "patch first"
            )

    @override
    def undo(self, module: ModuleType) -> None:
        if self._installed is None:
            return
        owner, attribute = self._owner(module)
        if self._original is _ABSENT:
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, self._original)
        self._installed = None


SERIES_MODULE = "megatron.bridge.training.optimizer_state_offload"
DRIVER = "EXTERNAL_DRIVER"


class StandAsidePatch(Patch):
    """Makes the calls to mcore's offloader do nothing in a Bridge that has the series in `patches/` applied.

    Why all of them: two drivers of the same states would undo each other, and of the two only this package has
    the native engine, and knows the readers between steps. Does nothing to a Bridge that is not patched. Bridge's
    config module imports the series' module, so the latter is there when the former is.
    """

    module = "megatron.bridge.training.config"
    name = f"{SERIES_MODULE}.{DRIVER}"

    @override
    def check(self, module: ModuleType) -> None:
        series = sys.modules.get(SERIES_MODULE)
        if series is None:
            return
        driver = getattr(series, DRIVER, self)
        if driver is not None:
            found = f"is {driver!r}" if driver is not self else "is not there"
            raise RuntimeError(
                f"bridge_fgo cannot take over from this patched Megatron-Bridge: {self.name} {found}; apply the "
                "patches of this version of bridge-fgo, and let no other package drive the offload"
            )

    @override
    def apply(self, module: ModuleType) -> None:
        if SERIES_MODULE in sys.modules:
            setattr(sys.modules[SERIES_MODULE], DRIVER, "bridge_fgo")

    @override
    def check_undo(self, module: ModuleType) -> None:
        series = sys.modules.get(SERIES_MODULE)
        if series is not None and getattr(series, DRIVER) != "bridge_fgo":
            raise RuntimeError(f"bridge_fgo cannot uninstall: {self.name} was set after bridge_fgo.install()")

    @override
    def undo(self, module: ModuleType) -> None:
        if SERIES_MODULE in sys.modules:
            setattr(sys.modules[SERIES_MODULE], DRIVER, None)
