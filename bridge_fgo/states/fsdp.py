"""mcore's DistributedOptimizer over a model in Megatron-FSDP, with Adam inside, as a source of states.

Megatron-FSDP keeps the masters of one of its parameter groups in one storage, the group's `main_weight_buffer.data`.
The parameters of the Adam inside are DTensors whose local shards are views of it, and it is sliced anew for each copy
to the weights: so it is emptied and filled in place. The moments are DTensors of their own. Of a DTensor only the local
shard is read here: whatever else is asked of it may be a collective.

Reads only these attributes: the optimizer's `optimizer` and `model_chunks`, their `param_and_grad_buffer` and its
`parameter_groups`, and of each its `params`, `dtype` and `main_weight_buffer`; and `orig_param` of the parameters.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, override

import torch

from bridge_fgo.memory.slab import Part
from bridge_fgo.memory.state_tensor import Bundle, Home, State, WeightShard, local
from bridge_fgo.states.distributed import MOMENTS, McoreSource, adam_states, of_inner
from bridge_fgo.states.shadowed import shadowed

BUFFER = "param_and_grad_buffer"  # attribute of a model chunk with what Megatron-FSDP keeps of it


def is_fsdp(optimizer: Any) -> bool:
    """Return whether an optimizer of mcore's updates a model that Megatron-FSDP shards."""
    return bool(getattr(getattr(optimizer, "ddp_config", None), "use_megatron_fsdp", False))


def parameter_groups(optimizer: Any) -> list[Any]:
    """Return the parameter groups of Megatron-FSDP behind an optimizer, in its order."""
    return [group for chunk in optimizer.model_chunks for group in getattr(chunk, BUFFER).parameter_groups]


