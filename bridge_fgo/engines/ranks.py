"""Collectives of a job's ranks: exchange answers, raise alike, check a node's memory, make engines."""

import gc
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from bridge_fgo.config import OffloadConfig, readable
from bridge_fgo.engines.engine import Engine
from bridge_fgo.engines.mcore import McoreEngine
from bridge_fgo.engines.native import NativeEngine
from bridge_fgo.memory.host_memory import (
    AUTO_SHARE,
    Need,
    free_for_each_rank,
    host_memory_refusal,
    pools,
    ranks_of_this_node,
)
from bridge_fgo.memory.meters import PeakMeter
from bridge_fgo.states.source import Source

collectives = threading.RLock()
"""Held from the first to the last of several collectives: those of two threads would cross on other ranks."""


def gather[T](own: T) -> list[T]:
    """Return the value of every rank of the job, in their order; a collective if torch.distributed is initialized."""
    if not torch.distributed.is_initialized():
        return [own]
    answers: list[Any] = [None] * torch.distributed.get_world_size()
    with collectives:
        torch.distributed.all_gather_object(answers, own)
    return answers


def gather_or_raise[T, Told](act: Callable[[], tuple[T, Told]]) -> tuple[T, list[Told]]:
    """Call `act`, which has no collective in it, and gather its results; raise on every rank if it fails on one.

    Otherwise the other ranks would wait in their next collective for the one that raised. An interruption (Ctrl-C) is
    not told: it ends the job.

    Args:
        act: returns a value for this rank, and one for all ranks.

    Returns:
        The value for this rank, and those for all ranks, in their order.

    Raises:
        ValueError, RuntimeError: `act` failed on another rank, which the text names; a ValueError if it raised one.
    """
    try:
        own, told = act()
    except Exception as error:
        gather((None, (isinstance(error, ValueError), f"{type(error).__name__}: {error}")))
        raise
    answers: list[tuple[Any, tuple[bool, str] | None]] = gather((told, None))
    for rank, (_, failure) in enumerate(answers):
        if failure is not None:
            is_value, text = failure
            raise (ValueError if is_value else RuntimeError)(f"rank {rank} failed, and so every rank does: {text}")
    return own, [answer for answer, _ in answers]


def on_every_rank[T](act: Callable[[], T]) -> T:
    """Do as `gather_or_raise` with nothing to gather; return what `act` returns."""
    return gather_or_raise(lambda: (act(), None))[0]


def require_host_memory(nbytes: int) -> None:
    """Raise ValueError, on every rank alike, if the ranks of a node need more host memory than it has free.

    A collective; `nbytes` is what this rank is about to pin, 0 if it pins nothing.
    """
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    if host_memory_refusal(_needs(nbytes), rank):
        gc.collect()  # an optimizer that was dropped and its offloader, which pins as much, refer to each other
        if refusal := host_memory_refusal(_needs(nbytes), rank):
            raise ValueError(refusal)


def host_share(config: OffloadConfig) -> float:
    """Return the bytes of host memory that each rank may take for states, by `OffloadConfig.host_memory_gib`.

    A collective if it is set: all ranks get what the one with the least can have.
    """
    limit = config.host_limit_gib
    if limit is None:
        return math.inf

    def share() -> float:
        return AUTO_SHARE * free_for_each_rank() if isinstance(limit, str) else limit * 2**30 / ranks_of_this_node()

    return min(gather_or_raise(lambda: (None, share()))[1])


def _needs(nbytes: int) -> list[Need]:
    return gather_or_raise(lambda: (None, Need(nbytes, pools() if nbytes else [])))[1]


def pin_on_every_rank(engine: Engine) -> None:
    """Page-lock the host memory of every rank's engine, or of none if a node lacks memory; a collective of all."""
    require_host_memory(engine.bytes_to_pin)
    on_every_rank(engine.pin)


def make_engine(
    name: str,
    sources: Sequence[Source],
    config: OffloadConfig,
    meter: PeakMeter,
    stage: int | None = None,
    host_bytes: float = math.inf,
) -> Engine:
    """Return the engine of that name ("native", or of `mcore.MEMBERS`) for a rank's sources; nothing is pinned yet.

    There may be no sources; they are in the order in which they step. `stage` is this rank's place in the pipeline;
    None if nothing says it. `host_bytes` is the most host memory that the native engine takes.
    """
    if name != "native":
        return McoreEngine(name, sources)
    engine = NativeEngine(sources, config, meter, host_bytes=host_bytes)
    if sources and not engine.planned_bytes and engine.unhosted_bytes:
        raise ValueError(
            f"OffloadConfig.host_memory_gib={config.host_memory_gib!r}: this rank's part of it, "
            f"{readable(host_bytes)}, holds none of {readable(engine.unhosted_bytes)} of states; use more, or None"
        )
    engine.schedule.holding.agree = partial(agree, stage)
    engine.schedule.holding.all_can = lambda own: all(gather(own))
    return engine


def agree(stage: int | None, room: int, least: int) -> tuple[int, int]:
    """Return the bytes that may stay on every rank of this pipeline stage, and the least budget of the fullest rank.

    Ranks of one stage hold equal shards, so that one that kept less would make the others wait for its copies.
    Stages differ in what they hold, and each chooses for itself. `room` and `least` (bytes) are those of this rank.
    """
    answers = gather((stage, room, least))
    return min(r for s, r, _ in answers if s == stage), max(bytes_ for _, _, bytes_ in answers)
