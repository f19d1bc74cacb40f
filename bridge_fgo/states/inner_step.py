"""Stepping a torch optimizer that updates every parameter for itself, for some of its parameters at a time."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.optim.optimizer as torch_optimizer
import torch.profiler

from bridge_fgo.states.shadowed import ABSENT, shadowed

KNOWN = {
    "torch.optim.adam.Adam.step",
    "torch.optim.adamw.AdamW.step",  # until torch 2.6
    "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam.step",
    "apex.optimizers.fused_adam.FusedAdam.step",
    "emerging_optimizers.orthogonalized_optimizers.orthogonalized_optimizer.OrthogonalizedOptimizer.step",
    "megatron.core.optimizer.emerging_optimizers.TensorParallelAdaptiveMuon.step",
}
"""Steps by module and name."""

UPSTREAM = {
    "torch", "transformer_engine", "apex", "emerging_optimizers", "megatron.core", "megatron.bridge",
    "megatron.training", "bridge_fgo.bridge",
}  # fmt: skip
"""Packages of the methods that these steps call, and of what wraps a method: torch's hooks, its schedulers' counter and
its `no_grad`, and this package's own wrappers."""

_DYNAMO = "torch._dynamo.eval_frame"


class KnownStep:
    """What the step of a class of optimizers runs, and which of it is not known.

    A method that a subclass overrides, or that somebody has replaced, may count its calls or look at all parameters.
    One that no step calls (it loads, say) does not matter.
    """

    def __init__(self, cls: type) -> None:
        # names of the methods that the step calls, also by way of others, and of what else has such a name
        self.methods = {"step"}
        self.unknown = ""  # the name of the first that is not known; empty if all are
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


def _is_upstream(module: str) -> bool:
    return any(f"{module}.".startswith(f"{package}.") for package in UPSTREAM)


def is_upstreams(function: Any) -> bool:
    """Return whether a function and all that wrap it are upstream's, by where their code is and not by their names."""
    function = getattr(function, "__func__", function)  # of a method
    while isinstance(function, FunctionType):
        # A proxy of wrapt's shows the globals of what it wraps: whose it is says the function that it calls.
        called = getattr(function, "_self_wrapper", function)
        module = getattr(called, "__globals__", {"__name__": type(called).__module__})["__name__"]
        if module == _DYNAMO and not hasattr(function, "_torchdynamo_disable"):
            return False  # it is compiled, for all parameters together
        if not _is_upstream(module):
            return False
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is None:
            return True
        function = wrapped
    return False


def in_place_of(name: str, owner: Any) -> str:
    """Return the name of what somebody else has put in the place of a method of upstream's class; empty for none.

    That is an override of a subclass, or a function in the place of an object's method or of the class's.
    """
    found = inspect.getattr_static(owner, name, None)
    if found is None or is_upstreams(found) or not any(_is_upstream(cls.__module__) for cls in type(owner).__mro__):
        return ""
    return name_of(found)


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


def _is_kinetos(hook: Callable[..., Any]) -> bool:
    """Return whether it is the hook that torch registers itself if `KINETO_USE_DAEMON` is set: it counts steps."""
    return hook is getattr(torch.profiler, "_optimizer_post_hook", None)


@contextmanager
def _kinetos_hook_called_once(adam: torch.optim.Optimizer) -> Iterator[None]:
    """Context of a divided step, at whose end torch's hook is called, instead of once for each part."""
    hooks = torch_optimizer._global_optimizer_post_hooks
    found = {key: hook for key, hook in hooks.items() if _is_kinetos(hook)}
    hooks.update(dict.fromkeys(found, lambda *of_a_part: None))  # in its place: others keep theirs
    try:
        yield
    finally:
        hooks.update(found)
    for hook in found.values():
        hook(adam, (adam,), {})


