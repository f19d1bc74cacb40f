"""What the patched readers and writers of optimizer state do, wherever they are called from."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bridge_fgo.bridge import fsdp_wrappers
from bridge_fgo.bridge.calls import Args, Call, Kwargs, Wrapped, arguments_of, served, shadowed
from bridge_fgo.bridge.compat import FLAG, flag_is_set
from bridge_fgo.bridge.session import active_session, all_sessions
from bridge_fgo.bridge.settings import installed_config, settings_of
from bridge_fgo.engines.engine import attachment_of
from bridge_fgo.memory.guard import own, touch_all
from bridge_fgo.sleep import upstream
from bridge_fgo.states.distributed import UPSTREAM_OFFLOADERS, as_they_are, load_groups
from bridge_fgo.states.fsdp import is_fsdp

# The optimizer step.


def updates_states(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Have the states where the optimizer step needs them; it is not called where a step is skipped."""
    session = active_session()
    to = attachment_of(instance)
    if session is not None:
        session.updating()
    if to is None:
        if session is None:
            _refuse_unwired(instance)
        return wrapped(*args, **kwargs)
    if session is None or session.engine is not to.engine:  # which another session's is not
        context = to.engine.stepping(to.source)
    else:
        context = session.stepping(to.source)
    with context:
        return wrapped(*args, **kwargs)


UNWIRED = "_bridge_fgo_unwired_steps"


def _refuse_unwired(optimizer: Any) -> None:
    """Raise RuntimeError where an optimizer with the flag steps a second time outside of any wired training step.

    A first one may be somebody's warm-up, before training.
    """
    if not flag_is_set(optimizer.config):
        return
    if any(getattr(optimizer, name, None) is not None for name in UPSTREAM_OFFLOADERS):
        return  # mcore's own offloader, which somebody drives by hand
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


@served
def copies_masters(call: Call) -> Any:
    """Copy the masters that were not copied part by part."""
    return call.engine.write_back(call.source, call)


# Readers and writers between steps.


@served
def reads_states(call: Call) -> Any:
    """Make the states readable first."""
    call.engine.require_whole(call.source, "read")
    if not call.is_checkpointing:
        call.engine.require_readable(call.source)
    with own():
        return call()


@served
def reads_masters(call: Call) -> Any:
    """Make the masters readable first."""
    if not call.is_checkpointing:
        call.engine.require_readable(call.source, masters_only=True)
    with own():  # in each pass, before the forward: masters that are on their way out are read, not touched
        return call()


