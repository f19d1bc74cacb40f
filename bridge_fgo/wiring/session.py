"""One session for each top-level optimizer: drives its offloaders through a training step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bridge_fgo.compat import Choice, check_flag, choose_engine, flag_is_set, mcore_version
from bridge_fgo.config import OffloadConfig
from bridge_fgo.engine.native import NativeOffloader
from bridge_fgo.engine.offloader import Offloader, total
from bridge_fgo.engine.states import home_device
from bridge_fgo.engine.transfers import make_transfers
from bridge_fgo.figures import Figures, Stats
from bridge_fgo.upstream.generation1 import Generation1Offloader
from bridge_fgo.upstream.generation2 import Generation2Offloader
from bridge_fgo.wiring.finalize import reload_hook
from bridge_fgo.wiring.optimizers import eligible
from bridge_fgo.wiring.refusals import refuse_full_iteration_graph, refuse_optimizer_config

SESSION = "_bridge_fgo_session"
OFFLOADER = "_bridge_fgo_offloader"
UPSTREAM_OFFLOADERS: dict[str, Callable[[Any], Offloader]] = {
    "_state_offloader": Generation1Offloader,
    "_optimizer_state_offloader": Generation2Offloader,
}
"""The attribute in which each generation of mcore keeps its offloader, and the adapter for it."""

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
        self.offloaders: list[Offloader] = []
        transfers = make_transfers(home_device(distributed[0]), config.piece_bytes) if distributed else None
        for leaf in distributed:
            if self.engine == "native":
                drop_upstream_offloader(leaf)
                assert transfers is not None
                self.offloaders.append(NativeOffloader(leaf, config, transfers))
            else:
                self.offloaders.append(upstream_offloader(leaf))
        # Only now, so that a refusal of the last one leaves nothing half attached.
        for leaf, offloader in zip(distributed, self.offloaders, strict=True):
            setattr(leaf, OFFLOADER, offloader)
        self._leaves = weakref.WeakSet(distributed)
        self.figures = Figures(self.offloaders, self.engine, mcore_version())
        self.closed = False
        # What the proof that the flag is no silent no-op needs: see _prove.
        self._proven = False
        self._updates = 0
        self._updates_before = 0
        self._eligible = False
        self._freed = 0

    # What the wrappers call, in the order of one training step.

    @contextmanager
    def training_step(self) -> Iterator[None]:
        """Be the active session of a training step; afterwards the states are resident, on every way out
        but an exception."""
        self.figures.begin_step()
        self._updates_before, self._freed = self._updates, 0
        _active.append(self)
        try:
            with reload_hook(self.model_config, self):
                yield
        finally:
            _active.pop()
        # A skipped step and an early exit leave a reload in flight: whatever reads the states next (a save,
        # a callback) does so on the current stream.
        for offloader in self.offloaders:
            offloader.settle()
        self.figures.end_step()
        self.publish()
        self._prove()

    def _prove(self) -> None:
        """Raise RuntimeError where the flag turns out to be a no-op, in whole or in part.

        A step that had any state released at least something; and the first step after an update, when every
        state exists, released what was planned.
        """
        if self._proven:
            return
        planned = total(self.offloaders, "planned_bytes")
        complete = self._updates_before > 0
        wanted = 0.95 * planned if complete else 1 if self._eligible else 0
        if self._freed < wanted:
            raise RuntimeError(
                f"optimizer.offload_optimizer_states=True, but a training step released {self._freed} bytes of the "
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

    def release(self) -> None:
        """Grads are zeroed and nothing reads the states any more: let their GPU memory go."""
        freed = sum(offloader.release() for offloader in self.offloaders)
        self._freed = max(freed, self._freed)
        self.figures.released(freed)

    def reload(self) -> None:
        """Backward is done: take GPU memory again and start the copies in."""
        self.figures.reloading()
        for offloader in self.offloaders:
            offloader.reload()

    def updating(self) -> None:
        """An optimizer is about to step, so that every state will exist."""
        self._updates += 1

    def require(self, offloader: Offloader, write: bool) -> None:
        """Something is about to read (and write) one optimizer's states on the current stream."""
        with self.figures.wait.measure():
            if write:
                offloader.require_writable()
            else:
                offloader.require_readable()

    def close(self) -> None:
        """Make the states resident for good and undo what the session hung on the optimizers."""
        for offloader in self.offloaders:
            offloader.close()
        for leaf in self._leaves:
            vars(leaf).pop(OFFLOADER, None)
        self.offloaders.clear()
        self.closed = True

    def publish(self) -> None:
        """Make the figures as they are now what `bridge_fgo.stats` returns."""
        global _newest_stats
        _newest_stats = self.figures.snapshot()

    def announce(self) -> None:
        """Say in one line, on rank 0, what will happen."""
        if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
            return
        gib = 2**30
        stays = "; ".join(note for o in self.offloaders if (note := o.resident_note())) or "no state"
        pinned = f"{total(self.offloaders, 'pinned_bytes') / gib:.2f} GiB of host memory pinned"
        if self.engine != "native":
            pinned = "host memory pinned by mcore in the first steps"
        if not self.offloaders:
            stays = "everything: this rank has only stub optimizers"
        print(
            f"bridge_fgo: optimizer-state offload on, engine {self.engine}, mcore {mcore_version()}: "
            f"{total(self.offloaders, 'planned_bytes') / gib:.2f} of "
            f"{total(self.offloaders, 'state_bytes') / gib:.2f} GiB a rank offloaded, "
            f"{pinned}, stays resident: {stays}",
            flush=True,
        )


def upstream_offloader(leaf: Any) -> Offloader:
    """Return the adapter of the offloader that mcore built into a DistributedOptimizer.

    Raises:
        ValueError: mcore built none, because the flag was set after the optimizer was made.
    """
    for name, adapter in UPSTREAM_OFFLOADERS.items():
        if vars(leaf).get(name) is not None:
            return adapter(leaf)
    raise ValueError(
        "optimizer.offload_optimizer_states=True was set after the optimizer was built, so mcore gave it no "
        "offloader: set it before, or use OffloadConfig(engine='native')"
    )


def drop_upstream_offloader(leaf: Any) -> None:
    """Take an unused offloader of mcore's off a DistributedOptimizer that the native engine serves."""
    for name in UPSTREAM_OFFLOADERS:
        if vars(leaf).get(name) is not None:
            setattr(leaf, name, None)


def attach(optimizer: Any, model_config: Any, config: OffloadConfig) -> Session:
    """Return the session of a top-level optimizer, made and announced on the first call.

    Raises:
        ValueError, RuntimeError: see `Session`.
    """
    session: Session | None = vars(optimizer).get(SESSION)
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
    """
    check_flag(cfg.optimizer)
    if flag_is_set(cfg.optimizer):
        return attach(optimizer, model_config, config)
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


def all_sessions() -> list[Session]:
    """Return the sessions whose optimizers are alive."""
    return list(_sessions)


def close_all() -> None:
    """End every session, and forget the figures."""
    global _newest_stats
    for session in all_sessions():
        session.close()
    _newest_stats = None
