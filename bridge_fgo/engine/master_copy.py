"""mcore's copy of updated masters to the model's weights, for some of the masters at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

MASTERS = ("shard_fp32_from_float16_groups", "model_float16_groups")
FP32 = ("shard_fp32_groups", "model_fp32_groups")


@dataclass(frozen=True)
class WeightShard:
    """The range of a parameter buffer that a master is copied to, in elements."""

    bucket: Any
    first: int
    numel: int

    @property
    def address(self) -> int:
        """Where it is now; DDP's buffer may be let go of and taken again."""
        weights: torch.Tensor = self.bucket.param_data
        return weights.data_ptr() + self.first * weights.element_size()

    def tensor(self) -> torch.Tensor:
        """Return it, [numel]."""
        return self.bucket.param_data.view(-1)[self.first : self.first + self.numel]


class MasterCopy:
    """Divides `DistributedOptimizer._copy_main_params_to_model_params`, so that masters may leave early.

    The method copies each master of `shard_fp32_from_float16_groups` into the range of the parameter buffer that
    belongs to the parameter at the same place of `model_float16_groups`; with shorter lists it copies fewer.

    Args:
        optimizer: a DistributedOptimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.copied: frozenset[int] = frozenset()
        """`id` of each master that was copied in the present optimizer step."""
        self.copying_part = False
        self._pairs: dict[int, tuple[Any, Any]] = {}

    def divides(self) -> bool:
        """Return whether the copy may be divided.

        Not for FP8 and FP4 weights: quantizing is one collective over all of them. And not where masters are
        staged in the gradient buffer (`reuse_grad_buf_for_mxfp8_param_ag`), which later parts still need.
        """
        config = getattr(self._optimizer, "config", None)
        ddp = getattr(self._optimizer, "ddp_config", None)
        return not (
            getattr(config, "reuse_grad_buf_for_mxfp8_param_ag", False)
            or getattr(ddp, "fp8_param_gather", False)
            or getattr(ddp, "fp4_param_gather", False)
        )

    def rounded_weights(self) -> dict[int, WeightShard]:
        """Return where each fp32 master is rounded to a bf16 weight, by the `id` of the master.

        Not for quantized weights (a class of their own), and not where the copy does not divide.
        """
        optimizer = self._optimizer
        if not self.divides() or not hasattr(optimizer, MASTERS[1]):
            return {}
        found = {}
        for master, model in self._all_pairs():
            if master is None or master.dtype != torch.float32 or model.dtype != torch.bfloat16:
                continue
            if type(model) not in (torch.Tensor, torch.nn.Parameter):
                continue
            index, _, bucket = optimizer.model_param_gbuf_map[model]
            place = optimizer._get_model_param_range_map(model)["gbuf_world_in_bucket"]
            found[id(master)] = WeightShard(optimizer.buffers[index].buckets[bucket], place.start, place.size)
        return found

    @contextmanager
    def session(self) -> Iterator[None]:
        """Be one optimizer step."""
        self.copied = frozenset()
        try:
            yield
        finally:
            self.copied, self._pairs = frozenset(), {}

    def copy_part(self, ids: frozenset[int]) -> None:
        """Copy the masters with the given `id`s to the model, by the optimizer's own method."""
        if not self._pairs:
            self._pairs = {id(main): (main, model) for main, model in self._all_pairs()}
        copy: Callable[[], Any] = self._optimizer._copy_main_params_to_model_params
        self.copying_part = True
        try:
            # Native fp32 parameters are no masters: the call for the rest has them.
            with self._only([self._pairs[i] for i in ids if i in self._pairs], [], []):
                copy()
        finally:
            self.copying_part = False
        self.copied |= ids

    @contextmanager
    def only_the_rest(self) -> Iterator[None]:
        """Have the method copy what was not copied part by part, inside the block."""
        if not self.copied:
            yield
            return
        with self._only([pair for pair in self._all_pairs() if id(pair[0]) not in self.copied]):
            yield

    def _all_pairs(self) -> Iterator[tuple[Any, Any]]:
        mains, models = (getattr(self._optimizer, name) for name in MASTERS)
        for main_group, model_group in zip(mains, models, strict=True):
            yield from zip(main_group, model_group, strict=True)

    @contextmanager
    def _only(self, pairs: list[tuple[Any, Any]], *fp32: list[Any]) -> Iterator[None]:
        """Have the optimizer's lists hold these masters and their parameters only.

        fp32: what to put in place of the native fp32 parameters; nothing leaves them as they are.
        """
        lists = [[[main for main, _ in pairs]], [[model for _, model in pairs]], *fp32]
        before = [(name, getattr(self._optimizer, name)) for name in (*MASTERS, *FP32)[: len(lists)]]
        try:
            for (name, _), value in zip(before, lists, strict=True):
                setattr(self._optimizer, name, value)
            yield
        finally:
            for name, value in before:
                setattr(self._optimizer, name, value)
