"""mcore's DistributedOptimizer with an Adam inside, as a source of states.

Reads only attributes that every mcore from 0.15 on has: `optimizer` (the Adam inside), its `param_groups`
and `state`, `shard_fp32_from_float16_groups` and `buffers`.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, override

import torch

from bridge_fgo.memory.guard import class_of
from bridge_fgo.memory.slab import Part
from bridge_fgo.memory.state_tensor import Bundle, State, WeightShard, local
from bridge_fgo.states.inner_step import InnerStep, in_place_of
from bridge_fgo.states.masters import PLAIN, take_first
from bridge_fgo.states.shadowed import shadowed
from bridge_fgo.states.source import Source

MOMENTS = ("exp_avg", "exp_avg_sq")  # what Adam calls its moments
COPY = "_copy_main_params_to_model_params"  # the method by which an optimizer of mcore's copies masters to weights
MASTER = "master_param"  # what TE's FusedAdam calls a master weight that it keeps itself
UPSTREAM_OFFLOADERS = ("_state_offloader", "_optimizer_state_offloader")  # of mcore's generations 1 and 2

TORCH = (torch.optim.Adam, torch.optim.AdamW)

HALF = (torch.bfloat16, torch.float16)

Buffers = dict[int, Callable[[], torch.Tensor]]  # reads each weight buffer, one callable by the `id` of its bucket


def is_adam(inner: Any) -> bool:
    """Return whether an inner optimizer is an Adam whose states the package knows: mcore's choice, or torch's."""
    from megatron.core.optimizer import distrib_optimizer

    return isinstance(inner, (distrib_optimizer.Adam, *TORCH))


class McoreSource(Source):
    """The states of an optimizer of mcore's that copies masters to weights, by `_copy_main_params_to_model_params`.

    It divides that copy, so that masters may leave early. A DistributedOptimizer's copies each master of
    `shard_fp32_from_float16_groups` into the range of the parameter buffer that belongs to the parameter at the same
    place of `model_float16_groups`; of shorter lists it copies fewer.
    """

    # the optimizer's lists of masters, and of the parameters that they are copied to
    masters = ("shard_fp32_from_float16_groups", "model_float16_groups")
    # its lists of native fp32 parameters that the method copies too
    native = ("shard_fp32_groups", "model_fp32_groups")

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self._copied: frozenset[int] | None = frozenset()  # by `id`, in the present step; None while a part is
        self._pairs: dict[int, tuple[Any, Any]] = {}
        self._inner_step = InnerStep(optimizer.optimizer)
        self._copies_parts = False

    @property
    @override
    def device(self) -> torch.device:
        return home_device(self.optimizer)

    @property
    @override
    def updates_in_place(self) -> bool:
        # TE's FusedAdam alone says of what dtypes its states are: it makes fp32 of others, for the length of its step.
        # torch's Adam makes several temporaries of each parameter, and Muon some of each matrix.
        dtypes = getattr(self.optimizer.optimizer, "name_to_dtype_map", {})
        return set(dtypes.values()) == {torch.float32}

    @override
    def kept_whole_by(self) -> str:
        return self._inner_step.kept_whole_by() or self.copy_kept_whole_by()

    @override
    def copy_kept_whole_by(self) -> str:
        # Called once for each part it would count, average or draw random numbers otherwise.
        copy = next(filter(None, (in_place_of(name, owner) for owner, name in self._copies())), "")
        return f"a function in the place of its copy to the weights, {copy}" if copy else ""

    def _copies(self) -> Iterator[tuple[Any, str]]:
        """Yield the methods that copy masters to weights, each as its owner and its name."""
        yield self.optimizer, COPY

    @contextmanager
    @override
    def stepping(self, run: Callable[[], None], owners: Mapping[int, Part]) -> Iterator[None]:
        self._copies_parts = self.writes_back_by_part  # asked once, not for each part
        with self._inner_step.replaced(run, owners), self.one_step():
            yield

    @override
    def step(self, part: Part | None) -> None:
        self._inner_step.update(part)
        if part is not None and part.written_back and self._copies_parts:
            # Part by part the copy to the model's weights hides behind the copies of the parts that follow, and the
            # masters may leave at once.
            self.copy_part(part.ids)
            part.mark_just_rounded()

    # The copy of masters to weights.

    @property
    @override
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
    @override
    def writing_back(self) -> Iterator[frozenset[int] | None]:
        """Context in which the method copies what was not copied part by part; see `Source.writing_back`."""
        copied = self._copied
        with self._all_but(copied) if copied else nullcontext():
            yield copied

    @override
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

    def upstream_offloader(self) -> Any:
        """Return the offloader that mcore has built into the optimizer, or None."""
        found = [vars(self.optimizer).get(name) for name in UPSTREAM_OFFLOADERS]
        return next((offloader for offloader in found if offloader is not None), None)

    def drop_other_offloader(self) -> None:
        """Take mcore's own offloader off the optimizer, as another engine serves it."""
        for name in UPSTREAM_OFFLOADERS:
            if vars(self.optimizer).get(name) is not None:
                setattr(self.optimizer, name, None)


