"""Which optimizer steps may be divided: those whose code is known to update every parameter for itself."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

KNOWN = {
    "torch.optim.adam.Adam.step",
    "torch.optim.adamw.AdamW.step",  # until torch 2.6
    "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam.step",
    "apex.optimizers.fused_adam.FusedAdam.step",
    "emerging_optimizers.orthogonalized_optimizers.orthogonalized_optimizer.OrthogonalizedOptimizer.step",
    "megatron.core.optimizer.emerging_optimizers.TensorParallelAdaptiveMuon.step",
}
"""Steps by module and name."""

UPSTREAM = {"torch", "transformer_engine", "apex", "emerging_optimizers", "megatron.core"}
"""Where the methods are that they call, and what wraps them: torch's hooks, its schedulers' counter, `no_grad`."""

_DYNAMO = "torch._dynamo.eval_frame"


class KnownStep:
    """What the step of a class of optimizers runs, and which of it is not known.

    A method that a subclass overrides, or that somebody has replaced, may count its calls or look at all parameters.
    One that no step calls (it loads, say) does not matter.
    """

    def __init__(self, cls: type) -> None:
        self.methods = {"step"}
        """Names of the methods that the step calls, also by way of others, and of what else has such a name."""
        self.unknown = ""
        """The name of the first that is not known; empty where all are."""
        todo = ["step"]
        while todo:
            name = todo.pop()
            found = [vars(each)[name] for each in cls.__mro__ if name in vars(each)]
            upstreams = [each for each in found if is_upstreams(each)]
            overrides = bool(upstreams) and upstreams[0] is not found[0]
            if overrides or (name == "step" and name_of(inspect.unwrap(found[0])) not in KNOWN):
                self.unknown = name_of(found[0])
                return
            for each in upstreams:
                called = set(_names(inspect.unwrap(each).__code__)) - self.methods
                self.methods |= called
                todo += sorted(called)


def is_upstreams(function: Any) -> bool:
    """Return whether a function and all that wrap it are upstream's, by where their code is and not by their names."""
    while isinstance(function, FunctionType):
        module = function.__globals__["__name__"]
        if module == _DYNAMO and not hasattr(function, "_torchdynamo_disable"):
            return False  # it is compiled, for all parameters together
        if not any(f"{module}.".startswith(f"{package}.") for package in UPSTREAM):
            return False
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is None:
            return True
        function = wrapped
    return False


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def name_of(function: Any) -> str:
    """Return the name of a function, or of the class of what can be called like one, with its module."""
    function = getattr(function, "func", function)  # of a partial
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