def stepped_params(optimizer: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield the parameters that the Adam inside steps and this rank has a shard of, each with its parameter group."""
    stepped = {id(param.orig_param): param for group in optimizer.optimizer.param_groups for param in group["params"]}
    for group in parameter_groups(optimizer):
        for param in group.params:
            own = stepped.get(id(param))
            if own is not None and local(own).numel():
                yield group, own


class FsdpSource(McoreSource):
    """The states of a DistributedOptimizer over Megatron-FSDP that is no stub, on this rank: its local shards.

    It divides Megatron-FSDP's `copy_main_weights_to_model_weights`, which goes through its parameter groups.
    """

    native = ()

    @property
    @override
    def writes_back_by_part(self) -> bool:
        """Whether the copy may be divided; not if it quantizes: that is one collective over all groups."""
        return not any(group.dtype == "float8" for group in parameter_groups(self.optimizer))

    @override
    def _copies(self) -> Iterator[tuple[Any, str]]:
        yield from super()._copies()
        yield from (
            (getattr(chunk, BUFFER), "copy_main_weights_to_model_weights") for chunk in self.optimizer.model_chunks
        )

    @override
    def rounded_weights(self, dtypes: Any = ()) -> dict[int, WeightShard]:
        """Return nothing: masters are copied whole."""
        return {}

    @override
    def _all_pairs(self) -> Iterator[tuple[Any, Any]]:
        for group, param in stepped_params(self.optimizer):
            yield param, group

    @contextmanager
    @override
    def _only(self, pairs: list[tuple[Any, Any]], native: bool) -> Iterator[None]:
        wanted = {id(group) for _, group in pairs}
        with ExitStack() as stack:
            for buffer in (getattr(chunk, BUFFER) for chunk in self.optimizer.model_chunks):
                some = [group for group in buffer.parameter_groups if id(group) in wanted]
                stack.enter_context(shadowed(buffer, {"parameter_groups": some}))
            yield

    @override
    def states(self) -> list[Bundle]:
        homes: dict[int, Home] = {}
        result = []
        for group, param in stepped_params(self.optimizer):
            bundle = Bundle(param)
            if (buffer := group.main_weight_buffer) is not None:
                # Of the tensor, not its storage, which may be empty now.
                home = homes.setdefault(id(group), Home(buffer.data.nbytes))
                bundle.states.append(_master(param, home))
            for state in adam_states(self.optimizer.optimizer, param):
                # mcore makes them before a load, by a step of the Adam inside: see `making`.
                read, held = partial(self._moment, param, state.name), partial(self._held, param, state.name)
                bundle.states.append(replace(state, read=read, make=None, handle=held))
            result.append(bundle)
        return result

    def _held(self, param: torch.Tensor, name: str) -> torch.Tensor | None:
        held: torch.Tensor | None = self.optimizer.optimizer.state.get(param, {}).get(name)
        return held

    def _moment(self, param: torch.Tensor, name: str) -> torch.Tensor | None:
        """Return the local shard of a moment, which nothing else keeps in the memory that it has."""
        adam = self.optimizer.optimizer
        shard = of_inner(adam, param, name)
        if shard is None or shard._base is None:
            return shard
        # TE makes it by `DTensor.from_local`, so that it is a view, whose base would keep the memory that it leaves.
        moment = adam.state[param][name]
        moment._local_tensor = shard.detach()
        return local(moment)

    @contextmanager
    @override
    def making(self, make: Callable[[], None], owners: Mapping[int, Part]) -> Iterator[Callable[[Part | None], None]]:
        adam = self.optimizer.optimizer

        def of_part() -> None:
            make()
            for group in adam.param_groups:
                for param in group["params"]:
                    # mcore's zeros, which TE's `zero_grad` keeps if the gradients are decoupled.
                    param.grad = None

        with self._inner_step.divided(of_part, owners):
            yield self._inner_step.update

    def has_own(self, state_dict: Mapping[str, Any]) -> bool:
        """Return whether a state dictionary has the very states of the Adam inside, which were loaded where they are.

        Loaded once more they would be the same, unless Transformer Engine scales them: those in fp16. Its `state` is
        by the names that its `param_groups` have for the parameters.
        """
        adam = self.optimizer.optimizer
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        params = [param for group in adam.param_groups for param in group["params"]]
        states: Mapping[Any, Any] = state_dict["state"]
        if len(names) != len(params) or not states.keys() <= set(names):
            return False
        for name, param in zip(names, params, strict=True):
            own, given = adam.state.get(param, {}), states.get(name, {})
            if own.keys() != given.keys() or not all(_is_same(own[key], given[key]) for key in own):
                return False
        return True

    def of_param(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the local shards of what the optimizer has of a parameter: of its states, and of itself."""
        states = self.optimizer.optimizer.state.get(param, {})
        moments = {name: self._moment(param, name) for name in MOMENTS if name in states}
        return {PARAM: local(param), **{name: moment for name, moment in moments.items() if moment is not None}}


PARAM = "param"  # what `FsdpSource.of_param` calls the parameter: no state of Adam's has that name


def place(shard: torch.Tensor) -> tuple[int, int]:
    """Return where a tensor is, be its memory there or not: its storage, and its first byte in that."""
    return shard.untyped_storage()._cdata, int(shard.storage_offset()) * shard.itemsize


def _is_same(own: Any, given: Any) -> bool:
    """Return whether a given state is one's own, and a load of it onto itself would leave every bit."""
    if not isinstance(own, torch.Tensor) or not isinstance(given, torch.Tensor):
        return own is given
    mine, theirs = local(own), local(given)
    if mine.dtype == torch.float16:
        return False
    return place(mine) == place(theirs) and (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)


def _master(param: torch.Tensor, home: Home) -> State:
    shard = local(param)
    offset = int(shard.storage_offset()) * shard.itemsize
    read = partial(local, param)
    return State(
        "master", "master weight", param, shard.dtype, read, written_back=True, home=home, offset=offset,
        handle=lambda: param,
    )  # fmt: skip
