"""The public class of the phases: what of a model and its optimizer is on the GPU, between steps."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, Literal

import torch

from bridge_fgo.config import OffloadConfig
from bridge_fgo.engines.ranks import on_every_rank, require_host_memory, told_by_ranks
from bridge_fgo.memory.guard import own
from bridge_fgo.memory.host_buffer import HostBuffer, page_lock
from bridge_fgo.memory.host_memory import local_cpus
from bridge_fgo.memory.storage_slab import find_aliases
from bridge_fgo.sleep.caches import Caches
from bridge_fgo.sleep.checks import Checks
from bridge_fgo.sleep.gradients import drop_shard_gradients
from bridge_fgo.sleep.guards import wrapped_models
from bridge_fgo.sleep.model import Model, map_hosts
from bridge_fgo.sleep.moved import (
    KINDS,
    Kind,
    Kinds,
    Moved,
    Tally,
    return_to_driver,
    wait_for_a_while,
    wait_for_gpu,
)
from bridge_fgo.sleep.refusals import refuse_models
from bridge_fgo.sleep.states import OptimizerStates
from bridge_fgo.sleep.weight_moves import WeightMoves

PARAMS = frozenset[Kind](("params",))

_open = weakref.WeakSet["Residency"]()
"""Those that are not closed. What one has hung on its model keeps it alive as long as the model is."""


def _verb[**P, R](
    method: Callable[Concatenate[Residency, P], R],
) -> Callable[Concatenate[Residency, P], R]:
    """Have a method wait for those that other threads are in, and record nothing for autograd.

    Nor is it in the inference mode that an inference engine has left on.
    """

    @wraps(method)
    def run(self: Residency, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._turn, torch.inference_mode(False), torch.no_grad(), own():
            return method(self, *args, **kwargs)

    return run


class Residency:
    """Parameters, gradients and optimizer state that leave a shared GPU, and come back, each by itself.

    Between steps only. Making one is a collective of all ranks of the job, and so is each verb: parameters of several
    data-parallel ranks return by an all-gather, and what fails on one rank fails on all. A model has one at a time,
    which `of` finds. Verbs that several threads call run one after another.

    Args:
        model: a model chunk or a list of them: mcore's DDP where there is one, not the model inside.
        optimizer: what the training loop steps, over DistributedOptimizers; None for a reference model.
        config: settings of the offload where no engine is attached to the optimizer; masters are copied whole unless
            it says otherwise.

    Raises:
        ValueError: something cannot be offloaded; names the setting to change. Or the host lacks memory.
        RuntimeError: host memory could not be page-locked.
    """

    def __init__(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        optimizer: Any = None,
        config: OffloadConfig | None = None,
    ) -> None:
        self._turn = threading.RLock()
        self._chunks = chunks = on_every_rank(lambda: _accepted(model, config))
        with torch.inference_mode(False):  # a tensor that is made in it may not be written outside
            self._states = None if optimizer is None else OptimizerStates(optimizer, config)
            try:
                self._model = on_every_rank(lambda: Model(chunks, self._states))
                self._pins = self._model.device.type == "cuda" and (config is None or config.pin_memory)
                buffers = on_every_rank(lambda: map_hosts(self._model.weight_slabs))
                require_host_memory(sum(buffer.tensor.numel() for buffer in buffers) if self._pins else 0)

                def finish() -> tuple[Caches, WeightMoves, Checks]:
                    self._lock(buffers)
                    caches, weights = Caches(chunks, self._model.device), WeightMoves(self._model, self._states)
                    checks = Checks(self._model, self._states, lambda: self.away)
                    self._put_on(checks, optimizer)
                    return caches, weights, checks

                self._caches, self._weights, self._checks = on_every_rank(finish)
            except BaseException:
                if self._states is not None:
                    self._states.close()
                raise
        _open.add(self)

    @classmethod
    def of(cls, model: torch.nn.Module | Sequence[torch.nn.Module]) -> Residency | None:
        """Return the Residency of a model, of what wraps it, or of a part of it; None where there is none."""
        chunks = _chunks_of(model)
        return next((each for each in list(_open) if not _ids(each._chunks).isdisjoint(_ids(chunks))), None)

    def _put_on(self, checks: Checks, optimizer: Any) -> None:
        checks.put_on(self._chunks, optimizer)

    def _lock(self, buffers: Sequence[HostBuffer]) -> None:
        if self._pins and buffers:
            page_lock(buffers, local_cpus(self._model.device))

    # What is where.

    @property
    def away(self) -> frozenset[Kind]:
        """What is not on the GPU, or not all of it."""
        found: set[Kind] = set()
        if any(unit.weights.is_away for unit in self._model.units):
            found.add("params")
        if any(gradients.is_away for gradients in self._model.gradients):
            found.add("grads")
        if self._states is not None and self._states.is_away:
            found.add("optimizer")
        return frozenset(found)

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host bytes that are held for all of it."""
        slabs = self._model.weight_slabs + self._model.gradient_slabs
        own = sum(slab.host.pinned_bytes for slab in slabs if slab.host is not None)
        return own + (self._states.engine.pinned_bytes if self._states is not None else 0)

    # The verbs. What one rank decides by itself leads to no collective: every rank does each of them, until one fails.

    def offload(self, kinds: Kinds = "all", *more: Kind, grads: Literal["drop", "keep"] = "drop") -> Moved:
        """Have "params", "grads" or "optimizer" leave the GPU, and its memory go to the driver.

        What is away stays away. At the end every copy is done.

        Args:
            kinds: any of the three, in any order, by one name or a list of names; "all" for all of them. An empty list
                moves nothing.
            more: further names.
            grads: "drop" lets gradients go, and they return as zeros. "keep" copies them.

        Returns:
            What was moved.

        Raises:
            ValueError: a word is not one of these. Nothing has moved.
            RuntimeError: a backward has run since the last update, and its gradients would be dropped; or the state
                cannot be offloaded as it is; or a parameter is not one of those that the Residency was made with, or
                it is closed. Nothing has moved. Or it has failed on another rank in the midst of it.
        """
        return self._offload(lambda: self._asked(kinds, more), grads)

    @_verb
    def _offload(self, asked: Callable[[], frozenset[Kind]], grads: str) -> Moved:
        def prepare() -> tuple[tuple[frozenset[Kind], Tally], bool]:
            leaving = asked() & self._here()
            self._require_no_backward(leaving, grads)
            self._require_leave(leaving, grads)
            self._model.wait_for_collectives()
            return (leaving, Tally(self._model.device)), "optimizer" in leaving and self._lacks_weights

        (leaving, tally), votes = told_by_ranks(prepare)
        goes_again = any(votes)
        if goes_again:
            if "params" in self.away:
                tally.woke.append("params")
                leaving |= PARAMS
            self._weights.wake(tally)

        def leave() -> Moved:
            if goes_again:
                self._model.columnwise.make()
            return self._leave(leaving, grads, tally) if leaving else Moved()

        return on_every_rank(leave)

    def _leave(self, leaving: frozenset[Kind], grads: str, tally: Tally) -> Moved:
        """Have kinds leave that are here; no other rank takes part in it."""
        states = self._states if "optimizer" in leaving else None
        units = [unit for unit in self._model.units if not unit.weights.is_away] if "params" in leaving else []
        gradients, keep = self._model.gradients if "grads" in leaving else [], grads == "keep"
        dropped = self._drop_shard_gradients() if gradients and not keep else 0
        slabs = [slab for unit in units for slab in unit.weights.slabs]
        find_aliases(slabs + [slab for one in gradients for slab in one.slabs])  # after views of gradients went
        # Race: memory goes to the driver from here on, while work on some stream may still use what is cached.
        wait_for_gpu(self._model.device)
        if gradients and not keep:  # first: the driver takes their memory back while others are copied
            with tally.part("grads"):
                tally.freed += dropped + sum(one.empty(keep=False) for one in gradients)
                self._model.gradients_are_used()
        try:
            # Weights first: their copies run while masters are compared, and while the states' are queued.
            self._weights.leave(units, states, tally)
            if states is not None:
                before = states.released_bytes + states.unmade_bytes
                with tally.part("optimizer"):
                    tally.copy("optimizer", states.start_offload())
                if not states.reads_weights:  # while states are copied the driver takes these back too
                    with tally.part("params"):
                        tally.freed += self._weights.empty(units)
                with tally.part("optimizer"):
                    states.end_offload()
                tally.freed += states.released_bytes - before
        except BaseException:
            self._model.forget_masters()
            if states is not None:
                states.give_up_offload()
            # Race: weights that stay after all may be written while their copies still read them.
            wait_for_gpu(self._model.device)
            raise
        if gradients and keep:
            tally.copy("grads", sum(one.copy_out() for one in gradients))
        # Race: storages that are emptied go to whoever asks next on the stream that they were made on, and to the
        # driver, while copies on another stream still read them.
        with tally.part("wait"):
            wait_for_gpu(self._model.device)
        tally.freed += self._weights.empty(units)
        if keep:
            tally.freed += sum(one.empty(keep) for one in gradients)
        with tally.part("driver"):
            return_to_driver(self._model.device)
        with tally.part("caches"):
            tally.caches = self._caches.drop(self.away, is_mid_step=self._model.has_backward)
        if tally.caches:
            with tally.part("driver"):
                return_to_driver(self._model.device)
        tally.note_what_stays()
        return tally.moved()

    def reload(self, kinds: Kinds = "all", *more: Kind) -> Moved:
        """Have "params", "grads" or "optimizer" back on the GPU, named as for `offload`.

        Where masters left packed they need their weights: "optimizer" brings "params" too, and `Moved.woke` says so.
        Parameters of several ranks are all-gathered, so that every rank has to ask for the same.

        Raises:
            ValueError: a word is not one of these. Nothing has moved.
            torch.OutOfMemoryError: there is no memory. What has not come back is away as before.
            RuntimeError: it has failed on another rank. Parameters are away as before, here too. Or the Residency is
                closed.
        """
        return self._reload(lambda: self._asked(kinds, more))

    @_verb
    def _reload(self, asked: Callable[[], frozenset[Kind]]) -> Moved:
        def look() -> tuple[tuple[frozenset[Kind], Tally], tuple[bool, bool, bool]]:
            coming = asked() & self.away
            votes = bool(coming), "params" in coming, "optimizer" in coming and self._lacks_weights
            return (coming, Tally(self._model.device)), votes

        (coming, tally), votes = told_by_ranks(look)
        comes, wakes, needs_weights = (any(each) for each in zip(*votes, strict=True))
        if not comes:
            return Moved()
        states = self._states if "optimizer" in coming else None
        if needs_weights:
            if "params" in self.away - coming:
                tally.woke.append("params")
            self._weights.wake(tally)

        def wake_others() -> None:
            if states is not None:  # first: the driver gives memory for the others while these are copied
                before = states.released_bytes
                with tally.part("optimizer"):
                    tally.copy("optimizer", states.reload())
                self._model.forget_masters()
                tally.freed += states.released_bytes - before
            if "grads" in coming:
                with tally.part("grads"):
                    self._wake_gradients(tally)

        if wakes and not needs_weights:
            self._weights.wake(tally, wake_others)

        def finish() -> Moved:
            if needs_weights or not wakes:
                wake_others()
            if needs_weights or wakes:
                self._model.columnwise.make()
            with tally.part("wait"):
                if states is not None:
                    states.came_back()
                wait_for_gpu(self._model.device)  # whatever stream reads next
            return tally.moved()

        return on_every_rank(finish)

    @contextmanager
    def only(self, kinds: Kinds = (), *more: Kind, grads: Literal["drop", "keep"] = "drop") -> Iterator[Moved]:
        """Context in which these are on the GPU and nothing else is; afterwards it is as it was before.

        They are named as for `offload`. Gives what leaving has moved. Raises as `offload` and `reload`.

        Where the block raises, what has come leaves again, and what has left stays away, as its return may be a
        collective: a note on the error says so. `reload` on every rank brings it back.
        """
        with self._as_before(grads):
            # First out, so that what comes finds room; but for packed masters, which bring their weights.
            moved = self._offload(lambda: frozenset(self._kinds()) - self._asked(kinds, more), grads)
            self._reload(lambda: self._asked(kinds, more))
            yield moved

    def asleep(self, grads: Literal["drop", "keep"] = "drop") -> Any:
        """Context in which nothing is on the GPU; afterwards it is as it was before, as with `only`."""
        return self.only((), grads=grads)

    @contextmanager
    def _as_before(self, grads: Literal["drop", "keep"] = "drop") -> Iterator[None]:
        def look() -> frozenset[Kind]:
            self._require_open()
            return self.away

        before = on_every_rank(look)
        try:
            yield
        except BaseException as error:
            # No collective: other ranks may be in the midst of the block, or have failed elsewhere.
            self._leave_again(before, grads, error)
            raise
        self._offload(lambda: before - self.away, grads)
        self._reload(lambda: self.away - before)

    @_verb
    def _leave_again(self, before: frozenset[Kind], grads: str, error: BaseException) -> None:
        """Have this rank send away what was away before an error; note on the error what is not as it was."""
        try:
            if gone := self.away - before:
                words = ", ".join(map(repr, sorted(gone)))
                error.add_note(f"bridge_fgo: {words} stay off the GPU after this error: call reload() on every rank")
            come = before & self._here()
            if "optimizer" in come and self._lacks_weights:
                come -= {"optimizer"}
            if come:
                wait_for_a_while(lambda: (self._model.wait_for_collectives(), wait_for_gpu(self._model.device)))
                self._require_leave(come, grads)
                self._leave(come, grads, Tally(self._model.device))
        except Exception as failure:
            error.add_note(f"bridge_fgo: what has come in the block may be on the GPU still: {failure}")

    @_verb
    def close(self) -> None:
        """Bring everything back, and take off all hooks and host memory. Idempotent; other verbs raise from then on.

        Raises:
            torch.OutOfMemoryError, RuntimeError: it cannot be brought back. It may be called again.
        """
        if self not in _open:
            return
        self._reload(lambda: frozenset(self._kinds()))
        on_every_rank(self._let_go)
        _open.discard(self)

    def _let_go(self) -> None:
        self._checks.close()
        self._caches.close()
        self._weights.close()
        self._model.close()
        if self._states is not None:
            self._states.close()
            self._states = None

    # Parts of the verbs.

    def _kinds(self) -> tuple[Kind, ...]:
        return KINDS if self._states is not None else ("params", "grads")

    def _here(self) -> frozenset[Kind]:
        """Return what is on the GPU, or a part of it."""
        found: set[Kind] = set()
        if not all(unit.weights.is_away for unit in self._model.units):
            found.add("params")
        if not all(gradients.is_away for gradients in self._model.gradients):
            found.add("grads")
        if self._states is not None and self._states.is_here:
            found.add("optimizer")
        return frozenset(found)

    @property
    def _lacks_weights(self) -> bool:
        """Whether states cannot move before weights have come back: packed masters need them."""
        return self._states is not None and self._states.reads_weights and "params" in self.away

    def _require_open(self) -> None:
        if self not in _open:
            raise RuntimeError("a Residency was used after close(): make another by Residency(model, optimizer)")

    def _asked(self, kinds: Kinds, more: Sequence[Kind]) -> frozenset[Kind]:
        self._require_open()
        # No dictionary of booleans: all its keys would be asked for.
        is_list = isinstance(kinds, Iterable) and not isinstance(kinds, str | Mapping)
        asked = [*(kinds if is_list else [kinds]), *more]
        for word in asked:
            if word not in ("all", *KINDS):
                raise ValueError(
                    f"{word!r}: use 'all' or any of {', '.join(map(repr, KINDS))}, as names or as one list of names"
                )
            if word == "optimizer" and self._states is None:
                raise ValueError("'optimizer' of a Residency that was made with optimizer=None: give it the optimizer")
        if self._model.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("nothing can move while the current stream is captured into a CUDA graph")
        return frozenset(self._kinds() if "all" in asked else asked)

    def _require_no_backward(self, leaving: frozenset[Kind], grads: str) -> None:
        if grads not in ("drop", "keep"):
            raise ValueError(f"grads={grads!r}: use 'drop' or 'keep'")
        if grads == "drop" and "grads" in leaving and self._model.has_backward:
            raise RuntimeError(
                "a backward has run since the last optimizer step, and offload() would drop its gradients: step, or "
                "zero them by each model chunk's zero_grad_buffer() (the optimizer's zero_grad() does not), or use "
                "offload(..., grads='keep')"
            )

    def _require_leave(self, leaving: frozenset[Kind], grads: str) -> None:
        slabs = self._model.gradient_slabs if "grads" in leaving else []
        if "params" in leaving:
            self._model.require_parameters()
            slabs += [slab for slab in self._model.weight_slabs if not slab.is_away]
        for slab in slabs:
            slab.require_resizable()
        if "optimizer" in leaving and self._states is not None:
            self._states.require_whole()
        if "grads" in leaving and grads == "keep":
            self._lock(map_hosts(self._model.gradient_slabs))

    def _drop_shard_gradients(self) -> int:
        """Let go of what mcore has left of gradients at its parameters; return the bytes."""
        freed = 0
        for leaf in () if self._states is None else self._states.optimizers:
            groups = leaf.optimizer.param_groups
            freed += drop_shard_gradients(param for group in groups for param in group["params"])
        return freed

    def _wake_gradients(self, tally: Tally) -> None:
        gradients = [one for one in self._model.gradients if one.is_away]
        filled = []
        try:
            for one in gradients:
                tally.freed -= one.fill()
                filled.append(one)
        except BaseException:
            for one in filled:
                one.empty_again()
            raise
        tally.copy("grads", sum(one.copy_in() for one in gradients))


def _chunks_of(model: torch.nn.Module | Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return model chunks as a list, of whatever type they are."""
    return list(model) if isinstance(model, Sequence) else [model]


def _ids(chunks: Sequence[torch.nn.Module]) -> set[int]:
    """Return the `id`s of chunks, of what they wrap, and of their parameters."""
    return {id(each) for chunk in chunks for each in (*wrapped_models(chunk), *chunk.parameters())}


def _accepted(
    model: torch.nn.Module | Sequence[torch.nn.Module], config: OffloadConfig | None
) -> list[torch.nn.Module]:
    """Return the chunks of a model, or raise ValueError where they, or the settings, are refused."""
    chunks = _chunks_of(model)
    refuse_models(chunks)
    if config is not None and config.engine == "mcore":
        raise ValueError(
            "Residency(config=OffloadConfig(engine='mcore')): this package's engine alone can move states between "
            "steps; use engine='native'"
        )
    if Residency.of(chunks) is not None:
        raise ValueError(
            "the model has a Residency already, or shares parameters with one that has: Residency.of(model) returns "
            "it, close() ends it"
        )
    return chunks
