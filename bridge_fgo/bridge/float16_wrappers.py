"""What the patched methods of Float16OptimizerWithFloat16Params do, which checkpoints get states from by other names.

Its state dictionary has the states of the optimizer inside, in torch's form, and the masters. Each wrapper passes
through unless the optimizer is attached to an engine; none runs where nothing is installed, see `FunctionPatch`.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch

from bridge_fgo.bridge.shadowing import shadowed
from bridge_fgo.bridge.wrappers import Args, Kwargs, Wrapped
from bridge_fgo.engines.attachment import Attachment, attachment_of
from bridge_fgo.states.late_masters import whole_masters_made_late
from bridge_fgo.states.megatron import TORCH

MASTER = "fp32_param"
"""What the master is called here, among the states of its parameter: no optimizer's state has that name."""

MASTERS = ("fp32_from_fp16_params", "fp32_from_fp16")
"""Where a state dictionary has the masters, param group by param group; the latter in old checkpoints."""

GROUPS = "fp32_from_float16_groups"
"""Where the optimizer has them."""


def builds_masters(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Have masters made without memory while `build_optimizer` builds an optimizer for the native engine."""
    inner = inspect.signature(wrapped).bind(*args, **kwargs).arguments["optimizer"]
    with whole_masters_made_late(inner.param_groups if inner else []):  # a rank without parameters has none
        return wrapped(*args, **kwargs)


def copies_masters(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Copy the masters that were not copied part by part."""
    to = attachment_of(instance)
    if to is None:
        return wrapped(*args, **kwargs)
    return to.engine.write_back(to.source, _where_any(instance, lambda: wrapped(*args, **kwargs)))


def rewrites_masters(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Have every master made anew of the weights, part by part."""
    to = attachment_of(instance)
    if to is None:
        return wrapped(*args, **kwargs)
    return to.engine.rewrite_masters(to.source, _where_any(instance, lambda: wrapped(*args, **kwargs)))


def _where_any(optimizer: Any, copy_masters: Callable[[], Any]) -> Callable[[], Any]:
    """Return the copy but for empty lists: of fp16 it is one kernel for all, which refuses to copy nothing."""
    return lambda: copy_masters() if any(getattr(optimizer, GROUPS)) else None


def saves_states(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Have a state dictionary for a distributed checkpoint made without bringing states to the GPU.

    Made for loading it has the states made, and says where they are to be loaded.
    """
    to = attachment_of(instance)
    if to is None:
        return wrapped(*args, **kwargs)
    with _taken(to, _is_loading(wrapped, args, kwargs)):
        return wrapped(*args, **kwargs)


def hands_out_states(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Give a state dictionary of host tensors, without bringing states to the GPU: copies, but for loading."""
    to = attachment_of(instance)
    if to is None:
        return wrapped(*args, **kwargs)
    inner: Any = instance.optimizer
    with _taken(to, _is_loading(wrapped, args, kwargs)), _states_as_they_are(inner):
        result = wrapped(*args, **kwargs)
        masters = {id(master) for master in chain(*getattr(instance, GROUPS))}
        saved, handed = result["optimizer"]["state"], {}
        for index, param in enumerate(_params(inner.param_groups)):
            states = to.engine.hand_out(to.source, param, lambda p=param: _states(inner, p, id(p) in masters))
            if id(param) in masters:
                handed[id(param)] = states.pop(MASTER)
            if index in saved:  # a count of steps is not shared with what is trained on
                saved[index] = {name: _own(value) for name, value in states.items()}
        result[MASTERS[0]] = [[handed[id(master)] for master in group] for group in getattr(instance, GROUPS)]
    return result


def _is_loading(wrapped: Wrapped, args: Args, kwargs: Kwargs) -> bool:
    return bool(inspect.signature(wrapped).bind(*args, **kwargs).arguments.get("is_loading", False))


@contextlib.contextmanager
def _taken(to: Attachment, is_loading: bool) -> Iterator[None]:
    """Context in which the engine hands out states, to be saved or to be loaded into."""
    if to.engine.is_away(to.source):  # mcore's methods call each other
        yield
        return
    if is_loading:
        with to.engine.loading(to.source, everything=True):
            yield
        return
    to.engine.require_whole(to.source, "saved")
    with to.engine.saving(to.source, copies=True):
        yield


def _params(groups: list[dict[str, Any]]) -> list[Any]:
    return [param for group in groups for param in group["params"]]


def _states(inner: Any, param: torch.Tensor, has_master: bool) -> dict[str, Any]:
    """Return the states of a parameter by name, the master among them; without making an entry for them."""
    return {**inner.state.get(param, {}), **({MASTER: param} if has_master else {})}


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) and value.dim() == 0 else value


@contextlib.contextmanager
def _states_as_they_are(inner: Any) -> Iterator[None]:
    """Context in which TE's `state_dict` takes states as they are, be they readable or not."""
    mine = {"get_unscaled_state": lambda param, name: inner.state[param][name]}
    with shadowed(inner, mine if hasattr(inner, "get_unscaled_state") else {}):
        yield


def loads_states(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Have a state dictionary loaded where states are; torch would make every one of them anew on the GPU."""
    to = attachment_of(instance)
    if to is None:
        return wrapped(*args, **kwargs)
    state_dict = inspect.signature(wrapped).bind(*args, **kwargs).arguments["state_dict"]
    saved = next((state_dict[name] for name in MASTERS if name in state_dict), [])
    pairs = zip(getattr(instance, GROUPS), saved, strict=False)  # as mcore pairs them
    masters = {id(own): value for group, values in pairs for own, value in zip(group, values, strict=False)}
    is_whole = all(id(master) in masters for master in chain(*getattr(instance, GROUPS)))

    def load(packed: Mapping[str, Any]) -> None:
        _load(to, instance, packed, masters)

    with (
        to.engine.loading(to.source, masters=is_whole),
        shadowed(instance.optimizer, {"load_state_dict": load}),
        shadowed(instance, {GROUPS: []}),  # the masters are put in their place with the rest
    ):
        return wrapped(*args, **kwargs)


@torch.no_grad()
def _load(to: Attachment, optimizer: Any, packed: Mapping[str, Any], masters: Mapping[int, torch.Tensor]) -> None:
    """Load what torch's `state_dict` of the optimizer inside has, and the masters by the `id` of their parameter."""
    inner = optimizer.optimizer
    state = inner.state
    torch.optim.Optimizer.load_state_dict(inner, {**packed, "state": {}})
    inner.state = state
    for index, param in zip(_params(packed["param_groups"]), _params(inner.param_groups), strict=True):
        values = packed["state"].get(index)
        if values is None:
            values = _as_made(inner, state.get(param, {}))
        tensors = {name: value for name, value in values.items() if _is_whole_tensor(value)}
        if counts := {name: value for name, value in values.items() if name not in tensors}:
            state[param].update(copy.deepcopy(counts))
        if id(param) in masters:
            tensors[MASTER] = masters[id(param)]
        if tensors:
            _put(to, inner, param, tensors)


def _as_made(inner: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return states as the first step makes them: a checkpoint from before it has none, and those are here."""
    zeros = {name: torch.zeros_like(v, device="cpu") for name, v in values.items() if isinstance(v, torch.Tensor)}
    counts = {"step": torch.tensor(0.0)} if zeros and isinstance(inner, TORCH) else {}
    return {**values, **zeros, **counts}


def _is_whole_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _put(to: Attachment, inner: Any, param: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
    has_master = MASTER in tensors

    def write(values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            own = param if name == MASTER else inner.state[param].get(name)
            if own is None:
                inner.state[param][name] = value.to(device=param.device, dtype=param.dtype, copy=True)
            elif own is not value:
                own.copy_(value)

    def hand_out() -> object:
        return to.engine.hand_out(to.source, param, lambda: _states(inner, param, has_master))

    to.engine.put(to.source, param, hand_out, tensors, write)
