"""Sequences of several lengths in one run: batches are cut, so that shapes change from step to step and within one."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch


def length_of(step: int, microbatch: int, lengths: Sequence[int]) -> int:
    """Return the length of a microbatch's sequences.

    Of two lengths: a step of the first, one of the second, one that begins with the first and alternates, one that
    begins with the second and alternates, and so on.
    """
    turn, alternates = step % len(lengths), step // len(lengths) % 2
    return lengths[(turn + microbatch * alternates) % len(lengths)]


def cut(batch: dict[str, Any], length: int) -> dict[str, Any]:
    """Return a batch with the first `length` tokens of each sequence.

    Its tensors are [batch, tokens], and an attention mask [batch, 1, tokens, tokens].
    """
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    shorter = {
        name: value[..., :length, :length] if name == "attention_mask" else value[:, :length]
        for name, value in tensors.items()
    }
    return batch | {name: value.contiguous() for name, value in shorter.items()}


def in_turn(forward_step: Callable[..., Any], lengths: Sequence[int]) -> Callable[..., Any]:
    """Return Bridge's forward step with batches that take the lengths in turn."""
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    calls = itertools.count()

    def batches(iterator: Iterator[dict[str, Any]], length: int) -> Iterator[dict[str, Any]]:
        yield cut(next(iterator), length)

    @functools.wraps(forward_step)
    def step(state: Any, data_iterator: Iterator[dict[str, Any]], *args: Any, **kwargs: Any) -> Any:
        number, microbatch = divmod(next(calls), get_num_microbatches())
        return forward_step(state, batches(data_iterator, length_of(number, microbatch, lengths)), *args, **kwargs)

    return step
