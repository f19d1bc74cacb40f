"""Patches: each replaces a binding of Bridge or mcore and can be undone; and which session serves a call."""

import functools
import inspect
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple, override

import wrapt

from bridge_fgo.bridge.compat import home_of, release, version_of
from bridge_fgo.bridge.settings import is_installed
from bridge_fgo.engines.lease import attachment_of
from bridge_fgo.engines.native import NativeEngine
from bridge_fgo.states.shadowed import ABSENT, put_back
from bridge_fgo.states.source import Source

Wrapped = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Wrapper = Callable[[Wrapped, Any, Args, Kwargs], Any]  # a wrapt wrapper: (wrapped, instance, args, kwargs) -> result

_TAKE_ANY = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD

warned: set[tuple[str, str]] = set()  # (distribution, version) of newer releases that were said not to be tested


def owner_of(module: ModuleType, target: str) -> tuple[Any, str]:
    """Return the owner of a target ("function" or "Class.method") in a module, None if there is none, and its name."""
    *path, attribute = target.split(".")
    owner: Any = module
    for part in path:
        owner = getattr(owner, part, None)
    return owner, attribute


class Patch(ABC):
    """One entry of the table: the bindings that it replaces, and puts back as they were."""

    module: str  # module whose import the patch waits for
    name: str  # the binding, for messages

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any, Any]] = []  # owner, attribute, what `vars` held, what replaced it

    @abstractmethod
    def check(self, module: ModuleType) -> None:
        """Raise RuntimeError if the binding is not the one that the patch was written for."""

    @abstractmethod
    def apply(self, module: ModuleType) -> None:
        """Replace the binding, by `replace`."""

    def replace(self, owner: Any, attribute: str, ours: Any) -> None:
        """Set an attribute of a module or a class, until `undo`."""
        # vars, not getattr: a method that is inherited must be inherited again after the undo.
        before = vars(owner).get(attribute, ABSENT)
        setattr(owner, attribute, ours)
        self._replaced.append((owner, attribute, before, ours))

    def check_undo(self) -> None:
        """Raise RuntimeError if another patch lies on top."""
        for owner, attribute, _, ours in self._replaced:
            if vars(owner).get(attribute) is not ours:
                place = owner.__name__ if inspect.ismodule(owner) else f"{owner.__module__}.{owner.__qualname__}"
                raise RuntimeError(
                    f"bridge_fgo cannot uninstall: {place}.{attribute} was replaced after bridge_fgo.install(); undo "
                    "that first"
                )

    def undo(self) -> None:
        """Put back what was there."""
        while self._replaced:
            owner, attribute, before, _ = self._replaced.pop()
            put_back(owner, attribute, before)


@dataclass(eq=False)
class FunctionPatch(Patch):
    """Wraps a function of a module, or a method of a class in it.

    The wrapper is skipped while nothing is installed, as in a function that other code holds after an uninstall.
    """

    module: str  # whose import the patch waits for, by the name that it has in Bridge 0.6; see `home_of`
    target: str  # "function" or "Class.method"
    wrapper: Wrapper  # what is called in its place
    parameters: tuple[str, ...]  # the names that the wrapper relies on; each must be a parameter of the function
    why: str  # why this is the one binding to replace
    distribution: str = "megatron-bridge"  # what the module comes with
    # Its releases that the patch was written for, as (first, end) of (major, minor). On a newer one the function's
    # signature decides, and a warning says that it was not tested.
    series: tuple[tuple[int, int], tuple[int, int]] = ((0, 6), (0, 7))
    optional: bool = False  # whether the target may be missing (another generation of mcore)
    # Names of the first parameters, in the order of a call, by which the wrapper understands a function of `*args` or
    # `**kwargs` that was wrapped around the target without `functools.wraps`; empty if it does not.
    order: tuple[str, ...] = ()
    name: str = field(init=False)

    def __post_init__(self) -> None:
        super().__init__()
        self.module = home_of(self.module)
        self.name = f"{self.module}.{self.target}"

    @override
    def check(self, module: ModuleType) -> None:
        version, (first, _) = version_of(self.distribution), self.series
        # A checkout on the path has no distribution; then the signature alone decides.
        if version != "unknown" and release(version) < first:
            raise RuntimeError(
                f"bridge_fgo supports {self.distribution} from {first[0]}.{first[1]} on, found {version}: install "
                "a newer one"
            )
        owner, attribute = owner_of(module, self.target)
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
        owner, attribute = owner_of(module, self.target)
        current = getattr(owner, attribute, None)
        if current is None and self.optional:
            return
        self._warn_of_a_newer_release()
        wrapped = vars(owner).get(attribute, current)
        assert wrapped is not None
        self.replace(owner, attribute, wrapt.FunctionWrapper(wrapped, self.wrapper, enabled=is_installed))

    def _warn_of_a_newer_release(self) -> None:
        distribution, (_, end) = self.distribution, self.series
        version = version_of(distribution)
        if version == "unknown" or release(version) < end or (distribution, version) in warned:
            return
        warned.add((distribution, version))
        warnings.warn(
            f"bridge_fgo: {distribution} {version} is newer than what this bridge-fgo was tested with, which is below "
            f"{end[0]}.{end[1]}. Every function that it wraps has the parameters that it relies on, so it goes on: "
            "compare the first losses with a run without the flag, or install a newer bridge-fgo",
            stacklevel=2,
        )


