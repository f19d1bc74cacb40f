"""Offload and reload on all ranks: they agree on what moves, all-gather weights, and fail alike.

What a rank decides by itself leads to no collective. Every rank runs each collective, until an error ends the call on
all of them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

import torch

from bridge_fgo.engines.ranks import collectives, gather_or_raise, on_every_rank
from bridge_fgo.memory.guard import own
from bridge_fgo.memory.transfers import wait_for_a_while
from bridge_fgo.memory.undo import undo_on_error
from bridge_fgo.sleep import local_moves
from bridge_fgo.sleep.local_moves import Grads, end_reload, require_movable, require_no_backward, start_reload
from bridge_fgo.sleep.moved import Moved, Tally, wait_for_gpu
from bridge_fgo.sleep.selection import Selection, require_match, weights_of
from bridge_fgo.sleep.trainer_memory import TrainerMemory, Unit
from bridge_fgo.sleep.weight_offloader import WeightSlab


def verb[**P, R](method: Callable[P, R]) -> Callable[P, R]:
    """Make calls of several threads take turns, on any Residency, outside of autograd and of inference mode.

    An inference engine may have left inference mode on.
    """

    @wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with collectives, torch.inference_mode(False), torch.no_grad(), own():
            return method(*args, **kwargs)

    return run


class Wake(NamedTuple):
    """A rank's answer to the others before a reload."""

    matches: bool  # `where` holds for one of its parameters
    moves: bool  # some of the selected units are away
    wakes_params: bool
    needs_weights: bool  # packed masters need their weights
    places: set[Any]  # of the selected parameters


class CollectiveMoves:
    """The moves of a trainer's memory; all ranks begin each together."""

    def __init__(self, memory: TrainerMemory) -> None:
        self._memory = memory

    @verb
    def offload(self, select: Callable[[], Selection], grads: Grads) -> Moved:
        """Offload what is selected; see `Residency.offload`."""
        memory, weights = self._memory, self._memory.weights

        def prepare() -> tuple[tuple[list[Unit], Tally], tuple[bool, bool]]:
            selected = select()
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
            return local_moves.offload(memory, units, grads, tally) if units else Moved()

        return on_every_rank(move)

    @verb
    def reload(self, select: Callable[[], Selection]) -> Moved:
        """Reload what is selected; see `Residency.reload`."""
        memory, weights = self._memory, self._memory.weights

        def look() -> tuple[tuple[list[Unit], list[WeightSlab], Tally], Wake]:
            selected = select()
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
    def only(self, select: Callable[[], Selection], grads: Grads) -> Iterator[Moved]:
        """Context in which the selected units alone are on the GPU; see `Residency.only`."""
        selected = Selection(())

        def others() -> Selection:
            nonlocal selected
            selected = select()
            staying = set(selected.units)
            return Selection([unit for unit in self._memory.units if unit not in staying], selected.matches)

        with self.as_before(grads):
            # Offload first, to make room; but packed masters reload their weights.
            moved = self.offload(others, grads)
            self.reload(lambda: selected)
            yield moved

    @contextmanager
    def as_before(self, grads: Grads = "drop") -> Iterator[None]:
        """Context after which the units that were on the GPU before are there, and no others."""
        memory = self._memory

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
            self._offload_again(before, grads, error)
            raise
        self.offload(newly_resident, grads)
        known = set(before)
        self.reload(lambda: Selection([unit for unit in memory.units if unit not in known]))
        self.offload(newly_resident, grads)  # packed masters may have reloaded their weights

    @verb
    def _offload_again(self, before: Sequence[Unit], grads: Grads, error: BaseException) -> None:
        """Offload on this rank what was away before an error; note on the error what is in another place."""
        memory = self._memory
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
                local_moves.offload(memory, reloaded, grads, Tally(memory.device))
        except Exception as failure:
            error.add_note(f"bridge_fgo: what the block has reloaded may still be on the GPU: {failure}")
