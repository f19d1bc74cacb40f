"""The reload hook: wraps whatever `finalize_model_grads_func` the model config has bound."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bridge_fgo.wiring.session import Session

HOOK = "finalize_model_grads_func"


class ReloadThenFinalize:
    """Starts the reload, then calls what was bound, with the same arguments.

    Why here: mcore's schedules call the hook once, after the last microbatch's backward, when activations
    are gone and the gradient reduction that follows can hide the copies. Delegating keeps Bridge's
    `partial(finalize_model_grads, pg_collection=...)` and MIMO's multimodule finalize as they are.
    """

    def __init__(self, bound: Callable[..., Any], session: Session) -> None:
        functools.update_wrapper(self, bound, updated=())
        self.bound = bound
        self._session = weakref.ref(session)

    def belongs_to(self, session: Session) -> bool:
        """Return whether this is the hook of `session`."""
        return self._session() is session

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Reload, then delegate."""
        session = self._session()
        if session is not None:
            session.reload()
        return self.bound(*args, **kwargs)


def layers(function: Any) -> Iterator[Any]:
    """Yield a function and what it wraps, outermost first, through `partial` and `functools.wraps`."""
    while function is not None:
        yield function
        if isinstance(function, ReloadThenFinalize):
            function = function.bound
        elif isinstance(function, functools.partial):
            function = function.func
        else:
            # Not getattr: a mock has every attribute, and each would be followed for ever.
            function = getattr(function, "__dict__", {}).get("__wrapped__")


def bind_reload(model_config: Any, session: Session) -> None:
    """Put the reload hook around the bound finalize, once for each session.

    Called at the start of every training step: an in-process restart sets the hook to None and binds
    another. With no hook bound, mcore's schedule calls none, and the optimizer step itself reloads.
    """
    bound = getattr(model_config, HOOK, None)
    if bound is None:
        return
    hooks = [layer for layer in layers(bound) if isinstance(layer, ReloadThenFinalize)]
    if any(hook.belongs_to(session) for hook in hooks):
        return
    if isinstance(bound, ReloadThenFinalize) and bound._session() is None:
        bound = bound.bound  # the optimizer that it belonged to is gone
    setattr(model_config, HOOK, ReloadThenFinalize(bound, session))


def unbind_reload(model_config: Any, session: Session) -> None:
    """Put back what was bound, where the session's hook is the outermost; elsewhere it turns inert."""
    bound = getattr(model_config, HOOK, None)
    if isinstance(bound, ReloadThenFinalize) and bound.belongs_to(session):
        setattr(model_config, HOOK, bound.bound)
