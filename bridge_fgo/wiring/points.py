"""Telling the engine how far forward and backward have come: hooks on the model's layers, within a step."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from bridge_fgo.core.profile import Mark

Point = Callable[[Mark], bool]
"""Passes a point; returns False where nothing may move, and so its backward is none either (`Engine.point`)."""
Forward = Callable[[int, int], None]
"""Takes the number of a layer whose forward begins, and the bytes of what goes into it (`Engine.forward`)."""


class ModelPoints:
    """Reports a point where a layer begins its forward, and where its backward has ended.

    Layers are the model chunk itself, the members of its module lists and what stands beside these; see `layers`. The
    hooks are there only within a training step: nothing of them is in a saved, copied or evaluated model.
    """

    def __init__(self) -> None:
        self._layers: weakref.WeakKeyDictionary[Module, list[Layer]] = weakref.WeakKeyDictionary()
        self._hook = PointHook(None)

    def begin_pass(self, forward: Forward | None = None) -> None:
        """Begin a forward-backward pass, perhaps anew: nothing is live.

        Args:
            forward: called in place of the points; None where they are called.
        """
        self._hook.begin_pass(forward)

    @contextmanager
    def hooked(self, model: Any, point: Point | None) -> Iterator[None]:
        """Context in which `point` is called at the points of `model` (a chunk or a list of them)."""
        chunks = [chunk for chunk in (model if isinstance(model, list) else [model]) if isinstance(chunk, Module)]
        handles = []
        self._hook = hook = PointHook(point)
        if point is not None:
            every = [layer for chunk in chunks for layer in self._of(chunk)]
            handles = [
                layer.module.register_forward_pre_hook(
                    partial(hook.before_forward, number, layer.is_sized), with_kwargs=True
                )
                for number, layer in enumerate(every)
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            hook.end()

    def _of(self, chunk: Module) -> list[Layer]:
        if chunk not in self._layers:
            self._layers[chunk] = layers(chunk)
        return self._layers[chunk]


class PointHook:
    """The hooks of one training step."""

    def __init__(self, point: Point | None) -> None:
        self._point = point
        self.begin_pass()

    def begin_pass(self, forward: Forward | None = None) -> None:
        """Forget what was live in an earlier pass of the step."""
        self._forward = forward
        self._live = 0
        self._recomputed: defaultdict[int, deque[int]] = defaultdict(deque)
        """Bytes of the forwards of a layer, by its number, that are run again before their backward."""

    def end(self) -> None:
        """End the step, also for whoever has copied the hooks."""
        self._point = None

    def before_forward(self, number: int, is_sized: bool, module: Module, args: Any, kwargs: Any) -> None:
        """Report that a layer's forward begins, and that its backward has ended once its input has a gradient.

        A hook on a tensor adds no node to the graph and changes no gradient.
        """
        if self._point is None:
            return
        nbytes, differentiable = 0, None
        for value in (*args, *kwargs.values()):  # one loop, as each layer of each microbatch runs it
            if isinstance(value, torch.Tensor):
                if is_sized:
                    nbytes += value.nbytes
                if differentiable is None and value.requires_grad:
                    differentiable = value
        if self._forward is not None:
            self._forward(number, nbytes)
            return
        has_backward = differentiable is not None and torch.is_grad_enabled()
        earlier = self._recomputed[number]
        live = self._live if has_backward and earlier else self._live + nbytes
        if not self._point(Mark(number, nbytes, live)):
            return  # a layer that is captured into a graph runs only once in Python
        self._live = live
        if not has_backward:
            earlier.append(nbytes)
            return
        if earlier:
            earlier.popleft()
        assert differentiable is not None
        differentiable.register_hook(partial(self._after_backward, number, nbytes))

    def _after_backward(self, number: int, nbytes: int, grad: torch.Tensor) -> None:
        if self._point is not None:
            self._live -= nbytes
            self._point(Mark(~number, nbytes, self._live))


class Layer(NamedTuple):
    """A module that reports points. is_sized: whether the same shapes always go into it, where a batch's are the same.

    Of an expert they are not: each gets as many tokens as are routed to it.
    """

    module: Module
    is_sized: bool = True


ENOUGH_LAYERS = 16
"""With so many layers or more, their children report no points: each point costs the host some microseconds."""


def layers(chunk: Module) -> list[Layer]:
    """Return a model chunk, its layers, and their children with parameters where layers are few; each once.

    The chunk itself, whose forward gets the batch, is one because its embeddings come before any layer. And so is what
    stands beside the outermost lists (the norm after the last layer): once its backward has ended, the logits are gone,
    which are the largest of all activations.
    """
    found: dict[int, Module] = {id(chunk): chunk}
    lists = [module for module in chunk.modules() if isinstance(module, torch.nn.ModuleList)]
    for members in lists:
        found.update((id(layer), layer) for layer in members)
    if len(found) <= ENOUGH_LAYERS:
        for layer in [layer for layer in found.values() if layer is not chunk]:
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
    within = {id(inner) for members in lists for layer in members for inner in layer.modules() if inner is not layer}
    routed = {id(inner) for members in lists if id(members) in within for layer in members for inner in layer.modules()}
    return [Layer(module, id(module) not in routed) for module in found.values() if id(module) not in unhookable]


def _beside_lists(module: Module) -> Iterator[Module]:
    children = [child for child in module.children() if not isinstance(child, torch.nn.ModuleList)]
    if len(children) < len(list(module.children())):
        yield from (child for child in children if _has_parameters(child))
        return
    for child in children:
        yield from _beside_lists(child)


def _has_parameters(module: Module) -> bool:
    return next(module.parameters(), None) is not None
