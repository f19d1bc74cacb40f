"""Weights as they leave and return: what masters tell of them, what is copied, and how they are made whole again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bridge_fgo.engines.ranks import on_every_rank
from bridge_fgo.sleep.model import Model, Unit
from bridge_fgo.sleep.moved import RETURNED_BYTES, SideStream, Tally, return_to_driver, wait_for_gpu
from bridge_fgo.sleep.parameters import digests_of
from bridge_fgo.sleep.rounding import round_again
from bridge_fgo.sleep.states import OptimizerStates


class WeightMoves:
    """Moves the weights of a model on this rank.

    Args:
        model: theirs.
        states: the optimizer's, whose masters may tell the weights; None without an optimizer.
    """

    def __init__(self, model: Model, states: OptimizerStates | None) -> None:
        self._model, self._states = model, states
        self._beside = SideStream(model.device)
        self._wakes_alone = False
        """Whether parameters have come back without their masters: then a copy of the shard is what is cheapest."""

    def leave(self, units: Sequence[Unit], states: OptimizerStates | None, tally: Tally) -> None:
        """Start the copies of what masters do not tell and the host does not have, and note what masters tell.

        Masters are here still, and the GPU does nothing. The copies go on when it returns: until `empty` nobody may
        write the weights.

        Args:
            units: whose weights leave.
            states: None where they do not leave.
            tally: counts the bytes and the time.
        """
        if self._wakes_alone:  # what is copied does not depend on masters: they are compared meanwhile
            self._copy_out(units, tally)
        with tally.part("compare"):
            self._note_what_masters_tell(units, states)
        if not self._wakes_alone:
            self._copy_out(units, tally)

    def _note_what_masters_tell(self, units: Sequence[Unit], states: OptimizerStates | None) -> None:
        """Compare masters with their weights, where both are here and one of them leaves; the host waits once.

        Of weights that stay here as their masters leave, the sums are noted: they may change until they leave.
        """
        leaving = set(units)
        told = [
            unit
            for unit in self._model.units
            if unit.rounding is not None
            and not unit.weights.is_away
            and (unit in leaving or states is not None)
            and unit.rounding.masters_are_here()
        ]
        if not told:
            return
        agree = torch.stack([unit.rounding.agrees() for unit in told if unit.rounding is not None]).tolist()
        staying = []
        for unit, agrees in zip(told, agree, strict=True):
            unit.told_digests, unit.is_told = None, agrees
            if agrees and unit not in leaving:
                staying.append(unit)
        for weights, digests in digests_of([unit.weights for unit in staying]):
            next(unit for unit in staying if unit.weights is weights).told_digests = digests

    def _copy_out(self, units: Sequence[Unit], tally: Tally) -> None:
        if not units:
            return
        with tally.part("params"):
            copied = self._start_copies(units)
        tally.copy("params", copied)
        if copied >= RETURNED_BYTES:  # meanwhile the driver takes back what has gone: gradients, and what was cached
            with tally.part("driver"):
                return_to_driver(self._model.device)

    def _start_copies(self, units: Sequence[Unit]) -> int:
        """Start the copies of what masters do not tell and the host does not have; return the bytes."""
        asked = [unit for unit in units if not self._is_told_now(unit) or self._wakes_alone]
        for weights, digests in digests_of([unit.weights for unit in asked]):
            weights.take_digests(digests)
        copied = 0
        for unit in units:
            unit.is_on_host = False
            if unit not in asked:
                continue
            # Masters that have left before tell what the weights were then.
            unit.is_told = unit.is_told and unit.told_digests in (None, unit.weights.digests)
            if not unit.is_told or self._wakes_alone or unit.weights.is_on_host:
                with self._beside.after_current():
                    copied += unit.weights.copy_out()
                unit.is_on_host = True
        return copied

    def empty(self, units: Sequence[Unit]) -> int:
        """Let the memory of weights go that `leave` has started to copy; return the bytes, 0 where it has gone."""
        here = [unit for unit in units if not unit.weights.is_away]
        if not here:
            return 0
        self._beside.synchronize()  # Race: their copies would read what is another's, or the driver's.
        self._model.columnwise.drop()
        return sum(unit.weights.empty() for unit in here)

    @staticmethod
    def _is_told_now(unit: Unit) -> bool:
        """Return whether the weights were compared with their masters in this very call."""
        return unit.is_told and unit.told_digests is None

    def wake(self, tally: Tally, first: Callable[[], None] = lambda: None) -> None:
        """Bring the weights back that are away, but for columnwise copies; a collective, also where none are away.

        first: is called before. Where it fails on one rank, all raise: they would wait for that rank in the all-gather.
        """
        units = [unit for unit in self._model.units if unit.weights.is_away]
        filled: list[Unit] = []

        def wake() -> None:
            first()
            with tally.part("params"):
                fill()

        def fill() -> None:
            if not all(unit.is_told or unit.is_on_host for unit in units):
                raise RuntimeError(
                    "parameters were sent off the GPU by something else than this Residency: bring them back the same "
                    "way"
                )
            for unit in units:
                tally.freed -= unit.weights.fill()
                filled.append(unit)
            tally.copy("params", self._write(units))

        try:
            on_every_rank(wake)
        except BaseException:
            # Nobody may take half-written weights for weights. What they come from is where it was.
            wait_for_gpu(self._model.device)
            for unit in filled:
                unit.weights.empty()
            raise
        for unit in units:
            unit.came_back()
        for unit in self._model.units:  # where weights had stayed, they are what the others have
            unit.weights.gather()

    def _write(self, units: Sequence[Unit]) -> int:
        """Write this rank's weights of some units; return the bytes that crossed the link."""
        roundings, copied = [], 0
        for unit in units:
            rounding = unit.rounding if unit.is_told else None
            is_here = rounding is not None and rounding.masters_are_here()
            if rounding is not None and not is_here:
                self._wakes_alone = True
            if rounding is not None and (is_here or not unit.is_on_host):
                roundings.append(rounding)
            else:
                copied += unit.weights.copy_in()
        if roundings:
            assert self._states is not None
            copied += round_again(roundings, self._states)
        return copied

    def close(self) -> None:
        """Let go of the optimizer's states."""
        self._states = None
