"""Finding the state tensors of a DistributedOptimizer, now or before its first step made them.

Reads only attributes that every mcore from 0.15 on has: `optimizer` (the Adam inside), its `param_groups`
and `state`, `shard_fp32_from_float16_groups` and `buffers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master_param"

PLAIN = (torch.Tensor, torch.nn.Parameter)

Kind = Literal["moment", "master"]


@dataclass(frozen=True, eq=False)
class StateRef:
    """One state tensor of one optimizer parameter, which may not exist yet.

    key: its name in `optimizer.state[param]`, or None for a master weight that is the parameter itself.
    """

    kind: Kind
    param: torch.Tensor
    key: str | None
    adam: torch.optim.Optimizer  # not its `state`: load_state_dict puts another dictionary there
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes, also before the tensor exists."""
        return self.param.numel() * self.dtype.itemsize

    @property
    def saved_nbytes(self) -> int:
        """Bytes, at most, of the copy that a checkpoint gets; TE makes fp32 of 16-bit states."""
        return self.nbytes * max(1, 4 // self.dtype.itemsize)

    def check_size(self, tensor: torch.Tensor) -> None:
        """Raise RuntimeError where the tensor is not of the size that was planned for it."""
        if tensor.nbytes != self.nbytes:
            raise RuntimeError(
                f"optimizer state {self.key or 'master weight'!r} has {tensor.nbytes} bytes of {tensor.dtype}, planned "
                f"were {self.nbytes} of {self.dtype}: something replaced it by a tensor of another kind"
            )

    def tensor(self) -> torch.Tensor | None:
        """Return the tensor as it is now, or None before the first step made it.

        Raises:
            ValueError: the tensor is a subclass with scales of its own (FP8 moments).
        """
        if self.key is None:
            return self.param
        # Not states[param]: `optimizer.state` is a defaultdict, and Adam takes an empty entry for a made one.
        tensor = self.adam.state.get(self.param, {}).get(self.key)
        if tensor is None or type(tensor) in PLAIN:
            return tensor
        raise ValueError(
            f"optimizer state {self.key!r} is a {type(tensor).__name__}: only plain tensors can be offloaded; set "
            f"optimizer.{self.key}_dtype to torch.float32 or torch.bfloat16"
        )


@dataclass
class Bundle:
    """The states of one optimizer parameter."""

    param: torch.Tensor
    refs: list[StateRef] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Size of all states of the parameter in bytes."""
        return sum(ref.nbytes for ref in self.refs)


def bundles(optimizer: Any) -> list[Bundle]:
    """Return the states of every parameter of a DistributedOptimizer, in the order of its param groups.

    Parameters of no elements are left out. A master weight that shares memory with a DDP buffer (native
    fp32 parameters) is left out: it is the model's weight, and must never be moved, resized or rebound.
    """
    adam = optimizer.optimizer
    masters = {id(p) for group in optimizer.shard_fp32_from_float16_groups for p in group if p is not None}
    owned_by_ddp = ddp_storages(optimizer)
    result = []
    for group in adam.param_groups:
        for param in group["params"]:
            if param.numel() == 0:
                continue
            bundle = Bundle(param)
            if id(param) in masters and param.untyped_storage().data_ptr() not in owned_by_ddp:
                bundle.refs.append(StateRef("master", param, None, adam, param.dtype))
            bundle.refs += _inner_states(adam, param)
            result.append(bundle)
    return result


def _inner_states(adam: torch.optim.Optimizer, param: torch.Tensor) -> Iterator[StateRef]:
    dtypes = getattr(adam, "name_to_dtype_map", None)  # TE FusedAdam; torch's Adam keeps the dtype of the param
    for key in MOMENTS:
        yield StateRef("moment", param, key, adam, param.dtype if dtypes is None else dtypes[key])
    if getattr(adam, "master_weights", False):
        assert dtypes is not None
        # TE keeps the low 16 bits of a bf16 parameter's fp32 master alone (store_param_remainders).
        remainders = getattr(adam, "store_param_remainders", False) and param.dtype == torch.bfloat16
        yield StateRef("master", param, MASTER, adam, torch.int16 if remainders else dtypes[MASTER])


def ddp_storages(optimizer: Any) -> set[int]:
    """Return the addresses of the DDP parameter and gradient buffers behind a DistributedOptimizer."""
    addresses = set()
    for buffer in optimizer.buffers:
        for name in ("param_data", "grad_data"):
            tensor = getattr(buffer, name, None)
            if tensor is not None:
                addresses.add(tensor.untyped_storage().data_ptr())
    return addresses - {0}


def live_bytes(states: Iterable[Bundle], home: torch.device) -> int:
    """Return the bytes of memory on the device `home` that states hold now.

    Released states count as nothing; states that an upstream offloader turned into host tensors neither.
    """
    storages: dict[int, int] = {}
    for bundle in states:
        for ref in bundle.refs:
            tensor = ref.tensor()
            if tensor is not None and tensor.device == home:
                storage = tensor.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def home_device(optimizer: Any) -> torch.device:
    """Return the device on which the states of a DistributedOptimizer are when resident: its DDP buffers'."""
    return optimizer.buffers[0].grad_data.device
