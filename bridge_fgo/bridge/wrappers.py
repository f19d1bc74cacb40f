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

from bridge_fgo.bridge import flag_use
from bridge_fgo.bridge.attaching import attach, session_for_step
from bridge_fgo.bridge.compat import CHUNKED_FLAG, FLAG, check_flag, choose_engine, flag_is_set
from bridge_fgo.bridge.graphs import is_replayed
from bridge_fgo.bridge.measuring import measured_peaks, measurement_of
from bridge_fgo.bridge.refusals import refuse_config, refuse_optimizer_config
from bridge_fgo.bridge.reporting import log_scalars
from bridge_fgo.bridge.session import active_session, all_sessions, newest_stats
from bridge_fgo.bridge.settings import SETTINGS, given_settings, settings_of, write_settings
from bridge_fgo.config import without_measure
from bridge_fgo.engines.ranks import on_every_rank
from bridge_fgo.states.late_masters import build_groups, masters_made_late

logger = logging.getLogger(__name__)

Wrapped = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@lru_cache(maxsize=64)
def _signature(function: Wrapped) -> inspect.Signature:
    """Return the signature of a module's function; a method would keep its object alive here."""
    return inspect.signature(function)


def arguments_of(wrapped: Wrapped, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """Return the arguments of a call to a patched function, by name."""
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
    flag_use.before_validation(instance.optimizer)
    result = wrapped(*args, **kwargs)
    _after_validation(instance)
    return result


def validate_mimo_config(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Refuse what cannot be combined; MIMO's road does not go through the container's own validation."""
    config = arguments_of(wrapped, args, kwargs)["cfg"]
    flag_use.before_validation(config.optimizer)
    result = wrapped(*args, **kwargs)
    _after_validation(config)
    return result


def _after_validation(config: Any) -> None:
    """Refuse what cannot be combined; have the config hold the settings in force, with which it is saved."""
    optimizer = config.optimizer
    flag_use.after_validation(optimizer)
    if _caller_refuses:
        return
    refuse_config(config, settings_of(optimizer))
    if flag_is_set(optimizer):
        write_settings(optimizer)
    elif given := without_measure(given_settings(optimizer)):
        told = ", ".join(f"optimizer.{SETTINGS}.{name}={value!r}" for name, value in given.items())
        logger.warning("bridge_fgo: optimizer.%s is not set: nothing is offloaded, in spite of %s", FLAG, told)


def build_optimizer(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Build an optimizer whose masters never are on the GPU together, and attach, where the native engine serves it.

    So a model can be built, and loaded, that fits only with its states offloaded. With an engine of mcore's
    `after_model_hooks` attaches.
    """
    arguments = arguments_of(wrapped, args, kwargs)
    config = arguments.get("optimizer_config", arguments.get("config"))
    check_flag(config)
    if not flag_is_set(config):
        return wrapped(*args, **kwargs)
    refuse_optimizer_config(config)
    settings = settings_of(config)
    if choose_engine(settings, config) != "native":
        result = wrapped(*args, **kwargs)
        _optimizer_of(result, config)
        return result
    with masters_made_late():
        result = _build_without_flag(wrapped, args, kwargs, config)
        optimizer = _optimizer_of(result, config)
        model = arguments.get("model", arguments.get("mimo_model"))
        if model is not None:
            engine = attach(optimizer, _model_config({"model": model}), settings).engine
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
    arguments = arguments_of(wrapped, args, kwargs)
    optimizer = arguments.get("optimizer")
    if optimizer is not None and flag_is_set(getattr(optimizer, "config", None)):
        attach(optimizer, _model_config(arguments), settings_of(optimizer.config))
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
    arguments = {**by_place, **arguments_of(wrapped, args, kwargs), **kwargs}
    state = arguments["global_state"]
    settings = settings_of(state.cfg.optimizer)
    session = session_for_step(arguments["optimizer"], _model_config(arguments), state.cfg, settings)
    if session is None:
        is_measured = settings.measure and arguments["optimizer"] is not None
        return _measured(wrapped, args, kwargs, arguments) if is_measured else wrapped(*args, **kwargs)
    with session.training_step(arguments["model"], _microbatches(), _is_saved_next(state)):
        if one_pass:
            session.begin_pass()
        result = wrapped(*args, **kwargs)
        session.updated = not result[1]  # `skipped_iter`, in Bridge's step and in MIMO's
    stats = newest_stats()
    if stats is not None:  # else the package was uninstalled within the step
        log_scalars(stats.scalars(), state)
    return result


def _measured(wrapped: Wrapped, args: Args, kwargs: Kwargs, arguments: dict[str, Any]) -> Any:
    """Run a training step without the offload, and log its peaks."""
    measurement = measurement_of(arguments["optimizer"])
    with measurement.training_step(_model_config(arguments)):
        result = wrapped(*args, **kwargs)
    log_scalars(measurement.scalars, arguments["global_state"])
    return result


def _microbatches() -> int:
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    return get_num_microbatches()


def _is_saved_next(state: Any) -> bool:
    """Return whether Bridge saves at an interval, or at the end, when the training step that begins is done."""
    checkpoint, step = state.cfg.checkpoint, state.train_state.step + 1
    if not checkpoint.save:
        return False
    intervals = (checkpoint.save_interval, checkpoint.non_persistent_save_interval, state.cfg.train.train_iters)
    return any(step % interval == 0 for interval in intervals if interval)


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
            session.begin_pass(is_replayed())
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
        session.begin_pass()  # that resets a graph, so that none is replayed
    return release_after(wrapped, instance, args, kwargs)


# Figures.


def report_memory(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Keep Bridge's peak figures those of the run, though the counters are reset between phases."""
    peaks: dict[str, int] = {}
    for of_run in (*(session.figures.run_peaks for session in all_sessions()), *measured_peaks()):
        for key, value in of_run.items():
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
