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
from bridge_fgo.core.guard import own
from bridge_fgo.core.host_buffer import HostBuffer, page_lock
from bridge_fgo.core.host_memory import local_cpus
from bridge_fgo.core.storage_slab import find_aliases
from bridge_fgo.engines.ranks import gather, on_every_rank, require_host_memory
from bridge_fgo.phases.caches import Caches
from bridge_fgo.phases.checks import Checks
from bridge_fgo.phases.gradients import drop_shard_gradients
from bridge_fgo.phases.guards import wrapped_models
from bridge_fgo.phases.model import Model, Unit, map_hosts
from bridge_fgo.phases.moved import KINDS, Kind, Kinds, Moved, Tally, return_to_driver, wait_for_gpu
from bridge_fgo.phases.refusals import refuse_models
from bridge_fgo.phases.states import OptimizerStates
from bridge_fgo.phases.weight_moves import WeightMoves

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

    Between steps only, and on every rank alike: parameters of several data-parallel ranks return by an all-gather.
    Making one is a collective of all ranks. A model has one at a time, which `of` finds. Verbs that several threads
    call run one after another.

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
        self._chunks = chunks = _chunks_of(model)
        on_every_rank(lambda: _refuse(chunks, config))
        with torch.inference_mode(False):  # a tensor that is made in it may not be written outside
            self._states = None if optimizer is None else OptimizerStates(optimizer, config)
            try:
                self._model = on_every_rank(lambda: Model(chunks, self._states))
                self._pins = self._model.device.type == "cuda" and (config is None or config.pin_memory)
                buffers = on_every_rank(lambda: map_hosts(self._model.weight_slabs))
                require_host_memory(sum(buffer.tensor.numel() for buffer in buffers) if self._pins else 0)
                on_every_rank(lambda: self._lock(buffers))
            except BaseException:
                if self._states is not None:
                    self._states.close()
                raise
        self._caches = Caches(chunks, self._model.device)
        self._weights = WeightMoves(self._model, self._states, lambda act: self._alike(act))
        self._checks = Checks(self._model, self._states, lambda: self.away)
        self._checks.put_on(chunks, optimizer)
        _open.add(self)

    @classmethod
    def of(cls, model: torch.nn.Module | Sequence[torch.nn.Module]) -> Residency | None:
        """Return the Residency of a model, of what wraps it, or of a part of it; None where there is none."""
        chunks = _chunks_of(model)
        return next((each for each in list(_open) if not _ids(each._chunks).isdisjoint(_ids(chunks))), None)

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

    # The verbs.

    @_verb
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
                it is closed. Nothing has moved.
        """
        asked = self._asked(kinds, more)
        leaving = asked & self._here()
        states = self._states if "optimizer" in leaving else None
        units = [unit for unit in self._model.units if not unit.weights.is_away] if "params" in leaving else []
        gradients = self._model.gradients if "grads" in leaving else []

        def prepare() -> bool:
            keep = self._keeps(asked, grads)
            self._require_leave(units, states, bool(gradients))
            if gradients and keep:
                self._lock(map_hosts(self._model.gradient_slabs))
            return keep

        keep = self._alike(prepare)
        tally = Tally(self._model.device)
        goes_again = self._anywhere(states is not None and states.reads_weights and "params" in self.away)
        if not leaving and not goes_again:
            return Moved()
        leaving_slabs = [slab for unit in units for slab in unit.weights.slabs]
        dropped = self._drop_shard_gradients() if gradients and not keep else 0
        find_aliases(leaving_slabs + [slab for one in gradients for slab in one.slabs])  # after views of gradients went
        self._model.wait_for_collectives()
        if goes_again:
            if "params" in self.away:
                tally.woke.append("params")
                units = list(self._model.units)
            self._weights.wake(tally)
        # Race: memory goes to the driver from here on, while work on some stream may still use what is cached.
        wait_for_gpu(self._model.device)
        if gradients and not keep:  # first: the driver takes their memory back while others are copied
            with tally.part("grads"):
                tally.freed += dropped + sum(one.empty(keep=False) for one in gradients)
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

    @_verb
    def reload(self, kinds: Kinds = "all", *more: Kind) -> Moved:
        """Have "params", "grads" or "optimizer" back on the GPU, named as for `offload`.

        Where masters left packed they need their weights: "optimizer" brings "params" too, and `Moved.woke` says so.
        Parameters of several ranks are all-gathered, so that every rank has to ask for the same.

        Raises:
            ValueError: a word is not one of these. Nothing has moved.
            torch.OutOfMemoryError: there is no memory. What has not come back is away as before.
            RuntimeError: there is none on another rank that shares the parameters. They are away as before, here too.
                Or the Residency is closed.
        """
        asked = self._asked(kinds, more)
        away = self.away
        coming = asked & away
        states = self._states if "optimizer" in coming else None
        wakes = self._anywhere("params" in coming)
        needs_weights = self._anywhere(states is not None and states.reads_weights and "params" in away)
        if not coming and not wakes and not needs_weights:
            return Moved()
        tally = Tally(self._model.device)
        if needs_weights:
            if "params" in away - coming:
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
        elif needs_weights:
            self._alike(wake_others)
        else:
            wake_others()
        with tally.part("wait"):
            if states is not None:
                states.came_back()
            wait_for_gpu(self._model.device)  # whatever stream reads next
        return tally.moved()

    @contextmanager
    def only(self, kinds: Kinds = (), *more: Kind, grads: Literal["drop", "keep"] = "drop") -> Iterator[Moved]:
        """Context in which these are on the GPU and nothing else is; afterwards it is as it was before.

        They are named as for `offload`. Gives what leaving has moved. Raises as `offload` and `reload`.
        """
        wanted = self._asked(kinds, more)
        before = self.away
        leaving = frozenset(self._kinds()) - wanted
        # First out, so that what comes finds room; but for packed masters, which bring their weights.
        moved = self.offload(leaving, grads=grads)
        try:
            self.reload(wanted)
            yield moved
        finally:
            if gone := before - self.away:
                self.offload(gone, grads=grads)
            if back := self.away - before:
                self.reload(back)

    def asleep(self, grads: Literal["drop", "keep"] = "drop") -> Any:
        """Context in which nothing is on the GPU; afterwards it is as it was before. Gives what leaving has moved."""
        return self.only((), grads=grads)

    @_verb
    def close(self) -> None:
        """Bring everything back, and take off all hooks and host memory. Idempotent; other verbs raise from then on.

        Raises:
            torch.OutOfMemoryError, RuntimeError: it cannot be brought back. It may be called again.
        """
        if self not in _open:
            return
        self.reload()
        self._checks.close()
        self._caches.close()
        self._weights.close()
        self._model.close()
        if self._states is not None:
            self._states.close()
            self._states = None
        _open.discard(self)

    # What ranks that share parameters do alike: those that went on would wait for the others in the all-gather.

    @property
    def _is_shared(self) -> bool:
        return any(unit.weights.ranks > 1 for unit in self._model.units)

    def _alike[T](self, act: Callable[[], T]) -> T:
        """Do something that may fail; where it fails on one of the ranks, raise on all."""
        return on_every_rank(act) if self._is_shared else act()

    def _anywhere(self, own: bool) -> bool:
        """Return whether something is so on any of the ranks: packing, and an error before, may make them differ."""
        return any(gather(own)) if self._is_shared else own

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

    def _keeps(self, asked: frozenset[Kind], grads: str) -> bool:
        if grads not in ("drop", "keep"):
            raise ValueError(f"grads={grads!r}: use 'drop' or 'keep'")
        drops = grads == "drop" and "grads" in asked & self._here()
        if drops and self._model.has_backward:
            raise RuntimeError(
                "a backward has run since the last optimizer step, and offload() would drop its gradients: step, or "
                "zero them by each model chunk's zero_grad_buffer() (the optimizer's zero_grad() does not), or use "
                "offload(..., grads='keep')"
            )
        return grads == "keep"

    def _require_leave(self, units: Sequence[Unit], states: OptimizerStates | None, gradients: bool) -> None:
        if units:
            self._model.require_parameters()
        slabs = [slab for unit in units for slab in unit.weights.slabs]
        for slab in slabs + (self._model.gradient_slabs if gradients else []):
            slab.require_resizable()
        if states is not None:
            states.require_whole()

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


def _refuse(chunks: Sequence[torch.nn.Module], config: OffloadConfig | None) -> None:
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
