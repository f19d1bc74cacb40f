"""One session for each top-level optimizer: translates Bridge's events into verbs of the rank's engine.

It is made as the optimizer is built, or at the first step with the flag, and closed when the flag is unset or the
package is uninstalled.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from bridge_fgo.bridge import activation_offload, refusals
from bridge_fgo.bridge.compat import FLAG, check_flag, choose_engine, flag_is_set, mcore_version
from bridge_fgo.bridge.crash import Survival, begin_training
from bridge_fgo.bridge.optimizers import eligible, stage_of
from bridge_fgo.bridge.points import ModelPoints, reload_hook
from bridge_fgo.bridge.reporting import say, warn
from bridge_fgo.config import OffloadConfig, readable
from bridge_fgo.engines.engine import Engine
from bridge_fgo.engines.gradients import Gradients
from bridge_fgo.engines.lease import EngineLease, shareable_leases
from bridge_fgo.engines.native import NativeEngine, make_transfers
from bridge_fgo.engines.ranks import collectives, host_share, make_engine, on_every_rank, pin_on_every_rank
from bridge_fgo.figures import Figures, Stats
from bridge_fgo.memory import max_connections
from bridge_fgo.memory.meters import ACTIVE, ALLOCATED, PeakMeter
from bridge_fgo.memory.undo import undo_on_error
from bridge_fgo.offload.profile import Mark
from bridge_fgo.sleep.refusals import ddp_of
from bridge_fgo.states.choice import source_of
from bridge_fgo.states.distributed import McoreSource
from bridge_fgo.states.source import Source

SESSION = "_bridge_fgo_session"
_active: list[Session] = []
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
_taken: weakref.WeakSet[Gradients] = weakref.WeakSet()  # those of every session: a model outlives its optimizer
_newest_stats: Stats | None = None  # a snapshot, so that it holds no state of a training that is over
GIVEN_UP = (
    "master weights were given up by bridge_fgo.uninstall(): weights of the model were changed while these were "
    "offloaded in part (OffloadConfig.master_remainders); build the optimizer anew and resume from the last checkpoint"
)
ASKED_BY = {"step": f"optimizer.{FLAG}=True", "sleep": "Residency.training_step()"}
"""By the owner of the engine, what asked for the offload, for messages."""
ENOUGH_RELEASED = 0.95  # share of the planned bytes whose release proves that the flag is no silent no-op


class Session:
    """The training steps of one top-level optimizer, which drive its engine: where they stand, and their figures.

    It hangs on the optimizer, so it goes when the optimizer goes, or on a `Residency`.

    Args:
        lease: that of the engine.
        model_config: the model config that holds `finalize_model_grads_func`.
        gradients: moves the model's gradients; None leaves them to mcore.
        survival: keeps finished steps for a start after a crash; None keeps none.
    """

    def __init__(
        self,
        lease: EngineLease,
        model_config: Any,
        gradients: Gradients | None = None,
        survival: Survival | None = None,
    ) -> None:
        self.lease, self.engine, self.meter, self.settings = lease, lease.engine, lease.meter, lease.settings
        self.gradients, self.survival, self.model_config = gradients, survival, model_config
        # mcore frees activations while their copies out may still run. Their memory is no room for states until then:
        # the allocator would wait for the copies.
        waits = self.settings.gpu_memory_budget_gib == "auto" and self._offloads_activations
        self.meter.of_intervals = ACTIVE if waits else ALLOCATED
        if isinstance(self.engine, NativeEngine):
            holding = self.engine.schedule.holding
            holding.announce, holding.warn = say, warn
        self.figures = Figures(self.engine, mcore_version(), self.meter, gradients)
        self._points = ModelPoints()
        self.closed = False
        self._is_captured = False  # whether the model has its passes captured into a full-iteration CUDA graph
        self.began = False  # whether a training step has begun
        self.updates = 0  # steps of optimizers so far; one that is skipped is none
        self._updates_before = 0  # those before the newest training step
        self.updated = False  # whether the optimizer stepped in the newest training step, as its wrapper says
        self._over_budget = False
        self._planned_steps = 0  # those with a plan so far
        self._is_proven = False  # whether a step has released what was planned
        self._had_bytes = 0  # of states that existed as the newest pass of a step that proves nothing yet began
        self._add_waits()
        lease.is_stepped = True
        _sessions.add(self)

    # What the wrappers call, in the order of one training step.

    @contextmanager
    def training_step(self, model: Any, microbatches: int) -> Iterator[None]:
        """Context of a training step of a model, or its chunks; no reload is in flight after it unless it raises."""
        engine = self.engine
        self._is_captured = is_captured = refusals.captures_full_iteration(self.model_config)
        self.figures.begin_step()
        self._updates_before, self.updated = self.updates, False
        _active.append(self)
        try:
            with (
                nullcontext() if is_captured else reload_hook(self.model_config, self.reload),
                self._points.hooked(model, self._point if engine.watches_points and not is_captured else None),
                engine.training_step(microbatches),
            ):
                yield
        except BaseException:
            if self.gradients is not None:
                self.gradients.interrupted = True
            raise
        finally:
            _active.pop()
        if self.closed:  # by an uninstall within the step
            return

        def settle() -> None:
            # A skipped step and an early exit leave a reload in flight. The next reader (a save, a callback) runs on
            # the current stream.
            engine.settle()
            self.figures.end_step()

        with collectives if engine.awaits_ranks else nullcontext():
            on_every_rank(settle) if engine.awaits_ranks else settle()
            engine.end_step(self.updated)
        self._watch_budget()
        self.publish()
        self._compare_peak()
        self._require_released()

    def _watch_budget(self) -> None:
        """Say once that a planned step needed more than the budget, as a longer sequence may."""
        budget, peak = self.settings.gpu_memory_budget_bytes, self.figures.peak_allocated_bytes or 0
        if self._over_budget or self.engine.planned_peak_bytes is None or budget is None or peak <= budget:
            return
        self._over_budget = True
        warn(
            f"a training step allocated {readable(peak)}, more than "
            f"OffloadConfig.gpu_memory_budget_gib={budget / 2**30:g}: it needed more than the "
            "measured one; set a lower budget to keep room for such steps"
        )

    def _compare_peak(self) -> None:
        """Say once, of the second step with a plan, which prefetches too, what was predicted and what was measured."""
        planned, peak = self.figures.snapshot().planned_peak_bytes, self.figures.peak_allocated_bytes
        if planned is None or peak is None:
            return
        self._planned_steps += 1
        if self._planned_steps == 2:
            text = (
                f"peak of step {self.figures.snapshot().steps}: {readable(peak)} measured, {readable(planned)} planned"
            )
            is_on = self._offloads_activations or getattr(self.model_config, "cpu_offloading", False) is True
            if is_on and (pinned := activation_offload.pinned_bytes()):
                text += f"; for activations {readable(pinned)} are pinned on the host"
            say(text)

    @property
    def _offloads_activations(self) -> bool:
        return getattr(self.model_config, activation_offload.ON, False) is True

    def _require_released(self) -> None:
        """Raise RuntimeError if the offload is a silent no-op, in whole or in part.

        A step that had any state released at least something; and the first step after an update, when every state
        exists, released what was planned. If code has removed states since, which the next update makes anew, a later
        step has to.
        """
        if self._is_proven:
            return
        planned, freed = self.engine.planned_bytes, self.engine.traffic.most_released
        enough = ENOUGH_RELEASED * planned
        is_remade = not self.updated or self.engine.existing_bytes() >= enough
        has_all = self._updates_before > 0 and not (self._had_bytes < enough and is_remade)
        if freed < (enough if has_all else int(self._had_bytes > 0)):
            raise RuntimeError(
                f"{ASKED_BY[self.lease.owner]}, but a training step released {freed} bytes of the {planned} planned "
                f"(engine {self.engine.name}): it would be a silent no-op. Please report this with the output of the "
                "run, and train without it meanwhile"
            )
        self._is_proven = has_all

    def begin_pass(self, is_replayed: bool = False) -> None:
        """Start the copies out: a pass begins, or a CUDA graph that has captured passes replays one."""
        if not self._is_proven:
            self._had_bytes = self.engine.existing_bytes()
        if news := self.engine.traffic.touches.news():
            warn(news)
        if self.gradients is not None:
            assert isinstance(self.engine, NativeEngine)
            self.gradients.begin_pass()
        self.engine.begin_pass(is_like_others=is_replayed or not self._is_captured)
        self._poll()
        self._points.begin_pass()

    def _poll(self) -> None:
        if self.survival is not None and self.survival.kept is not None:
            self.survival.kept.poll()

    def _point(self, mark: Mark) -> bool:
        if self.closed:  # within the step, for whose length the hooks hang
            return False
        moves = self.engine.point(mark)
        self._poll()
        if self.gradients is not None:
            self.gradients.point(mark)
        return moves

    def release(self) -> None:
        """Free GPU memory: grads are zeroed and nothing reads the states any more."""
        if self.gradients is not None:
            self.gradients.guard_views()
        self.engine.release()
        self.figures.released()

    def reload(self) -> None:
        """Allocate GPU memory and start the copies in: backward is done."""
        if self.closed:  # within the step, for whose length the hook is bound
            return
        self.figures.reloading()
        self.engine.reload()
        if self.survival is not None:
            self.survival.end_pass()

    def updating(self) -> None:
        """Note that an optimizer is about to step, so that every state will exist; raise as `Engine.updating`."""
        self.updates += 1
        self.engine.updating()

    @contextmanager
    def stepping(self, source: Source) -> Iterator[None]:
        """Context of one optimizer's step, with its states on the GPU as it needs them."""
        with self.figures.step_clock.measure(), self.engine.stepping(source):
            yield

    @property
    def is_lost(self) -> bool:
        """Whether a move of its states was interrupted, so that they cannot be used any more."""
        return hasattr(self, "engine") and self.engine.is_lost  # a closed one has no engine

    def trains(self, chunks: list[Any]) -> bool:
        """Return whether one of its optimizers updates one of these model chunks, as DDP wraps them."""
        leaves = (source.optimizer for source in self.lease.sources)
        own = {id(chunk) for leaf in leaves for chunk in getattr(leaf, "model_chunks", ())}
        return any(id(chunk) in own for chunk in chunks)

    def close(self, gives_up: bool = False) -> None:
        """Make the states resident for good, and end the use of the engine.

        If it `gives_up`, masters that cannot be reloaded, as weights were changed, are lost, and a line says so; and
        the states of a `Residency` stay with it as they are.

        Raises:
            RuntimeError: states cannot be reloaded. The session stays open, and may be closed once they can.
        """
        if self.closed and not self.is_lost:  # by an uninstall
            return
        if self.gradients is not None:
            self.gradients.close()
            self.gradients = None
        if self.survival is not None:
            begin_training(None)
            self.survival = None
        lease, engine = self.lease, self.engine
        is_own = lease.owner == "step"
        if gives_up and is_own and isinstance(engine, NativeEngine) and (lost := engine.give_up_masters(GIVEN_UP)):
            warn(f"{readable(lost)} of {GIVEN_UP}")
        lease.end_steps(reloads=not gives_up)
        if gives_up and not is_own:
            warn("optimizer state stays off the GPU with its Residency, which could not reload it")
        if engine.is_torn:
            say("an error ended the newest optimizer step half-way: its state is no more fit to be saved or trained on")
        self.closed = True
        del self.lease, self.engine, self.figures  # the engine's transfers know every slab, and its host memory

    def publish(self) -> None:
        """Make the figures as they are now what `bridge_fgo.stats` returns."""
        global _newest_stats
        _newest_stats = self.figures.snapshot()
        if self.survival is not None:
            restored = {"restored_step": self.survival.restored_step, "restore_seconds": self.survival.seconds}
            _newest_stats = replace(_newest_stats, **restored)

    def announce(self) -> None:
        """Say in one line, on rank 0, what will happen."""
        engine = self.engine
        stays = engine.resident_note() or "no state"
        pinned = f"{readable(self.figures.snapshot().pinned_bytes)} of host memory pinned"
        if engine.name != "native":
            pinned = "host memory pinned by mcore in the first steps"
        if (gradients := self.gradients) is not None:
            moving = f", {readable(gradients.moving_bytes)} leave between microbatches" * gradients.offloads
            stays += f"; {readable(gradients.nbytes)} of gradients are allocated in backward{moving}"
        if isinstance(engine, NativeEngine) and self.settings.nvme_folder is not None:
            pinned += f", {engine.file_note()}"
        if not engine.sources:
            stays = "everything: this rank has only stub optimizers"
        say(
            f"optimizer-state offload on, engine {engine.name}, mcore {mcore_version()}: "
            f"{readable(engine.planned_bytes)} of {readable(engine.state_bytes)} a rank offloaded, "
            f"{pinned}, stays resident: {stays}"
        )
        if shortage := max_connections.shortage():
            say(shortage)

    def _add_waits(self) -> None:
        """Add the waits that mcore's activation offload lacks; say so, or which of its methods are missing."""
        activation_offload.add_waits(self.figures.snapshot().pinned_bytes)
        if self._offloads_activations:
            for each in (self.engine, self.gradients):
                if isinstance(each, NativeEngine | Gradients):
                    each.transfers.limit_pieces(activation_offload.PIECE_BYTES)
            missing = ", ".join(activation_offload.missing_methods())
            say(
                f"model.{activation_offload.ON}=True: "
                + (
                    f"this mcore has no {missing} to add waits to: if its copies race as those of 0.19.2, two runs of "
                    "one job differ; set it to False where runs must be equal"
                    if missing
                    else "the waits that mcore's copies of activations lack are added (activation_waits=True adds them "
                    "in a run without the offload of states too)"
                )
            )


