"""Move a trainer's memory by one `Residency`, made at its first sleep, as a framework calls its own functions.

Frameworks have functions for a model and others for its optimizer. If one is called without the other, they are found
again by identity. Gradients of a backward that no step has used yet are kept, and not dropped. States that are away are
served: a checkpoint saves and loads them on the host.

A model that a `Residency` refuses with a ValueError as it is made stays with the framework's own functions, until a
later sleep succeeds, and a line on rank 0 says why. Later errors are errors: the framework's functions could not reload
what a `Residency` has offloaded.

While a rank handles an error it joins no collective that the others may not join, and each move is one. So it moves
nothing then, but for a function that is a collective of itself (a save), and a reload of a job of one rank.
"""

from __future__ import annotations

import gc
import inspect
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from bridge_fgo.bridge.framework_names import FOLDER, host_memory_limit_gib
from bridge_fgo.bridge.patch import Args, Kwargs, Wrapped, Wrapper
from bridge_fgo.bridge.reporting import say
from bridge_fgo.bridge.residency import Residency
from bridge_fgo.sleep.moved import LEAST_KEPT_BYTES, Kind
from bridge_fgo.states.shadowed import shadowed

# for each optimizer the chunks of its model
_models = weakref.WeakKeyDictionary[Any, tuple[weakref.ref[torch.nn.Module], ...]]()
_made = weakref.WeakSet[Residency]()
_refused = weakref.WeakKeyDictionary[torch.nn.Module, str]()  # for first chunks of models without a Residency, why
_moved = weakref.WeakSet[Residency]()  # those that a function has moved, for itself and for the functions that it calls
# for each set of kinds that are away, the fewest bytes on the GPU since garbage was last collected there
_left = dict[frozenset[Kind], int]()

_of_new = 0  # sleeps in a row that have looked at new objects alone

MOST_OF_NEW = 9  # garbage on the host waits for as many sleeps at most


class Move(NamedTuple):
    """A call's request: offload or reload these kinds of a model, and of its optimizer if that is known."""

    offloads: bool
    kinds: Sequence[Kind]
    model: Any
    optimizer: Any = None
    trained_alone: bool = False
    """Whether "params" reloads DDP's buffers, and of the other parameters only those that train."""
    result: Any = None  # the call returns this
    # offloaded on all ranks after the framework's own function, which would decide it on each rank alone
    offloads_after: Sequence[Kind] = ()
    is_collective: bool = False  # whether the framework's own function is one: a call by one rank alone would wait


Plan = Callable[..., Move | None]
"""Tells from the object and all arguments of a call what it asks for; None if that is left to the framework."""