class MegatronSource(McoreSource):
    """The states of a DistributedOptimizer that is no stub, with Adam inside: the moments, and the fp32 masters."""

    @override
    def states(self) -> list[Bundle]:
        return bundles(self.optimizer, self.rounded_weights())

    def rounded_masters(self) -> list[tuple[torch.Tensor, WeightShard]]:
        """Return each fp32 master that mcore keeps, and the 16-bit weights of this rank that it is rounded to."""
        shards = self.rounded_weights(HALF)
        masters = (master for group in self.optimizer.shard_fp32_from_float16_groups for master in group)
        return [(master, shards[id(master)]) for master in masters if id(master) in shards]

    def round_again(self, masters: Iterable[torch.Tensor]) -> None:
        """Write the weights that some masters are rounded to, by mcore's own copy; the masters are on the GPU."""
        with self.one_step():
            self.copy_part(frozenset(id(master) for master in masters))


def bundles(optimizer: Any, rounded: Mapping[int, WeightShard] | None = None) -> list[Bundle]:
    """Return the states of every parameter of a DistributedOptimizer, in the order of its param groups.

    Parameters of no elements are left out. A master weight that shares memory with a DDP buffer (native fp32
    parameters) is left out: it is the model's weight, and must never be moved, resized or rebound.
    """
    adam = optimizer.optimizer
    masters = {id(p) for group in optimizer.shard_fp32_from_float16_groups for p in group if p is not None}
    owned_by_ddp = ddp_storages(optimizer)
    result = [Bundle(param) for group in adam.param_groups for param in group["params"] if param.numel()]
    for bundle in result:
        param = bundle.param
        if id(param) in masters and param.untyped_storage()._cdata not in owned_by_ddp:
            bundle.states.append(master_state(param, (rounded or {}).get(id(param))))
        bundle.states += adam_states(adam, param)
    return result


def master_state(param: torch.Tensor, rounds_to: WeightShard | None) -> State:
    """Return the state of a parameter of the optimizer inside that is a master itself."""
    name, first = "master weight", partial(take_first, param)
    return State(
        "master", name, param, param.dtype, lambda: param, written_back=True, rounds_to=rounds_to, take_first=first
    )