# The engine of a session that the flag asks for.


def _make_session(optimizer: Any, model_config: Any, config: OffloadConfig, model: Any) -> Session:
    """Return the session of an optimizer that owns its engine.

    A collective: ranks tell each other whether engines can be made, and what host memory these take.

    Raises:
        ValueError, RuntimeError: the optimizer or a setting is refused, or there is no host memory, on any rank.
    """
    meter, taken, host_bytes = PeakMeter(), list[Gradients](), host_share(config)
    survival: Survival | None = None
    chunks = [chunk for chunk in (model if isinstance(model, list) else [model]) if chunk is not None]

    def make() -> tuple[list[McoreSource], Engine]:
        nonlocal survival
        sources, engine = _make_engine(optimizer, model_config, config, meter, chunks, host_bytes)
        if config.gradients:
            assert isinstance(engine, NativeEngine)  # with another the setting is refused
            taken.append(gradients := _take_gradients(chunks, config))
            if config.gpu_memory_budget_gib is not None:
                engine.schedule.holding.gradients_stay = gradients.stay
            engine.hosts_beside = gradients.map_hosts()
        survival = begin_training(Survival(sources, engine, chunks) if config.survive_crash else None)
        return sources, engine

    with undo_on_error(lambda: [each.close() for each in taken]), collectives:
        sources, engine = on_every_rank(make)
        if survival is not None:
            survival.agree()
        pin_on_every_rank(engine)
    # Only now, so that a refusal leaves nothing half attached, on any rank.
    for source in sources if engine.name == "native" else ():
        source.drop_other_offloader()
    lease = EngineLease("step", sources, engine, config, meter)
    return Session(lease, model_config, next(iter(taken), None), survival)