def moving(plan: Plan, then: bool = False) -> Wrapper:
    """Return the wrapper that does what a plan tells, and, if `then`, calls the framework's own function afterwards."""

    def wrapper(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        bound = inspect.signature(wrapped).bind(*args, **kwargs)
        bound.apply_defaults()
        move = plan(instance, *(value for name, value in bound.arguments.items() if not name.startswith("_")))
        # The making of a Residency is a collective, too.
        error = sys.exc_info()[1]
        res = _residency(move, make=move.offloads and error is None) if move is not None and move.kinds else None
        if move is None or res is None:
            return wrapped(*args, **kwargs)
        is_outermost = res not in _moved
        moves = move.is_collective or _may_move(move.offloads)
        if is_outermost and not moves:
            call = f"bridge_fgo.Residency.of(model).reload({', '.join(map(repr, move.kinds))})"
            advice = "" if move.offloads else f"; to reload what is away, call {call} on every rank"
            warnings.warn(f"bridge_fgo moves nothing while this is handled: {error!r}{advice}", stacklevel=2)
        elif is_outermost and move.offloads:
            res.offload(move.kinds, grads="keep" if res.has_gradients else "drop")
        elif is_outermost:
            (res.reload_trained if move.trained_alone else res.reload)(move.kinds)
        if not then:
            return move.result
        _moved.add(res)
        try:
            with _collecting_new_objects(res.away) if is_outermost and move.offloads else nullcontext():
                result = wrapped(*args, **kwargs)
        finally:
            if is_outermost:
                _moved.discard(res)
        if is_outermost and moves and move.offloads_after:
            res.offload(move.offloads_after, grads="keep" if res.has_gradients else "drop")
        return result

    return wrapper


def _may_move(offloads: bool) -> bool:
    """Return whether all ranks join in a move: none has an error that the others may not have."""
    has_others = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    return sys.exc_info()[1] is None or not (offloads or has_others)


@contextmanager
def _collecting_new_objects(away: frozenset[Kind]) -> Iterator[None]:
    """Context in which `gc.collect()` looks at new objects alone, unless old ones may hold GPU memory.

    NeMo-RL collects garbage in each sleep: 0.43 s with 818,000 objects. Here all are looked at in the first sleep and
    each tenth, and when after a sleep `LEAST_KEPT_BYTES` more are on the GPU than were left before. If Python's
    automatic collections are disabled, nothing changes.
    """
    global _of_new
    allocated = torch.cuda.memory_allocated()
    may_hold = away not in _left or allocated > _left[away] + LEAST_KEPT_BYTES
    if may_hold or _of_new >= MOST_OF_NEW or not gc.isenabled():
        _of_new = 0
        yield
        _left[away] = torch.cuda.memory_allocated()
        return
    _of_new, _left[away] = _of_new + 1, min(_left[away], allocated)
    collect = gc.collect
    # Not by gc.freeze(), whose undo would thaw what a user has frozen.
    with shadowed(gc, {"collect": lambda generation=1: collect(min(generation, 1))}):
        yield


def _residency(move: Move, make: bool) -> Residency | None:
    """Return the Residency of a model; None if it has none, and none is made.

    Whether one is made depends on what all ranks know alike: its constructor is a collective.
    """
    chunks = _chunks(move.model)
    if not chunks:
        return None
    optimizer, found = move.optimizer, Residency.of(chunks)
    if optimizer is None:
        optimizer = next((key for key, of in _models.items() if of[0]() is chunks[0]), None)
    else:
        _models[optimizer] = tuple(map(weakref.ref, chunks))
    lacks = found is not None and found in _made and optimizer is not None and not found.has_optimizer
    if found is not None and lacks and make and not found.away:
        found.close()  # of a call for the model alone, before its optimizer was known
        found = None
    if found is not None or not make:
        return found
    try:
        made = Residency(
            chunks,
            optimizer,
            host_memory_limit_gib=host_memory_limit_gib(),
            frozen_folder=os.environ.get(FOLDER) or None if _has_frozen(chunks) else None,
        )
    except ValueError as error:
        if _refused.get(chunks[0]) != str(error):
            say(f"a {type(chunks[0]).__name__} stays with the framework's own functions: {error}")
        _refused[chunks[0]] = str(error)
        return None
    made.serve_states()
    _made.add(made)
    return made


def _has_frozen(chunks: Sequence[torch.nn.Module]) -> bool:
    """Return whether a model has parameters that no optimizer updates; of one without DDP none are."""
    return not _has_ddp(chunks) or not all(param.requires_grad for chunk in chunks for param in chunk.parameters())


def _has_ddp(chunks: Sequence[torch.nn.Module]) -> bool:
    return any(hasattr(chunk, "expert_parallel_buffers") for chunk in chunks)


def _chunks(model: Any) -> list[torch.nn.Module]:
    return list(model) if isinstance(model, Sequence) else [model]


def require_all_here() -> None:
    """Raise RuntimeError if something is away, which the frameworks' own functions could not reload."""
    if _made:
        gc.collect()  # a model that was dropped is in a cycle with its hooks, and closed in vain
    for away in [res.away for res in _made if res.away]:
        raise RuntimeError(
            f"bridge_fgo cannot uninstall: {', '.join(map(repr, sorted(away)))} of a model are offloaded, and a "
            "framework's own functions would not bring them back: have it load them first"
        )


def close_all() -> None:
    """End what was made for frameworks, whose own functions may move everything from then on."""
    global _of_new
    for res in list(_made):
        res.close()
    for known in (_models, _made, _refused, _left):
        known.clear()
    _of_new = 0


def _kinds(params: bool = False, grads: bool = False, states: bool = False) -> list[Kind]:
    flags: dict[Kind, bool] = {"params": params, "grads": grads, "optimizer": states}
    return [kind for kind, is_asked in flags.items() if is_asked]


# verl: parameters are offloaded with their gradients.


def _verl_offload_model(_: Any, models: Any) -> Move:
    return Move(True, _kinds(params=True, grads=True), models)


def _verl_load_model(_: Any, models: Any, load_grad: bool, load_frozen_params: bool) -> Move:
    # verl's own leaves frozen parameters of DDP's models alone, but loads DDP's buffers, and other models, whole.
    is_whole = load_frozen_params or not _has_ddp(_chunks(models))
    return Move(False, _kinds(params=True, grads=load_grad), models, trained_alone=not is_whole)


def _verl_move_optimizer(offloads: bool) -> Plan:
    def plan(_: Any, optimizer: Any) -> Move | None:
        # No Residency has been made with an optimizer whose model is not known.
        known = _models[optimizer] if optimizer in _models else ()  # noqa: SIM401 - some objects have no weak references
        chunks = [chunk() for chunk in known]
        return Move(offloads, _kinds(states=True), chunks, optimizer) if chunks and None not in chunks else None

    return plan


def _verl_to(engine: Any, device: str, model: bool, optimizer: bool, grad: bool) -> Move:
    kinds = _kinds(model, model and (grad or device == "cpu"), optimizer and engine.optimizer is not None)
    return Move(device == "cpu", kinds, engine.module, engine.optimizer)


def _verl_save(engine: Any, *_: Any) -> Move:
    # verl's own loads if the rank's first buffer is empty. A stage in which nothing trains has none, and the other
    # ranks would wait for it.
    kinds = _kinds(params=True, grads=True)
    after = kinds if engine._is_offload_param else ()
    return Move(False, kinds, engine.module, engine.optimizer, offloads_after=after, is_collective=True)


verl_offload_model = moving(_verl_offload_model)
verl_load_model = moving(_verl_load_model)
verl_offload_optimizer = moving(_verl_move_optimizer(offloads=True))
verl_load_optimizer = moving(_verl_move_optimizer(offloads=False))
verl_to = moving(_verl_to, then=True)
verl_save = moving(_verl_save, then=True)


def verl_with_parameters(wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
    """Let verl's own read or write parameters on the GPU; afterwards they are where they were."""
    chunks = _chunks(args[0] if args else kwargs["models"])
    res = Residency.of(chunks) if chunks else None
    if res is None or not _may_move(offloads=False):
        return wrapped(*args, **kwargs)
    with res.checkpointing():
        return wrapped(*args, **kwargs)


# SkyRL: gradients are offloaded with the optimizer's states, even without an optimizer.


def _skyrl(offloads: bool) -> Plan:
    def plan(_: Any, model: Any, optimizer: Any, states: bool, params: bool) -> Move:
        return Move(offloads, _kinds(params, states, states and optimizer is not None), model, optimizer)

    return plan


skyrl_offload, skyrl_backload = moving(_skyrl(offloads=True)), moving(_skyrl(offloads=False))


# NeMo-RL: masters are offloaded with the moments, which its own functions move alone.


def _of_worker(worker: Any, model: Any, device: str, kinds: list[Kind], result: Any = None) -> Move | None:
    """Return the move of a worker's model, which has its optimizer, or of another model."""
    optimizer = getattr(worker, "optimizer", None) if model is worker.model else None
    if device not in ("cpu", "cuda"):
        return None
    return Move(device == "cpu", kinds, model, optimizer, result=result)


def _moves_states(worker: Any) -> bool:
    return getattr(worker, "optimizer", None) is not None and not worker.optimizer_cpu_offload


def _nemo_rl_move_model(worker: Any, model: Any, device: str, params: bool, grads: bool) -> Move | None:
    return _of_worker(worker, model, device, _kinds(params, grads), result=model)


def _nemo_rl_move_optimizer(worker: Any, device: str) -> Move | None:
    return _of_worker(worker, worker.model, device, _kinds(states=True))


def _nemo_rl_sleep(params: bool) -> Plan:
    def plan(worker: Any, *_: Any) -> Move | None:
        worker.finalize_async_save()  # as its own does first: a background save may hold handles of what moves
        states = _moves_states(worker) and worker.offload_optimizer_for_refit
        return _of_worker(worker, worker.model, "cpu", _kinds(params, True, states))

    return plan


def _nemo_rl_wake(worker: Any, *_: Any) -> Move | None:
    return _of_worker(worker, worker.model, "cuda", _kinds(True, True, _moves_states(worker)))


nemo_rl_move_model, nemo_rl_move_optimizer = moving(_nemo_rl_move_model), moving(_nemo_rl_move_optimizer)
nemo_rl_offload_before_refit = moving(_nemo_rl_sleep(params=False), then=True)
nemo_rl_offload_after_refit = moving(_nemo_rl_sleep(params=True), then=True)
nemo_rl_prepare_for_training = moving(_nemo_rl_wake, then=True)
