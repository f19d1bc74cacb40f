"""The user's class: which of a model's parameters, gradients and optimizer state are on the GPU, between steps."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, Literal, NamedTuple

import torch

from bridge_fgo.bridge import activation_offload
from bridge_fgo.bridge.compat import FLAG
from bridge_fgo.bridge.reporting import say
from bridge_fgo.bridge.session import Session, active_session
from bridge_fgo.bridge.settings import SETTINGS, is_installed, settings_of
from bridge_fgo.config import OffloadConfig, readable
from bridge_fgo.engines.ranks import collectives, gather_or_raise, on_every_rank, require_host_memory
from bridge_fgo.memory.guard import class_of, own
from bridge_fgo.memory.host_buffer import HostBuffer, page_lock
from bridge_fgo.memory.storage_slab import find_aliases
from bridge_fgo.memory.transfers import wait_for_a_while
from bridge_fgo.memory.undo import undo_on_error
from bridge_fgo.sleep.caches import Caches
from bridge_fgo.sleep.checks import Checks, wrapped_models
from bridge_fgo.sleep.gradient_offloader import Backwards, GradientOffloader, drop_shard_gradients
from bridge_fgo.sleep.moved import (
    KINDS,
    Kind,
    Kinds,
    Moved,
    Tally,
    map_hosts,
    return_to_driver,
    wait_for_gpu,
)
from bridge_fgo.sleep.refusals import PLAIN, ddp_of, movable_optimizers, refuse_models, shared_lease
from bridge_fgo.sleep.state_offloader import DEFAULTS, StateOffloader, offloader_of
from bridge_fgo.sleep.weight_offloader import HostParam, WeightOffloader, WeightSlab, Where, fitting
from bridge_fgo.sleep.weight_sets import WeightSet, WeightSets

Unit = WeightSlab | GradientOffloader | StateOffloader
"""Moves as one."""


class Asked(NamedTuple):
    """A verb moves these on this rank."""

    units: Sequence[Unit]
    finds: bool = True  # `where` holds for a parameter of this rank


class Wake(NamedTuple):
    """A rank tells the others this before a reload."""

    finds: bool  # `where` holds for any parameter
    moves: bool  # something is away
    wakes_params: bool
    needs_weights: bool  # packed masters need their parameters
    places: set[Any]  # of the parameters that are asked for


_open = weakref.WeakSet["Residency"]()  # those that are not closed; the hooks on its model keep each alive


def _verb[**P, R](method: Callable[Concatenate[Residency, P], R]) -> Callable[Concatenate[Residency, P], R]:
    """Have calls of several threads wait for each other, on any Residency, outside of autograd and of inference mode.

    An inference engine may have left inference mode on.
    """

    @wraps(method)
    def run(self: Residency, *args: P.args, **kwargs: P.kwargs) -> R:
        with collectives, torch.inference_mode(False), torch.no_grad(), own():
            return method(self, *args, **kwargs)

    return run


class Residency:
    """Offloads parameters, gradients and optimizer state from a shared GPU and reloads them, each by itself.

    Use it between steps only. The constructor is a collective of all ranks of the job, and so is each verb: an
    all-gather makes parameters of several data-parallel ranks whole, and what fails on one rank fails on all. A model
    has at most one, which `of` finds. Verbs that several threads call, also on different objects, run one after
    another; every rank has to begin them in the same order.

    Args:
        model: a model chunk or a list of them: mcore's DDP where there is one, not the model inside.
        optimizer: what the training loop steps, over DistributedOptimizers; None for a reference model.
        config: settings of the offload where no engine is attached to the optimizer; None for those given to
            `bridge_fgo.install`. A setting that would have no effect is refused.
        host_memory_limit_gib: the most host memory in GiB that a rank takes here, page-locked or not; the least that
            any rank is given counts. What does not fit stays on the GPU for good: a line on rank 0 and `Moved.stays`
            say how much. None has no limit but what the host has.
        frozen_folder: a folder in which frozen parameters are kept in files without names, which are not page-locked
            and do not count to the limit. The kernel takes their memory back where it is short. Copies from there are
            slower. None keeps them as all others.

    Raises:
        ValueError: something cannot be offloaded; names the setting to change. Or the host lacks memory.
        RuntimeError: host memory could not be page-locked.
    """

    def __init__(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        optimizer: Any = None,
        config: OffloadConfig | None = None,
        host_memory_limit_gib: float | None = None,
        frozen_folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self._session: Session | None = None  # the session that drives training steps; None before the first
        self._states: StateOffloader | None = None
        self._parts: list[Any] = []
        self._own_room = math.inf  # host bytes that may be allocated yet; with states the engine keeps this number
        self._settings = partial(_settings, config, getattr(optimizer, "config", None), optimizer is not None)
        with collectives:
            self._chunks, limits = gather_or_raise(
                lambda: (_accepted(model, optimizer, config), _limit_bytes(host_memory_limit_gib))
            )
            # A tensor that is made in inference mode may not be written outside.
            with undo_on_error(self._let_go), torch.inference_mode(False):
                self._make(optimizer, min(limits), frozen_folder)
            _open.add(self)

    def _make(self, optimizer: Any, limit: float, frozen_folder: str | os.PathLike[str] | None) -> None:
        """Find what moves, and take host memory for it. Between collectives nothing may fail on one rank alone."""
        room, in_files = gather_or_raise(lambda: self._find_memory(frozen_folder, optimizer is None, limit))
        if any(each is not None for each in in_files) and not any(in_files):  # told: the others go on with ranks
            raise ValueError(
                f"Residency(frozen_folder={str(frozen_folder)!r}): no parameter is frozen on any rank; leave it out"
            )
        if optimizer is not None:
            self._states = self._kept(offloader_of(optimizer, self._settings, room))
        staying, places = gather_or_raise(lambda: self._lacking(limit))
        alike = set[Any]().union(*places) - {None}
        _, unhosted = gather_or_raise(lambda: self._settle(limit, staying, alike))
        if max(map(sum, unhosted)):
            params, states = map(readable, max(unhosted, key=sum))
            say(
                f"a limit of {readable(limit)} of host memory a rank has no room for {states} of optimizer "
                f"state and {params} of parameters (on the rank with most), which stay on the GPU"
            )
        settings = self._settings() if self._states is None else self._states.lease.settings
        self._pins = self._device.type == "cuda" and settings.pin_memory
        hosts = on_every_rank(lambda: map_hosts(self._weights.slabs))
        require_host_memory(sum(buffer.tensor.numel() for buffer in hosts) if self._pins else 0)
        on_every_rank(lambda: self._finish(hosts, optimizer))
        if settings.activation_waits:
            activation_offload.askers.add(self)

    def _find_memory(
        self, frozen_folder: str | os.PathLike[str] | None, all_are_frozen: bool, limit: float
    ) -> tuple[float, int | None]:
        """Find weights and gradients; return the bytes of host memory that a limit leaves for states.

        And, to be told, the bytes of frozen weights in files; None without a folder.
        """
        self._ddps = [ddp for chunk in self._chunks for ddp in ddp_of(chunk)]
        buffers = [buffer for ddp in self._ddps for buffer in ddp.buffers + ddp.expert_parallel_buffers]
        names = {id(param): name for chunk in self._chunks for name, param in chunk.named_parameters()}
        devices = [buffer.grad_data.device for buffer in buffers]
        devices += [parameter.device for chunk in self._chunks for parameter in chunk.parameters()]
        self._device = next((device for device in devices if device.type == "cuda"), torch.device("cpu"))
        self._gradients = self._kept(GradientOffloader(buffers, names))
        self._weights = self._kept(WeightOffloader(self._chunks, buffers, names, self._device))
        if not isinstance(frozen_folder, str | os.PathLike | None) or frozen_folder == "":
            raise ValueError(f"Residency(frozen_folder={frozen_folder!r}): name a folder, or leave it out")
        folder = None if frozen_folder is None else Path(frozen_folder)
        in_files = None if folder is None else self._weights.keep_in_files(folder, all_are_frozen)
        # Weights first: DDP's buffers free most of the GPU's memory for the host's.
        return limit - sum(slab.host_bytes for slab in fitting(self._weights.slabs, limit)), in_files

    def _lacking(self, limit: float) -> tuple[list[WeightSlab], set[Any]]:
        """Return the weights for which states leave no host memory, and, to be told, their places."""
        taken = 0 if self._states is None else self._states.host_bytes
        if taken > limit:
            raise ValueError(
                f"Residency(host_memory_limit_gib={limit / 2**30:g}): the engine that is attached to the optimizer has "
                f"{readable(taken)} of host memory already: raise the limit, or lower OffloadConfig.fraction"
            )
        moving = set(fitting(self._weights.slabs, limit - taken))
        staying = [slab for slab in self._weights.slabs if slab not in moving]
        return staying, {slab.place for slab in staying}

    def _settle(self, limit: float, staying: list[WeightSlab], alike: set[Any]) -> tuple[None, tuple[int, int]]:
        """Keep weights on the GPU for good; return, to be told, their bytes, and those of states that stay too.

        alike: places of what stays on some rank, and so on all that gather it.
        """
        states, weights = self._states, self._weights
        own = set(staying)
        weights.keep_here([slab for slab in weights.slabs if slab in own or slab.place in alike])
        room = limit - sum(slab.host_bytes for slab in weights.slabs)
        if states is None:
            self._own_room = room
        else:
            states.engine.host_room = room - states.host_bytes
            weights.round_from(states)
        self._checks = self._kept(Checks(lambda: self.away, states))
        self._backwards = self._kept(Backwards(self._ddps))
        self._caches = self._kept(Caches(self._chunks, self._device))
        self._sets = self._kept(WeightSets(self._chunks, self._lock))
        unhosted = weights.unhosted_bytes, 0 if states is None else states.engine.unhosted_bytes
        self._unhosted = sum(unhosted)
        find_aliases(self._weights.slabs + self._gradients.slabs)
        return None, unhosted

    def _kept[T](self, part: T) -> T:
        """Return what is to be closed with this."""
        self._parts.append(part)
        return part

    @property
    def _room(self) -> float:
        """Bytes of host memory that may be taken yet; background saves of the states take of the same."""
        return self._own_room if self._states is None else self._states.engine.host_room

    @_room.setter
    def _room(self, nbytes: float) -> None:
        if self._states is None:
            self._own_room = nbytes
        else:
            self._states.engine.host_room = nbytes

    def _finish(self, hosts: Sequence[HostBuffer], optimizer: Any) -> None:
        self._lock(hosts)
        self._checks.on_model(self._chunks, self._ddps, self._backwards)
        if self._states is not None:
            self._checks.on_optimizer(optimizer, self._backwards)
        for ddp in self._ddps:
            self._checks.before(ddp, "finish_grad_sync", self._gradients_ready)

    @classmethod
    def of(cls, model: torch.nn.Module | Sequence[torch.nn.Module]) -> Residency | None:
        """Return the Residency of a model, of what wraps it, or of a part of it; None where there is none."""
        ids = _ids(_chunks_of(model))
        return next((each for each in list(_open) if not _ids(each._chunks).isdisjoint(ids)), None)

    def _lock(self, hosts: Sequence[HostBuffer]) -> None:
        if self._pins and hosts:
            page_lock(hosts)

    # What is where.

    @property
    def _units(self) -> list[Unit]:
        return [*self._weights.slabs, self._gradients, *([] if self._states is None else [self._states])]

    @property
    def away(self) -> frozenset[Kind]:
        """The kinds that are not on the GPU, or not all of them."""
        return frozenset(unit.kind for unit in self._units if unit.is_away)

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host bytes that are held for all of it."""
        slabs = self._weights.slabs + self._gradients.slabs
        own = sum(slab.host.pinned_bytes for slab in slabs if slab.host is not None)
        own += sum(bucket.pinned_bytes for bucket in self._gradients.buckets)
        own += self._sets.pinned_bytes
        return own + (self._states.engine.pinned_bytes if self._states is not None else 0)

    @property
    def has_optimizer(self) -> bool:
        """Whether it was made with an optimizer."""
        return self._states is not None

    @property
    def has_gradients(self) -> bool:
        """Whether a backward has run whose gradients no step has used, and nobody has zeroed."""
        return bool(self._backwards.pending)

    def serve_states(self) -> None:
        """Have installed patches serve states that are away to readers and steps, also outside of `checkpointing`."""
        if self._states is not None:
            self._states.lease.serves_sleep = True

    @_verb
    def host_params(self) -> list[HostParam]:
        """Return this rank's shard of every parameter, from the host; parameters that are away stay so.

        Where a part of them is away, those on the GPU are copied. Values are the host's own memory: read them before
        parameters are offloaded again, and write nothing there. No collective. Parameters that were not copied, as
        masters round to them, are rounded on the host, once a sleep.

        Raises:
            RuntimeError: all parameters are on the GPU, or the Residency is closed.
            ValueError: a parameter is in FP8.
        """
        self._require_open()
        wait_for_gpu(self._device)
        return self._weights.on_host()

    # The verbs. What one rank decides by itself leads to no collective: every rank does each of them, until one fails.

    def offload(
        self,
        kinds: Kinds = "all",
        *more: Kind,
        grads: Literal["drop", "keep"] = "drop",
        where: Where | None = None,
    ) -> Moved:
        """Offload "params", "grads" or "optimizer", and return their GPU memory to the driver.

        What is away stays away. When it returns, every copy is done.

        Args:
            kinds: any of the three, in any order, by one name or a list of names; "all" for all of them. An empty list
                moves nothing.
            more: further names.
            grads: "drop" discards gradients, which `reload` makes zeros. "keep" copies them.
            where: of "params" those alone for which this returns True, called with the name and the parameter. "params"
                are in `away` as long as any of them is. Parameters in one of DDP's buffers move together.

        Returns:
            What was moved.

        Raises:
            ValueError: a word is not one of these, or `where` holds for a part of a buffer, or for no parameter on any
                rank. Nothing has moved.
            RuntimeError: a backward has run since the last update, and its gradients would be dropped; or the state
                cannot be offloaded as it is; or a parameter is not one of those that the Residency was made with, or
                it is closed. Nothing has moved. Or another rank failed on the way.
        """
        return self._offload(lambda: self._asked(kinds, more, where), grads)

    @_verb
    def _offload(self, asked: Callable[[], Asked], grads: str) -> Moved:
        def prepare() -> tuple[tuple[list[Unit], Tally], tuple[bool, bool]]:
            given = asked()
            units = [unit for unit in given.units if unit.is_here]
            self._require_no_backward(units, grads)
            self._require_movable(units, grads)
            self._wait_for_collectives()
            wakes = self._states in units and self._lacks_weights
            return (units, Tally(self._device)), (given.finds, wakes)

        (units, tally), votes = gather_or_raise(prepare)
        _require_found(any(finds for finds, _ in votes))
        wakes_params = any(wakes for _, wakes in votes)
        if wakes_params:
            if woken := [slab for slab in self._weights.read_by_masters if slab.is_away]:
                tally.moved.woke = ("params",)
                units += woken
            self._weights.reload(self._weights.read_by_masters, tally)

        def move() -> Moved:
            if wakes_params:
                self._weights.make_columnwise()
            return self._offload_alone(units, grads, tally) if units else Moved()

        return on_every_rank(move)

    def _offload_alone(self, units: Sequence[Unit], grads: str, tally: Tally) -> Moved:
        """Offload what is on the GPU; no other rank takes part in it."""
        states, slabs = self._states if self._states in units else None, _weights_of(units)
        has_grads = self._gradients in units
        drops, keeps = has_grads and grads == "drop", has_grads and grads == "keep"
        dropped = 0
        if drops and self._states is not None:
            dropped = sum(drop_shard_gradients(leaf.optimizer) for leaf in self._states.optimizers)
        find_aliases([*slabs, *(self._gradients.slabs if has_grads else ())])  # after views of gradients went
        # Race: memory goes to the driver from here on, while work on some stream may still use what is cached.
        wait_for_gpu(self._device)
        if drops:  # first: the driver takes their memory back while others are copied
            with tally.part("grads"):
                tally.moved.freed += dropped + self._gradients.empty(kept=False)
                self._backwards.used()

        def give_up() -> None:
            if states is not None:
                states.give_up_offload()
            # Race: weights that stay after all may be written while their copies still read them.
            wait_for_gpu(self._device)

        with undo_on_error(give_up, self._weights.masters_may_change):
            # Weights first: their copies run while masters are compared, and while the states' are queued.
            self._weights.start_offload(slabs, states is not None, tally)
            if states is not None:
                before = states.released_bytes + states.unmade_bytes
                with tally.part("optimizer"):
                    tally.copy("optimizer", states.start_offload())
                if not states.reads_weights:  # while states are copied the driver takes these back too
                    with tally.part("params"):
                        tally.moved.freed += self._weights.release(slabs)
                with tally.part("optimizer"):
                    states.end_offload()
                tally.moved.freed += states.released_bytes - before
        if keeps:
            tally.copy("grads", self._gradients.copy_out())
        # Race: storages that are emptied go to whoever asks next on the stream that they were made on, and to the
        # driver, while copies on another stream still read them.
        with tally.part("wait"):
            wait_for_gpu(self._device)
        tally.moved.freed += self._weights.release(slabs)
        if keeps:
            tally.moved.freed += self._gradients.empty(kept=True)
        with tally.part("driver"):
            return_to_driver(self._device)
        with tally.part("caches"):
            tally.moved.caches = self._caches.drop(self.away, is_mid_step=self.has_gradients)
        if tally.moved.caches:
            with tally.part("driver"):
                return_to_driver(self._device)
        tally.note_what_stays(self._unhosted)
        return tally.end()

    def reload(self, kinds: Kinds = "all", *more: Kind, where: Where | None = None) -> Moved:
        """Reload "params", "grads" or "optimizer" to the GPU, named and chosen as for `offload`.

        Packed masters need their weights: then "optimizer" reloads these too, and `Moved.woke` says so. Parameters of
        several ranks are all-gathered: one of DDP's buffers that any of its ranks asks for is reloaded on all of them.

        Raises:
            ValueError: as `offload`. Nothing has moved.
            torch.OutOfMemoryError: there is no memory. What was not reloaded is away as before.
            RuntimeError: another rank failed. Parameters are away as before, here too. Or the Residency is closed.
        """
        return self._reload(lambda: self._asked(kinds, more, where))

    def reload_trained(self, kinds: Kinds) -> Moved:
        """Do as `reload`, of "params" with DDP's buffers, whole, and of other parameters with those that train."""

        def asked() -> Asked:
            given, trained = self._asked(kinds, (), None), self._weights.trained
            return given._replace(units=[unit for unit in given.units if unit.kind != "params" or unit in trained])

        return self._reload(asked)

    @_verb
    def _reload(self, asked: Callable[[], Asked]) -> Moved:
        def look() -> tuple[tuple[list[Unit], list[WeightSlab], Tally], Wake]:
            given = asked()
            units, slabs = [unit for unit in given.units if unit.is_away], _weights_of(given.units)
            wakes_params = any(slab.is_away for slab in slabs)
            needs_weights = self._states in units and self._lacks_weights
            places = {slab.place for slab in slabs}
            told = Wake(given.finds, bool(units), wakes_params, needs_weights, places)
            return (units, slabs, Tally(self._device)), told

        (units, slabs, tally), ranks = gather_or_raise(look)
        _require_found(any(rank.finds for rank in ranks))
        moves, wakes_params = any(rank.moves for rank in ranks), any(rank.wakes_params for rank in ranks)
        needs_weights = any(rank.needs_weights for rank in ranks)
        if not moves:
            return Moved()
        asked_by_any = set[Any]().union(*(rank.places for rank in ranks)) - {None}
        known, needed = set(slabs), set(self._weights.read_by_masters if needs_weights else ())
        others = [s for s in self._weights.slabs if s not in known and (s in needed or s.place in asked_by_any)]
        if any(slab.is_away for slab in others):
            tally.moved.woke = ("params",)
        known.update(others)
        slabs = [slab for slab in self._weights.slabs if slab in known]  # the ranks gather them in one order
        states = self._states if self._states in units else None

        def reload_others() -> None:
            if states is not None:  # first: the driver gives memory for the others while these are copied
                before = states.released_bytes
                with tally.part("optimizer"):
                    tally.copy("optimizer", states.reload())
                tally.moved.freed += states.released_bytes - before
            if self._gradients in units:
                with tally.part("grads"):
                    taken, copied = self._gradients.reload()
                tally.moved.freed -= taken
                tally.copy("grads", copied)

        def finish() -> Moved:
            if needs_weights or not wakes_params:
                reload_others()
            if needs_weights or wakes_params:
                self._weights.make_columnwise()
            with tally.part("wait"):
                if states is not None:
                    states.finish_reload()
                wait_for_gpu(self._device)  # whatever stream reads next
            self._weights.masters_came(tally)
            return tally.end()

        self._weights.is_reloading_masters = True
        with undo_on_error(lambda: self._weights.masters_came(tally)):
            if needs_weights:
                self._weights.reload(slabs, tally)
            elif wakes_params:
                self._weights.reload(slabs, tally, reload_others)
            return on_every_rank(finish)

    @contextmanager
    def only(
        self,
        kinds: Kinds = (),
        *more: Kind,
        grads: Literal["drop", "keep"] = "drop",
        where: Where | None = None,
    ) -> Iterator[Moved]:
        """Context in which these kinds alone are on the GPU; afterwards everything is where it was before.

        Kinds are named, and parameters chosen, as for `offload`. Gives what the offload has moved. Raises as `offload`
        and `reload`.

        Where the block raises, what was reloaded is offloaded again, and what was offloaded stays away, as its reload
        may be a collective: a note on the error says so. `reload` on every rank ends it.
        """
        asked = Asked(())

        def others() -> Asked:
            nonlocal asked
            asked = self._asked(kinds, more, where)
            staying = set(asked.units)
            return Asked([unit for unit in self._units if unit not in staying], finds=asked.finds)

        with self._as_before(grads):
            # Offload first, to make room; but packed masters bring their weights with them.
            moved = self._offload(others, grads)
            self._reload(lambda: asked)
            yield moved

    def asleep(self, grads: Literal["drop", "keep"] = "drop") -> Any:
        """Context in which nothing is on the GPU; afterwards everything is where it was before, as with `only`."""
        return self.only((), grads=grads)

    @contextmanager
    def _as_before(self, grads: Literal["drop", "keep"] = "drop") -> Iterator[None]:
        def look() -> list[Unit]:
            self._require_open()
            return [unit for unit in self._units if unit.is_away]

        def newly_resident() -> Asked:
            self._require_open()
            return Asked([unit for unit in before if not unit.is_away])

        before = on_every_rank(look)
        try:
            yield
        except BaseException as error:
            # No collective: other ranks may be in the midst of the block, or have failed elsewhere.
            self._offload_again(before, grads, error)
            raise
        self._offload(newly_resident, grads)
        known = set(before)
        self._reload(lambda: Asked([unit for unit in self._units if unit not in known]))
        self._offload(newly_resident, grads)  # packed masters may have brought their weights

    @_verb
    def _offload_again(self, before: Sequence[Unit], grads: str, error: BaseException) -> None:
        """Offload on this rank what was away before an error; note on the error what is not where it was."""
        try:
            self._require_open()
            if gone := {unit.kind for unit in self._units if unit.is_away and unit not in before}:
                words = ", ".join(map(repr, sorted(gone)))
                error.add_note(f"bridge_fgo: {words} stay off the GPU after this error: call reload() on every rank")
            reloaded = [unit for unit in before if unit.is_here]
            if self._lacks_weights:
                reloaded = [unit for unit in reloaded if unit is not self._states]
            if reloaded:
                wait_for_a_while(lambda: (self._wait_for_collectives(), wait_for_gpu(self._device)))
                self._require_movable(reloaded, grads)
                self._offload_alone(reloaded, grads, Tally(self._device))
        except Exception as failure:
            error.add_note(f"bridge_fgo: what the block has reloaded may still be on the GPU: {failure}")

    @_verb
    def close(self) -> None:
        """Reload everything, and remove all hooks and host memory. Idempotent; other verbs raise from then on.

        Raises:
            torch.OutOfMemoryError, RuntimeError: it cannot be reloaded. It may be called again.
        """

        def everything() -> Asked:
            self._require_open()
            return Asked(self._units)

        if self not in _open:
            return
        self._reload(everything)
        on_every_rank(self._let_go)
        _open.discard(self)

    def _let_go(self) -> None:
        if self._session is not None and not self._session.closed:
            self._session.close()
        for part in reversed(self._parts):
            part.close()
        self._states = None
        activation_offload.askers.discard(self)

    # Several weights.

    @_verb
    def keep(self, name: str, where: Where | None = None) -> Moved:
        """Copy parameters to the host under a name, for `weights`; each rank copies its own shard.

        Persistent buffers of modules go with them. What has not changed since a set of that name was kept is not copied
        again. Host memory is page-locked once, and held until `drop` or `close`.

        Args:
            name: any text.
            where: as for `offload`; a swap leaves other parameters as they are.

        Raises:
            ValueError: a parameter is in FP8, or forwards would change the model's amax history
                (`model.fp8_recipe="delayed"`); or the name, or `where`, as for `offload`. Or the host lacks memory.
            RuntimeError: parameters are away; or it is closed. Or another rank failed. What fails in copying leaves
                nothing under the name.
        """

        def look() -> tuple[tuple[list[WeightSlab], bool, int, Tally], bool]:
            self._require_open(in_block=True)
            _require_name("keep", name)
            self._weights.require_known()
            slabs, finds = self._weights.chosen(where)
            self._require_plain(slabs)
            is_new = not self._sets.has(name, slabs)
            needed = sum(slab.copied_nbytes for slab in slabs) if is_new else 0
            if needed > self._room or self._weights.unhosted_bytes:
                raise ValueError(
                    f"keep({name!r}) takes {readable(needed)} of host memory beside that of all parameters, and "
                    f"host_memory_limit_gib leaves {readable(max(0, self._room))}: give Residency a higher limit"
                )
            if any(slab.is_away for slab in slabs):
                raise RuntimeError(f"keep({name!r}) while parameters are away: call reload('params') first")
            self._wait_for_collectives()
            wait_for_gpu(self._device)
            return (slabs, is_new, needed, Tally(self._device)), finds

        (slabs, is_new, needed, tally), finds = gather_or_raise(look)
        _require_found(any(finds))
        require_host_memory(needed if self._pins else 0)

        def copy() -> Moved:
            if is_new:
                self._room += self._sets.make(name, slabs) - needed
            self._sets.copy_out(name, tally)
            wait_for_gpu(self._device)
            return tally.end()

        # On some rank it would have another's values, or none.
        # Race: copies that are queued write host memory that goes.
        with undo_on_error(lambda: wait_for_gpu(self._device), lambda: self.drop(name)):
            return on_every_rank(copy)

    @_verb
    def drop(self, name: str) -> None:
        """Release the host memory of what was kept under a name; local, and no error where nothing was."""
        _require_name("drop", name)
        self._room += self._sets.drop(name)

    @contextmanager
    def weights(self, name: str) -> Iterator[Moved]:
        """Context in which the model has the weights that were kept under a name, for forwards without gradients.

        At its end the model's own are there again, bit for bit, or away as before. All ranks take part. Inside only
        `keep` and `drop` may be called; forwards with gradients, backwards and optimizer steps are refused.

        Gives what the swap has moved: of what is equal nothing, and of the model's own what the host lacks.

        Where the block raises, parameters that it has swapped stay off the GPU, and a note on the error says so:
        `reload("params")` on every rank brings the model's own.

        Raises:
            ValueError: nothing was kept under the name.
            RuntimeError: a backward has run since the last update, or a training step is running, or it is in another
                such block, or closed; or ranks that share a buffer differ in whether it is away, or kept. Nothing has
                moved. Or another rank failed.
            torch.OutOfMemoryError: there is no memory for parameters that are away.
        """
        kept, slabs, tally = self._find_swapped(name)
        try:
            moved = self._swap_in(name, kept, slabs, tally)
            with torch.no_grad():
                yield moved
            self._swap_out()
        except BaseException as error:
            self._give_up_swap(error)
            raise
        finally:
            self._checks.swapped = ""

    @_verb
    def _find_swapped(self, name: str) -> tuple[WeightSet, list[WeightSlab], Tally]:
        def look() -> tuple[tuple[WeightSet, set[WeightSlab], Tally], tuple[set[Any], set[Any]]]:
            self._require_open()
            _require_name("weights", name)
            if (kept := self._sets.by_name.get(name)) is None:
                raise ValueError(f"weights({name!r}): kept are {sorted(self._sets.by_name)}; call keep({name!r}) first")
            if self.has_gradients or active_session() is not None:
                raise RuntimeError(
                    f"weights({name!r}) in a training step, or between a backward and its update: swap before, or after"
                )
            self._weights.require_known()
            self._wait_for_collectives()
            # Race: work on another stream may still write the weights that are summed, or read those that go.
            wait_for_gpu(self._device)
            changed, slabs = self._sets.changed(kept), set(kept.slabs)
            found = {(slab.place, slab.is_away, slab in slabs) for slab in self._weights.slabs if slab.place}
            return (kept, changed, Tally(self._device)), ({slab.place for slab in changed}, found)

        (kept, changed, tally), told = gather_or_raise(look)
        found = set[Any]().union(*(found for _, found in told))
        if len({place for place, *_ in found}) < len(found):  # some would gather, and others not
            raise RuntimeError(
                f"weights({name!r}): of one of DDP's buffers some ranks alone have parameters away, or kept: call "
                f"reload('params'), or keep({name!r}) with one `where`, on every rank"
            )
        alike = set[Any]().union(*(places for places, _ in told)) - {None}
        return kept, [slab for slab in kept.slabs if slab in changed or slab.place in alike], tally

    @_verb
    def _swap_in(self, name: str, kept: WeightSet, slabs: Sequence[WeightSlab], tally: Tally) -> Moved:
        def swap() -> None:
            self._checks.swapped = name
            self._caches.drop({"params"}, is_mid_step=False)
            self._sets.swap_in(kept, slabs, tally)

        def end() -> Moved:
            wait_for_gpu(self._device)  # whatever stream reads next
            return tally.end()

        on_every_rank(swap)
        for slab in slabs:
            slab.gather()
        return on_every_rank(end)

    @_verb
    def _swap_out(self) -> None:
        def swap() -> list[WeightSlab]:
            wait_for_gpu(self._device)  # Race: forwards on another stream may still read what is written
            self._caches.drop({"params"}, is_mid_step=False)
            return self._sets.swap_out()

        def end() -> None:
            wait_for_gpu(self._device)  # whatever stream reads next, and before memory is released
            self._sets.end()
            return_to_driver(self._device)

        for slab in on_every_rank(swap):
            slab.gather()
        on_every_rank(end)

    @_verb
    def _give_up_swap(self, error: BaseException) -> None:
        """End a swap on this rank after an error; note on it what is not where it was."""
        try:
            wait_for_a_while(lambda: (self._wait_for_collectives(), wait_for_gpu(self._device)))
            self._caches.drop({"params"}, is_mid_step=False)
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
        for config in (getattr(chunk, "config", None) for chunk in self._chunks):
            if getattr(config, "fp8", None) and getattr(config, "fp8_recipe", "delayed") == "delayed":
                raise ValueError(
                    "keep() with model.fp8_recipe='delayed': forwards of other weights would be in the model's amax "
                    "history; set model.fp8_recipe='tensorwise'"
                )

    # Training steps.

    @contextmanager
    def training_step(self, microbatches: int = 1) -> Iterator[None]:
        """Context of one training step of a loop of one's own, in which the optimizer state is offloaded.

        As Bridge's `train_step` with the flag: states leave as it begins, come back as gradients are finalized (mcore's
        `finalize_model_grads_func`, or DDP's `finish_grad_sync`) or the optimizer steps, and step by parts. Afterwards
        the parts whose memory others needed are away ("optimizer" is in `away`, of a model with several parts), until
        the next step, or until `reload` brings them.

        Inside, forwards and backwards of all microbatches, then one `optimizer.step()`, which may skip the update.
        Where the block raises before that, nothing is lost, and the next block may follow.

        Args:
            microbatches: how many the block runs; steps of as many need as much memory.

        Raises:
            ValueError: the Residency has no optimizer, or its engine is Bridge's, by the flag. Or `microbatches`.
            RuntimeError: `bridge_fgo.install()` was not called; a training step is running; parameters or gradients
                are away. Nothing has moved. Or an error has ended an optimizer step half-way.
        """
        session = self._begin(microbatches)
        with session.training_step(self._chunks, microbatches):
            updates = session.updates
            session.begin_pass()
            session.release()
            yield
            session.updated = session.updates > updates

    def _begin(self, microbatches: int) -> Session:
        self._require_open()
        states = self._states
        if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
            raise ValueError(f"training_step(microbatches={microbatches!r}): give how many the step runs, at least 1")
        if states is None:
            raise ValueError("training_step() of a Residency that was made with optimizer=None: give it the optimizer")
        if states.lease.owner != "sleep":
            raise ValueError(
                f"training_step() with optimizer.{FLAG}=True: Bridge's train_step offloads already; leave the context "
                "out, or unset the flag in a loop of your own"
            )
        if not is_installed():
            raise RuntimeError("training_step() needs mcore's optimizer to be patched: call bridge_fgo.install() first")
        if active_session() is not None:
            raise RuntimeError("training_step() inside of a training step: end that one first")
        self._checks.require("params", "grads")
        if self._session is None or self._session.closed:  # by an uninstall
            from megatron.core.utils import get_model_config

            if self._settings() != states.lease.settings:
                raise ValueError(
                    f"training_step() of a Residency that was made with {states.lease.settings}, and "
                    f"{self._settings()} was given to bridge_fgo.install later: close() it, and make it after install()"
                )
            states.forget_copies()
            self._session = Session(states.lease, get_model_config(self._chunks[0]))
        return self._session

    def _gradients_ready(self) -> None:
        session = active_session()
        if session is not None and session is self._session:
            session.reload()

    # Checkpoints.

    @contextmanager
    def checkpointing(self) -> Iterator[None]:
        """Context in which a checkpoint may be saved or loaded, asleep or not; afterwards, as with `only`, as before.

        Parameters are on the GPU inside: they come back if they are away, so every rank has to take part. Optimizer
        state stays where it is with `bridge_fgo.install()`: it is saved from the host, and loaded to there. Without,
        it comes back too. Gradients stay away.

        Raises:
            torch.OutOfMemoryError, RuntimeError: as `reload`, before the block, and `offload`, after it.
        """
        states = self._states if is_installed() else None

        def needed() -> Asked:
            if states is None:
                return Asked([unit for unit in self._units if unit is not self._gradients])
            states.require_whole()
            return Asked(self._weights.slabs)

        with self._as_before():  # what is loaded is loaded to the host
            self._reload(needed)
            with nullcontext() if states is None else states.lease.serve():
                yield

    # Parts of the verbs.

    @property
    def _lacks_weights(self) -> bool:
        """Whether states cannot move before weights are reloaded: packed masters need them."""
        reads = self._states is not None and self._states.reads_weights
        return reads and any(slab.is_away for slab in self._weights.read_by_masters)

    def _require_open(self, in_block: bool = False) -> None:
        """Raise RuntimeError after `close`, and inside of `weights` where not `in_block`."""
        if self not in _open:
            raise RuntimeError("a Residency was used after close(): make another by Residency(model, optimizer)")
        if self._checks.swapped and not in_block:
            raise RuntimeError(
                f"a Residency was used in the block of its weights({self._checks.swapped!r}), where only keep() and "
                "drop() may be called: end the block first"
            )

    def _asked(self, kinds: Kinds, more: Sequence[Kind], where: Where | None) -> Asked:
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
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("nothing can move while the current stream is captured into a CUDA graph")
        found = set(KINDS if "all" in asked else asked)
        if where is not None and "params" not in found:
            raise ValueError(f"where= chooses among 'params', and only {sorted(found)} are asked for: add 'params'")
        slabs, finds = self._weights.chosen(where) if "params" in found else ([], True)
        others = [unit for unit in self._units if unit.kind != "params" and unit.kind in found]
        return Asked([*slabs, *others], finds)

    def _require_no_backward(self, units: Sequence[Unit], grads: str) -> None:
        if grads not in ("drop", "keep"):
            raise ValueError(f"grads={grads!r}: use 'drop' or 'keep'")
        if grads == "drop" and self._gradients in units and self.has_gradients:
            raise RuntimeError(
                "a backward has run since the last optimizer step, and offload() would drop its gradients: step, or "
                "zero them by each model chunk's zero_grad_buffer() (the optimizer's zero_grad() does not), or use "
                "offload(..., grads='keep')"
            )

    def _require_movable(self, units: Sequence[Unit], grads: str) -> None:
        slabs, has_grads = _weights_of(units), self._gradients in units
        if slabs:
            self._weights.require_known()
        for slab in (*slabs, *(self._gradients.slabs if has_grads else ())):
            slab.require_resizable()
        if self._states is not None and self._states in units:
            self._states.require_whole()
        if has_grads and grads == "keep":
            needed = self._gradients.unmapped_bytes
            if needed > self._room:
                raise ValueError(
                    f"offload(grads='keep') takes {readable(needed)} of host memory, and host_memory_limit_gib leaves "
                    f"{readable(self._room)}: step or zero them before, or give Residency a higher limit"
                )
            hosts = self._gradients.map_hosts()
            self._room -= needed  # also if the lock fails: they stay mapped, to be locked by another call
            self._lock(hosts)

    def _wait_for_collectives(self) -> None:
        """Have the current stream wait for gathers and reductions in flight; DDP keeps the handles, and waits too."""
        for ddp in self._ddps:
            for group in ddp.bucket_groups + ddp.expert_parallel_bucket_groups:
                for handle in (group.param_gather_handle, group.grad_reduce_handle):
                    if handle is not None:
                        # Race: the collective would write into memory that was released, or not be in the copy.
                        handle.wait()


