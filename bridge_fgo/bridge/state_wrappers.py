"""Wrappers of mcore's functions that step, read or write states and gradients; Megatron-FSDP's are in `fsdp_wrappers`.

`OF_DISTRIBUTED` is the usual case, a DistributedOptimizer: its methods ask each parameter for its states one by one.
A Float16OptimizerWithFloat16Params has a state dictionary with the states in torch's form, and the masters.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch

from bridge_fgo.bridge import fsdp_wrappers
from bridge_fgo.bridge.compat import FLAG, flag_is_set
from bridge_fgo.bridge.patch import Args, Call, Kwargs, Wrapped, arguments_of, reading, served
from bridge_fgo.bridge.session import active_session, all_sessions
from bridge_fgo.engines.gradients import gradients_of
from bridge_fgo.engines.lease import attachment_of
from bridge_fgo.engines.native import NativeEngine
from bridge_fgo.memory.guard import own, touch_all
from bridge_fgo.states.distributed import TORCH, UPSTREAM_OFFLOADERS, as_they_are, load_groups, loads_its_own_way
from bridge_fgo.states.fsdp import is_fsdp
from bridge_fgo.states.inner_step import is_upstreams
from bridge_fgo.states.shadowed import shadowed

# The optimizer step.


def updates_states(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Step with the states on the GPU as the optimizer step needs them; a skipped step does not call it."""
    session, to = active_session(), attachment_of(instance)
    if session is not None:
        session.updating()
    if to is None:
        if session is None:
            _refuse_unwired(instance)
        return wrapped(*args, **kwargs)
    # The engine may be another session's.
    owner = session if session is not None and session.engine is to.engine else to.engine
    with owner.stepping(to.source):
        return wrapped(*args, **kwargs)


UNWIRED = "_bridge_fgo_unwired_steps"


def _refuse_unwired(optimizer: Any) -> None:
    """Raise RuntimeError if an optimizer with the flag steps a second time outside of any wired training step.

    A first one may be a warm-up, before training.
    """
    if not flag_is_set(optimizer.config):
        return
    if any(getattr(optimizer, name, None) is not None for name in UPSTREAM_OFFLOADERS):
        return  # mcore's own offloader, which other code drives by hand
    steps = vars(optimizer).get(UNWIRED, 0) + 1
    setattr(optimizer, UNWIRED, steps)
    if steps > 1:
        raise RuntimeError(
            f"optimizer.{FLAG}=True, but the optimizer steps outside of Bridge's train_step as bridge_fgo.install() "
            "has patched it, and nothing would be offloaded. In a loop of your own unset the flag and use "
            "`res.training_step()`, with res = bridge_fgo.Residency(model, optimizer). In Bridge's call install() "
            "before training takes train_step (before `from megatron.bridge.training.train import train_step` and "
            "before train(), not in a callback of it)"
        )


@reading
def copies_masters(call: Call) -> Any:
    """Copy the masters that were not copied part by part."""
    return call.engine.write_back(call.source, _where_any(call))


# Readers and writers between steps.


@reading
def reads_states(call: Call) -> Any:
    """Make the states readable first."""
    call.engine.require_whole(call.source, "read")
    if not call.is_checkpointing:
        call.engine.require_readable(call.source)
    with own():
        return call()


