"""Offload and reload: the ranks agree on what moves, all-gather weights and fail alike, and each moves its own memory.

What a rank decides by itself leads to no collective. Every rank runs each collective, until an error ends the call on
all of them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Literal, NamedTuple

import torch

from bridge_fgo.engines.ranks import collectives, gather_or_raise, on_every_rank
from bridge_fgo.memory.guard import own
from bridge_fgo.memory.storage_slab import find_aliases
from bridge_fgo.memory.transfers import wait_for_a_while
from bridge_fgo.memory.undo import undo_on_error
from bridge_fgo.sleep.gradient_offloader import drop_shard_gradients
from bridge_fgo.sleep.moved import KINDS, Kind, Kinds, Moved, Tally, return_to_driver, wait_for_gpu
from bridge_fgo.sleep.trainer_memory import TrainerMemory, Unit
from bridge_fgo.sleep.weight_offloader import WeightSlab, Where

Grads = Literal["drop", "keep"]  # whether an offload drops gradients, which a reload makes zeros, or copies them


def verb[**P, R](method: Callable[P, R]) -> Callable[P, R]:
    """Make calls of several threads take turns, on any Residency, outside of autograd and of inference mode.

    An inference engine may have left inference mode on.
    """

    @wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with collectives, torch.inference_mode(False), torch.no_grad(), own():
            return method(*args, **kwargs)

    return run


class Selection(NamedTuple):
    """The units of this rank that a call moves."""

    units: Sequence[Unit]
    matches: bool = True  # whether `where` holds for a parameter of this rank


def select(memory: TrainerMemory, kinds: Kinds, more: Sequence[Kind] = (), where: Where | None = None) -> Selection:
    """Return what the arguments of a call name.

    Raises:
        ValueError: a name is unknown, or `where` holds for a part of what moves together.
        RuntimeError: the Residency is closed, or the current stream is captured into a CUDA graph.
    """
    memory.require_open()
    # No dictionary of booleans: all its keys would be asked for.
    is_list = isinstance(kinds, Iterable) and not isinstance(kinds, str | Mapping)
    asked = [*(kinds if is_list else [kinds]), *more]
    for word in asked:
        if word not in ("all", *KINDS):
            raise ValueError(
                f"{word!r}: use 'all' or any of {', '.join(map(repr, KINDS))}, as names or as one list of names"
            )
        if word == "optimizer" and memory.states is None:
            raise ValueError("'optimizer' of a Residency that was made with optimizer=None: give it the optimizer")
    if memory.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("nothing can move while the current stream is captured into a CUDA graph")
    found = set(KINDS if "all" in asked else asked)
    if where is not None and "params" not in found:
        raise ValueError(f"where= chooses among 'params', and only {sorted(found)} are asked for: add 'params'")
    slabs, matches = memory.weights.chosen(where) if "params" in found else ([], True)
    others = [unit for unit in memory.units if unit.kind != "params" and unit.kind in found]
    return Selection([*slabs, *others], matches)


def require_match(matches: Iterable[bool]) -> None:
    """Raise ValueError if `where` holds for no parameter on any rank; every rank knows the answers of all."""
    if not any(matches):
        raise ValueError(
            "where= holds for no parameter on any rank: it is called with the names that the model's "
            "named_parameters() have, and with the parameters"
        )


def weights_of(units: Iterable[Unit]) -> list[WeightSlab]:
    """Return the weights among some units."""
    return [unit for unit in units if isinstance(unit, WeightSlab)]


class Wake(NamedTuple):
    """A rank's answer to the others before a reload."""

    matches: bool  # `where` holds for one of its parameters
    moves: bool  # some of the selected units are away
    wakes_params: bool
    needs_weights: bool  # packed masters need their weights
    places: set[Any]  # of the selected parameters


@verb
def offload(memory: TrainerMemory, chosen: Callable[[], Selection], grads: Grads) -> Moved:
    """Offload what is selected; see `Residency.offload`."""
    weights = memory.weights

    def prepare() -> tuple[tuple[list[Unit], Tally], tuple[bool, bool]]:
        selected = chosen()
        units = [unit for unit in selected.units if unit.is_here]
        require_no_backward(memory, units, grads)
        require_movable(memory, units, grads)
        memory.wait_for_collectives()
        wakes = memory.states in units and memory.lacks_weights
        return (units, Tally(memory.device)), (selected.matches, wakes)

    (units, tally), answers = gather_or_raise(prepare)
    require_match(matches for matches, _ in answers)
    wakes_params = any(wakes for _, wakes in answers)
    if wakes_params:
        if woken := [slab for slab in weights.read_by_masters if slab.is_away]:
            tally.moved.woke = ("params",)
            units += woken
        weights.reload(weights.read_by_masters, tally)

    def move() -> Moved:
        if wakes_params:
            weights.make_columnwise()
        return offload_units(memory, units, grads, tally) if units else Moved()

    return on_every_rank(move)