def _weights_of(units: Iterable[Unit]) -> list[WeightSlab]:
    return [unit for unit in units if isinstance(unit, WeightSlab)]


def _chunks_of(model: torch.nn.Module | Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return model chunks as a list, or raise ValueError where one is something else."""
    chunks = list(model) if isinstance(model, Sequence) else [model]
    for wrong in [type(chunk) for chunk in chunks if not isinstance(chunk, torch.nn.Module)]:
        raise ValueError(
            f"Residency(model={wrong.__name__}): pass a module, or a list of model chunks, and then the optimizer: "
            "Residency(model, optimizer)"
        )
    return chunks


def _require_name(verb: str, name: Any) -> None:
    """Raise ValueError where a name for weights is none; an empty one would not end what `weights` refuses."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"{verb}({name!r}): give a name, which is a text that is not empty")


def _require_found(is_any: bool) -> None:
    """Raise ValueError where a `where` holds for no parameter on any rank; every rank knows that alike."""
    if not is_any:
        raise ValueError(
            "where= holds for no parameter on any rank: it is called with the names that the model's "
            "named_parameters() have, and with the parameters"
        )


def _ids(chunks: Sequence[torch.nn.Module]) -> set[int]:
    """Return the `id`s of chunks, of what they wrap, and of their parameters."""
    return {id(each) for chunk in chunks for each in (*wrapped_models(chunk), *chunk.parameters())}


def _limit_bytes(gib: float | None) -> float:
    """Return a limit in bytes, or raise ValueError where it is none."""
    if gib is None:
        return math.inf
    if isinstance(gib, bool) or not isinstance(gib, int | float) or not gib > 0:
        raise ValueError(f"Residency(host_memory_limit_gib={gib!r}): use a number of GiB above 0, or None")
    return gib * 2**30


def _accepted(
    model: torch.nn.Module | Sequence[torch.nn.Module], optimizer: Any, config: OffloadConfig | None
) -> list[torch.nn.Module]:
    """Return the chunks of a model, or raise ValueError where they, or the settings, are refused."""
    chunks = _chunks_of(model)
    refuse_models(chunks)
    if config is not None:
        _refuse_settings(config, optimizer)
        if config.activation_waits:
            activation_offload.refuse_unwaited(getattr(chunks[0], "config", None))
    if Residency.of(chunks) is not None:
        raise ValueError(
            "the model has a Residency already, or shares parameters with one that has: Residency.of(model) returns "
            "it, close() ends it"
        )
    return chunks


def _settings(config: OffloadConfig | None, optimizer_config: Any, moves_states: bool) -> OffloadConfig:
    """Return the settings of a Residency: `config`, or else the installed ones.

    Raises:
        ValueError: the installed ones have some that would have no effect.
    """
    if config is not None or not is_installed():
        return config or DEFAULTS
    found = settings_of(optimizer_config)
    if moves_states and (found.engine == "mcore" or found.gradients):
        lost = f"engine={found.engine!r}" if found.engine == "mcore" else f"gradients={found.gradients!r}"
        raise ValueError(
            f"Residency with OffloadConfig({lost}) of bridge_fgo.install or optimizer.{SETTINGS}: only Bridge's "
            f"train_step with optimizer.{FLAG}=True goes by that; leave it out, or give Residency a config of its own"
        )
    return replace(found, engine="native")


def _refuse_settings(config: OffloadConfig, optimizer: Any) -> None:
    """Raise ValueError where a setting would have no effect in a Residency."""
    if not isinstance(config, OffloadConfig):
        raise ValueError(f"Residency(config={config!r}): give the settings as bridge_fgo.OffloadConfig(...)")
    if config.engine == "mcore":
        raise ValueError(
            "Residency(config=OffloadConfig(engine='mcore')): this package's engine alone can move states between "
            "steps; use engine='native'"
        )
    if config.gradients:
        raise ValueError(
            f"Residency(config=OffloadConfig(gradients={config.gradients!r})): gradients are managed in Bridge's "
            "train_step alone; set it to False, or set optimizer.offload_optimizer_states and leave config out"
        )
    if config.measure:
        raise ValueError(
            "Residency(config=OffloadConfig(measure=True)): Bridge's train_step alone logs peaks without the offload; "
            "set it to False, and read the peaks of training_step() from bridge_fgo.stats()"
        )
    lost = [each for each in config.native_only_settings() if not each.startswith("pin_memory=")]
    if lost and optimizer is None:
        raise ValueError(
            f"Residency(config=OffloadConfig({', '.join(lost)})) with optimizer=None: there are no states to offload; "
            "leave it out, or give Residency the optimizer"
        )
    lease = None if optimizer is None else shared_lease(movable_optimizers(optimizer))
    in_force = config if lease is None else lease.settings
    if lost := [each for each in config.native_only_settings() if each not in in_force.native_only_settings()]:
        raise ValueError(
            f"Residency(config=OffloadConfig({', '.join(lost)})): the engine that is attached to the optimizer has "
            "settings of its own; leave config out, and give the settings to bridge_fgo.install"
        )
    needs = {"activation_waits": config.activation_waits, "gpu_memory_budget_gib": config.gpu_memory_budget_gib}
    for name, value in needs.items():
        if value and not is_installed():
            raise ValueError(
                f"Residency(config=OffloadConfig({name}={value!r})): call bridge_fgo.install() first, without which it "
                "has no effect"
            )
