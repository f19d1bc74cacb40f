"""What the patched readers and writers of optimizer state do, wherever they are called from.

Each passes through unless the optimizer is attached to an engine. None of them runs where nothing is installed; see
`FunctionPatch`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bridge_fgo.bridge import fsdp_loads
from bridge_fgo.bridge.compat import FLAG, flag_is_set
from bridge_fgo.bridge.session import active_session, all_sessions
from bridge_fgo.bridge.shadowing import shadowed
from bridge_fgo.bridge.wrappers import Args, Kwargs, Wrapped, arguments_of
from bridge_fgo.engines.attachment import Attachment, attachment_of
from bridge_fgo.memory.guard import own, touch_all
from bridge_fgo.states.fsdp import is_fsdp
from bridge_fgo.states.megatron import UPSTREAM_OFFLOADERS, load_groups


def _require_readable(instance: Any, masters_only: bool = False) -> None:
    to = attachment_of(instance)
    if to is not None and not to.engine.is_away(to.source):
        to.engine.require_readable(to.source, masters_only)


def reads_states(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make the states readable first."""
    to = attachment_of(instance)
    if to is None:
        return wrapped(*args, **kwargs)
    to.engine.require_whole(to.source, "read")
    _require_readable(instance)
    with own():
        return wrapped(*args, **kwargs)


