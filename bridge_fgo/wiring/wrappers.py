"""What the patched bindings do. Each wrapper passes through unless a session is active or attached.

None of them runs where nothing is installed; see `FunctionPatch`.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
import wrapt

from bridge_fgo.engines.attachment import Attachment, attachment_of
from bridge_fgo.engines.ranks import on_every_rank
from bridge_fgo.sources.late_masters import build_groups, masters_made_late
from bridge_fgo.sources.megatron import UPSTREAM_OFFLOADERS
from bridge_fgo.wiring.compat import CHUNKED_FLAG, FLAG, check_flag, choose_engine, flag_is_set
from bridge_fgo.wiring.refusals import refuse_config, refuse_optimizer_config
from bridge_fgo.wiring.reporting import log_figures
from bridge_fgo.wiring.session import (
    active_session,
    all_sessions,
    attach,
    newest_stats,
    session_for_step,
)
from bridge_fgo.wiring.settings import installed_config

logger = logging.getLogger(__name__)

Wrapped = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@lru_cache(maxsize=64)
def _signature(function: Wrapped) -> inspect.Signature:
    """Return the signature of a module's function; a method would keep its object alive here."""
    return inspect.signature(function)


def _arguments(wrapped: Wrapped, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    return _signature(wrapped).bind(*args, **kwargs).arguments


# Before training.

_caller_refuses = False


@contextlib.contextmanager
def refusals_left_to_caller() -> Iterator[None]:
    """Context in which Bridge's validation refuses nothing in this package's name: the caller lists the refusals."""
    global _caller_refuses
    before, _caller_refuses = _caller_refuses, True
    try:
        yield
    finally:
        _caller_refuses = before


def validate_config(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Refuse what cannot be combined, once Bridge has validated and finalized the config."""
    result = wrapped(*args, **kwargs)
    if not _caller_refuses:
        refuse_config(instance, installed_config())
    return result


def validate_mimo_config(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Refuse what cannot be combined; MIMO's road does not go through the container's own validation."""
    result = wrapped(*args, **kwargs)
    if not _caller_refuses:
        refuse_config(_arguments(wrapped, args, kwargs)["cfg"], installed_config())
    return result


def build_optimizer(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Build an optimizer whose masters never are on the GPU together, and attach, where the native engine serves it.

    So a model can be built, and loaded, that fits only with its states offloaded. With an engine of mcore's
    `after_model_hooks` attaches.
    """
    arguments = _arguments(wrapped, args, kwargs)
    config = arguments.get("optimizer_config", arguments.get("config"))
    check_flag(config)
    if not flag_is_set(config):
        return wrapped(*args, **kwargs)
    refuse_optimizer_config(config)
    if choose_engine(installed_config(), config) != "native":
        result = wrapped(*args, **kwargs)
        _optimizer_of(result, config)
        return result
    with masters_made_late():
        result = _build_without_flag(wrapped, args, kwargs, config)
        optimizer = _optimizer_of(result, config)
        model = arguments.get("model", arguments.get("mimo_model"))
        if model is not None:
            engine = attach(optimizer, _model_config({"model": model}), installed_config()).engine
            on_every_rank(engine.take_in)
    return result


def _optimizer_of(result: Any, config: Any) -> Any:
    """Return the optimizer of what was built; the empty chain of a rank that trains nothing gets the config.

    By that `after_model_hooks` knows that the flag is set: else the rank would miss what all ranks do together, and
    they would wait for it.
    """
    optimizer = result[0] if isinstance(result, tuple) else result
    if getattr(optimizer, "chained_optimizers", None) == []:
        optimizer.config = config
    return optimizer


def _build_without_flag(wrapped: Wrapped, args: Args, kwargs: Kwargs, config: Any) -> Any:
    """Keep mcore from building its own offloader.

    Generation 1's constructor asserts on any Adam but TE's, and generation 2's step goes through its
    offloader, so the flag is hidden while the optimizer is built.
    """
    before = {name: getattr(config, name) for name in (FLAG, CHUNKED_FLAG) if hasattr(config, name)}
    for name in before:
        setattr(config, name, False)
    try:
        return wrapped(*args, **kwargs)
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def builds_masters(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Have masters made without memory while `build_optimizer` builds an optimizer for the native engine."""
    bound = inspect.signature(wrapped).bind(*args, **kwargs)

    def build(groups: list[Any]) -> Any:
        bound.arguments[GROUPS] = groups
        return wrapped(*bound.args, **bound.kwargs)

    return build_groups(build, bound.arguments[GROUPS])


GROUPS = "opt_group_ranges"
"""The parameter with mcore's param groups."""


def after_model_hooks(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Attach where `build_optimizer` has not, as soon as the optimizer exists and finalize is bound.

    So a refusal comes, and host memory is pinned, before the first collective of training.
    """
    result = wrapped(*args, **kwargs)
    arguments = _arguments(wrapped, args, kwargs)
    optimizer = arguments.get("optimizer")
    if optimizer is not None and flag_is_set(getattr(optimizer, "config", None)):
        attach(optimizer, _model_config(arguments), installed_config())
    return result


def _model_config(arguments: dict[str, Any]) -> Any:
    from megatron.core.utils import get_model_config

    if "model_config" in arguments:
        return arguments["model_config"]
    model = arguments["model"]
    return get_model_config(model[0] if isinstance(model, list) else model)


def compile_helpers(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Let Bridge go on where `make` fails but the compiled dataset helper is there.

    mcore's wheel ships the helper built and no Makefile, so Bridge would exit.
    """
    try:
        return wrapped(*args, **kwargs)
    except (SystemExit, FileNotFoundError) as error:
        try:
            importlib.import_module("megatron.core.datasets.helpers_cpp")
        except ImportError:
            raise error from None
        logger.info("megatron.core.datasets.helpers_cpp is there already; going on without make")
        return None


# Inside a training step.


STEP_ORDER = ("forward_step_func", "data_iterator", "model", "optimizer", "scheduler", "global_state")
"""First parameters of a training step; MIMO calls its scheduler's parameter otherwise, and passes all by name."""


def _run_step(wrapped: Wrapped, args: Args, kwargs: Kwargs, one_pass: bool) -> Any:
    """Run a training step with the session of its optimizer active, where the flag is set.

    one_pass: the step has no rerun loop that would tell when a pass begins.
    """
    # A step of `*args, **kwargs`, as somebody has wrapped it, has no names: it is called as Bridge's own.
    by_place = dict(zip(STEP_ORDER, args, strict=False))
    arguments = {**by_place, **_arguments(wrapped, args, kwargs), **kwargs}
    state = arguments["global_state"]
    session = session_for_step(arguments["optimizer"], _model_config(arguments), state.cfg, installed_config())
    if session is None:
        return wrapped(*args, **kwargs)
    with session.training_step(arguments["model"], _microbatches()):
        if one_pass:
            session.begin_pass()
        result = wrapped(*args, **kwargs)
        session.updated = not result[1]  # `skipped_iter`, in Bridge's step and in MIMO's
    stats = newest_stats()
    if stats is not None:  # else the package was uninstalled within the step
        log_figures(stats, state)
    return result


def _microbatches() -> int:
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    return get_num_microbatches()


def train_step(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run Bridge's step with the session of its optimizer active."""
    return _run_step(wrapped, args, kwargs, one_pass=False)


def train_step_megatron_mimo(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run Bridge's MIMO step, which has one pass and no rerun loop, with the session active."""
    return _run_step(wrapped, args, kwargs, one_pass=True)


class PassBeginningMachine(wrapt.ObjectProxy):
    """The rerun state machine, telling the session of every pass that it grants."""

    def should_run_forward_backward(self, *args: Any, **kwargs: Any) -> bool:
        """Ask the machine; when a pass is granted, start the offload before grads are zeroed."""
        granted = self.__wrapped__.should_run_forward_backward(*args, **kwargs)
        session = active_session()
        if granted and session is not None:
            session.begin_pass()
        return granted


def get_rerun_state_machine(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Inside an active training step, hand out the machine that tells of passes."""
    machine = wrapped(*args, **kwargs)
    return machine if active_session() is None else PassBeginningMachine(machine)


def release_after(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Release once the last reader of the masters before forward (MXFP8's copy) or the zeroing is done."""
    result = wrapped(*args, **kwargs)
    session = active_session()
    if session is not None:
        session.release()
    return result


def pass_around(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run another attempt at forward and backward in the same pass: offload before it zeroes, release after."""
    session = active_session()
    if session is not None:
        session.begin_pass()
    return release_after(wrapped, instance, args, kwargs)


# Readers and writers of the states, wherever they are called from.


def _require_readable(instance: Any, masters_only: bool = False) -> None:
    to = attachment_of(instance)
    if to is not None and not to.engine.is_away(to.source):
        to.engine.require_readable(to.source, masters_only)


def reads_states(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make the states readable first."""
    to = attachment_of(instance)
    if to is not None:
        to.engine.require_whole(to.source, "read")
    _require_readable(instance)
    return wrapped(*args, **kwargs)


def reads_masters(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make the masters readable first."""
    _require_readable(instance, masters_only=True)
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
    with _shadowed(instance, {SEARCH: _called_once(instance)}):
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


_ABSENT = object()


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

    def load_groups(state_dict: dict[str, Any]) -> None:
        state = adam.state
        torch.optim.Optimizer.load_state_dict(adam, {**state_dict, "state": {}})
        adam.state = state
        params = [param for group in adam.param_groups for param in group["params"]]
        for index, values in state_dict["state"].items():
            counts = {n: v for n, v in values.items() if not isinstance(v, torch.Tensor) or v.dim() == 0}
            if counts:  # torch's `step`; an empty entry would count as made
                state[params[index]].update(counts)

    mine: dict[str, Callable[..., Any]] = {"load_state_dict": load_groups}
    if hasattr(adam, "get_unscaled_state"):
        mine["get_unscaled_state"] = lambda param, name: adam.state[param][name]
    with _shadowed(adam, mine):
        yield


@contextlib.contextmanager
def _shadowed(instance: Any, methods: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Context in which an object has other methods."""
    before = {name: vars(instance).get(name, _ABSENT) for name in methods}
    for name, method in methods.items():
        setattr(instance, name, method)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _ABSENT:
                delattr(instance, name)
            else:
                setattr(instance, name, value)


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
    with _shadowed(adam, {"get_unscaled_state": lambda param, name: adam.state[param][name]}):
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
            "has patched it, and nothing would be offloaded: call install() before training takes train_step (before "
            "`from megatron.bridge.training.train import train_step` and before train(), not in a callback of it), "
            "or unset the flag"
        )


def replaces_states(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make the states writable first; afterwards let go of the memory of tensors that were replaced."""
    result = writes_states(wrapped, instance, args, kwargs)
    if (to := attachment_of(instance)) is not None:
        to.engine.states_replaced(to.source)
    return result


def clip_qk(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make the masters writable for QK-clip, which scales them also after a step that was skipped."""
    session = active_session()
    if session is not None:
        session.engine.require_writable(masters_only=True)
    return wrapped(*args, **kwargs)


def reads_all_masters(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make the masters of a model readable first, for a reader that knows parameters and no optimizer."""
    model = _arguments(wrapped, args, kwargs)["model"]
    chunks = model if isinstance(model, list) else [model]
    # Of all sessions where the model is wrapped once more than its optimizers know.
    for session in [one for one in all_sessions() if one.trains(chunks)] or all_sessions():
        session.engine.require_readable(masters_only=True)
    return wrapped(*args, **kwargs)


def make_room(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Have every state off the GPU before something between steps takes memory."""
    for session in all_sessions():
        if not session.is_lost:
            session.engine.make_room()
    return wrapped(*args, **kwargs)


# Figures.


def report_memory(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Keep Bridge's peak figures those of the run, though the counters are reset between phases."""
    peaks: dict[str, int] = {}
    for session in all_sessions():
        for key, value in session.figures.run_peaks.items():
            peaks[key] = max(value, peaks.get(key, 0))
    if not peaks:
        return wrapped(*args, **kwargs)
    original = torch.cuda.memory_stats

    def memory_stats(*stats_args: Any, **stats_kwargs: Any) -> dict[str, Any]:
        stats = original(*stats_args, **stats_kwargs)
        return {**stats, **{key: max(peak, stats.get(key, 0)) for key, peak in peaks.items()}}

    torch.cuda.memory_stats = memory_stats
    try:
        return wrapped(*args, **kwargs)
    finally:
        torch.cuda.memory_stats = original