def _make_engine(
    optimizer: Any,
    model_config: Any,
    config: OffloadConfig,
    meter: PeakMeter,
    chunks: list[torch.nn.Module],
    host_bytes: float,
) -> tuple[list[McoreSource], Engine]:
    """Return this rank's sources and their engine; raise as `_make_session`."""
    optimizer_config = getattr(optimizer, "config", None)  # an empty chain has none
    refusals.refuse_optimizer_config(optimizer_config)
    name = choose_engine(config, optimizer_config)
    refusals.refuse_model_config(model_config, name, chunks)
    leaves = eligible(optimizer)
    # The optimizers were put into another chain since they were built: their states are reloaded first.
    leases = shareable_leases(leaves, f"optimizer.{FLAG}=True")
    for session in _open_sessions():
        if session.lease in leases:
            session.close()
    sources = [source_of(leaf) for leaf in leaves]
    return sources, make_engine(name, sources, config, meter, stage_of(leaves), host_bytes)


def _take_gradients(chunks: list[torch.nn.Module], config: OffloadConfig) -> Gradients:
    ddps = [ddp for chunk in chunks for ddp in ddp_of(chunk)]
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    if not ddps and (not chunks or any(parameter.requires_grad for parameter in parameters)):
        raise ValueError(
            f"OffloadConfig.gradients={config.gradients!r}: the model has no DDP of mcore's, whose gradients it is "
            "about; set OffloadConfig.gradients=False"
        )
    refusals.refuse_gradients_of(chunks, config)
    devices = (buffer.grad_data.device for ddp in ddps for buffer in ddp.buffers)
    transfers = make_transfers(next(devices, torch.device("cpu")), config)
    gradients = Gradients(ddps, transfers, offloads=config.gradients is True)
    _taken.add(gradients)
    return gradients