def reads_masters(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make the masters readable first, under any engine: in each pass they are read beside their copies out."""
    if (to := attachment_of(instance)) is None:
        return wrapped(*args, **kwargs)
    if not (isinstance(to.engine, NativeEngine) and to.engine.is_checkpointing(to.source)):
        to.engine.require_readable(to.source, masters_only=True)
    with own():  # a touch would give the copies up
        return wrapped(*args, **kwargs)


def reads_all_masters(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make the masters of a model readable first, for a reader that knows parameters and no optimizer."""
    model = arguments_of(wrapped, args, kwargs)["model"]
    chunks = model if isinstance(model, list) else [model]
    # Of all sessions where the model is wrapped once more than its optimizers know.
    for session in [one for one in all_sessions() if one.trains(chunks)] or all_sessions():
        session.engine.require_readable(masters_only=True)
    return wrapped(*args, **kwargs)


def touches_lists(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Reload the offloaded tensors in the lists first."""
    touch_all((args, kwargs))
    return wrapped(*args, **kwargs)


def clip_qk(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make the masters writable for QK-clip, which scales them also after a step that was skipped.

    From mcore 0.20 on Bridge calls it in every step, with `log_max_only` if nothing is clipped: that writes none.
    """
    session = active_session()
    if session is not None and not arguments_of(wrapped, args, kwargs).get("log_max_only", False):
        session.engine.require_writable(masters_only=True)
    return wrapped(*args, **kwargs)


@served
def overwrites_masters(call: Call) -> Any:
    """Make the states writable first; the weights may have been loaded already, and every master follows."""
    with call.engine.overwriting_masters(call.source):
        return call()


SEARCH = "_build_model_param_to_state_dict_param_map"
"""mcore's search for each parameter's weights in a checkpoint. It compares every name with every other, and changes the
checkpoint's dictionary; one result does for all parts."""


@served
def rewrites_masters(call: Call) -> Any:
    """Make masters anew of the weights part by part by upstream's function; other code in its place runs once."""
    if not is_upstreams(call.wrapped):
        with call.engine.overwriting_masters(call.source):
            return call()
    search: Any = getattr(call.optimizer, SEARCH, None)
    found: list[Any] = []

    def once(*args: Any, **kwargs: Any) -> Any:
        if not found:
            found.append(search(*args, **kwargs))
        return found[0]

    with shadowed(call.optimizer, {SEARCH: once}):
        return call.engine.rewrite_masters(call.source, _where_any(call))


def refuses_mcores_sleep(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Refuse to rebind states that an engine moves, and weights too, with precision-aware Adam."""
    if attachment_of(instance) is not None:
        raise RuntimeError(
            f"mcore's {wrapped.__name__}() with optimizer.{FLAG}=True, which moves the states itself: leave the call "
            "out, and offload what else a trainer has by offload() and reload() of bridge_fgo.Residency(model, "
            "optimizer)"
        )
    return wrapped(*args, **kwargs)


def make_room(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Offload all states before something between steps takes memory."""
    for session in all_sessions():
        if not session.is_lost:
            session.engine.offload_now()
    return wrapped(*args, **kwargs)


# Checkpoints of a DistributedOptimizer.

COPIED_AT_ONCE = ("fully_reshardable", "dp_zero_gather_scatter")  # of these mcore gathers copies; others take tensors


@reading
def saves_states(call: Call) -> Any:
    """Make a state dictionary, to be saved or to be loaded into, without reloading states to the GPU."""
    if is_fsdp(call.optimizer):
        return fsdp_wrappers.gives_states(call)
    asked = call.arguments
    # The default is that of mcore's method.
    sharding = (asked.get("metadata") or {}).get("distrib_optim_sharding_type", "fully_sharded_model_space")
    copies = (asked.get("sharding_type") or sharding) not in COPIED_AT_ONCE
    # A save reads Adam's states by mcore's own function: Transformer Engine scales those that are in fp16.
    with _handing_out(call, copies), _adam_kept_from_states(call) if call.is_loading else contextlib.nullcontext():
        return call()


@reading
def reads_no_states(call: Call) -> Any:
    """Make the states readable first, except for a checkpoint: mcore drops the states that TE reads there."""
    adam: Any = call.optimizer.optimizer
    if not call.is_checkpointing or not (mine := as_they_are(adam)):
        return reads_states(call.wrapped, call.optimizer, call.args, call.kwargs)
    with shadowed(adam, mine):
        return call()


@reading
def hands_out_states(call: Call) -> Any:
    """Hand out the states of one parameter, for a checkpoint without reloading them to the GPU."""
    model_param = call.args[0] if call.args else call.kwargs["model_param"]
    return call.engine.hand_out(call.source, _parameter(call.optimizer, model_param), call)


def _parameter(optimizer: Any, model_param: Any) -> Any:
    """Return a parameter as the Adam inside a DistributedOptimizer has it."""
    group, position = optimizer.model_param_group_index_map[model_param]
    return optimizer.optimizer.param_groups[group]["params"][position]


@served
def loads_parameters(call: Call) -> Any:
    """Load the states of every parameter to where they are; the weights may have been loaded already."""
    with call.engine.loading(call.source, masters=True), _adam_kept_from_states(call):
        return call()


@served
def loads_state_dict(call: Call) -> Any:
    """Load a state dictionary without reloading states to the GPU."""
    if is_fsdp(call.optimizer):
        return fsdp_wrappers.loads_states(call)
    # mcore calls it in `sharded_state_dict` too, to make states.
    if not call.is_checkpointing and loads_its_own_way(call.optimizer.optimizer):
        return _loads_whole(call, masters=False)
    with call.engine.loading(call.source), _adam_kept_from_states(call):
        result = call()
    call.engine.states_replaced(call.source)
    return result


def _loads_whole(call: Call, masters: bool) -> Any:
    """Load a state dictionary as in a resident run, `masters` with it: the optimizer inside sees its states."""
    with call.engine.overwriting_masters(call.source, every=masters):
        result = call()
    call.engine.states_replaced(call.source)
    return result


@served
def puts_states(call: Call) -> Any:
    """Put loaded states of one parameter where they are."""
    if not call.is_checkpointing:
        call.engine.require_writable(call.source)
        return call()
    model_param, tensors = call.arguments.values()
    call.engine.put(
        call.source,
        _parameter(call.optimizer, model_param),
        lambda: call.optimizer._get_main_param_and_optimizer_states(model_param),
        tensors,
        lambda left: call.wrapped(model_param, left),
    )


@contextlib.contextmanager
def _adam_kept_from_states(call: Call) -> Iterator[None]:
    """Context in which the Adam inside does not touch states that may be away: TE's load makes every one anew."""
    adam = call.optimizer.optimizer
    if not call.is_checkpointing:
        yield
        return

    def load(state_dict: dict[str, Any]) -> None:
        load_groups(adam, state_dict)
        params = _params(adam.param_groups)
        for index, values in state_dict["state"].items():
            counts = {name: value for name, value in values.items() if not _is_whole_tensor(value)}
            if counts:  # torch's `step`; an empty entry would count as made
                adam.state[params[index]].update(counts)

    with shadowed(adam, {"load_state_dict": load, **as_they_are(adam)}):
        yield


def _params(groups: list[dict[str, Any]]) -> list[Any]:
    return [param for group in groups for param in group["params"]]


def _is_whole_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


# Checkpoints of a Float16OptimizerWithFloat16Params.

MASTER = "fp32_param"  # among the states of its parameter: no optimizer's state has that name

MASTERS = ("fp32_from_fp16_params", "fp32_from_fp16")  # in a state dictionary, by param group; the latter in old ones

GROUPS = "fp32_from_float16_groups"  # where the optimizer has them


def _where_any(call: Call) -> Callable[[], Any]:
    """Return the copy, or nothing for empty lists: in fp16 it is one kernel for all, which refuses to copy nothing."""
    return lambda: call() if any(getattr(call.optimizer, GROUPS, [True])) else None


@served
def saves_float16_states(call: Call) -> Any:
    """Do as `saves_states`."""
    with _handing_out(call):
        return call()


@served
def hands_out_float16_states(call: Call) -> Any:
    """Return a state dictionary of host tensors, without reloading states to the GPU: copies, except to load into."""
    inner: Any = call.optimizer.optimizer
    groups = getattr(call.optimizer, GROUPS)
    with _handing_out(call), shadowed(inner, as_they_are(inner)):
        result = call()
        masters = {id(master) for master in chain(*groups)}
        handed = {}  # by the `id` of a state
        for param in _params(inner.param_groups):
            states = _states(inner, param, id(param) in masters)
            for name, value in call.engine.hand_out(call.source, param, partial(dict, states)).items():
                handed[id(states[name])] = _own(value)  # a count of steps is not shared with what is trained on
        # Not by names: a hook on the state dictionary, or an override, may have put something else there.
        result["optimizer"]["state"] = {
            index: {name: handed.get(id(value), value) for name, value in values.items()}
            for index, values in result["optimizer"]["state"].items()
        }
        result[MASTERS[0]] = [[handed[id(master)] for master in group] for group in groups]
    return result


def _handing_out(call: Call, copies: bool = True) -> contextlib.AbstractContextManager[None]:
    """Return the context in which the engine hands out states, to be saved or to be loaded into."""
    if call.is_checkpointing:  # mcore's methods call each other
        return contextlib.nullcontext()
    if call.is_loading:
        return call.engine.loading(call.source, everything=True)
    return call.engine.saving(call.source, copies)


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) and value.dim() == 0 else value


def _states(inner: Any, param: torch.Tensor, has_master: bool) -> dict[str, Any]:
    """Return the states of a parameter by name, the master among them; without making an entry for them."""
    return {**inner.state.get(param, {}), **({MASTER: param} if has_master else {})}


@served
def loads_float16_states(call: Call) -> Any:
    """Load a state dictionary to where states are; torch would make every one of them anew on the GPU."""
    groups, state_dict = getattr(call.optimizer, GROUPS), call.arguments["state_dict"]
    saved = next((state_dict[name] for name in MASTERS if name in state_dict), [])
    pairs = zip(groups, saved, strict=False)  # as mcore pairs them
    masters = {id(own): value for group, values in pairs for own, value in zip(group, values, strict=False)}
    is_whole = all(id(master) in masters for master in chain(*groups))
    if loads_its_own_way(call.optimizer.optimizer):
        return _loads_whole(call, masters=is_whole)
    with (
        call.engine.loading(call.source, masters=is_whole),
        shadowed(call.optimizer.optimizer, {"load_state_dict": partial(_load, call, masters)}),
        shadowed(call.optimizer, {GROUPS: []}),  # the masters are put in their place with the rest
    ):
        return call()


@torch.no_grad()
def _load(call: Call, masters: Mapping[int, torch.Tensor], packed: Mapping[str, Any]) -> None:
    """Load torch's `state_dict` of the optimizer inside, and the masters by the `id` of their parameter."""
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
    """Return states as the first step makes them: a checkpoint from before it has none."""
    zeros = {name: torch.zeros_like(v, device="cpu") for name, v in values.items() if isinstance(v, torch.Tensor)}
    counts = {"step": torch.tensor(0.0)} if zeros and isinstance(inner, TORCH) else {}
    return {**values, **zeros, **counts}


def _put(call: Call, param: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
    inner = call.optimizer.optimizer

    def read() -> dict[str, Any]:
        states = _states(inner, param, MASTER in tensors)
        return {name: value for name, value in states.items() if _is_whole_tensor(value)}

    def write(values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            own = param if name == MASTER else inner.state[param].get(name)
            if own is None:
                inner.state[param][name] = value.to(device=param.device, dtype=param.dtype, copy=True)
            elif own is not value:
                own.copy_(value)

    call.engine.put(call.source, param, lambda: call.engine.hand_out(call.source, param, read), tensors, write)


# Gradients of DDP's buffers and bucket groups, if training manages them.


def zeroes_gradients(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Free the memory of gradients instead of zeroing it."""
    gradients = gradients_of(instance)
    return wrapped(*args, **kwargs) if gradients is None else gradients.zero(instance)


def drops_gradients(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Free the memory of managed gradients as mcore drops gradients; the buffer itself has none."""
    gradients = gradients_of(instance)
    if gradients is not None and arguments_of(wrapped, args, kwargs).get("move_grads", True):
        gradients.zero(instance)
    return wrapped(*args, **kwargs)


def scales_gradients(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Scale the gradients that have memory."""
    gradients = gradients_of(instance)
    if gradients is None:
        return wrapped(*args, **kwargs)
    return gradients.scale(instance, arguments_of(wrapped, args, kwargs)["scaling_factor"])


def reduces_gradients(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make the gradients of a group resident before they are checked, scaled and reduced."""
    gradients = gradients_of(instance)
    if gradients is not None:
        gradients.reduce(instance)
    return wrapped(*args, **kwargs)
