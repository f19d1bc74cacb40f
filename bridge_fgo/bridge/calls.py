"""Helpers for wrappers: bind the arguments of a call, find the optimizer's engine, replace an attribute for a while.

A wrapper passes through unless a session is active or the optimizer is attached to an engine. None of them runs where
nothing is installed; see `FunctionPatch`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from bridge_fgo.bridge.patch import Wrapper
from bridge_fgo.engines.engine import Engine, attachment_of
from bridge_fgo.states.source import Source

Wrapped = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_ABSENT = object()


@functools.lru_cache(maxsize=64)
def _signature(function: Wrapped) -> inspect.Signature:
    """Return the signature of a module's function; a method would keep its object alive here."""
    return inspect.signature(function)


def arguments_of(wrapped: Wrapped, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """Return the arguments of a call to a patched function, by name."""
    return _signature(wrapped).bind(*args, **kwargs).arguments


class Call(NamedTuple):
    """A call of a method of one of mcore's optimizers, which an engine serves."""

    engine: Engine
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
        return inspect.signature(self.wrapped).bind(*self.args, **self.kwargs).arguments

    @property
    def is_loading(self) -> bool:
        """Whether a state dictionary is asked for to be loaded into."""
        return bool(self.arguments.get("is_loading", False))

    @property
    def is_checkpointing(self) -> bool:
        """Whether the states are being saved or loaded, by a call of mcore's around this one."""
        return self.engine.is_checkpointing(self.source)


def served(act: Callable[[Call], Any]) -> Wrapper:
    """Return a wrapper that does `act` in place of a method, where an engine serves the optimizer."""

    @functools.wraps(act)
    def wrapper(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        to = attachment_of(instance)
        return wrapped(*args, **kwargs) if to is None else act(Call(*to, instance, wrapped, args, kwargs))

    return wrapper


@contextlib.contextmanager
def shadowed(instance: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Context in which an object has other methods or attributes, in the place of its class's or of its own."""
    before = {name: vars(instance).get(name, _ABSENT) for name in attributes}
    for name, value in attributes.items():
        setattr(instance, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _ABSENT:
                delattr(instance, name)
            else:
                setattr(instance, name, value)