@verb
def reload(memory: TrainerMemory, chosen: Callable[[], Selection]) -> Moved:
    """Reload what is selected; see `Residency.reload`."""
    weights = memory.weights

    def look() -> tuple[tuple[list[Unit], list[WeightSlab], Tally], Wake]:
        selected = chosen()
        units, slabs = [unit for unit in selected.units if unit.is_away], weights_of(selected.units)
        wakes_params = any(slab.is_away for slab in slabs)
        needs_weights = memory.states in units and memory.lacks_weights
        places = {slab.place for slab in slabs}
        return (units, slabs, Tally(memory.device)), Wake(
            selected.matches, bool(units), wakes_params, needs_weights, places
        )

    (units, slabs, tally), ranks = gather_or_raise(look)
    require_match(rank.matches for rank in ranks)
    if not any(rank.moves for rank in ranks):
        return Moved()
    wakes_params, needs_weights = any(r.wakes_params for r in ranks), any(r.needs_weights for r in ranks)
    of_any = set[Any]().union(*(rank.places for rank in ranks)) - {None}
    known, needed = set(slabs), set(weights.read_by_masters if needs_weights else ())
    others = [s for s in weights.slabs if s not in known and (s in needed or s.place in of_any)]
    if any(slab.is_away for slab in others):
        tally.moved.woke = ("params",)
    known.update(others)
    slabs = [slab for slab in weights.slabs if slab in known]  # the ranks gather them in one order

    def finish() -> Moved:
        if needs_weights or not wakes_params:
            start_reload(memory, units, tally)
        if needs_weights or wakes_params:
            weights.make_columnwise()
        return end_reload(memory, units, tally)

    weights.is_reloading_masters = True
    with undo_on_error(lambda: weights.masters_reloaded(tally)):
        if needs_weights:
            weights.reload(slabs, tally)
        elif wakes_params:
            weights.reload(slabs, tally, lambda: start_reload(memory, units, tally))
        return on_every_rank(finish)


@contextmanager
def only(memory: TrainerMemory, chosen: Callable[[], Selection], grads: Grads) -> Iterator[Moved]:
    """Context in which the selected units alone are on the GPU; see `Residency.only`."""
    selected = Selection(())

    def others() -> Selection:
        nonlocal selected
        selected = chosen()
        staying = set(selected.units)
        return Selection([unit for unit in memory.units if unit not in staying], selected.matches)

    with as_before(memory, grads):
        # Offload first, to make room; but packed masters reload their weights.
        moved = offload(memory, others, grads)
        reload(memory, lambda: selected)
        yield moved


@contextmanager
def as_before(memory: TrainerMemory, grads: Grads = "drop") -> Iterator[None]:
    """Context after which the units that were on the GPU before are there, and no others."""

    def look() -> list[Unit]:
        memory.require_open()
        return [unit for unit in memory.units if unit.is_away]

    def newly_resident() -> Selection:
        memory.require_open()
        return Selection([unit for unit in before if not unit.is_away])

    before = on_every_rank(look)
    try:
        yield
    except BaseException as error:
        # No collective: other ranks may be in the midst of the block, or have failed elsewhere.
        _offload_again(memory, before, grads, error)
        raise
    offload(memory, newly_resident, grads)
    known = set(before)
    reload(memory, lambda: Selection([unit for unit in memory.units if unit not in known]))
    offload(memory, newly_resident, grads)  # packed masters may have reloaded their weights


@verb
def _offload_again(memory: TrainerMemory, before: Sequence[Unit], grads: Grads, error: BaseException) -> None:
    """Offload on this rank what was away before an error; note on the error what is in another place."""
    try:
        memory.require_open()
        if gone := {unit.kind for unit in memory.units if unit.is_away and unit not in before}:
            words = ", ".join(map(repr, sorted(gone)))
            error.add_note(f"bridge_fgo: {words} stay off the GPU after this error: call reload() on every rank")
        reloaded = [unit for unit in before if unit.is_here]
        if memory.lacks_weights:
            reloaded = [unit for unit in reloaded if unit is not memory.states]
        if reloaded:
            wait_for_a_while(lambda: (memory.wait_for_collectives(), wait_for_gpu(memory.device)))
            require_movable(memory, reloaded, grads)
            offload_units(memory, reloaded, grads, Tally(memory.device))
    except Exception as failure:
        error.add_note(f"bridge_fgo: what the block has reloaded may still be on the GPU: {failure}")


# Moves of one rank: no collective runs here.


