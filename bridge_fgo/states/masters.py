"""fp32 masters: mcore's copy of them to the model's weights, for some at a time, and making them without GPU memory."""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from bridge_fgo.memory.guard import class_of
from bridge_fgo.memory.slab import Part
from bridge_fgo.memory.state_tensor import WeightShard
from bridge_fgo.states.shadowed import shadowed

PLAIN = (torch.Tensor, torch.nn.Parameter)
COPY = "_copy_main_params_to_model_params"  # the method by which an optimizer of mcore's copies masters to weights

Buffers = dict[int, Callable[[], torch.Tensor]]  # reads each weight buffer, one callable by the `id` of its bucket


class MasterCopy:
    """The part of a source that divides `_copy_main_params_to_model_params`, so that masters may leave early.

    A DistributedOptimizer's copies each master of `shard_fp32_from_float16_groups` into the range of the parameter
    buffer that belongs to the parameter at the same place of `model_float16_groups`; of shorter lists it copies fewer.
    """

    # the optimizer's lists of masters, and of the parameters that they are copied to
    masters = ("shard_fp32_from_float16_groups", "model_float16_groups")
    # its lists of native fp32 parameters that the method copies too
    native = ("shard_fp32_groups", "model_fp32_groups")

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self._copied: frozenset[int] | None = frozenset()  # by `id`, in the present step; None while a part is
        self._pairs: dict[int, tuple[Any, Any]] = {}

    @property
    def writes_back_by_part(self) -> bool:
        """Whether the copy may be divided: not if quantizing is one collective over all weights (FP8, FP4).

        Nor if masters are staged in the gradient buffer (`reuse_grad_buf_for_mxfp8_param_ag`), which later parts
        need.
        """
        config, ddp = (getattr(self.optimizer, name, None) for name in ("config", "ddp_config"))
        quantized = any(getattr(ddp, name, False) for name in ("fp8_param_gather", "fp4_param_gather"))
        return not (quantized or getattr(config, "reuse_grad_buf_for_mxfp8_param_ag", False))

    def rounded_weights(self, dtypes: Collection[torch.dtype] = (torch.bfloat16,)) -> dict[int, WeightShard]:
        """Return where each fp32 master is rounded to a weight of one of the `dtypes`, by the `id` of the master.

        Not for quantized weights (a class of their own), and not if the copy does not divide.
        """
        if not self.writes_back_by_part or not hasattr(self.optimizer, self.masters[1]):
            return {}
        found = {}
        buffers: Buffers = {}
        for master, model in self._all_pairs():
            rounds = master is not None and master.dtype == torch.float32 and model.dtype in dtypes
            if not rounds or class_of(model) not in PLAIN:
                continue
            if (shard := self._shard(model, buffers)) is not None:
                found[id(master)] = shard
        return found

    def _shard(self, model: torch.Tensor, buffers: Buffers) -> WeightShard | None:
        """Return where the master of a parameter is rounded to; None if its elements lie in another order."""
        index, _, bucket = self.optimizer.model_param_gbuf_map[model]
        place = self.optimizer._get_model_param_range_map(model)["gbuf_world_in_bucket"]
        of_bucket = self.optimizer.buffers[index].buckets[bucket]
        buffer = buffers.setdefault(id(of_bucket), partial(getattr, of_bucket, "param_data"))
        return WeightShard(buffer, place.start, place.size)

    @contextmanager
    def one_step(self) -> Iterator[None]:
        """Context of one optimizer step, at whose end nothing counts as copied any more."""
        try:
            yield
        finally:
            self._copied, self._pairs = frozenset(), {}

    def copy_part(self, ids: frozenset[int]) -> None:
        """Copy the masters with the given `id`s to the model, by the optimizer's own method."""
        if not self._pairs:
            self._pairs = {id(main): (main, model) for main, model in self._all_pairs()}
        copied, self._copied = self._copied or frozenset(), None
        try:
            # Native fp32 parameters are no masters: the call for the rest has them.
            with self._only([self._pairs[i] for i in ids if i in self._pairs], native=False):
                self.optimizer._copy_main_params_to_model_params()
            copied |= ids
        finally:
            self._copied = copied

    @contextmanager
    def writing_back(self) -> Iterator[frozenset[int] | None]:
        """Context in which the method copies what was not copied part by part; see `Source.writing_back`."""
        copied = self._copied
        with self._all_but(copied) if copied else nullcontext():
            yield copied

    def rewriting(self, part: Part | None, parts: Iterable[Part]) -> AbstractContextManager[None]:
        """Context in which the lists hold a part's masters, or with None all others; see `Source.rewriting`."""
        if part is None:
            return self._all_but(frozenset().union(*(each.ids for each in parts)))
        return self._only([pair for pair in self._all_pairs() if id(pair[0]) in part.ids], native=False)

    def _all_but(self, ids: frozenset[int]) -> AbstractContextManager[None]:
        """Return a context in which the lists lack the masters with these `id`s."""
        return self._only([pair for pair in self._all_pairs() if id(pair[0]) not in ids], native=True)

    def _all_pairs(self) -> Iterator[tuple[Any, Any]]:
        for groups in zip(*(getattr(self.optimizer, name) for name in self.masters), strict=True):
            yield from zip(*groups, strict=True)

    def _only(self, pairs: list[tuple[Any, Any]], native: bool) -> AbstractContextManager[None]:
        """Return a context in which the lists hold these masters alone, and `native` fp32 parameters or none."""
        of_masters, of_weights = self.masters
        lists: dict[str, Any] = {of_masters: [[main for main, _ in pairs]], of_weights: [[model for _, model in pairs]]}
        if not native:
            lists |= {name: [] for name in self.native}
        return shadowed(self.optimizer, lists)


