"""What the patched functions around `fsdp_dtensor` checkpoints do, in which masters are the model's own parameters.

Megatron-FSDP gives the masters, as DTensors, in the model's state dictionary, and the optimizer its moments. Bridge
makes views of them (a gated layer's matrix is two entries), which reads no bytes, and then has torch's distributed
checkpoint write them, or read into them. So the entries are made of tensors without memory where states are away, and
the writer or reader gets views of host memory in their place. The rest of a load is in `fsdp_loads`. Each wrapper
passes through where no Megatron-FSDP is offloaded.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from bridge_fgo.bridge.session import active_session, all_sessions
from bridge_fgo.bridge.wrappers import Args, Kwargs, Wrapped
from bridge_fgo.engines.attachment import Attachment
from bridge_fgo.memory.guard import own
from bridge_fgo.memory.state import local
from bridge_fgo.states.fsdp import FsdpSource, place, stepped_params

CLOSURES = ("__create_chunk_list__", "__create_write_items__")
"""What Megatron-FSDP hangs on a local shard, by which torch's checkpoints know its place in the whole."""

_served = False
"""Whether a checkpoint is being made or loaded that finds the states by itself."""

_loaded_into: list[Attachment] | None = None
"""The sources whose states a checkpoint is being loaded into; None while none is."""


@contextlib.contextmanager
def serving() -> Iterator[None]:
    """Context in which nobody who asks for the model's parameters reads masters, so that none counts as touched."""
    global _served
    before, _served = _served, True
    try:
        with own():
            yield
    finally:
        _served = before


@contextlib.contextmanager
def loading_into(found: list[Attachment]) -> Iterator[None]:
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


def attachments() -> list[Attachment]:
    """Return each source of Megatron-FSDP in an open session, with its engine."""
    engines = {id(session.engine): session.engine for session in all_sessions() if not session.is_lost}
    return [
        Attachment(engine, source)
        for engine in engines.values()
        for source in engine.sources
        if isinstance(source, FsdpSource)
    ]


def makes_state_dict(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Have a state dictionary made without bringing states to the GPU: nothing reads their bytes yet."""
    with serving() if attachments() else contextlib.nullcontext():
        return wrapped(*args, **kwargs)


def hands_out_states(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Have entries made of tensors without memory where states are away, and then give them host memory.

    From there a writer reads them, or a reader loads them there. What is on the GPU is loaded where it is.
    """
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    hosts = _Hosts()
    for engine, source in attachments() if _loaded_into is None else _loaded_into:
        assert isinstance(source, FsdpSource)
        if _loaded_into is None:
            engine.require_whole(source, "saved")
            handing_out = engine.saving(source, copies=False)
        else:
            engine.load_begins(source)
            handing_out = engine.loading(source, everything=True)
        with handing_out:
            for _, param in stepped_params(source.optimizer):
                own = source.of_param(param)
                handed = engine.hand_out(source, param, partial(dict, own))
                for name, shard in own.items():
                    hosts.add(shard, handed[name])
    bound.arguments[STATE_DICT] = replaced(bound.arguments[STATE_DICT], hosts.without_memory)
    return replaced(wrapped(*bound.args, **bound.kwargs), hosts.on_the_host)


STATE_DICT = "raw_state_dict"
"""The parameter with the state dictionary."""


def replaced(value: Any, by: Callable[[DTensor], DTensor]) -> Any:
    """Return a state dictionary, or a value of one, with each DTensor replaced; itself where none was."""
    if isinstance(value, DTensor):
        return by(value)
    if isinstance(value, dict):
        inside = {key: replaced(each, by) for key, each in value.items()}
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
        self._hosts: dict[int, torch.Tensor] = {}
        """By the storage of such a tensor, the bytes of the state on the host, uint8."""

    def add(self, shard: torch.Tensor, host: torch.Tensor) -> None:
        """Note what was handed out for a state; nothing where that is the state itself."""
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
        return _wrap(meta.view(meta.shape), tensor)

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
        return _wrap(home, tensor)


def _wrap(shard: torch.Tensor, like: DTensor) -> DTensor:
    return DTensor(shard, like._spec, requires_grad=False)  # type: ignore[reportCallIssue]


def _of_shard(name: str, tensor: DTensor, *args: Any) -> Any:
    closure = getattr(local(tensor), name)
    return closure(args[0], tensor) if args else closure()


def reads_masters(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make the masters readable where somebody is about to get them as the model's parameters, outside of a step."""
    if not _served and active_session() is None:
        for engine, source in attachments():
            engine.require_readable(source, masters_only=True)
    return wrapped(*args, **kwargs)
