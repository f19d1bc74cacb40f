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

from bridge_fgo.engines.attachment import attachment_of
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
    """Keep mcore from building its own offloader where the native engine serves the run.

    Generation 1's constructor asserts on any Adam but TE's, and generation 2's step goes through its
    offloader, so the flag is hidden while the optimizer is built.
    """
    arguments = _arguments(wrapped, args, kwargs)
    config = arguments.get("optimizer_config", arguments.get("config"))
    check_flag(config)
    if not flag_is_set(config):
        return wrapped(*args, **kwargs)
    result = _build(wrapped, args, kwargs, config)
    optimizer = result[0] if isinstance(result, tuple) else result
    # The empty chain of a rank that trains nothing has no config, and `after_model_hooks` looks for the flag there:
    # the rank would miss what all ranks do together then, and they would wait for it.
    if getattr(optimizer, "chained_optimizers", None) == []:
        optimizer.config = config
    return result


def _build(wrapped: Wrapped, args: Args, kwargs: Kwargs, config: Any) -> Any:
    refuse_optimizer_config(config)
    if choose_engine(installed_config(), config) != "native":
        return wrapped(*args, **kwargs)
    before = {name: getattr(config, name) for name in (FLAG, CHUNKED_FLAG) if hasattr(config, name)}
    for name in before:
        setattr(config, name, False)
    try:
        return wrapped(*args, **kwargs)
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def after_model_hooks(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Attach as soon as the optimizer exists and finalize is bound.

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
    if to is not None and not to.engine.is_saving(to.source):
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


COPIED_AT_ONCE = ("fully_reshardable", "dp_zero_gather_scatter")
"""Checkpoint formats for which mcore gathers copies of the states; the others take the tensors themselves."""


def saves_states(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Have a state dictionary for a checkpoint made without bringing states to the GPU; for loading, bring them.

    Made for loading it steps the Adam, to have the states made.
    """
    to = attachment_of(instance)
    if to is None:
        return wrapped(*args, **kwargs)
    asked = inspect.signature(wrapped).bind(*args, **kwargs).arguments
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
    if to is None or not to.engine.is_saving(to.source) or not hasattr(adam, "get_unscaled_state"):
        return reads_states(wrapped, instance, args, kwargs)
    adam.get_unscaled_state = lambda param, name: adam.state[param][name]
    try:
        return wrapped(*args, **kwargs)
    finally:
        del adam.get_unscaled_state


def hands_out_states(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Hand out the states of one parameter, for a checkpoint without bringing them to the GPU."""
    to = attachment_of(instance)
    if to is None:
        return wrapped(*args, **kwargs)
    model_param = args[0] if args else kwargs["model_param"]
    group, position = instance.model_param_group_index_map[model_param]
    param = instance.optimizer.param_groups[group]["params"][position]
    return to.engine.hand_out(to.source, param, lambda: wrapped(*args, **kwargs))


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