# Masters without memory until they have a place.
#
# mcore makes the masters of all parameters on the GPU as it builds an optimizer. With the offload they need never be
# there together. Inside `masters_made_late` mcore itself makes each, it is emptied at once, and its slab writes it anew
# from its weights (`State.take_first`).

FIRST = "_bridge_fgo_first_value"  # attribute of a master without memory: the shard of weights that it is to be made of
Groups = tuple[list[list[Any]], ...]  # lists of tensors, one for each param group, by what they are to mcore

KINDS = 5
"""How many such lists there are. Megatron-LM #6544 returns one more, of masters that it made in host memory; with
the flag hidden from it there are none, and the list stays as it came."""

_late: list[tuple[Any, torch.Tensor]] | None = None  # weight and emptied master; None outside of `masters_made_late`


@contextmanager
def masters_made_late() -> Iterator[None]:
    """Context in which an optimizer is built, and its masters are taken in; those that are not are made at its end.

    If it ends in an error nobody gets the optimizer, and the model's parameters forget masters that have no memory.
    """
    global _late
    before, _late = _late, []
    try:
        yield
        for _, master in _late:
            make(master)
    except BaseException:
        for weight, master in _late:
            if FIRST in vars(master):
                weight.main_param = None  # as mcore has it for parameters without a master on this rank
        raise
    finally:
        _late = before


def build_groups(build: Callable[[list[Any]], Groups], groups: list[Any]) -> Groups:
    """Return what `DistributedOptimizer._build_model_and_main_param_groups` would, by `build`, which calls it.

    In `masters_made_late` it is called for one parameter after another, so that no two masters are there at once. The
    `params` of each `orig_group` become those that the Adam inside steps.
    """
    if _late is None:
        return build(groups)
    result = build([])
    for group in groups:
        lists: list[list[Any]] = [[] for _ in range(KINDS)]
        native: list[Any] = []
        others: list[Any] = []
        for param in group["params"]:
            alone = {**group, "params": [param], "orig_group": {}}
            of_param = build([alone])[:KINDS]
            for found, (new,) in zip(lists, of_param, strict=True):
                found += new
            (halves,), (natives,), (shards,), _, (masters,) = of_param
            (native if natives else others).extend(alone["orig_group"]["params"])
            for weight, shard, master in zip(halves, shards, masters, strict=True):
                if _is_cast(weight, shard, master):
                    _empty(weight, shard, master)
        for found, of_group in zip(result[:KINDS], lists, strict=True):
            found.append(of_group)
        group["orig_group"]["params"] = [*native, *others]  # mcore's order: native fp32 parameters first
    return result


class _Params(list[Any]):
    """The parameters of a param group; each is replaced by its master, to be emptied at once."""

    def __setitem__(self, index: Any, new: Any) -> None:
        weight = self[index]
        super().__setitem__(index, new)
        if new is not weight and _is_cast(weight, weight.detach(), new):
            _empty(weight, weight.detach(), new)


@contextmanager
def whole_masters_made_late(param_groups: list[dict[str, Any]]) -> Iterator[None]:
    """Context in which `Float16OptimizerWithFloat16Params` is built over an optimizer with these param groups.

    It puts one master after another in the place of its weights, in the param groups. In `masters_made_late` each that
    is put there is emptied, so that no two masters are there at once.
    """
    if _late is None:
        yield
        return
    try:
        for group in param_groups:
            group["params"] = _Params(group["params"])
        yield
    finally:
        for group in param_groups:
            group["params"] = list(group["params"])


def _is_cast(weight: torch.Tensor, shard: torch.Tensor | None, master: torch.Tensor | None) -> bool:
    """Return whether a master is no more than its plain weights in fp32, in memory of its own, and without NaNs."""
    if master is None or shard is None or not master.numel() or {class_of(weight), class_of(shard)} - set(PLAIN):
        return False
    is_own = master.untyped_storage().nbytes() == master.nbytes
    return is_own and master.dtype == torch.float32 and torch.equal(master, shard.float())


def _empty(weight: torch.Tensor, shard: torch.Tensor, master: torch.Tensor) -> None:
    assert _late is not None
    _late.append((weight, master))
    setattr(master, FIRST, shard)
    master.untyped_storage().resize_(0)


def take_first(master: torch.Tensor) -> torch.Tensor | None:
    """Return, once, the weights that a master without memory is to be made of; None if it has memory."""
    return vars(master).pop(FIRST, None)


def make(master: torch.Tensor) -> None:
    """Give a master memory and its first value, if it has none yet."""
    if FIRST in vars(master):
        master.untyped_storage().resize_(master.nbytes)
        master.detach().copy_(vars(master).pop(FIRST))