SERIES_MODULE = "megatron.bridge.training.optimizer_state_offload"
DRIVER = "EXTERNAL_DRIVER"


class StandAsidePatch(Patch):
    """Makes the calls to mcore's offloader do nothing in a Bridge that has the series in `patches/` applied.

    Why all of them: two drivers of the same states would undo each other, and only this package has the native engine,
    and knows the readers between steps. Does nothing to a Bridge that is not patched. Bridge's config module imports
    the series' module.
    """

    module = home_of("megatron.bridge.training.config")
    name = f"{SERIES_MODULE}.{DRIVER}"

    @override
    def check(self, module: ModuleType) -> None:
        series = sys.modules.get(SERIES_MODULE)
        driver = None if series is None else getattr(series, DRIVER, self)
        if driver is not None:
            found = f"is {driver!r}" if driver is not self else "is not there"
            raise RuntimeError(
                f"bridge_fgo cannot take over from this patched Megatron-Bridge: {self.name} {found}; apply the "
                "patches of this version of bridge-fgo, and let no other package drive the offload"
            )

    @override
    def apply(self, module: ModuleType) -> None:
        if SERIES_MODULE in sys.modules:
            self.replace(sys.modules[SERIES_MODULE], DRIVER, "bridge_fgo")


# What a wrapper knows of a call. It passes through without an active session, or an engine that serves the optimizer.


def arguments_of(wrapped: Wrapped, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """Return the arguments of a call to a patched function, by name."""
    return inspect.signature(wrapped).bind(*args, **kwargs).arguments


class Call(NamedTuple):
    """A call of a method of one of mcore's optimizers, which the native engine serves."""

    engine: NativeEngine
    source: Source
    optimizer: Any
    wrapped: Wrapped
    args: Args
    kwargs: Kwargs

    def __call__(self) -> Any:
        """Call the method as it was called."""
        return self.wrapped(*self.args, **self.kwargs)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that were given, by name."""
        return arguments_of(self.wrapped, self.args, self.kwargs)

    @property
    def is_loading(self) -> bool:
        """Whether a state dictionary is asked for to be loaded into."""
        return bool(self.arguments.get("is_loading", False))

    @property
    def is_checkpointing(self) -> bool:
        """Whether the states are being saved or loaded, by a call of mcore's around this one."""
        return self.engine.is_checkpointing(self.source)


def served(act: Callable[[Call], Any], writes: bool = True) -> Wrapper:
    """Return a wrapper that calls `act` instead of a method, if the native engine serves the optimizer.

    An engine of mcore's makes states readable, or writable, as the method needs them, and the method is called.
    """

    @functools.wraps(act)
    def wrapper(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        if (to := attachment_of(instance)) is not None:
            if isinstance(to.engine, NativeEngine):
                return act(Call(to.engine, to.source, instance, wrapped, args, kwargs))
            (to.engine.require_writable if writes else to.engine.require_readable)(to.source)
        return wrapped(*args, **kwargs)

    return wrapper


reading = functools.partial(served, writes=False)  # does as `served`, for a method that only reads states
