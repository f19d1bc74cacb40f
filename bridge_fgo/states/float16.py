"""mcore's Float16OptimizerWithFloat16Params as a source of states: Adam that is not distributed, and Muon.

Each rank has masters of whole parameters, as the parameters of the optimizer inside. mcore's
LayerWiseDistributedOptimizer is a chain of such optimizers, each over the parameters that fall to a rank.

Reads only these attributes: `optimizer` (the one inside), its `param_groups` and `state`, `fp32_from_float16_groups`,
`float16_groups`, and the scalars that say where its tensors are.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, override

import torch

from bridge_fgo.memory.state_tensor import Bundle, State, WeightShard
from bridge_fgo.states.distributed import TORCH, Buffers, McoreSource, adam_states, master_state, of_inner

MUON_CLASSES = ("TensorParallelMuon", "TensorParallelAdaptiveMuon")
"""mcore's Muons, by the names of their classes: each steps a parameter by that parameter's states alone."""

MOMENTUM = "momentum_buffer"  # what they call the momentum, of the parameter's shape
SECOND_MOMENT = "moment2_buffer"  # AdaptiveMuon's: of the parameter's shape, a row's, a column's, or one number


def is_muon(inner: Any) -> bool:
    """Return whether the optimizer inside is one of mcore's Muons, or of a subclass."""
    return any(each.__name__ in MUON_CLASSES for each in type(inner).__mro__)


class Float16Source(McoreSource):
    """The states of a Float16OptimizerWithFloat16Params that is no stub, over Adam or Muon: whole on a rank."""

    masters = ("fp32_from_float16_groups", "float16_groups")
    native = ()

    @property
    @override
    def writes_back_by_part(self) -> bool:
        return True  # each master is copied by a call of its own, also to a quantized weight

    @override
    def _shard(self, model: torch.Tensor, buffers: Buffers) -> WeightShard | None:
        # In a slab a master is contiguous.
        return WeightShard(partial(getattr, model, "data"), 0, model.numel()) if model.is_contiguous() else None

    @property
    @override
    def keeps_order(self) -> bool:
        # With tp_mode "duplicated" or "distributed" each update has collectives over the ranks of tensor parallelism.
        return is_muon(self.optimizer.optimizer)

    @property
    @override
    def device(self) -> torch.device:
        params = (param for group in self.optimizer.optimizer.param_groups for param in group["params"])
        # A rank may have none to update: then by the tensor that every such optimizer has beside them.
        scalars = (getattr(self.optimizer, name, None) for name in ("_scale_one", "found_inf"))
        return next(tensor.device for tensor in (*params, *scalars) if tensor is not None)

    @override
    def states(self) -> list[Bundle]:
        rounded = self.rounded_weights()
        masters = {id(param) for group in self.optimizer.fp32_from_float16_groups for param in group}
        inner = self.optimizer.optimizer
        result = [Bundle(param) for group in inner.param_groups for param in group["params"] if param.numel()]
        for bundle in result:
            param = bundle.param
            if id(param) in masters:
                bundle.states.append(master_state(param, rounded.get(id(param))))
            if is_muon(inner):
                bundle.states += self._muon_states(param)
                continue
            for state in adam_states(inner, param):
                # As mcore makes them before it loads a checkpoint, which has torch's count of steps too.
                make = partial(_make_zeros, inner, state) if isinstance(inner, TORCH) else state.make
                bundle.states.append(replace(state, make=make))
        return result

    def _muon_states(self, param: torch.Tensor) -> Iterator[State]:
        muon = self.optimizer.optimizer
        # A second moment of another shape is small, and stays.
        is_whole = getattr(muon, "moment2_method", None) == "adamuon"
        make = partial(self._init_muon, param)
        for name in (MOMENTUM, SECOND_MOMENT) if is_whole else (MOMENTUM,):
            yield State("moment", name, param, param.dtype, partial(of_inner, muon, param, name), late=True, make=make)

    def _init_muon(self, param: torch.Tensor) -> None:
        """Make the states of a parameter, as mcore does of all before it loads; left to it if that may matter."""
        if not self.kept_whole_by():
            self.optimizer.optimizer._init_group({"params": [param]}, skip_non_grad_params=False)


def _make_zeros(adam: torch.optim.Optimizer, state: State) -> None:
    adam.state[state.param][state.name] = torch.zeros_like(state.param)
