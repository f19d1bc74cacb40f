"""Keep weights of a model under names, and swap one set into its parameters for a block, on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from bridge_fgo.engines.ranks import gather_or_raise, on_every_rank, require_host_memory
from bridge_fgo.memory.guard import class_of
from bridge_fgo.memory.transfers import wait_for_a_while
from bridge_fgo.memory.undo import undo_on_error
from bridge_fgo.sleep.collective_moves import verb
from bridge_fgo.sleep.moved import Moved, Tally, return_to_driver, wait_for_gpu
from bridge_fgo.sleep.refusals import PLAIN
from bridge_fgo.sleep.selection import require_match
from bridge_fgo.sleep.trainer_memory import TrainerMemory
from bridge_fgo.sleep.weight_offloader import WeightSlab, Where
from bridge_fgo.sleep.weight_sets import WeightSet


class WeightSwaps:
    """Keeps and swaps weights; `is_training` returns whether a training step is running."""

    def __init__(self, memory: TrainerMemory, is_training: Callable[[], bool]) -> None:
        self._memory, self._sets, self._is_training = memory, memory.sets, is_training

    @verb
    def keep(self, name: str, where: Where | None) -> Moved:
        """Copy parameters to the host under a name; see `Residency.keep`."""
        memory, sets = self._memory, self._sets

        def look() -> tuple[tuple[list[WeightSlab], bool, int, Tally], bool]:
            memory.require_open(in_block=True)
            _require_name("keep", name)
            memory.weights.require_known()
            slabs, matches = memory.weights.chosen(where)
            self._require_plain(slabs)
            is_new = not sets.has(name, slabs)
            needed = sum(slab.copied_nbytes for slab in slabs) if is_new else 0
            # A swap copies the model's own weights to the host too.
            has_room = not memory.weights.unhosted_bytes
            memory.budget.require(f"keep({name!r})", needed, "", " beside that of all parameters", has_room)
            if any(slab.is_away for slab in slabs):
                raise RuntimeError(f"keep({name!r}) while parameters are away: call reload('params') first")
            memory.wait_for_collectives()
            wait_for_gpu(memory.device)
            return (slabs, is_new, needed, Tally(memory.device)), matches

        (slabs, is_new, needed, tally), matches = gather_or_raise(look)
        require_match(matches)
        require_host_memory(needed if memory.pins else 0)

        def copy() -> Moved:
            if is_new:
                memory.budget.left += sets.make(name, slabs) - needed
            sets.copy_out(name, tally)
            wait_for_gpu(memory.device)
            return tally.end()

        # On an error the set would have another's values on some rank, or none.
        # Race: copies that are queued write host memory that is released.
        with undo_on_error(lambda: wait_for_gpu(memory.device), lambda: self.drop(name)):
            return on_every_rank(copy)

    @verb
    def drop(self, name: str) -> None:
        """Release the host memory of a set; see `Residency.drop`."""
        _require_name("drop", name)
        self._memory.budget.left += self._sets.drop(name)

    @contextmanager
    def swapped(self, name: str) -> Iterator[Moved]:
        """Context in which the model has the weights of a set; see `Residency.weights`."""
        kept, slabs, tally = self._find(name)
        try:
            moved = self._swap_in(name, kept, slabs, tally)
            with torch.no_grad():
                yield moved
            self._swap_out()
        except BaseException as error:
            self._give_up(error)
            raise
        finally:
            self._memory.checks.swapped = ""

    @verb
    def _find(self, name: str) -> tuple[WeightSet, list[WeightSlab], Tally]:
        memory = self._memory

        def look() -> tuple[tuple[WeightSet, set[WeightSlab], Tally], tuple[set[Any], set[Any]]]:
            memory.require_open()
            _require_name("weights", name)
            if (kept := self._sets.by_name.get(name)) is None:
                raise ValueError(f"weights({name!r}): kept are {sorted(self._sets.by_name)}; call keep({name!r}) first")
            if memory.has_gradients or self._is_training():
                raise RuntimeError(
                    f"weights({name!r}) in a training step, or between a backward and its update: swap before, or after"
                )
            memory.weights.require_known()
            memory.wait_for_collectives()
            # Race: work on another stream may still write the weights that are summed, or read those that are evicted.
            wait_for_gpu(memory.device)
            changed, slabs = self._sets.changed(kept), set(kept.slabs)
            found = {(slab.place, slab.is_away, slab in slabs) for slab in memory.weights.slabs if slab.place}
            return (kept, changed, Tally(memory.device)), ({slab.place for slab in changed}, found)

        (kept, changed, tally), ranks = gather_or_raise(look)
        found = set[Any]().union(*(found for _, found in ranks))
        if len({place for place, *_ in found}) < len(found):  # some would gather, and others not
            raise RuntimeError(
                f"weights({name!r}): of one of DDP's buffers some ranks alone have parameters away, or kept: call "
                f"reload('params'), or keep({name!r}) with one `where`, on every rank"
            )
        alike = set[Any]().union(*(places for places, _ in ranks)) - {None}
        return kept, [slab for slab in kept.slabs if slab in changed or slab.place in alike], tally

    @verb
    def _swap_in(self, name: str, kept: WeightSet, slabs: Sequence[WeightSlab], tally: Tally) -> Moved:
        memory = self._memory

        def swap() -> None:
            memory.checks.swapped = name
            memory.caches.drop({"params"}, is_mid_step=False)
            self._sets.swap_in(kept, slabs, tally)

        def end() -> Moved:
            wait_for_gpu(memory.device)  # whatever stream reads next
            return tally.end()

        on_every_rank(swap)
        for slab in slabs:
            slab.gather()
        return on_every_rank(end)

    @verb
    def _swap_out(self) -> None:
        memory = self._memory

        def swap() -> list[WeightSlab]:
            wait_for_gpu(memory.device)  # Race: forwards on another stream may still read what is written
            memory.caches.drop({"params"}, is_mid_step=False)
            return self._sets.swap_out()

        def end() -> None:
            wait_for_gpu(memory.device)  # whatever stream reads next, and before memory is released
            self._sets.end()
            return_to_driver(memory.device)

        for slab in on_every_rank(swap):
            slab.gather()
        on_every_rank(end)

    @verb
    def _give_up(self, error: BaseException) -> None:
        """End a swap on this rank after an error; note on it what is in another place."""
        memory = self._memory
        try:
            wait_for_a_while(lambda: (memory.wait_for_collectives(), wait_for_gpu(memory.device)))
            memory.caches.drop({"params"}, is_mid_step=False)
            if self._sets.give_up():
                error.add_note("bridge_fgo: 'params' stay off the GPU after this error: call reload() on every rank")
        except Exception as failure:
            error.add_note(f"bridge_fgo: the parameters may have another's weights: {failure}")

    def _require_plain(self, slabs: Iterable[WeightSlab]) -> None:
        for name, param in (named for slab in slabs for named in slab.params):
            if class_of(param) not in PLAIN:
                raise ValueError(
                    f"keep() of parameter {name!r}, which is in FP8, and whose scales are not kept: set "
                    "ddp.fp8_param_gather=False"
                )
        for config in (getattr(chunk, "config", None) for chunk in self._memory.chunks):
            if getattr(config, "fp8", None) and getattr(config, "fp8_recipe", "delayed") == "delayed":
                raise ValueError(
                    "keep() with model.fp8_recipe='delayed': forwards of other weights would be in the model's amax "
                    "history; set model.fp8_recipe='tensorwise'"
                )


def _require_name(call: str, name: Any) -> None:
    """Raise ValueError unless a name is a text; an empty one would not end what `weights` refuses."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"{call}({name!r}): give a name, which is a text that is not empty")
