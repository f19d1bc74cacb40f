"""The reload hook: wraps whatever `finalize_model_grads_func` the model config has bound."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

HOOK = "finalize_model_grads_func"


class ReloadThenFinalize:
    """A hook that starts the reload, then calls what was bound, with the same arguments.

    Why here: mcore's schedules call the hook once, after the last microbatch's backward, when activations
    are gone and the gradient reduction that follows can hide the copies. Delegating keeps Bridge's
    `partial(finalize_model_grads, pg_collection=...)` and MIMO's multimodule finalize as they are.
    """

    def __init__(self, bound: Callable[..., Any], reload: Callable[[], None]) -> None:
        functools.update_wrapper(self, bound, updated=())
        self.bound = bound
        self._reload = reload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Reload, then delegate."""
        self._reload()
        return self.bound(*args, **kwargs)


@contextmanager
def reload_hook(model_config: Any, reload: Callable[[], None]) -> Iterator[None]:
    """Have `reload` called before the bound finalize inside the block; afterwards, bind again what was bound.

    Only for the length of a training step: an in-process restart binds another hook between steps, and a
    checkpoint's run config, saved between steps, must name Bridge's function and not ours. With no hook
    bound, mcore's schedule calls none, and the optimizer step itself reloads.
    """
    bound = getattr(model_config, HOOK, None)
    if bound is None:
        yield
        return
    hook = ReloadThenFinalize(bound, reload)
    setattr(model_config, HOOK, hook)
    try:
        yield
    finally:
        # Where the step itself bound another one, that one stays.
        if getattr(model_config, HOOK, None) is hook:
            setattr(model_config, HOOK, bound)