class InnerStep:
    """Steps TE's FusedAdam, torch's Adam or mcore's Muon in parts, with the same bits.

    Adam updates every element for itself, and Muon every parameter. What is not per parameter is kept exact: FusedAdam
    counts `step` in the param group (torch's Adam in the state of each parameter), so every part is stepped from the
    count before, and the group ends one higher.
    """

    def __init__(self, adam: torch.optim.Optimizer) -> None:
        self._adam = adam
        self._step: Callable[[], Any] = adam.step
        self._shares: dict[Any, list[tuple[dict[str, Any], list[Any], Any]]] = {}
        """Param groups of each owner, its parameters in them, and the groups' counts before the present step."""
        self._known: tuple[Any, KnownStep] | None = None

    def _known_step(self) -> KnownStep:
        """Return what the step's class runs; judged anew only if its `step` is another, as that takes 0.1 ms."""
        cls = type(self._adam)
        if self._known is None or self._known[0] is not cls.step:
            self._known = cls.step, KnownStep(cls)
        return self._known[1]

    def kept_whole_by(self) -> str:
        """Return the name of what forbids to divide the step: it must run once a step, with everything there.

        That is a hook, a method that is not known (see `KnownStep`), and a function of somebody else's in the place of
        one (an average of the weights, a counter); not what only counts: torch's schedulers, and torch's hook for
        Kineto's daemon.
        """
        registries = (
            getattr(self._adam, "_optimizer_step_pre_hooks", {}),
            getattr(self._adam, "_optimizer_step_post_hooks", {}),
            torch_optimizer._global_optimizer_pre_hooks,
            torch_optimizer._global_optimizer_post_hooks,
        )
        found = [f"a hook on it, {name_of(h)}" for hooks in registries for h in hooks.values() if not _is_kinetos(h)]
        known, own, cls = self._known_step(), vars(self._adam), type(self._adam)
        if known.unknown:
            found.append(f"a method that {name_of(cls)} has of its own, {known.unknown}")
        instead = [own[name] for name in sorted(known.methods & own.keys()) if callable(getattr(cls, name, None))]
        found += [f"a function in its place, {name_of(each)}" for each in instead if not is_upstreams(each)]
        return "; ".join(found)

    @contextmanager
    def replaced(self, step: Callable[[], None], owners: Mapping[int, Any]) -> Iterator[None]:
        """Context in which `adam.step()` calls `step`, which calls `update` once for each owner.

        `owners` says whose a parameter is, by its `id`; parameters that are not in it are None's.
        """
        original = self._adam.step

        def in_parts(*args: Any, **kwargs: Any) -> None:
            if args or kwargs:
                raise RuntimeError("the optimizer step got arguments that an update in parts cannot honour")
            with self.divided(original, owners):
                step()

        with shadowed(self._adam, {"step": in_parts}):
            yield

    @contextmanager
    def divided(self, call: Callable[[], Any], owners: Mapping[int, Any]) -> Iterator[None]:
        """Context in which `update` calls `call`, which steps Adam once for what it finds; see `replaced`."""
        before, self._step = self._step, call
        entries = len(self._adam.state)
        self._divide(owners)
        try:
            with _kinetos_hook_called_once(self._adam):
                yield
        finally:
            self._step = before
        if len(self._adam.state) > entries:
            self._sort_entries()

    def _sort_entries(self) -> None:
        """Have entries that the step made be in the parameters' order, as without the offload: code may walk them."""
        state = self._adam.state
        for param in (param for group in self._adam.param_groups for param in group["params"]):
            if param in state:
                state[param] = state.pop(param)

    def _divide(self, owners: Mapping[int, Any]) -> None:
        self._shares = {}
        for group in self._adam.param_groups:
            of_group: dict[Any, list[Any]] = {}
            for param in group["params"]:
                of_group.setdefault(owners.get(id(param)), []).append(param)
            # Of no parameters it is None's: TE counts its steps, from 2.19 on.
            for owner, params in of_group.items() or [(None, [])]:
                self._shares.setdefault(owner, []).append((group, params, group.get("step", ABSENT)))

    def update(self, owner: Any) -> None:
        """Step the parameters of one owner."""
        shares = self._shares.get(owner)
        if not shares:
            return
        groups = self._adam.param_groups
        whole = [group["params"] for group, _, _ in shares]
        try:
            for group, params, count in shares:
                group["params"] = params
                if count is ABSENT:
                    group.pop("step", None)
                else:
                    group["step"] = count
            self._adam.param_groups = [group for group, _, _ in shares]
            self._step()
        finally:
            self._adam.param_groups = groups
            for (group, _, _), params in zip(shares, whole, strict=True):
                group["params"] = params
