"""What the patched bindings of mcore's own sleep and wake do: they go through this package's memory."""

from __future__ import annotations

import inspect
from typing import Any

from bridge_fgo.bridge.settings import installed_config, settings_of
from bridge_fgo.bridge.state_wrappers import replaces_states
from bridge_fgo.bridge.wrappers import Args, Kwargs, Wrapped
from bridge_fgo.sleep import upstream


def moves_states_to_cpu(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Have the states leave by an engine.

    mcore's own method rebinds the parameters of precision-aware Adam, which then train no weights any more.
    """
    if upstream.can_move(instance):
        return upstream.offload_states(instance, settings_of(instance.config))
    return replaces_states(wrapped, instance, args, kwargs)


def restores_states(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Have the states come back by the engine that they left by."""
    if upstream.can_restore(instance):
        return upstream.restore_states(instance)
    return replaces_states(wrapped, instance, args, kwargs)


def offloads_buffer(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Have a DDP buffer leave by exact pinned memory, and only what has changed."""
    upstream.mover_of(instance, installed_config().pin_memory).offload(*_moved_parts(wrapped, args, kwargs))


def reloads_buffer(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Have a DDP buffer come back; mcore does it itself where it has sent it away, before the package was installed."""
    if upstream.BUFFER not in vars(instance):
        return wrapped(*args, **kwargs)
    return upstream.mover_of(instance, installed_config().pin_memory).reload(*_moved_parts(wrapped, args, kwargs))


def _moved_parts(wrapped: Wrapped, args: Args, kwargs: Kwargs) -> tuple[bool, bool]:
    """Return whether parameters, and gradients, are asked for; the defaults are mcore's."""
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments["move_params"], bound.arguments["move_grads"]
