"""Save and load `fsdp_dtensor` checkpoints, in which masters are the model's own parameters, without states on the GPU.

Megatron-FSDP puts the masters, as DTensors, into the model's state dictionary, and the optimizer its moments. Bridge
makes views of them (a gated layer's matrix is two entries), which reads no bytes, and torch's distributed checkpoint
writes them, or reads into them. So the entries of offloaded states are made of tensors without memory, and the writer
or reader gets views of host memory in their place (`hands_out_states`).

In a load upstream has all states of a rank on the parameters' device in four steps. Here each goes part by part, or
without the bytes:

1. mcore makes the moments by a step of the Adam inside, on gradients of zeros. It runs for one part after another,
   whose states are then offloaded (`makes_states`). What else it does is as upstream's, also to states that the
   checkpoint lacks: it counts, and its weight decay scales masters.
2. The reader writes into DTensors, which have host memory.
3. The model's `load_state_dict` copies each master onto itself, which torch leaves out, and then all of them to the
   weights, which goes part by part (`rewrites_weights`).
4. Transformer Engine's `load_state_dict` makes each moment anew, beside the loaded ones. It gets the param groups alone
   (`loads_states`).

All states are on the GPU, as without offload, in the first step if the optimizer's step cannot be divided
(`Source.kept_whole_by`), and in the last if moments are in fp16, which Transformer Engine scales anew. All masters, and
no moments, are there in the third step if weights are in FP8, whose copy is one collective, or if the layout of gated
layers is changed (`moe_mlp_glu_interleave_size`), by copies on the GPU. Other code in the place of the methods of the
first and third step, and of the copy to the weights, runs once.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from bridge_fgo.bridge.patch import Args, Call, Kwargs, Wrapped, arguments_of, served
from bridge_fgo.bridge.session import all_sessions
from bridge_fgo.engines.native import NativeEngine
from bridge_fgo.memory.guard import own
from bridge_fgo.memory.state_tensor import local
from bridge_fgo.states.choice import leaves
from bridge_fgo.states.distributed import load_groups, loads_its_own_way
from bridge_fgo.states.fsdp import BUFFER, FsdpSource, is_fsdp, place, stepped_params
from bridge_fgo.states.inner_step import is_upstreams
from bridge_fgo.states.shadowed import shadowed

CLOSURES = ("__create_chunk_list__", "__create_write_items__")
"""Attributes that Megatron-FSDP sets on a local shard: torch's checkpoints read its place in the whole from them."""

Served = tuple[NativeEngine, FsdpSource]

_loaded_into: list[Served] | None = None  # of the checkpoint that is being loaded; None while none is


STATE_DICT = "raw_state_dict"  # the parameter of `hands_out_states` with the state dictionary
MAKING = "_init_optimizer_states_with_dummy_values"  # the method by which mcore makes the moments before a load


@contextlib.contextmanager
def _loading_into(found: list[Served]) -> Iterator[None]:
    """Context in which a checkpoint is loaded into the states of some sources; inside another it is that other."""
    global _loaded_into
    if _loaded_into is not None:
        yield
        return
    _loaded_into = found
    try:
        yield
    finally:
        _loaded_into = None
    # Not after an error: what the reader had written by then stays, and nothing may use it.
    for engine, source in found:
        engine.load_ends(source)


def _attachments() -> list[Served]:
    """Return each source of Megatron-FSDP in an open session, with its engine."""
    engines = dict.fromkeys(session.engine for session in all_sessions() if not session.is_lost)
    native = [engine for engine in engines if isinstance(engine, NativeEngine)]
    return [(engine, source) for engine in native for source in engine.sources if isinstance(source, FsdpSource)]


