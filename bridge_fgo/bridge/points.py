"""Hooks that tell the engine, within a step, how far forward and backward have come: on layers, and on finalize."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from bridge_fgo.offload.profile import Mark

Point = Callable[[Mark], bool]  # returns False if nothing may move, so that its backward is no point either


class ModelPoints:
    """Reports a point as a layer begins its forward, and as its backward has ended; see `layers`.

    The hooks exist only within a training step: a model that is saved, copied or evaluated has none.
    """

    def __init__(self) -> None:
        self._layers: weakref.WeakKeyDictionary[Module, list[Layer]] = weakref.WeakKeyDictionary()
        self._hook = PointHook(None)

    def begin_pass(self) -> None:
        """Begin a pass, perhaps anew."""
        self._hook.begin_pass()

    @contextmanager
    def hooked(self, model: Any, point: Point | None) -> Iterator[None]:
        """Context in which `point` is called at the points of `model` (a chunk or a list of them)."""
        every: list[Layer] = []
        for chunk in (model if isinstance(model, list) else [model]) if point is not None else ():
            if isinstance(chunk, Module):
                if chunk not in self._layers:
                    self._layers[chunk] = layers(chunk)
                every += self._layers[chunk]
        self._hook = hook = PointHook(point, every)
        try:
            yield
        finally:
            hook.end()


class PointHook:
    """The hooks of one training step on all layers of the rank, `every`, which are numbered by their places."""

    def __init__(self, point: Point | None, every: Sequence[Layer] = ()) -> None:
        self._point = point
        self._handles: list[RemovableHandle] = []
        self.begin_pass()
        for number, layer in enumerate(every):
            hook = partial(self.before_forward, number, layer)
            self._handles.append(layer.module.register_forward_pre_hook(hook, with_kwargs=True))

    def begin_pass(self) -> None:
        """Forget what was live in an earlier pass of the step."""
        self._live = 0
        # bytes of the forwards of a layer, by its number, that are run again before their backward
        self._recomputed: defaultdict[int, deque[int]] = defaultdict(deque)

    def end(self) -> None:
        """End the step, also for copies of the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._point = None

    def before_forward(self, number: int, layer: Layer, module: Module, args: Any, kwargs: Any) -> None:
        """Report that a layer's forward begins, and that its backward has ended once its input has a gradient.

        A hook on a tensor adds no node to the graph and changes no gradient.
        """
        if self._point is None:
            return
        nbytes, differentiable = 0, None
        for value in (*args, *kwargs.values()):  # one loop, as each layer of each microbatch runs it
            if isinstance(value, torch.Tensor):
                if layer.is_sized:
                    nbytes += value.nbytes
                if differentiable is None and value.requires_grad:
                    differentiable = value
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
        after = partial(self._after_backward, number, nbytes)
        if not differentiable.is_leaf:
            differentiable.register_hook(after)
            return

        def once(grad: torch.Tensor) -> None:
            # A weight that goes into a layer outlives one backward, and the step.
            handle.remove()
            after(grad)

        handle = differentiable.register_hook(once)
        self._handles.append(handle)

    def _after_backward(self, number: int, nbytes: int, grad: torch.Tensor) -> None:
        if self._point is not None:
            self._live -= nbytes
            self._point(Mark(~number, nbytes, self._live))


class Layer(NamedTuple):
    """A module that reports points."""

    module: Module
    is_sized: bool = True  # whether its inputs have one shape for batches of one shape; an expert's have not


ENOUGH_LAYERS = 16  # of so many layers children report no points, as each takes the host some microseconds


def layers(chunk: Module) -> list[Layer]:
    """Return a model chunk, its layers, and their children with parameters if layers are few; each once.

    Layers are the members of module lists; the chunk itself, as its embeddings run before any other; and modules beside
    the outermost lists (the norm after the last layer): once their backward has ended, the logits are freed, which are
    the largest of all activations.
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
    return [Layer(module, key not in routed) for key, module in found.items() if key not in unhookable]


def _beside_lists(module: Module) -> Iterator[Module]:
    children = [child for child in module.children() if not isinstance(child, torch.nn.ModuleList)]
    if len(children) < len(list(module.children())):
        yield from (child for child in children if _has_parameters(child))
        return
    for child in children:
        yield from _beside_lists(child)


def _has_parameters(module: Module) -> bool:
    return next(module.parameters(), None) is not None


# The end of the last backward.

HOOK = "finalize_model_grads_func"


@contextmanager
def reload_hook(model_config: Any, reload: Callable[[], None]) -> Iterator[None]:
    """Call `reload` before the bound finalize inside the block; afterwards, bind again what was bound.

    Why there: mcore's schedules call the hook once, after the last microbatch's backward, when activations are freed
    and the gradient reduction that follows can hide the copies. What was bound (Bridge's `partial`, MIMO's multimodule
    finalize) is called with the same arguments.

    Only for the length of a training step: an in-process restart binds another hook between steps, and a checkpoint's
    run config, saved between steps, must name Bridge's function. Without a hook the optimizer step itself reloads.
    """
    bound = getattr(model_config, HOOK, None)
    if bound is None:
        yield
        return

    @wraps(bound, updated=())
    def reload_then_finalize(*args: Any, **kwargs: Any) -> Any:
        reload()
        return bound(*args, **kwargs)

    setattr(model_config, HOOK, reload_then_finalize)
    try:
        yield
    finally:
        # If the step has bound another function meanwhile, keep that one.
        if getattr(model_config, HOOK, None) is reload_then_finalize:
            setattr(model_config, HOOK, bound)