def reads_all_masters(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make the masters of a model readable first, for a reader that knows parameters and no optimizer."""
    model = arguments_of(wrapped, args, kwargs)["model"]
    chunks = model if isinstance(model, list) else [model]
    # Of all sessions where the model is wrapped once more than its optimizers know.
    for session in [one for one in all_sessions() if one.trains(chunks)] or all_sessions():
        session.engine.require_readable(masters_only=True)
    return wrapped(*args, **kwargs)


def touches_lists(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Bring back what is offloaded of the tensors in the lists first."""
    touch_all((args, kwargs))
    return wrapped(*args, **kwargs)


def clip_qk(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make the masters writable for QK-clip, which scales them also after a step that was skipped.

    From mcore 0.20 on Bridge calls it in every step, with `log_max_only` where nothing is clipped: that writes none.
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


@served
def rewrites_masters(call: Call) -> Any:
    """Have every master made anew of the weights, part by part."""
    with shadowed(call.optimizer, {SEARCH: _called_once(call.optimizer)}):
        return call.engine.rewrite_masters(call.source, call)


SEARCH = "_build_model_param_to_state_dict_param_map"


def _called_once(optimizer: Any) -> Callable[..., Any]:
    """Return mcore's search for each parameter's weights in a checkpoint, of which one result does for all parts.

    It compares every name with every other, and changes the checkpoint's dictionary.
    """
    found: list[Any] = []
    search: Any = getattr(optimizer, SEARCH, None)

    def once(*args: Any, **kwargs: Any) -> Any:
        if not found:
            found.append(search(*args, **kwargs))
        return found[0]

    return once


@served
def replaces_states(call: Call) -> Any:
    """Make the states writable first; afterwards let go of the memory of tensors that were replaced."""
    result = _write(call)
    call.engine.states_replaced(call.source)
    return result


def _write(call: Call) -> Any:
    call.engine.require_writable(call.source)
    return call()


def make_room(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Have every state off the GPU before something between steps takes memory."""
    for session in all_sessions():
        if not session.is_lost:
            session.engine.offload_now()
    return wrapped(*args, **kwargs)


# Checkpoints of a DistributedOptimizer.

COPIED_AT_ONCE = ("fully_reshardable", "dp_zero_gather_scatter")
"""Checkpoint formats for which mcore gathers copies of the states; the others take the tensors themselves."""


@served
def saves_states(call: Call) -> Any:
    """Have a state dictionary for a checkpoint made without bringing states to the GPU.

    Made for loading it has the states made, and says where they are to be loaded.
    """
    if is_fsdp(call.optimizer):
        return fsdp_wrappers.gives_states(call)
    if call.is_loading:
        with call.engine.loading(call.source, everything=True), _adam_kept_from_states(call):
            return call()
    call.engine.require_whole(call.source, "saved")
    asked = call.arguments
    # The default is that of mcore's method.
    sharding = (asked.get("metadata") or {}).get("distrib_optim_sharding_type", "fully_sharded_model_space")
    copies = (asked.get("sharding_type") or sharding) not in COPIED_AT_ONCE
    with call.engine.saving(call.source, copies=copies):
        return call()


@served
def reads_no_states(call: Call) -> Any:
    """Make the states readable first, but for a checkpoint: mcore drops what TE reads of them there."""
    adam: Any = call.optimizer.optimizer
    if not call.is_checkpointing or not (mine := as_they_are(adam)):
        return reads_states(call.wrapped, call.optimizer, call.args, call.kwargs)
    with shadowed(adam, mine):
        return call()


@served
def hands_out_states(call: Call) -> Any:
    """Hand out the states of one parameter, for a checkpoint without bringing them to the GPU."""
    model_param = call.args[0] if call.args else call.kwargs["model_param"]
    return call.engine.hand_out(call.source, _parameter(call.optimizer, model_param), call)


def _parameter(optimizer: Any, model_param: Any) -> Any:
    """Return a parameter as the Adam inside a DistributedOptimizer has it."""
    group, position = optimizer.model_param_group_index_map[model_param]
    return optimizer.optimizer.param_groups[group]["params"][position]


@served
def loads_parameters(call: Call) -> Any:
    """Have the states of every parameter loaded where they are; the weights may have been loaded already."""
    with call.engine.loading(call.source, masters=True), _adam_kept_from_states(call):
        return call()


@served
def loads_state_dict(call: Call) -> Any:
    """Have a state dictionary loaded without bringing states to the GPU."""
    if is_fsdp(call.optimizer):
        return fsdp_wrappers.loads_states(call)
    with call.engine.loading(call.source), _adam_kept_from_states(call):
        result = call()
    call.engine.states_replaced(call.source)
    return result


@served
def puts_states(call: Call) -> Any:
    """Put loaded states of one parameter where they are."""
    if not call.is_checkpointing:
        return _write(call)
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
    """Context in which the Adam inside neither reads nor replaces states that are away, where any may be.

    TE's `load_state_dict` makes every state anew, of what mcore found there or made to be overwritten.
    """
    adam = call.optimizer.optimizer
    if not call.is_checkpointing:
        yield
        return

    def load(state_dict: dict[str, Any]) -> None:
        load_groups(adam, state_dict)
        params = [param for group in adam.param_groups for param in group["params"]]
        for index, values in state_dict["state"].items():
            counts = {n: v for n, v in values.items() if not isinstance(v, torch.Tensor) or v.dim() == 0}
            if counts:  # torch's `step`; an empty entry would count as made
                adam.state[params[index]].update(counts)

    with shadowed(adam, {"load_state_dict": load, **as_they_are(adam)}):
        yield


# mcore's own sleep and wake, which go through this package's memory.


def moves_states_to_cpu(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Have the states offloaded by an engine.

    mcore's own method rebinds the parameters of precision-aware Adam, which then train no weights any more.
    """
    if upstream.can_move(instance):
        return upstream.offload_states(instance, settings_of(instance.config))
    return replaces_states(wrapped, instance, args, kwargs)


def restores_states(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Have the states reloaded by the engine that offloaded them."""
    if upstream.can_restore(instance):
        return upstream.restore_states(instance)
    return replaces_states(wrapped, instance, args, kwargs)


def offloads_buffer(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Have a DDP buffer offloaded to exact pinned memory, and only what has changed."""
    upstream.mover_of(instance, installed_config().pin_memory).offload(*_moved_parts(wrapped, args, kwargs))


def reloads_buffer(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Have a DDP buffer reloaded; mcore does it itself where it has offloaded it, before the package was installed."""
    if upstream.BUFFER not in vars(instance):
        return wrapped(*args, **kwargs)
    return upstream.mover_of(instance, installed_config().pin_memory).reload(*_moved_parts(wrapped, args, kwargs))


def _moved_parts(wrapped: Wrapped, args: Args, kwargs: Kwargs) -> tuple[bool, bool]:
    """Return whether parameters, and gradients, are asked for; the defaults are mcore's."""
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments["move_params"], bound.arguments["move_grads"]
