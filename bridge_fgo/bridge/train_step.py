"""The wrappers of the functions in a training step: each calls a verb of its optimizer's `Session`.

`offload.schedule` has the time line of one training step, with the functions that run it in their order. Between steps
states stay where they are, and code that uses one reloads it (`memory.guard`).
"""

import sys
from typing import Any

import torch
import wrapt

from bridge_fgo.bridge.patch import Args, Kwargs, Wrapped, arguments_of
from bridge_fgo.bridge.reporting import log_scalars, measured_peaks, measurement_of
from bridge_fgo.bridge.session import active_session, all_sessions, model_config_of, newest_stats, session_for_step
from bridge_fgo.bridge.settings import settings_of
from bridge_fgo.states.shadowed import shadowed

STEP_ORDER = ("forward_step_func", "data_iterator", "model", "optimizer", "scheduler", "global_state")
"""First parameters of a training step; MIMO calls its scheduler's parameter otherwise, and passes all by name."""


def train_step(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs, one_pass: bool = False) -> Any:
    """Run Bridge's step with the session of its optimizer active, if the flag is set.

    one_pass: the step has no rerun loop that would tell when a pass begins; MIMO's.
    """
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    # A step of `*args, **kwargs`, as somebody has wrapped it, has no names: it is called as Bridge's own.
    by_place = dict(zip(STEP_ORDER, args, strict=False))
    arguments = {**by_place, **arguments_of(wrapped, args, kwargs), **kwargs}
    state, optimizer, model_config = arguments["global_state"], arguments["optimizer"], model_config_of(arguments)
    settings = settings_of(state.cfg.optimizer)
    session = session_for_step(optimizer, model_config, state.cfg, settings, arguments["model"])
    if session is None and settings.measure and optimizer is not None:
        measurement = measurement_of(optimizer)
        with measurement.training_step(model_config):
            result = wrapped(*args, **kwargs)
        log_scalars(measurement.scalars, state)
        return result
    if session is None:
        return wrapped(*args, **kwargs)
    with session.training_step(arguments["model"], get_num_microbatches()):
        if one_pass:
            session.begin_pass()
        result = wrapped(*args, **kwargs)
        session.updated = not result[1]  # `skipped_iter`, in Bridge's step and in MIMO's
    stats = newest_stats()
    if stats is not None:  # else the package was uninstalled within the step
        log_scalars(stats.scalars(), state)
    return result


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


# Full-iteration CUDA graphs.

MODULE = "megatron.core.full_cuda_graph"


def is_replayed() -> bool:
    """Return whether a training pass that begins now replays a graph."""
    return _graphs().get("training") is not None


def run_schedule(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run, capture or replay forward and backward, and reload after it: a graph has no Python that would."""
    before = _graphs()
    result = wrapped(*args, **kwargs)
    if any(graph is not before.get(stage) for stage, graph in _graphs().items()):
        for session in all_sessions():
            session.meter.count_graphs()
    session = active_session()
    if session is not None and not kwargs["forward_only"]:
        session.reload()
    return result


def _graphs() -> dict[str, Any]:
    """Return the process's graphs, "training" and "validation"; Bridge deletes the entries after training."""
    module = sys.modules.get(MODULE)
    return {} if module is None else dict(module.FullCudaGraphWrapper.cuda_graph)


# Figures.


def report_memory(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Keep Bridge's peak figures those of the run, though the counters are reset between phases."""
    peaks: dict[str, int] = {}
    for of_run in (*(session.meter.run_peaks for session in all_sessions()), *measured_peaks()):
        for key, value in of_run.items():
            peaks[key] = max(value, peaks.get(key, 0))
    if not peaks:
        return wrapped(*args, **kwargs)
    original = torch.cuda.memory_stats

    def memory_stats(*stats_args: Any, **stats_kwargs: Any) -> dict[str, Any]:
        stats = original(*stats_args, **stats_kwargs)
        return {**stats, **{key: max(peak, stats.get(key, 0)) for key, peak in peaks.items()}}

    with shadowed(torch.cuda, {"memory_stats": memory_stats}):
        return wrapped(*args, **kwargs)
