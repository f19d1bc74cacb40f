"""The user's class: which of a model's parameters, gradients and optimizer state are on the GPU, between steps.

It is a facade over `sleep.trainer_memory`, which finds what moves, `sleep.moves`, which moves it on all
ranks, `sleep.weight_sets`, and `bridge.session`, which drives training steps.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from bridge_fgo.bridge import activation_offload
from bridge_fgo.bridge.compat import FLAG
from bridge_fgo.bridge.reporting import say
from bridge_fgo.bridge.residency_settings import refuse_settings, settings_in_force
from bridge_fgo.bridge.session import Session, active_session
from bridge_fgo.bridge.settings import is_installed
from bridge_fgo.config import OffloadConfig, readable
from bridge_fgo.engines.ranks import collectives, gather_or_raise, on_every_rank
from bridge_fgo.sleep import moves
from bridge_fgo.sleep.checks import wrapped_models
from bridge_fgo.sleep.host_budget import limit_bytes
from bridge_fgo.sleep.moved import Kind, Kinds, Moved, wait_for_gpu
from bridge_fgo.sleep.moves import Grads, Selection, select, verb
from bridge_fgo.sleep.refusals import refuse_models
from bridge_fgo.sleep.trainer_memory import TrainerMemory
from bridge_fgo.sleep.weight_offloader import HostParam, WeightSlab, Where
from bridge_fgo.sleep.weight_sets import WeightSets

_open = weakref.WeakSet["Residency"]()  # those that are not closed; the hooks on its model keep each alive


class Residency:
    """Offloads parameters, gradients and optimizer state from a shared GPU and reloads them, each by itself.

    Use it between steps only. A model has at most one, which `of` finds. The constructor is a collective of all ranks
    of the job, and so is each verb: an all-gather makes parameters of several data-parallel ranks whole, and an error
    on one rank is an error on all. Verbs that several threads call, also on different objects, run one after another;
    every rank has to begin them in the same order.

    Args:
        model: a model chunk or a list of them: mcore's DDP if there is one, not the model inside.
        optimizer: what the training loop steps, over DistributedOptimizers; None for a reference model.
        config: settings of the offload if no engine is attached to the optimizer; None for those given to
            `bridge_fgo.install`. A setting that would have no effect is refused.
        host_memory_limit_gib: the most host memory in GiB that a rank takes here, page-locked or not; the lowest limit
            of any rank counts. What does not fit stays on the GPU for good: a line on rank 0 and `Moved.stays` say how
            much. None has no limit but what the host has.
        frozen_folder: a folder in which frozen parameters are kept in files without names, which are not page-locked
            and do not count to the limit. The kernel takes their memory back when it is short. Copies from there are
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
        self._settings = partial(settings_in_force, config, getattr(optimizer, "config", None), optimizer is not None)

        def accept() -> tuple[list[torch.nn.Module], float]:
            chunks = _chunks_of(model)
            refuse_models(chunks)
            refuse_settings(config, optimizer, chunks)
            if Residency.of(chunks) is not None:
                raise ValueError(
                    "the model has a Residency already, or shares parameters with one that has: Residency.of(model) "
                    "returns it, close() ends it"
                )
            return chunks, limit_bytes(host_memory_limit_gib)

        # A tensor that is made in inference mode may not be written outside.
        with collectives, torch.inference_mode(False):
            chunks, limits = gather_or_raise(accept)
            self._memory = memory = TrainerMemory(
                chunks, optimizer, self._settings, min(limits), frozen_folder, self._gradients_ready
            )
            self._sets = WeightSets(memory, lambda: active_session() is not None)
            if max(map(sum, memory.unhosted_by_rank)):
                params, states = map(readable, max(memory.unhosted_by_rank, key=sum))
                say(
                    f"a limit of {readable(min(limits))} of host memory a rank has no room for {states} of optimizer "
                    f"state and {params} of parameters (on the rank with most), which stay on the GPU"
                )
            if memory.settings.activation_waits:
                activation_offload.askers.add(self)
            _open.add(self)

    @classmethod
    def of(cls, model: torch.nn.Module | Sequence[torch.nn.Module]) -> Residency | None:
        """Return the Residency of a model, of what wraps it, or of a part of it; None if there is none."""
        ids = _ids(_chunks_of(model))
        return next((each for each in list(_open) if not _ids(each._memory.chunks).isdisjoint(ids)), None)

    def _selection(self, kinds: Kinds, more: Sequence[Kind] = (), where: Where | None = None) -> partial[Selection]:
        return partial(select, self._memory, kinds, more, where)

    @property
    def away(self) -> frozenset[Kind]:
        """The kinds that are not on the GPU, or not all of them."""
        return self._memory.away

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host bytes that are held for all of it."""
        return self._memory.pinned_bytes + self._sets.pinned_bytes

    @property
    def has_optimizer(self) -> bool:
        """Whether it was made with an optimizer."""
        return self._memory.states is not None

    @property
    def has_gradients(self) -> bool:
        """Whether a backward has run whose gradients no step has used and nobody has zeroed."""
        return self._memory.has_gradients

    def serve_states(self) -> None:
        """Let installed patches serve states that are away to readers and steps, also outside of `checkpointing`."""
        if self._memory.states is not None:
            self._memory.states.lease.serves_sleep = True

    @verb
    def host_params(self) -> list[HostParam]:
        """Return this rank's shard of every parameter, from the host; parameters that are away stay so.

        No collective. Parameters on the GPU are copied, and parameters that masters round to are rounded on the host,
        once a sleep. Values are the host's own memory: read them before parameters are offloaded again, and write
        nothing there.

        Raises:
            RuntimeError: all parameters are on the GPU, or the Residency is closed.
            ValueError: a parameter is in FP8.
        """
        self._memory.require_open()
        wait_for_gpu(self._memory.device)
        return self._memory.weights.on_host()

    def offload(self, kinds: Kinds = "all", *more: Kind, grads: Grads = "drop", where: Where | None = None) -> Moved:
        """Offload "params", "grads" or "optimizer", and return their GPU memory to the driver.

        Offloaded memory stays offloaded. Every copy has ended when it returns.

        Args:
            kinds: any of the three, in any order, by one name or a list of names; "all" for all of them. An empty list
                moves nothing.
            more: further names.
            grads: "drop" discards gradients, which `reload` makes zeros. "keep" copies them.
            where: moves only those of "params" for which this returns True, called with the name and the parameter.
                "params" are in `away` as long as any of them is. Parameters in one of DDP's buffers move together.

        Returns:
            What was moved.

        Raises:
            ValueError: a word is not one of these, or `where` holds for a part of a buffer, or for no parameter on any
                rank. Nothing has moved.
            RuntimeError: a backward has run since the last update, and its gradients would be dropped; or the state
                cannot be offloaded as it is; or a parameter is not one of those that the Residency was made with, or
                it is closed. Nothing has moved. Or another rank failed on the way.
        """
        return moves.offload(self._memory, self._selection(kinds, more, where), grads)

    def reload(self, kinds: Kinds = "all", *more: Kind, where: Where | None = None) -> Moved:
        """Reload "params", "grads" or "optimizer" to the GPU, named and chosen as for `offload`.

        Packed masters need their weights: then "optimizer" reloads these too, and `Moved.woke` says so. Parameters of
        several ranks are all-gathered: one of DDP's buffers that any of its ranks asks for is reloaded on all of them.

        Raises:
            ValueError: as `offload`. Nothing has moved.
            torch.OutOfMemoryError: there is no memory. What was not reloaded is away as before.
            RuntimeError: another rank failed. Parameters are away as before, here too. Or the Residency is closed.
        """
        return moves.reload(self._memory, self._selection(kinds, more, where))

    def reload_trained(self, kinds: Kinds) -> Moved:
        """Do as `reload`, but of "params" only with DDP's buffers, whole, and other parameters that train."""

        def selection() -> Selection:
            selected = select(self._memory, kinds)
            units = [unit for unit in selected.units if not isinstance(unit, WeightSlab) or unit.trains]
            return selected._replace(units=units)

        return moves.reload(self._memory, selection)

    def only(self, kinds: Kinds = (), *more: Kind, grads: Grads = "drop", where: Where | None = None) -> Any:
        """Context in which these kinds alone are on the GPU; afterwards everything is where it was before.

        Kinds are named, and parameters chosen, as for `offload`. Gives what the offload has moved. Raises as `offload`
        and `reload`.

        If the block raises, what was reloaded is offloaded again, and what was offloaded stays away, as its reload
        may be a collective: a note on the error says so. `reload` on every rank ends it.
        """
        return moves.only(self._memory, self._selection(kinds, more, where), grads)

    def asleep(self, grads: Grads = "drop") -> Any:
        """Context in which nothing is on the GPU; afterwards everything is where it was before, as with `only`."""
        return self.only((), grads=grads)

    @verb
    def close(self) -> None:
        """Reload everything, and remove all hooks and host memory. Idempotent; other verbs raise from then on.

        Raises:
            torch.OutOfMemoryError, RuntimeError: it cannot be reloaded. It may be called again.
        """
        if self._memory.is_closed:
            return
        moves.reload(self._memory, self._selection("all"))
        on_every_rank(self._let_go)
        self._memory.is_closed = True
        _open.discard(self)

    def _let_go(self) -> None:
        if self._session is not None and not self._session.closed:
            self._session.close()
        self._sets.close()
        self._memory.close()
        activation_offload.askers.discard(self)

    # Several weights.

    def keep(self, name: str, where: Where | None = None) -> Moved:
        """Copy parameters to the host under a name, for `weights`; each rank copies its own shard.

        Persistent buffers of modules are copied too. What has not changed since a set of that name was kept is not
        copied again. Host memory is page-locked once, and held until `drop` or `close`.

        Args:
            name: any text.
            where: as for `offload`; a swap leaves other parameters as they are.

        Raises:
            ValueError: a parameter is in FP8, or forwards would change the model's amax history
                (`model.fp8_recipe="delayed"`); or the name, or `where`, as for `offload`. Or the host lacks memory.
            RuntimeError: parameters are away; or it is closed. Or another rank failed. If copying fails, nothing is
                left under the name.
        """
        return self._sets.keep(name, where)

    def drop(self, name: str) -> None:
        """Release the host memory of what was kept under a name; local, and no error if nothing was."""
        self._sets.drop(name)

    def weights(self, name: str) -> Any:
        """Context in which the model has the weights that were kept under a name, for forwards without gradients.

        At its end the model has its own again, bit for bit, or they are away as before. All ranks take part. Inside
        only `keep` and `drop` may be called; forwards with gradients, backwards and optimizer steps are refused.

        Gives what the swap has moved: nothing of what is equal, and of the model's own weights what the host lacks.

        If the block raises, parameters that it has swapped stay off the GPU, and a note on the error says so:
        `reload("params")` on every rank reloads the model's own.

        Raises:
            ValueError: nothing was kept under the name.
            RuntimeError: a backward has run since the last update, or a training step is running, or it is in another
                such block, or closed; or ranks that share a buffer differ in whether it is away, or kept. Nothing has
                moved. Or another rank failed.
            torch.OutOfMemoryError: there is no memory for parameters that are away.
        """
        return self._sets.swapped(name)

    # Training steps.

    @contextmanager
    def training_step(self, microbatches: int = 1) -> Iterator[None]:
        """Context of one training step of a loop of one's own, in which the optimizer state is offloaded.

        The block runs forwards and backwards of all microbatches, then one `optimizer.step()`, which may skip the
        update. If it raises before that, nothing is lost, and the next block may follow.

        States are offloaded as it begins, reloaded as gradients are finalized (mcore's `finalize_model_grads_func`, or
        DDP's `finish_grad_sync`) or the optimizer steps, and updated by parts, as in Bridge's `train_step` with the
        flag. Parts whose memory others needed stay away ("optimizer" is in `away`) until the next step or `reload`.

        Args:
            microbatches: how many the block runs; steps of as many need as much memory.

        Raises:
            ValueError: the Residency has no optimizer, or its engine is Bridge's, by the flag. Or `microbatches`.
            RuntimeError: `bridge_fgo.install()` was not called; a training step is running; parameters or gradients
                are away. Nothing has moved. Or an error has ended an optimizer step half-way.
        """
        session = self._session_for_step(microbatches)
        with session.training_step(self._memory.chunks, microbatches):
            updates = session.updates
            session.begin_pass()
            session.release()
            yield
            session.updated = session.updates > updates

    def _session_for_step(self, microbatches: int) -> Session:
        self._memory.require_open()
        states = self._memory.states
        if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
            raise ValueError(f"training_step(microbatches={microbatches!r}): give how many the step runs, at least 1")
        if states is None:
            raise ValueError("training_step() of a Residency that was made with optimizer=None: give it the optimizer")
        lease = states.lease
        if lease.owner != "sleep":
            raise ValueError(
                f"training_step() with optimizer.{FLAG}=True: Bridge's train_step offloads already; leave the context "
                "out, or unset the flag in a loop of your own"
            )
        if not is_installed():
            raise RuntimeError("training_step() needs mcore's optimizer to be patched: call bridge_fgo.install() first")
        if active_session() is not None:
            raise RuntimeError("training_step() inside of a training step: end that one first")
        self._memory.checks.require("params", "grads")
        if self._session is None or self._session.closed:  # by an uninstall
            from megatron.core.utils import get_model_config

            if self._settings() != lease.settings:
                raise ValueError(
                    f"training_step() of a Residency that was made with {lease.settings}, and {self._settings()} was "
                    "given to bridge_fgo.install later: close() it, and make it after install()"
                )
            states.forget_copies()
            self._session = Session(lease, get_model_config(self._memory.chunks[0]))
        return self._session

    def _gradients_ready(self) -> None:
        session = active_session()
        if session is not None and session is self._session:
            session.reload()

    # Checkpoints.

    @contextmanager
    def checkpointing(self) -> Iterator[None]:
        """Context in which a checkpoint may be saved or loaded, asleep or not; afterwards, as with `only`, as before.

        Parameters are on the GPU inside: they are reloaded if they are away, so every rank has to take part. With
        `bridge_fgo.install()` optimizer state stays away: it is saved from the host, and loaded to there. Without, it
        is reloaded too. Gradients stay away.

        Raises:
            torch.OutOfMemoryError, RuntimeError: as `reload`, before the block, and `offload`, after it.
        """
        memory = self._memory
        states = memory.states if is_installed() else None

        def needed() -> Selection:
            if states is None:
                return Selection([unit for unit in memory.units if unit is not memory.gradients])
            states.require_whole()
            return Selection(memory.weights.slabs)

        with moves.as_before(memory):  # what is loaded is loaded to the host
            moves.reload(self._memory, needed)
            with nullcontext() if states is None else states.lease.serve():
                yield


def _chunks_of(model: torch.nn.Module | Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return model chunks as a list, or raise ValueError if one is something else."""
    chunks = list(model) if isinstance(model, Sequence) else [model]
    for wrong in [type(chunk) for chunk in chunks if not isinstance(chunk, torch.nn.Module)]:
        raise ValueError(
            f"Residency(model={wrong.__name__}): pass a module, or a list of model chunks, and then the optimizer: "
            "Residency(model, optimizer)"
        )
    return chunks


def _ids(chunks: Sequence[torch.nn.Module]) -> set[int]:
    """Return the `id`s of chunks, of what they wrap, and of their parameters."""
    return {id(each) for chunk in chunks for each in (*wrapped_models(chunk), *chunk.parameters())}
