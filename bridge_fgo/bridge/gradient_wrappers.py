"""Wrappers of what mcore does with the gradients of DDP's buffers and bucket groups, where `Gradients` has them."""

from __future__ import annotations

from typing import Any

from bridge_fgo.bridge.patch import Args, Kwargs, Wrapped, arguments_of
from bridge_fgo.engines.gradients import gradients_of


def zeroes(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Have gradients let go of their memory in place of zeroing it."""
    gradients = gradients_of(instance)
    return wrapped(*args, **kwargs) if gradients is None else gradients.zero(instance)


def scales(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Scale the gradients that have memory."""
    gradients = gradients_of(instance)
    if gradients is None:
        return wrapped(*args, **kwargs)
    return gradients.scale(instance, arguments_of(wrapped, args, kwargs)["scaling_factor"])


def reduces(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Have the gradients of a group on the GPU before they are checked, scaled and reduced."""
    gradients = gradients_of(instance)
    if gradients is not None:
        gradients.reduce(instance)
    return wrapped(*args, **kwargs)
