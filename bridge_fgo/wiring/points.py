"""Telling the engine how far forward and backward have come: hooks on the model's layers, within a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Point = Callable[[], bool]
"""Passes a point; returns False where nothing may move, and so its backward is none either (`Engine.point`)."""


class ModelPoints:
    """Reports a point where a layer begins its forward, and where its backward has ended.

    Layers are the members of the model's module lists and what stands beside these; see `layers`. The
    hooks are there only within a training step: nothing of them is in a saved, copied or evaluated model.
    """

    def __init__(self) -> None:
        self._layers: weakref.WeakKeyDictionary[torch.nn.Module, list[torch.nn.Module]] = weakref.WeakKeyDictionary()

    @contextmanager
    def hooked(self, model: Any, point: Point | None) -> Iterator[None]:
        """Context in which `point` is called at the points of `model` (a chunk or a list of them)."""
        chunks = model if isinstance(model, list) else [model]
        handles = []
        hook = PointHook(point)
        if point is not None:
            handles = [
                layer.register_forward_pre_hook(hook.before_forward, with_kwargs=True)
                for chunk in chunks
                if isinstance(chunk, torch.nn.Module)
                for layer in self._of(chunk)
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            hook.end()

    def _of(self, chunk: torch.nn.Module) -> list[torch.nn.Module]:
        if chunk not in self._layers:
            self._layers[chunk] = layers(chunk)
        return self._layers[chunk]


class PointHook:
    """The hooks of one training step."""

    def __init__(self, point: Point | None) -> None:
        self._point = point

    def end(self) -> None:
        """End the step, also for whoever has copied the hooks."""
        self._point = None

    def before_forward(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Report that the layer's forward begins, and that its backward has ended once its input has a gradient.

        A hook on a tensor adds no node to the graph and changes no gradient.
        """
        if self._point is None or not self._point():
            return  # a layer that is captured into a graph runs only once in Python
        if torch.is_grad_enabled():
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    value.register_hook(self._after_backward)
                    return

    def _after_backward(self, grad: torch.Tensor) -> None:
        if self._point is not None:
            self._point()


ENOUGH_LAYERS = 16
"""With so many layers or more, their children report no points: each point costs the host some microseconds."""


def layers(chunk: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers of a model chunk, and their children with parameters where layers are few; each once.

    Also what stands beside the outermost lists (the norm after the last layer): once its backward has ended, the
    logits are gone, which are the largest of all activations.
    """
    found: dict[int, torch.nn.Module] = {}
    for module in chunk.modules():
        if isinstance(module, torch.nn.ModuleList):
            found.update((id(layer), layer) for layer in module)
    if len(found) < ENOUGH_LAYERS:
        for layer in list(found.values()):
            found.update((id(child), child) for child in layer.children() if _has_parameters(child))
    found.update((id(module), module) for module in _beside_lists(chunk))
    # mcore's own CUDA graphs of layers (`cuda_graph_impl="local"`) take no hooks but DDP's on what they hold. Its fused
    # modules (`TEFusedMLP`, `TEFusedResidualRMSNorm`) warn of others than these, and copy them for good.
    unhookable = {
        id(inner)
        for module in chunk.modules()
        if hasattr(module, "cudagraph_manager") or hasattr(module, "_fused_impl")
        for inner in module.modules()
    }
    return [module for module in found.values() if id(module) not in unhookable]


def _beside_lists(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    children = [child for child in module.children() if not isinstance(child, torch.nn.ModuleList)]
    if len(children) < len(list(module.children())):
        yield from (child for child in children if _has_parameters(child))
        return
    for child in children:
        yield from _beside_lists(child)


def _has_parameters(module: torch.nn.Module) -> bool:
    return next(module.parameters(), None) is not None
