"""Which session drives a training step: made at the first with the flag, closed when the flag or the package goes."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

from bridge_fgo.bridge.compat import check_flag, flag_is_set
from bridge_fgo.bridge.messages import say
from bridge_fgo.bridge.refusals import copies_go_to_a_worker, refuse_small_shared_memory
from bridge_fgo.bridge.session import SESSION, Session, forget_stats, open_sessions
from bridge_fgo.config import OffloadConfig
from bridge_fgo.engines.engine import Engine
from bridge_fgo.engines.ranks import on_every_rank


def attach(optimizer: Any, model_config: Any, config: OffloadConfig) -> Session:
    """Return the session of a top-level optimizer, made and announced on the first call.

    Raises:
        ValueError: as `Session`; or the settings are others than at the first call.
        RuntimeError: as `Session`.
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
        session.publish()
        session.announce()
    if session.settings != config:
        raise ValueError(
            f"{config} after {session.settings}: the offload's settings cannot change while an optimizer trains; build "
            "it anew, from a checkpoint"
        )
    session.model_config = model_config
    return session


def _share_copies(engine: Engine, checkpoint: Any) -> None:
    """Have a checkpoint worker get this rank's states by shared memory, once it is known that it can."""
    refuse_small_shared_memory(checkpoint, engine.copied_for_a_save())
    engine.share_copies()


def session_for_step(optimizer: Any, model_config: Any, cfg: Any, config: OffloadConfig) -> Session | None:
    """Return the session that drives a training step, or None where the flag is not set.

    A flag that was unset in mid-run makes the states resident and closes the session.

    Raises:
        ValueError, RuntimeError: as `Session`, or as `refuse_small_shared_memory`.
    """
    check_flag(cfg.optimizer)
    if flag_is_set(cfg.optimizer):
        session = attach(optimizer, model_config, config)
        if not session.began:
            if copies_go_to_a_worker(cfg.checkpoint):
                on_every_rank(partial(_share_copies, session.engine, cfg.checkpoint))
            session.began = True
        return session
    session = None if optimizer is None else getattr(optimizer, "__dict__", {}).get(SESSION)
    if session is not None:
        session.close()
        delattr(optimizer, SESSION)
    return None


def close_all() -> None:
    """End every session, and forget the figures.

    Raises:
        RuntimeError: as `Session.close`; every session that can be closed is.
    """
    if _close_sessions():
        gc.collect()  # of a training that is over only a cycle of references may be left
        if failures := _close_sessions():
            raise failures[0]
    forget_stats()


def _close_sessions() -> list[RuntimeError]:
    failures = []
    for session in open_sessions():
        if session.is_lost:  # and only to be thrown away: nothing can be brought back
            say("states that an error had caught on their way are left as they are, with the optimizer to throw away")
            session.closed = True
            continue
        try:
            session.close()
        except RuntimeError as error:
            failures.append(error)
    return failures
