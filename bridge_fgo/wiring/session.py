"""One session for each top-level optimizer: drives its offloaders through a training step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bridge_fgo.config import OffloadConfig
from bridge_fgo.engine.offloader import Offloader, total
from bridge_fgo.engine.peaks import PeakMeter
from bridge_fgo.engine.schedule import Schedule
from bridge_fgo.figures import Figures, Stats
from bridge_fgo.wiring.compat import Choice, check_flag, choose_engine, flag_is_set, mcore_version
from bridge_fgo.wiring.finalize import reload_hook
from bridge_fgo.wiring.offloaders import make_offloader, make_schedule
from bridge_fgo.wiring.optimizers import eligible
from bridge_fgo.wiring.points import ModelPoints
from bridge_fgo.wiring.refusals import (
    refuse_full_iteration_graph,
    refuse_optimizer_config,
    refuse_small_shared_memory,
)

SESSION = "_bridge_fgo_session"
OFFLOADER = "_bridge_fgo_offloader"
_active: list[Session] = []
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
_newest_stats: Stats | None = None  # a snapshot, so that it holds no state of a training that is over


class Session:
    """The offloaders of one top-level optimizer, and where they stand in the training step.

    It hangs on the optimizer, so it goes when the optimizer goes.

    Args:
        optimizer: what Bridge hands to `train_step`: a ChainedOptimizer, a MimoOptimizer or a
            DistributedOptimizer.
        model_config: the model config that holds `finalize_model_grads_func`.
        config: what `install` was given.

    Raises:
        ValueError: the optimizer or a setting is refused.
        RuntimeError: host memory could not be had.
    """

    def __init__(self, optimizer: Any, model_config: Any, config: OffloadConfig) -> None:
        optimizer_config = getattr(optimizer, "config", None)  # an empty chain has none
        if optimizer_config is not None:
            refuse_optimizer_config(optimizer_config)
        refuse_full_iteration_graph(model_config)
        distributed = eligible(optimizer)
        self.engine: Choice = choose_engine(config, optimizer_config)
        self.model_config = model_config
        meter = PeakMeter()
        self.schedule = None if self.engine != "native" else make_schedule(distributed, config, meter)
        self.offloaders = [make_offloader(leaf, config, self.schedule) for leaf in distributed]
        # Only now, so that a refusal of the last one leaves nothing half attached.
        for leaf, offloader in zip(distributed, self.offloaders, strict=True):
            setattr(leaf, OFFLOADER, offloader)
        self._leaves = weakref.WeakSet(distributed)
        self.figures = Figures(self.offloaders, self.engine, mcore_version(), meter)
        if self.schedule is not None:
            self.schedule.planner.announce, self.schedule.planner.warn = say, warn
        self._points = ModelPoints()
        self.closed = False
        self.began = False
        """Whether a training step has begun."""
        # What the proof that the flag is no silent no-op needs: see _prove.
        self._proven = False
        self._updates = 0
        self._updates_before = 0
        self._eligible = False
        self._over_budget = False
        self.updated = False
        """Whether the optimizer stepped in the newest training step; the wrapper of the step sets it."""
        self._updating = False
        """Whether an optimizer has begun to step in the present training step."""
        self._stepped: set[int] = set()
        """`id` of each offloader whose optimizer has ended its step in the present training step."""

    # What the wrappers call, in the order of one training step.

    @contextmanager
    def training_step(self, model: Any, microbatches: int) -> Iterator[None]:
        """Be the active session of a training step; afterwards no reload is in flight, on every way out but
        an exception.

        Args:
            model: the model chunk, or a list of them.
            microbatches: how many the step runs.
        """
        self.figures.begin_step()
        self._updates_before, self.updated = self._updates, False
        self._updating = False
        self._stepped.clear()
        _active.append(self)
        try:
            with reload_hook(self.model_config, self.reload), self._points.hooked(model, self.schedule):
                if self.schedule is not None:
                    self.schedule.signature = microbatches
                yield
        finally:
            _active.pop()
        if self.schedule is not None and self._updating:
            self.schedule.torn = False
        # A skipped step and an early exit leave a reload in flight: whatever reads the states next (a save,
        # a callback) does so on the current stream.
        for offloader in self.offloaders:
            offloader.settle()
        self.figures.end_step()
        if self.schedule is not None:
            self.schedule.end_step(self.updated)
            self._watch_budget(self.schedule)
        self.publish()
        self._prove()

    def _watch_budget(self, schedule: Schedule) -> None:
        """Say once that a step needed more than the budget, as a longer sequence may."""
        peak, budget = self.figures.peak_allocated_bytes, schedule.planner.budget_bytes
        if schedule.is_planned and budget is not None and (peak or 0) > budget:
            if not self._over_budget:
                warn(
                    f"a training step allocated {(peak or 0) / 2**30:.2f} GiB, more than "
                    f"OffloadConfig.gpu_memory_budget_gib={budget / 2**30:g}: it needed more than the "
                    "measured one; set a lower budget to keep room for such steps"
                )
            self._over_budget = True

    def _prove(self) -> None:
        """Raise RuntimeError where the flag turns out to be a no-op, in whole or in part.

        A step that had any state released at least something; and the first step after an update, when every
        state exists, released what was planned.
        """
        if self._proven or self.closed:
            return
        planned = total(self.offloaders, "planned_bytes")
        complete = self._updates_before > 0
        wanted = 0.95 * planned if complete else 1 if self._eligible else 0
        freed = total(self.offloaders, "released_bytes")
        if freed < wanted:
            raise RuntimeError(
                f"optimizer.offload_optimizer_states=True, but a training step released {freed} bytes of the "
                f"{planned} planned (engine {self.engine}): the flag would be a silent no-op. Please report this "
                "with the output of the run, and train with the flag unset meanwhile"
            )
        self._proven = complete

    def begin_pass(self) -> None:
        """A forward-backward pass begins: start the copies out."""
        if not self._proven:
            self._eligible = self._eligible or any(offloader.has_states() for offloader in self.offloaders)
        for offloader in self.offloaders:
            offloader.offload()
        if self.schedule is not None:  # also on a rank with stub optimizers only: it takes part in the agreement
            self.schedule.begin_pass()

    def release(self) -> None:
        """Grads are zeroed and nothing reads the states any more: let GPU memory go."""
        for offloader in self.offloaders:
            offloader.release()
        if self.schedule is not None:
            self.schedule.release()
        self.figures.released()

    def reload(self) -> None:
        """Backward is done: take GPU memory again and start the copies in."""
        self.figures.reloading()
        for offloader in self.offloaders:
            offloader.reload()
        if self.schedule is not None:
            self.schedule.reload()

    def updating(self) -> None:
        """An optimizer is about to step, so that every state will exist.

        Raises:
            RuntimeError: an error ended an earlier step half-way, or states cannot be brought back.
        """
        self._updates += 1
        if self.schedule is not None and not self._updating:
            self.schedule.require_whole("updated")
            for offloader in self.offloaders:  # of all, before the first of them is updated
                offloader.require_restorable()
        self._updating = True

    @contextmanager
    def stepping(self, offloader: Offloader) -> Iterator[None]:
        """One optimizer steps, with its states where it needs them."""
        with self.figures.step_clock.measure(), offloader.stepping():
            self._stepped.discard(id(offloader))
            if self.schedule is not None:
                self.schedule.torn = True
            yield
        self._stepped.add(id(offloader))
        if self.schedule is not None and self._stepped >= {id(one) for one in self.offloaders}:
            # Of a chain each has stepped: an error from here on, in the scheduler say, leaves states that are whole.
            self.schedule.torn = False

    def require_readable(self, masters_only: bool = False) -> None:
        """Something is about to read the states (or masters) of every optimizer on the current stream."""
        for offloader in self.offloaders:
            offloader.require_readable(masters_only)

    def require_writable(self) -> None:
        """Something may read or change the states of every optimizer on the current stream.

        A copy out that is under way is given up: what is written now would not be in it. Generation 2's is waited for.
        """
        for offloader in self.offloaders:
            offloader.require_readable()
            offloader.require_writable()

    @property
    def is_lost(self) -> bool:
        """Whether something came in the midst of a move of its states, so that they cannot be used any more."""
        return any(offloader.is_lost for offloader in self.offloaders)

    def trains(self, chunks: list[Any]) -> bool:
        """Return whether one of its optimizers updates one of these model chunks, as DDP wraps them."""
        own = {id(chunk) for leaf in self._leaves for chunk in getattr(leaf, "model_chunks", ())}
        return any(id(chunk) in own for chunk in chunks)

    def check_background_saves(self, checkpoint: Any) -> None:
        """Refuse a checkpoint worker that could not be handed this rank's copies of the states.

        Raises:
            ValueError: see `refuse_small_shared_memory`.
        """
        copies = [nbytes for offloader in self.offloaders for nbytes in offloader.copied_for_a_save()]
        refuse_small_shared_memory(checkpoint, copies)

    def make_room(self) -> None:
        """Something between steps takes memory (an evaluation, the capture of graphs): let go of all that may leave."""
        if self.schedule is not None:
            self.schedule.release_everything()

    def close(self) -> None:
        """Make the states resident for good and undo what the session hung on the optimizers.

        Raises:
            RuntimeError: states cannot be brought back, see `MasterRemainders.require_unchanged`; the session stays
                open, and may be closed once they can.
        """
        for offloader in self.offloaders:  # all, before the first of them lets go
            offloader.require_restorable()
            offloader.require_writable()
        if self.schedule is not None and self.schedule.torn:
            say("an error ended the newest optimizer step half-way: its state is no more fit to be saved or trained on")
        for offloader in self.offloaders:
            offloader.close()
        for leaf in self._leaves:
            vars(leaf).pop(OFFLOADER, None)
        self.offloaders.clear()
        self.schedule = None  # its transfers know every slab that was ever copied, and so its host memory
        self.closed = True

    def publish(self) -> None:
        """Make the figures as they are now what `bridge_fgo.stats` returns."""
        global _newest_stats
        _newest_stats = self.figures.snapshot()

    def announce(self) -> None:
        """Say in one line, on rank 0, what will happen."""
        gib = 2**30
        stays = "; ".join(note for o in self.offloaders if (note := o.resident_note())) or "no state"
        pinned = f"{total(self.offloaders, 'pinned_bytes') / gib:.2f} GiB of host memory pinned"
        if self.engine != "native":
            pinned = "host memory pinned by mcore in the first steps"
        if not self.offloaders:
            stays = "everything: this rank has only stub optimizers"
        say(
            f"optimizer-state offload on, engine {self.engine}, mcore {mcore_version()}: "
            f"{total(self.offloaders, 'planned_bytes') / gib:.2f} of "
            f"{total(self.offloaders, 'state_bytes') / gib:.2f} GiB a rank offloaded, "
            f"{pinned}, stays resident: {stays}"
        )


def say(text: str) -> None:
    """Print a line on rank 0."""
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print(f"bridge_fgo: {text}", flush=True)


def warn(text: str) -> None:
    """Print a line on the rank that it concerns, whichever that is."""
    several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    print(f"bridge_fgo: {f'rank {torch.distributed.get_rank()}: ' if several else ''}{text}", flush=True)


def attach(optimizer: Any, model_config: Any, config: OffloadConfig) -> Session:
    """Return the session of a top-level optimizer, made and announced on the first call.

    Raises:
        ValueError, RuntimeError: see `Session`.
    """
    session: Session | None = vars(optimizer).get(SESSION)
    if session is not None and session.is_lost:
        raise RuntimeError(
            "the optimizer cannot be trained any more: something (Ctrl-C, a restart) came while a part of its state "
            "was on its way between GPU and host; build it anew and resume from the last checkpoint"
        )
    if session is None or session.closed:
        session = Session(optimizer, model_config, config)
        setattr(optimizer, SESSION, session)
        _sessions.add(session)
        session.publish()
        session.announce()
    session.model_config = model_config
    return session


def session_for_step(optimizer: Any, model_config: Any, cfg: Any, config: OffloadConfig) -> Session | None:
    """Return the session that drives a training step, or None where the flag is not set.

    A flag that was unset in mid-run makes the states resident and closes the session.

    Raises:
        ValueError, RuntimeError: see `Session` and `Session.check_background_saves`.
    """
    check_flag(cfg.optimizer)
    if flag_is_set(cfg.optimizer):
        session = attach(optimizer, model_config, config)
        if not session.began:
            session.check_background_saves(cfg.checkpoint)
            session.began = True
        return session
    session = None if optimizer is None else getattr(optimizer, "__dict__", {}).get(SESSION)
    if session is not None:
        session.close()
        delattr(optimizer, SESSION)
    return None


def active_session() -> Session | None:
    """Return the session whose training step is running."""
    return _active[-1] if _active else None


def newest_stats() -> Stats | None:
    """Return the figures of the newest training step, also when its training is over."""
    return _newest_stats


def _open_sessions() -> list[Session]:
    return [session for session in _sessions if not session.closed]


def all_sessions() -> list[Session]:
    """Return the open sessions whose optimizers are alive; without those that are lost, where there are others.

    A lost one may live for long, in the traceback of the error that a notebook keeps.
    """
    opened = _open_sessions()
    return [session for session in opened if not session.is_lost] or opened


def close_all() -> None:
    """End every session, and forget the figures.

    Raises:
        RuntimeError: see `Session.close`; every session that can be closed is.
    """
    global _newest_stats
    if _close_sessions():
        gc.collect()  # of a training that is over only a cycle of references may be left
        if failures := _close_sessions():
            raise failures[0]
    _newest_stats = None


def _close_sessions() -> list[RuntimeError]:
    failures = []
    for session in _open_sessions():
        if session.is_lost:  # and only to be thrown away: nothing can be brought back
            say("states that an error had caught on their way are left as they are, with the optimizer to throw away")
            session.closed = True
            continue
        try:
            session.close()
        except RuntimeError as error:
            failures.append(error)
    return failures