def makes_state_dict(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make a state dictionary without reloading states to the GPU: nothing reads their bytes yet."""
    with own() if _attachments() else contextlib.nullcontext():
        return wrapped(*args, **kwargs)


def hands_out_states(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make entries of offloaded states from tensors without memory, and then give them host memory.

    A writer reads that, or a reader loads into it. States on the GPU are loaded there.
    """
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    hosts = _Hosts()
    for engine, source in _attachments() if _loaded_into is None else _loaded_into:
        if _loaded_into is None:
            handing_out = engine.saving(source, copies=False)
        else:
            engine.load_begins(source)
            handing_out = engine.loading(source, everything=True)
        with handing_out:
            for _, param in stepped_params(source.optimizer):
                states = source.of_param(param)
                handed = engine.hand_out(source, param, partial(dict, states))
                for name, shard in states.items():
                    hosts.add(shard, handed[name])
    bound.arguments[STATE_DICT] = _replaced(bound.arguments[STATE_DICT], hosts.without_memory)
    return _replaced(wrapped(*bound.args, **bound.kwargs), hosts.on_the_host)


def _replaced(value: Any, by: Callable[[DTensor], DTensor]) -> Any:
    """Return a state dictionary, or a value of one, with each DTensor replaced; itself if none was."""
    if isinstance(value, DTensor):
        return by(value)
    if isinstance(value, dict):
        inside = {key: _replaced(each, by) for key, each in value.items()}
        # A dictionary of the optimizer's own must not change.
        return inside if any(inside[key] is not each for key, each in value.items()) else value
    return value


class _Hosts:
    """Host memory of states, and tensors without memory that stand for them while the entries are made.

    PyTorch makes no view of a storage that is empty, and `DTensor.from_local` moves what is not on the mesh's device to
    it, but for tensors on the meta device.
    """

    def __init__(self) -> None:
        self._metas: dict[tuple[int, int], torch.Tensor] = {}
        """By the storage of a state and its first byte there, a tensor like it on the meta device."""
        self._hosts: dict[int, torch.Tensor] = {}  # by that tensor's storage, its state's bytes on the host, uint8

    def add(self, shard: torch.Tensor, host: torch.Tensor) -> None:
        """Note what was handed out for a state, unless that is the state itself."""
        if host is not shard and shard.numel():
            assert host.dtype == shard.dtype
            meta = torch.empty(shard.shape, dtype=shard.dtype, device="meta")
            self._metas[place(shard)] = meta
            self._hosts[meta.untyped_storage()._cdata] = host.view(-1).view(torch.uint8)

    def without_memory(self, tensor: DTensor) -> DTensor:
        """Return what stands for a DTensor of a state that was handed out; any other as it is."""
        meta = self._metas.get(place(local(tensor)))
        if meta is None or meta.shape != local(tensor).shape:
            return tensor
        # A view: of one state there are several entries where its parameter is shared, each with closures of its own.
        return _like(tensor, meta.view(meta.shape))

    def on_the_host(self, tensor: DTensor) -> DTensor:
        """Return a DTensor with host memory for one that stands for a state, or for a part of one."""
        meta = local(tensor)
        host = self._hosts.get(meta.untyped_storage()._cdata) if meta.is_meta else None
        if host is None:
            return tensor
        assert meta.is_contiguous()
        first = int(meta.storage_offset()) * meta.itemsize
        home = host[first : first + meta.nbytes].view(meta.dtype).view(meta.shape)
        for name in CLOSURES:
            # Not of `home`: that its memory is page-locked would be written too.
            setattr(home, name, partial(_of_shard, name, tensor))
        return _like(tensor, home)


def _like(tensor: DTensor, shard: torch.Tensor) -> DTensor:
    return DTensor(shard, tensor._spec, requires_grad=False)  # type: ignore[reportCallIssue]


def _of_shard(name: str, tensor: DTensor, *args: Any) -> Any:
    closure = getattr(local(tensor), name)
    return closure(args[0], tensor) if args else closure()


# The rest of a load.


def loads_checkpoint(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Keep states offloaded while a checkpoint is loaded, and afterwards; see the module."""
    optimizer = arguments_of(wrapped, args, kwargs).get("optimizer")
    given = {id(leaf) for leaf in leaves(optimizer)}
    # A load of weights may be given no optimizer, whose masters they are.
    found = [to for to in _attachments() if optimizer is None or id(to[1].optimizer) in given]
    if not found:
        return wrapped(*args, **kwargs)
    for engine, _ in found:
        engine.offload_now()
    with own(), _loading_into(found):  # it finds the states by itself, and none counts as touched
        result = wrapped(*args, **kwargs)
    for engine, _ in found:
        engine.offload_now()
    return result


def reads_checkpoint(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Note that a checkpoint is read, and none written."""
    with _loading_into(_attachments()):
        return wrapped(*args, **kwargs)


@served
def makes_states(call: Call) -> Any:
    """Make the moments part by part."""
    if not is_fsdp(call.optimizer):
        return call()
    if not is_upstreams(call.wrapped):
        call.engine.require_writable(call.source)
        return call()
    call.engine.make_states(call.source, call)
    return None


def gives_states(call: Call) -> dict[str, Any]:
    """Return a state dictionary of the states themselves, whose bytes nothing reads yet, or which are to be loaded.

    Its entries are in the order of the optimizer's parameters, as without offload, where states are made in that order:
    what follows is a collective for each entry, and parts step in an order that differs from rank to rank.
    """
    if call.is_loading and not hasattr(call.optimizer, MAKING):
        call.engine.require_writable(call.source)  # this mcore makes them in another way
    result = call()
    state = result["state"]
    groups = call.optimizer.optimizer.param_groups
    names = [call.optimizer._param_name(param) for group in groups for param in group["params"]]
    return {**result, "state": {name: state[name] for name in dict.fromkeys([*names, *state]) if name in state}}


def loads_states(call: Call) -> Any:
    """Load param groups, and states only if they are not the optimizer's own, which were loaded in place."""
    source, adam = call.source, call.optimizer.optimizer
    assert isinstance(source, FsdpSource)
    load, is_somebodys = adam.load_state_dict, loads_its_own_way(adam)

    def load_what_differs(state_dict: dict[str, Any]) -> None:
        if source.has_own(state_dict) and not is_somebodys:
            load_groups(adam, state_dict)
            return
        call.engine.require_writable(source)
        load(state_dict)
        call.engine.states_replaced(source)

    with shadowed(adam, {"load_state_dict": load_what_differs}):
        return call()


def rewrites_weights(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make the weights of a model that Megatron-FSDP shards anew of its masters, part by part."""
    buffer = getattr(instance, BUFFER)
    for engine, source in _attachments():
        # It has one optimizer, for dense parameters and experts alike.
        if any(getattr(chunk, BUFFER) is buffer for chunk in source.optimizer.model_chunks):
            if not is_upstreams(wrapped):
                engine.require_readable(source, masters_only=True)
                break
            return engine.rewrite_weights(source, lambda: wrapped(*args, **kwargs))
    return wrapped(*args, **kwargs)


def interleaves_masters(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make the masters writable: the layout of gated layers is changed by copies on the GPU, in a load to them."""
    for engine, source in _attachments():
        engine.require_writable(source, masters_only=True)
    return wrapped(*args, **kwargs)
