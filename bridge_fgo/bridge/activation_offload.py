"""Wrappers of mcore's fine-grained activation offload: they add the waits that its copies lack (read in mcore 0.19.2).

One more tells when the forward of a model chunk ends. Another checks host memory before Transformer Engine offloads a
whole layer, whose copies lack no wait (2.17).

mcore copies a group of saved tensors out on one stream (D2H) and back on another (H2D), and computes on a third. In the
capture of a layer's CUDA graph neither mcore nor a wrapper waits for an event: the graphs wait for whole streams.
"""

import importlib
import weakref
from collections import Counter
from typing import Any, override

import torch
from torch.overrides import TorchFunctionMode

from bridge_fgo.bridge.compat import setting_of
from bridge_fgo.bridge.patch import Args, Kwargs, Wrapped, Wrapper
from bridge_fgo.bridge.settings import installed_config
from bridge_fgo.config import readable
from bridge_fgo.memory.host_memory import free_for_each_rank, power_of_two_at_least

METHODS = {
    "ChunkOffloadHandler": ("tensor_pop", "finish_all_groups"),
    "OffloadTensorPool": ("free", "allocate", "reset"),
}
"""The methods that are wrapped, by class: waits are added to all but `finish_all_groups`."""
READS = "_bridge_fgo_reads"
"""Attribute of a pool: for each of its free buffers, by `id`, the event of its newest copy to the GPU."""
PIECE_BYTES = 32 * 2**20
"""Most bytes that one stream copies before another's turn: of saved tensors, and of states and gradients beside them.

Copies of saved tensors back stay whole: no `.item()` waits for them, but backward does, and states would pass pieces.
Measured on one H200: the longest wait of an `.item()` was 9.1 ms with whole tensors, 0.35 ms with pieces, and 0.78 ms
with the states' offload beside (4 layers, hidden 2048, 6 steps of 4 microbatches). With 43 GB a step, both directions
together, enqueuing took 23.8 ms with pieces of 64 MiB and 26.3 ms with 32 MiB (16 experts, 10 layers). No order of the
copies shortened a step: pieces of 16 MiB, a higher priority of mcore's streams, or states that wait for activations.
"""
CHECKED = "_bridge_fgo_checked"
"""Attribute of a layer's state in Transformer Engine: how many blocks of host memory were there for it, by size."""
PIECES = "_bridge_fgo_pieces"  # attribute of a pool: its `_InPieces`

MODULE = "megatron.core.pipeline_parallel.fine_grained_activation_offload"
ON = "fine_grained_activation_offloading"  # its setting in Bridge's model config

_are_added = False
_pinned_for_states = 0
askers = weakref.WeakSet[Any]()  # residencies whose own settings ask for the waits, until they are closed


def add_waits(pinned_for_states: int = 0) -> None:
    """Add the waits from now on, also for later trainings in this process.

    `pinned_for_states` are the bytes that are pinned beside the host copies of activations, for messages.
    """
    global _are_added, _pinned_for_states
    _are_added, _pinned_for_states = True, pinned_for_states or _pinned_for_states


def forget_waits() -> None:
    """Add no more waits, except for `askers`."""
    global _are_added, _pinned_for_states
    _are_added, _pinned_for_states = False, 0


def pinned_bytes() -> int:
    """Return the bytes that PyTorch's own allocator has pinned, in powers of two: host copies of activations, mostly.

    0 without a GPU, and with an older PyTorch that does not count them.
    """
    counts = getattr(torch.cuda, "host_memory_stats_as_nested_dict", None)
    if counts is None or not torch.cuda.is_initialized():
        return 0
    return counts().get("allocated_bytes", {}).get("current", 0)


def refuse_unwaited(model_config: Any) -> None:
    """Raise ValueError if activation offload is on, and this mcore lacks a method that the waits are added to."""
    if setting_of(model_config, ON) is True and (missing := missing_methods()):
        raise ValueError(
            f"OffloadConfig.activation_waits=True: this mcore has no {', '.join(missing)} to add the waits to; set "
            f"model.{ON}=False, or train with an mcore that has them, as 0.19.2 does"
        )