def require_no_backward(memory: TrainerMemory, units: Sequence[Unit], grads: Grads) -> None:
    """Raise RuntimeError if an offload would drop gradients that no step has used."""
    if grads not in ("drop", "keep"):
        raise ValueError(f"grads={grads!r}: use 'drop' or 'keep'")
    if grads == "drop" and memory.gradients in units and memory.has_gradients:
        raise RuntimeError(
            "a backward has run since the last optimizer step, and offload() would drop its gradients: step, or "
            "zero them by each model chunk's zero_grad_buffer() (the optimizer's zero_grad() does not), or use "
            "offload(..., grads='keep')"
        )


def require_movable(memory: TrainerMemory, units: Sequence[Unit], grads: Grads) -> None:
    """Raise ValueError or RuntimeError if units cannot be offloaded; allocate host memory for kept gradients."""
    slabs, has_grads = weights_of(units), memory.gradients in units
    if slabs:
        memory.weights.require_known()
    for slab in (*slabs, *(memory.gradients.slabs if has_grads else ())):
        slab.require_resizable()
    if memory.states is not None and memory.states in units:
        memory.states.require_whole()
    if has_grads and grads == "keep":
        needed = memory.gradients.unmapped_bytes
        memory.budget.require("offload(grads='keep')", needed, "step or zero them before, or ")
        hosts = memory.gradients.map_hosts()
        memory.budget.left -= needed  # also if the lock fails: they stay mapped, to be locked by another call
        memory.lock(hosts)


def offload_units(memory: TrainerMemory, units: Sequence[Unit], grads: Grads, tally: Tally) -> Moved:
    """Offload units that are on the GPU."""
    states, slabs = memory.states if memory.states in units else None, weights_of(units)
    has_grads = memory.gradients in units
    drops, keeps = has_grads and grads == "drop", has_grads and grads == "keep"
    dropped = 0
    if drops and memory.states is not None:
        dropped = sum(drop_shard_gradients(leaf.optimizer) for leaf in memory.states.optimizers)
    find_aliases([*slabs, *(memory.gradients.slabs if has_grads else ())])  # after views of gradients went
    # Race: memory goes to the driver from here on, while work on some stream may still use what is cached.
    wait_for_gpu(memory.device)
    if drops:  # first: the driver takes their memory back while others are copied
        with tally.part("grads"):
            tally.moved.freed += dropped + memory.gradients.empty(kept=False)
            memory.backwards.used()

    def give_up() -> None:
        if states is not None:
            states.give_up_offload()
        # Race: weights that stay after all may be written while their copies still read them.
        wait_for_gpu(memory.device)

    with undo_on_error(give_up, memory.weights.masters_may_change):
        # Weights first: their copies run while masters are compared, and while the states' are queued.
        memory.weights.start_offload(slabs, states is not None, tally)
        if states is not None:
            before = states.engine.traffic.released + states.unmade_bytes
            with tally.part("optimizer"):
                tally.copy("optimizer", states.start_offload())
            if not states.reads_weights:  # while states are copied the driver takes these back too
                with tally.part("params"):
                    tally.moved.freed += memory.weights.release(slabs)
            with tally.part("optimizer"):
                states.end_offload()
            tally.moved.freed += states.engine.traffic.released - before
    if keeps:
        tally.copy("grads", memory.gradients.copy_out())
    # Race: an emptied storage goes to the next allocation on the stream that it was made on, and to the driver, while
    # copies on another stream still read it.
    with tally.part("wait"):
        wait_for_gpu(memory.device)
    tally.moved.freed += memory.weights.release(slabs)
    if keeps:
        tally.moved.freed += memory.gradients.empty(kept=True)
    with tally.part("driver"):
        return_to_driver(memory.device)
    with tally.part("caches"):
        tally.moved.caches = memory.caches.drop(memory.away, is_mid_step=memory.has_gradients)
    if tally.moved.caches:
        with tally.part("driver"):
            return_to_driver(memory.device)
    tally.note_what_stays(memory.unhosted)
    return tally.end()


def start_reload(memory: TrainerMemory, units: Sequence[Unit], tally: Tally) -> None:
    """Start to reload states and gradients; `end_reload` follows."""
    states = memory.states
    if states is not None and states in units:  # first: the driver gives memory for the others while these are copied
        before = states.engine.traffic.released
        with tally.part("optimizer"):
            tally.copy("optimizer", states.reload())
        tally.moved.freed += states.engine.traffic.released - before
    if memory.gradients in units:
        with tally.part("grads"):
            taken, copied = memory.gradients.reload()
        tally.moved.freed -= taken
        tally.copy("grads", copied)


def end_reload(memory: TrainerMemory, units: Sequence[Unit], tally: Tally) -> Moved:
    """Wait until all that was reloaded is there, for whatever stream reads it next."""
    with tally.part("wait"):
        if memory.states is not None and memory.states in units:
            memory.states.finish_reload()
        wait_for_gpu(memory.device)
    memory.weights.masters_reloaded(tally)
    return tally.end()
