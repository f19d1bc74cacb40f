"""What the ranks of a job do together: tell each other, fail alike, and ask their nodes for host memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from bridge_fgo.engines.engine import Engine
from bridge_fgo.memory.host_memory import Need, host_memory_refusal, pools


def gather[T](own: T) -> list[T]:
    """Return what every rank of the job tells, in their order; a collective where there is torch.distributed."""
    if not torch.distributed.is_initialized():
        return [own]
    answers: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(answers, own)
    return answers


def told_by_ranks[T, Told](act: Callable[[], tuple[T, Told]]) -> tuple[T, list[Told]]:
    """Do something that has no collective in it and may fail; raise on every rank where it fails on one, and name that.

    The others would go on, and wait in their next collective for a rank that has raised. An interruption is not told:
    whoever interrupts a rank ends the job. What `act` returns is for this rank, and what the others are told; what this
    returns is the first, and what every rank tells, in their order. It is a ValueError where `act` raised one, and else
    a RuntimeError.
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
    """Do as `told_by_ranks`, with nothing to tell; return what `act` returns."""
    own, _ = told_by_ranks(lambda: (act(), None))
    return own


def require_host_memory(nbytes: int) -> None:
    """Raise ValueError, on every rank alike, where the ranks of a node need more host memory than it has free.

    A collective, which a rank that pins nothing takes part in too; `nbytes` is what this one is about to pin.
    """
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    if host_memory_refusal(_needs(nbytes), rank):
        gc.collect()  # an optimizer that was dropped and its offloader, which pins as much, refer to each other
        if refusal := host_memory_refusal(_needs(nbytes), rank):
            raise ValueError(refusal)


def _needs(nbytes: int) -> list[Need]:
    return told_by_ranks(lambda: (None, Need(nbytes, pools() if nbytes else [])))[1]


def pin_on_every_rank(engine: Engine) -> None:
    """Page-lock the host memory of every rank's engine, or of none where a node has not enough for its ranks.

    A collective. Whatever its optimizers and its engine, every rank of the job comes here.
    """
    require_host_memory(engine.bytes_to_pin)
    on_every_rank(engine.pin)
