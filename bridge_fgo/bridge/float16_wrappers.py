"""What the patched methods of Float16OptimizerWithFloat16Params do, which checkpoints get states from by other names.

Its state dictionary has the states of the optimizer inside, in torch's form, and the masters.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch

from bridge_fgo.bridge.calls import Args, Call, Kwargs, Wrapped, served, shadowed
from bridge_fgo.states.distributed import TORCH, as_they_are, load_groups
from bridge_fgo.states.masters import whole_masters_made_late

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


@served
def copies_masters(call: Call) -> Any:
    """Copy the masters that were not copied part by part."""
    return call.engine.write_back(call.source, _where_any(call))


@served
def rewrites_masters(call: Call) -> Any:
    """Have every master made anew of the weights, part by part."""
    return call.engine.rewrite_masters(call.source, _where_any(call))


def _where_any(call: Call) -> Callable[[], Any]:
    """Return the copy but for empty lists: of fp16 it is one kernel for all, which refuses to copy nothing."""
    return lambda: call() if any(getattr(call.optimizer, GROUPS)) else None


@served
def saves_states(call: Call) -> Any:
    """Have a state dictionary for a distributed checkpoint made without bringing states to the GPU.

    Made for loading it has the states made, and says where they are to be loaded.
    """
    with _taken(call):
        return call()


@served
def hands_out_states(call: Call) -> Any:
    """Give a state dictionary of host tensors, without bringing states to the GPU: copies, but for loading."""
    inner: Any = call.optimizer.optimizer
    groups = getattr(call.optimizer, GROUPS)
    with _taken(call), shadowed(inner, as_they_are(inner)):
        result = call()
        masters = {id(master) for master in chain(*groups)}
        saved, handed = result["optimizer"]["state"], {}
        for index, param in enumerate(_params(inner.param_groups)):
            read = partial(_states, inner, param, id(param) in masters)
            states = call.engine.hand_out(call.source, param, read)
            if id(param) in masters:
                handed[id(param)] = states.pop(MASTER)
            if index in saved:  # a count of steps is not shared with what is trained on
                saved[index] = {name: _own(value) for name, value in states.items()}
        result[MASTERS[0]] = [[handed[id(master)] for master in group] for group in groups]
    return result


@contextlib.contextmanager
def _taken(call: Call) -> Iterator[None]:
    """Context in which the engine hands out states, to be saved or to be loaded into."""
    if call.is_checkpointing:  # mcore's methods call each other
        yield
        return
    if call.is_loading:
        with call.engine.loading(call.source, everything=True):
            yield
        return
    call.engine.require_whole(call.source, "saved")
    with call.engine.saving(call.source, copies=True):
        yield


def _params(groups: list[dict[str, Any]]) -> list[Any]:
    return [param for group in groups for param in group["params"]]


def _states(inner: Any, param: torch.Tensor, has_master: bool) -> dict[str, Any]:
    """Return the states of a parameter by name, the master among them; without making an entry for them."""
    return {**inner.state.get(param, {}), **({MASTER: param} if has_master else {})}


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) and value.dim() == 0 else value


@served
def loads_states(call: Call) -> Any:
    """Have a state dictionary loaded where states are; torch would make every one of them anew on the GPU."""
    groups, state_dict = getattr(call.optimizer, GROUPS), call.arguments["state_dict"]
    saved = next((state_dict[name] for name in MASTERS if name in state_dict), [])
    pairs = zip(groups, saved, strict=False)  # as mcore pairs them
    masters = {id(own): value for group, values in pairs for own, value in zip(group, values, strict=False)}
    is_whole = all(id(master) in masters for master in chain(*groups))
    with (
        call.engine.loading(call.source, masters=is_whole),
        shadowed(call.optimizer.optimizer, {"load_state_dict": partial(_load, call, masters)}),
        shadowed(call.optimizer, {GROUPS: []}),  # the masters are put in their place with the rest
    ):
        return call()


@torch.no_grad()
def _load(call: Call, masters: Mapping[int, torch.Tensor], packed: Mapping[str, Any]) -> None:
    """Load what torch's `state_dict` of the optimizer inside has, and the masters by the `id` of their parameter."""
    inner = call.optimizer.optimizer
    load_groups(inner, packed)
    for index, param in zip(_params(packed["param_groups"]), _params(inner.param_groups), strict=True):
        values = packed["state"].get(index)
        if values is None:
            values = _as_made(inner, inner.state.get(param, {}))
        tensors = {name: value for name, value in values.items() if _is_whole_tensor(value)}
        if counts := {name: value for name, value in values.items() if name not in tensors}:
            inner.state[param].update(copy.deepcopy(counts))
        if id(param) in masters:
            tensors[MASTER] = masters[id(param)]
        if tensors:
            _put(call, param, tensors)


def _as_made(inner: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return states as the first step makes them: a checkpoint from before it has none, and those are here."""
    zeros = {name: torch.zeros_like(v, device="cpu") for name, v in values.items() if isinstance(v, torch.Tensor)}
    counts = {"step": torch.tensor(0.0)} if zeros and isinstance(inner, TORCH) else {}
    return {**values, **zeros, **counts}


def _is_whole_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _put(call: Call, param: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
    inner = call.optimizer.optimizer
    read = partial(_states, inner, param, MASTER in tensors)

    def write(values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            own = param if name == MASTER else inner.state[param].get(name)
            if own is None:
                inner.state[param][name] = value.to(device=param.device, dtype=param.dtype, copy=True)
            elif own is not value:
                own.copy_(value)

    call.engine.put(call.source, param, lambda: call.engine.hand_out(call.source, param, read), tensors, write)