def adam_states(adam: torch.optim.Optimizer, param: torch.Tensor) -> Iterator[State]:
    """Yield what an Adam keeps of a parameter: the moments, and a master if it is FusedAdam that has it."""
    has_masters = getattr(adam, "master_weights", False)

    def state(kind: str, name: str, dtype: torch.dtype) -> State:
        read = partial(of_inner, adam, param, name)
        # mcore cannot load into torch's Adam before it has stepped.
        make = None if isinstance(adam, TORCH) else partial(_make, adam, param, name, dtype)
        # Of TE's FusedAdam with masters of its own mcore reads states by `get_unscaled_state`, which makes fp32 of one
        # in 16 bits, on the GPU. Of any other Adam it takes them as they are.
        converts = has_masters and dtype in HALF
        return State(kind, name, param, dtype, read, late=True, converts=converts, make=make)

    dtypes = getattr(adam, "name_to_dtype_map", {})  # TE FusedAdam; torch's Adam keeps the dtype of the param
    for name in MOMENTS:
        yield state("moment", name, dtypes.get(name, param.dtype))
    if has_masters:
        # TE keeps the low 16 bits of a bf16 parameter's fp32 master alone (store_param_remainders).
        remainders = getattr(adam, "store_param_remainders", False) and param.dtype == torch.bfloat16
        yield state("master", MASTER, torch.int16 if remainders else dtypes[MASTER])


def loads_its_own_way(adam: Any) -> bool:
    """Return whether somebody else's code takes part in a load of the optimizer inside: a hook, or an override."""
    hooks = [getattr(adam, f"_optimizer_load_state_dict_{when}_hooks", {}) for when in ("pre", "post")]
    return any(hooks) or bool(in_place_of("load_state_dict", adam))


def load_groups(adam: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Load the param groups of a state dictionary into an Adam, whose states stay as they are."""
    state = adam.state
    torch.optim.Optimizer.load_state_dict(adam, {**state_dict, "state": {}})
    adam.state = state


def as_they_are(adam: Any) -> dict[str, Callable[..., Any]]:
    """Return methods for an Adam whose `state_dict` takes states as they are; TE's makes fp32 of 16 bits."""
    mine = {"get_unscaled_state": lambda param, name: adam.state[param][name]}
    return mine if hasattr(adam, "get_unscaled_state") else {}


def _make(adam: Any, param: torch.Tensor, name: str, dtype: torch.dtype) -> None:
    """Make a state of TE's FusedAdam, as mcore does for all of them together before it loads a checkpoint."""
    if hasattr(adam, "set_scaled_state"):  # makes what goes with it, scales say; of integers or of fp32
        dtype = dtype if dtype == torch.int16 else torch.float32
        adam.set_scaled_state(param, name, torch.zeros(param.shape, dtype=dtype, device=param.device))
    else:
        adam.state[param][name] = torch.zeros(param.shape, dtype=dtype, device=param.device)


def of_inner(adam: torch.optim.Optimizer, param: torch.Tensor, name: str) -> torch.Tensor | None:
    """Return a tensor of `adam.state` as it is now, None before the first step made it; ValueError for FP8 moments."""
    # Not states[param]: `optimizer.state` is a defaultdict, and Adam takes an empty entry for a made one. And not kept:
    # load_state_dict puts another dictionary there.
    tensor = adam.state.get(param, {}).get(name)
    if tensor is not None:
        tensor = local(tensor)
    if tensor is None or class_of(tensor) in PLAIN:
        return tensor
    raise ValueError(
        f"optimizer state {name!r} is a {type(tensor).__name__}: only plain tensors can be offloaded; set "
        f"optimizer.{name}_dtype to torch.float32 or torch.bfloat16"
    )


def ddp_storages(optimizer: Any) -> set[int]:
    """Return the storages (`_cdata`) of the DDP parameter and gradient buffers behind a DistributedOptimizer."""
    data = (getattr(buffer, name, None) for buffer in optimizer.buffers for name in ("param_data", "grad_data"))
    return {tensor.untyped_storage()._cdata for tensor in data if tensor is not None}


def live_bytes(states: Iterable[Bundle], home: torch.device) -> int:
    """Return the bytes of memory on the device `home` that states hold now: none of released ones, or on the host."""
    tensors = (state.read() for bundle in states for state in bundle.states)
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None and tensor.device == home]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def home_device(optimizer: Any) -> torch.device:
    """Return the device of a DistributedOptimizer's states: its DDP buffers', or without any the model's."""
    for buffer in getattr(optimizer, "buffers", ()):
        return buffer.grad_data.device
    return next(param.device for chunk in optimizer.model_chunks for param in chunk.parameters())