def reads_masters(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make the masters readable first."""
    if attachment_of(instance) is None:
        return wrapped(*args, **kwargs)
    _require_readable(instance, masters_only=True)
    with own():  # in each pass, before the forward: masters that are on their way out are read, not touched
        return wrapped(*args, **kwargs)


def copies_masters(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Copy the masters that were not copied part by part."""
    to = attachment_of(instance)
    if to is None:
        return wrapped(*args, **kwargs)
    return to.engine.write_back(to.source, lambda: wrapped(*args, **kwargs))


def writes_states(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make the states readable and writable first."""
    to = attachment_of(instance)
    if to is not None:
        to.engine.require_writable(to.source)
    return wrapped(*args, **kwargs)


def overwrites_masters(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make the states writable first; the weights may have been loaded already, and every master follows."""
    to = attachment_of(instance)
    if to is None:
        return wrapped(*args, **kwargs)
    with to.engine.overwriting_masters(to.source):
        return wrapped(*args, **kwargs)


def rewrites_masters(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Have every master made anew of the weights, part by part."""
    to = attachment_of(instance)
    if to is None:
        return wrapped(*args, **kwargs)
    with shadowed(instance, {SEARCH: _called_once(instance)}):
        return to.engine.rewrite_masters(to.source, lambda: wrapped(*args, **kwargs))


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


def _loads_by_parameter(optimizer: Any) -> bool:
    """Return whether this mcore reads and writes the states of one parameter after another."""
    return hasattr(optimizer, "_get_main_param_and_optimizer_states") and hasattr(
        optimizer, "_set_main_param_and_optimizer_states"
    )


def loads_parameters(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Have the states of every parameter loaded where they are; the weights may have been loaded already."""
    to = attachment_of(instance)
    if to is None or not _loads_by_parameter(instance):
        return overwrites_masters(wrapped, instance, args, kwargs)
    with to.engine.loading(to.source, masters=True), _adam_kept_from_states(to, instance):
        return wrapped(*args, **kwargs)


def loads_state_dict(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Have a state dictionary loaded without bringing states to the GPU."""
    to = attachment_of(instance)
    if to is not None and is_fsdp(instance):
        return fsdp_loads.loads_states(to, wrapped, instance, args, kwargs)
    if to is None or not _loads_by_parameter(instance):
        return replaces_states(wrapped, instance, args, kwargs)
    with to.engine.loading(to.source), _adam_kept_from_states(to, instance):
        result = wrapped(*args, **kwargs)
    to.engine.states_replaced(to.source)
    return result


def puts_states(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Put loaded states of one parameter where they are."""
    to = attachment_of(instance)
    if to is None or not to.engine.is_away(to.source):
        return writes_states(wrapped, instance, args, kwargs)
    model_param, tensors = inspect.signature(wrapped).bind(*args, **kwargs).args
    to.engine.put(
        to.source,
        _parameter(instance, model_param),
        lambda: instance._get_main_param_and_optimizer_states(model_param),
        tensors,
        lambda left: wrapped(model_param, left),
    )


@contextlib.contextmanager
def _adam_kept_from_states(to: Attachment, optimizer: Any) -> Iterator[None]:
    """Context in which the Adam inside neither reads nor replaces states that are away, where any may be.

    TE's `state_dict` makes fp32 of moments in 16 bits, all of them at once, which mcore drops. Its `load_state_dict`
    makes every state anew, of what mcore found there or made to be overwritten.
    """
    adam = optimizer.optimizer
    if not to.engine.is_away(to.source):
        yield
        return

    def load(state_dict: dict[str, Any]) -> None:
        state = adam.state
        load_groups(adam, state_dict)
        params = [param for group in adam.param_groups for param in group["params"]]
        for index, values in state_dict["state"].items():
            counts = {n: v for n, v in values.items() if not isinstance(v, torch.Tensor) or v.dim() == 0}
            if counts:  # torch's `step`; an empty entry would count as made
                state[params[index]].update(counts)

    mine: dict[str, Callable[..., Any]] = {"load_state_dict": load}
    if hasattr(adam, "get_unscaled_state"):
        mine["get_unscaled_state"] = lambda param, name: adam.state[param][name]
    with shadowed(adam, mine):
        yield


COPIED_AT_ONCE = ("fully_reshardable", "dp_zero_gather_scatter")
"""Checkpoint formats for which mcore gathers copies of the states; the others take the tensors themselves."""


def saves_states(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Have a state dictionary for a checkpoint made without bringing states to the GPU.

    Made for loading it has the states made, and says where they are to be loaded.
    """
    to = attachment_of(instance)
    if to is None:
        return wrapped(*args, **kwargs)
    asked = inspect.signature(wrapped).bind(*args, **kwargs).arguments
    if is_fsdp(instance):
        return fsdp_loads.gives_states(to, wrapped, instance, args, kwargs, asked.get("is_loading", False))
    if asked.get("is_loading", False) and _loads_by_parameter(instance):
        with to.engine.loading(to.source, everything=True), _adam_kept_from_states(to, instance):
            return wrapped(*args, **kwargs)
    if asked.get("is_loading", False) or not hasattr(instance, "_get_main_param_and_optimizer_states"):
        return writes_states(wrapped, instance, args, kwargs)
    to.engine.require_whole(to.source, "saved")
    # The default is that of mcore's method.
    sharding = (asked.get("metadata") or {}).get("distrib_optim_sharding_type", "fully_sharded_model_space")
    with to.engine.saving(to.source, copies=(asked.get("sharding_type") or sharding) not in COPIED_AT_ONCE):
        return wrapped(*args, **kwargs)


def reads_no_states(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make the states readable first, but for a checkpoint: mcore drops what TE reads of them there.

    TE's `state_dict` makes fp32 of moments in 16 bits, all of them at once.
    """
    to = attachment_of(instance)
    adam: Any = getattr(instance, "optimizer", None)
    if to is None or not to.engine.is_away(to.source) or not hasattr(adam, "get_unscaled_state"):
        return reads_states(wrapped, instance, args, kwargs)
    with shadowed(adam, {"get_unscaled_state": lambda param, name: adam.state[param][name]}):
        return wrapped(*args, **kwargs)


def hands_out_states(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Hand out the states of one parameter, for a checkpoint without bringing them to the GPU."""
    to = attachment_of(instance)
    if to is None:
        return wrapped(*args, **kwargs)
    model_param = args[0] if args else kwargs["model_param"]
    return to.engine.hand_out(to.source, _parameter(instance, model_param), lambda: wrapped(*args, **kwargs))


def _parameter(optimizer: Any, model_param: Any) -> Any:
    """Return a parameter as the Adam inside a DistributedOptimizer has it."""
    group, position = optimizer.model_param_group_index_map[model_param]
    return optimizer.optimizer.param_groups[group]["params"][position]


def updates_states(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Bring the states for the optimizer step, which is not called where a step is skipped."""
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


def replaces_states(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make the states writable first; afterwards let go of the memory of tensors that were replaced."""
    result = writes_states(wrapped, instance, args, kwargs)
    if (to := attachment_of(instance)) is not None:
        to.engine.states_replaced(to.source)
    return result


def clip_qk(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make the masters writable for QK-clip, which scales them also after a step that was skipped.

    From mcore 0.20 on Bridge calls it in every step, with `log_max_only` where nothing is clipped: that writes none.
    """
    session = active_session()
    if session is not None and not arguments_of(wrapped, args, kwargs).get("log_max_only", False):
        session.engine.require_writable(masters_only=True)
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
    """Bring back what is away of the tensors in the lists first."""
    touch_all((args, kwargs))
    return wrapped(*args, **kwargs)


def make_room(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Have every state off the GPU before something between steps takes memory."""
    for session in all_sessions():
        if not session.is_lost:
            session.engine.make_room()
    return wrapped(*args, **kwargs)
