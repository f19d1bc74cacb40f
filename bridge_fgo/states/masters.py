"""fp32 masters that are made without GPU memory.

mcore makes the masters of all parameters on the GPU as it builds an optimizer. With the offload they need never be
there together. Inside `masters_made_late` mcore itself makes each, it is emptied at once, and its slab writes it anew
from its weights (`State.take_first`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bridge_fgo.memory.guard import class_of

PLAIN = (torch.Tensor, torch.nn.Parameter)
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
