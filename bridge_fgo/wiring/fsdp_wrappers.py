"""What the patched functions around `fsdp_dtensor` checkpoints do, in which masters are the model's own parameters.

Megatron-FSDP gives the masters, as DTensors, in the model's state dictionary, and the optimizer its moments. Bridge
makes views of them (a gated layer's matrix is two entries), which reads no bytes, and then writes them by torch's
distributed checkpoint. So the dictionary is made of tensors that may be away, and what is handed to the writer is the
same with views of host memory in their place. Each wrapper passes through where no Megatron-FSDP is offloaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from bridge_fgo.core.state import local
from bridge_fgo.engines.attachment import Attachment, attachment_of
from bridge_fgo.sources.fsdp import FsdpSource, is_fsdp, stepped_params
from bridge_fgo.sources.leaves import leaves
from bridge_fgo.wiring.session import active_session, all_sessions
from bridge_fgo.wiring.wrappers import Args, Kwargs, Wrapped, arguments_of

CLOSURES = ("__create_chunk_list__", "__create_write_items__")
"""What Megatron-FSDP hangs on a local shard, by which torch's checkpoints know its place in the whole."""

_served = False
"""Whether a checkpoint is being made or loaded that finds the states by itself."""


@contextlib.contextmanager
def _serving() -> Iterator[None]:
    global _served
    before, _served = _served, True
    try:
        yield
    finally:
        _served = before


def _attachments() -> list[Attachment]:
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
    with _serving() if _attachments() else contextlib.nullcontext():
        return wrapped(*args, **kwargs)


def hands_out_states(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Give the writer host memory in the place of states that are away."""
    result = wrapped(*args, **kwargs)
    if _served:  # to be loaded into
        return result
    hosts = _Hosts()
    for engine, source in _attachments():
        assert isinstance(source, FsdpSource)
        engine.require_whole(source, "saved")
        with engine.saving(source, copies=False):
            for _, param in stepped_params(source.optimizer):
                own = source.of_param(param)
                hosts.add(own, engine.hand_out(source, param, partial(dict, own)))
    return hosts.swapped(result)


class _Hosts:
    """Where the bytes of states are on the host, by where they would be on the GPU."""

    def __init__(self) -> None:
        self._found: dict[int, list[tuple[int, torch.Tensor]]] = {}
        """By storage: the first byte of a tensor in it, and its bytes on the host, uint8."""

    def add(self, own: dict[str, torch.Tensor], handed: dict[str, torch.Tensor]) -> None:
        """Note the local shards of one parameter, and what was handed out for them."""
        for name, tensor in own.items():
            if (host := handed[name]) is not tensor:
                place = int(tensor.storage_offset()) * tensor.itemsize, host.view(-1).view(torch.uint8)
                self._found.setdefault(tensor.untyped_storage()._cdata, []).append(place)

    def swapped(self, value: Any) -> Any:
        """Return a state dictionary, or a value of one, with host memory in its tensors; itself where none is away."""
        if isinstance(value, DTensor):
            return self._swapped(value)
        if isinstance(value, dict):
            inside = {key: self.swapped(each) for key, each in value.items()}
            # A dictionary of the optimizer's own must not change.
            return inside if any(inside[key] is not each for key, each in value.items()) else value
        return value

    def _swapped(self, tensor: DTensor) -> DTensor:
        shard = local(tensor)
        first = shard.storage_offset() * shard.itemsize
        for start, host in self._found.get(shard.untyped_storage()._cdata, []):
            if shard.numel() and start <= first and first + shard.nbytes <= start + host.numel():
                assert shard.is_contiguous()
                home = host[first - start : first - start + shard.nbytes].view(shard.dtype).view(shard.shape)
                for name in CLOSURES:
                    # Of the shard itself: that the memory is page-locked would be written too.
                    setattr(home, name, partial(_of_shard, name, tensor))
                return DTensor(home, tensor._spec, requires_grad=False)  # type: ignore[reportCallIssue]
        return tensor


def _of_shard(name: str, tensor: DTensor, *args: Any) -> Any:
    closure = getattr(local(tensor), name)
    return closure(args[0], tensor) if args else closure()


def loads_checkpoint(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Have all states on the GPU while a checkpoint is loaded, as upstream writes them there, and away afterwards."""
    optimizer = arguments_of(wrapped, args, kwargs).get("optimizer")
    found = [to for leaf in leaves(optimizer) if is_fsdp(leaf) and (to := attachment_of(leaf)) is not None]
    if not found:
        return wrapped(*args, **kwargs)
    for to in found:
        to.engine.require_writable(to.source)
    with _serving():
        result = wrapped(*args, **kwargs)
    for to in found:
        to.engine.states_replaced(to.source)
        to.engine.make_room()
    return result


def reads_masters(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make the masters readable where somebody is about to get them as the model's parameters, outside of a step."""
    if not _served and active_session() is None:
        for engine, source in _attachments():
            engine.require_readable(source, masters_only=True)
    return wrapped(*args, **kwargs)


def interleaves_masters(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make the masters readable: the layout of gated layers is changed by copies on the GPU."""
    for engine, source in _attachments():
        engine.require_readable(source, masters_only=True)
    return wrapped(*args, **kwargs)
