"""What the patched functions around `fsdp_dtensor` checkpoints do, in which masters are the model's own parameters.

Megatron-FSDP gives the masters, as DTensors, in the model's state dictionary, and the optimizer its moments. Bridge
makes views of them (a gated layer's matrix is two entries), which reads no bytes, and then writes them by torch's
distributed checkpoint. So the entries are made of tensors without memory where states are away, and the writer gets
views of host memory in their place. Each wrapper passes through where no Megatron-FSDP is offloaded.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
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
    """Have entries made of tensors without memory where states are away, and give the writer host memory for them."""
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    found = [] if _served else _attachments()  # else it is to be loaded into
    hosts = _Hosts()
    for engine, source in found:
        assert isinstance(source, FsdpSource)
        engine.require_whole(source, "saved")
        with engine.saving(source, copies=False):
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
            meta = torch.empty(shard.shape, dtype=shard.dtype, device="meta")
            self._metas[_place(shard)] = meta
            self._hosts[meta.untyped_storage()._cdata] = host.view(-1).view(torch.uint8)

    def without_memory(self, tensor: DTensor) -> DTensor:
        """Return what stands for a DTensor of a state that was handed out; any other as it is."""
        meta = self._metas.get(_place(local(tensor)))
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


def _place(shard: torch.Tensor) -> tuple[int, int]:
    return shard.untyped_storage()._cdata, int(shard.storage_offset()) * shard.itemsize


def _wrap(shard: torch.Tensor, like: DTensor) -> DTensor:
    return DTensor(shard, like._spec, requires_grad=False)  # type: ignore[reportCallIssue]


def _of_shard(name: str, tensor: DTensor, *args: Any) -> Any:
    closure = getattr(local(tensor), name)
    return closure(args[0], tensor) if args else closure()


def loads_checkpoint(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Have all states on the GPU while a checkpoint is loaded, as upstream writes them there, and away afterwards.

    Host memory cannot be loaded into, as DistributedOptimizer's is. Four steps of a load want all states of a rank on
    the parameters' device. mcore makes the moments by a step of the Adam inside, on gradients of zeros
    (`_init_optimizer_states_with_dummy_values`). The reader writes into the DTensors. The model's `load_state_dict`
    copies each master onto itself, and all of them to the weights. Transformer Engine's `load_state_dict` makes each
    moment anew, beside the loaded ones. Each step would need a replacement that goes part by part.
    """
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