# All sessions.


def active_session() -> Session | None:
    """Return the session whose training step is running; None if an uninstall within the step has closed it."""
    return _active[-1] if _active and not _active[-1].closed else None


def newest_stats() -> Stats | None:
    """Return the figures of the newest training step, also when its training is over."""
    return _newest_stats


def _open_sessions() -> list[Session]:
    return [session for session in _sessions if not session.closed]


def all_sessions() -> list[Session]:
    """Return the open sessions; without lost ones, which a traceback may keep alive, if there are others."""
    opened = _open_sessions()
    return [session for session in opened if not session.is_lost] or opened


def attach(optimizer: Any, model_config: Any, config: OffloadConfig, model: Any = None) -> Session:
    """Return the session of a top-level optimizer and its model, made and announced on the first call.

    Raises as `_make_session`, and ValueError if the settings are others than at the first call.
    """
    session: Session | None = vars(optimizer).get(SESSION)
    if session is not None and session.is_lost:
        raise RuntimeError(
            "the optimizer cannot be trained any more: something (Ctrl-C, a restart) came while a part of its state "
            "was on its way between GPU and host; build it anew and resume from the last checkpoint"
        )
    if session is None or session.closed:
        session = _make_session(optimizer, model_config, config, model)
        setattr(optimizer, SESSION, session)
        session.publish()
        session.announce()
    if session.settings != config:
        raise ValueError(
            f"{config} after {session.settings}: the offload's settings cannot change while an optimizer trains; build "
            "it anew, from a checkpoint"
        )
    session.model_config = model_config
    return session