def missing_methods() -> list[str]:
    """Return which of the wrapped methods the installed mcore lacks, by name."""
    module = importlib.import_module(MODULE)
    owners = {owner: getattr(module, owner, None) for owner in METHODS}
    return [f"{owner}.{name}" for owner, names in METHODS.items() for name in names if not hasattr(owners[owner], name)]


def _where_wanted(act: Wrapper) -> Wrapper:
    """Return the wrapper, skipped if nothing asks for it, and in the capture of a layer."""

    def wrapper(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        from megatron.core.transformer.cuda_graphs import is_graph_capturing

        if not (_are_added or askers or installed_config().activation_waits) or is_graph_capturing():
            return wrapped(*args, **kwargs)
        return act(wrapped, instance, args, kwargs)

    wrapper.__doc__ = act.__doc__
    return wrapper


@_where_wanted
def takes_tensor(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make backward wait for the D2H of a tensor that it copies back itself, or for a prefetch that it has missed.

    Race: a tensor whose group was not prefetched is copied back on the stream of backward at once, while its own D2H
    may still write the host buffer. No group is prefetched in the first step, nor is the first one of a backward that
    follows no other. If such a group encloses others (`mlp_norm` experts, `attn_norm` attention), the first of these
    prefetches it: backward waits for prefetches as a group begins, and has passed that.
    """
    tag = args[0] if args else kwargs["tensor_tag"]
    if not isinstance(tag, torch.Tensor):
        group = instance.offload_groups[tag[0] - 1]
        if isinstance(group._tensors.get(tag), tuple):  # it is on the host
            group.wait_offload_event(torch.cuda.current_stream())
        elif group in instance._reloading_group:
            group.wait_reload_event(torch.cuda.current_stream())
    return wrapped(*args, **kwargs)


@_where_wanted
def ends_forward(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> bool:
    """Return whether no group of a name is left in a chunk's forward, so that the next one is another chunk's.

    mcore 0.19 also says so as soon as no copy is under way. That happens within a forward whose first groups stay on
    the GPU, as in a chunk of one layer whose backward runs first. The chunk's other groups then count as the next
    chunk's, and training ends with "Chunk mismatch" or goes on with wrong gradients. (#6783 mends it in the same way in
    mcore's dev.)
    """
    if (name := args[0] if args else kwargs.get("name")) is None:
        return wrapped(*args, **kwargs)
    return instance.find_group_with_name(instance.offload_groups, name, instance._offloaded_group_index) is None


class _InPieces(TorchFunctionMode):
    """Cuts copies into pieces, on the current stream and a second one in turn, for the reason that `Lane` has."""

    def __init__(self) -> None:
        super().__init__()
        self._second = torch.cuda.Stream()
        self._run = 0  # bytes that the current stream got since the second one's turn

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # A subclass, of quantized elements say, is not as many bytes in a row.
        if func is not torch.Tensor.copy_ or type(args[1]) is not torch.Tensor:
            return func(*args, **kwargs)
        target, source, *others = args
        self._run += source.nbytes
        if self._run <= PIECE_BYTES or torch.cuda.is_current_stream_capturing():
            return func(*args, **kwargs)
        step, first = PIECE_BYTES // source.itemsize, torch.cuda.current_stream()
        streams = self._second, first
        for i, (to, piece) in enumerate(zip(target.view(-1).split(step), source.view(-1).split(step), strict=True)):
            # Race: the tensor may not be computed yet. And pieces are one sequence, whose last one is waited for.
            streams[i % 2].wait_stream(streams[1 - i % 2])
            with torch.cuda.stream(streams[i % 2]):
                func(to, piece, *others, **kwargs)
            self._run = piece.nbytes * (i % 2)
        # Race: mcore records on this stream alone when the copy has ended and when the tensor's memory is free again.
        first.wait_stream(self._second)
        return target


@_where_wanted
def copies_out(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Copy a saved tensor to the host in pieces; ValueError if mcore has no buffer for it, and its node no memory.

    mcore has no buffer in its first iteration, nor for a tensor of another shape later. It keeps none of experts: each
    copy counts as one more in the first iteration, and as none later.
    """
    if (pool := getattr(instance, "cpu_tensor_pool", None)) is None:  # a static method before mcore had its pool
        return wrapped(*args, **kwargs)
    tensor = args[0] if args else kwargs["src_tensor"]
    of_shape = pool._pools.get((tensor.shape, tensor.dtype), {})
    if not of_shape.get("free") if kwargs.get("use_cpu_pool", True) else instance.is_warmup:
        to_do = "take modules out of model.offload_modules"
        _refuse_shortage(power_of_two_at_least(tensor.nbytes), f"model.{ON}=True: mcore", to_do)
    if not hasattr(pool, PIECES):
        setattr(pool, PIECES, _InPieces())
    # mcore delays some copies until after a layer's graph. It makes them in forward, where autograd records.
    with getattr(pool, PIECES), torch.no_grad():
        return wrapped(*args, **kwargs)


@_where_wanted
def offloads_layer(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Raise ValueError before Transformer Engine makes host copies of a layer for which this node has no memory.

    Later copies reuse the blocks of earlier ones, and only the rest is checked: the first forwards may save nothing,
    without gradients, and microbatches get longer.
    """
    # One that several operations save is copied once.
    saved = {(tensor.data_ptr(), tensor.nbytes) for tensor in instance.fwd_gpu_tensor_group.tensor_list}
    blocks = Counter(power_of_two_at_least(nbytes) for _, nbytes in saved)
    there: Counter[int] = vars(instance).get(CHECKED, Counter())
    if more := blocks - there:
        needed = sum(more.elements())
        _refuse_shortage(
            needed, "model.cpu_offloading=True: Transformer Engine", "lower model.cpu_offloading_num_layers"
        )
        setattr(instance, CHECKED, there | blocks)
    return wrapped(*args, **kwargs)


def _refuse_shortage(nbytes: int, who: str, what_to_do: str) -> None:
    """Raise ValueError if a rank's share of its node's free host memory is less. That of states is pinned by then."""
    if nbytes > (free := free_for_each_rank()):
        raise ValueError(
            f"{who} pins {readable(nbytes)} more of host memory for activations, but each rank of this node can have "
            f"{readable(free)}; pinned are {readable(pinned_bytes())} for activations and "
            f"{readable(_pinned_for_states)} for optimizer states: {what_to_do}, lower OffloadConfig.fraction, or give "
            "the job more host memory"
        )


@_where_wanted
def frees_buffer(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> None:
    """Record an event after the H2D of a host buffer that goes back to its pool.

    Race: the H2D has only been enqueued. The next D2H into the buffer is on another stream, which waits for backward
    alone; and backward has not waited yet for what was prefetched for the next microbatch of a pipeline. If all
    microbatches are of one length, the pool's order hides this: it has a spare buffer for each prefetched one.
    """
    wrapped(*args, **kwargs)
    tensor = args[0] if args else kwargs["tensor"]
    vars(instance).setdefault(READS, {})[id(tensor)] = torch.cuda.current_stream().record_event()


@_where_wanted
def takes_buffer(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make the D2H into a host buffer wait for the H2D out of it; see `frees_buffer`."""
    tensor = wrapped(*args, **kwargs)
    if read := vars(instance).get(READS, {}).pop(id(tensor), None):
        torch.cuda.current_stream().wait_event(read)
    return tensor


def resets_pool(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> None:
    """Wait for an iteration's last reads of host buffers, also of tensors that no backward has taken.

    The next iteration may be captured into a graph, which cannot wait for an older event.
    """
    for read in vars(instance).pop(READS, {}).values():
        torch.cuda.current_stream().wait_event(read)
    wrapped(*args, **kwargs)