def session_for_step(optimizer: Any, model_config: Any, cfg: Any, config: OffloadConfig, model: Any) -> Session | None:
    """Return the session that drives a training step, or None if the flag is not set.

    A flag that was unset in mid-run makes the states resident and closes the session.

    Raises:
        ValueError, RuntimeError: as `_make_session` and `refuse_small_shared_memory`.
    """
    check_flag(cfg.optimizer)
    if not flag_is_set(cfg.optimizer):
        session = None if optimizer is None else getattr(optimizer, "__dict__", {}).get(SESSION)
        if session is not None:
            session.close()
            delattr(optimizer, SESSION)
        return None
    session = attach(optimizer, model_config, config, model)
    if not session.began:
        engine = session.engine
        if refusals.copies_go_to_a_worker(cfg.checkpoint) and isinstance(engine, NativeEngine):

            def share_copies() -> None:
                refusals.refuse_small_shared_memory(cfg.checkpoint, engine.copied_for_a_save())
                engine.use_worker_memory()

            on_every_rank(share_copies)
        session.began = True
    return session


def close_all() -> None:
    """End every session, and forget the figures; raise as `Session.close` that gives up."""
    global _newest_stats
    if _close_sessions():
        gc.collect()  # a training that is over may be kept by a cycle of references alone
        if failures := _close_sessions(gives_up=True):
            raise failures[0]
    for gradients in list(_taken):  # of sessions that are lost, or whose optimizer is gone
        gradients.close()
    _sessions.clear()
    _taken.clear()
    _newest_stats = None


def _close_sessions(gives_up: bool = False) -> list[RuntimeError | TimeoutError]:
    failures: list[RuntimeError | TimeoutError] = []
    for session in _open_sessions():
        if session.is_lost:  # nothing can be reloaded
            say("states that an error had caught on their way are left as they are, with the optimizer to throw away")
            session.closed = True
            continue
        try:
            session.close(gives_up)
        except (RuntimeError, TimeoutError) as error:  # the others are closed all the same
            failures.append(error)
    return failures


def model_config_of(arguments: dict[str, Any]) -> Any:
    """Return the config of the model that a patched function was given."""
    from megatron.core.utils import get_model_config

    if "model_config" in arguments:
        return arguments["model_config"]
    model = arguments["model"]
    return get_model_config(model[0] if isinstance(model, list) else model)
