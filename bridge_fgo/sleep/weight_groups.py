"""Groups of weights: this rank's shard of a DDP buffer, or storages of their own, with the host's copies of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from bridge_fgo.memory.digest import Digester
from bridge_fgo.memory.storage_slab import Named, Range, StorageSlab
from bridge_fgo.sleep.checkpoint_workers import let_go_for, stop_for
from bridge_fgo.sleep.moved import fill_all_or_none
from bridge_fgo.sleep.refusals import PLAIN
from bridge_fgo.sleep.rounding import Rounding, rounding_of
from bridge_fgo.sleep.states import OptimizerStates

Digests = list[tuple[int, ...]]
"""For each slab of a group, the sums over the bytes of its ranges."""


class WeightGroup:
    """Weights that are offloaded and reloaded together, and what they are reloaded from.

    Args:
        slabs: their storages; the ranges are what this rank copies.
        gather: all-gathers what this rank does not copy; a collective.
        rounding: the masters that round to them; None where there are none.
    """

    def __init__(
        self,
        slabs: Sequence[StorageSlab],
        gather: Callable[[], None] = lambda: None,
        rounding: Rounding | None = None,
    ) -> None:
        self.slabs = list(slabs)
        self.gather = gather
        self.rounding = rounding
        self.is_rounded = False
        """Whether masters, as they were offloaded or are here, round to exactly these weights."""
        self.rounded_digests: Digests | None = None
        """The weights' sums when those masters were offloaded before the weights; None where they were not."""
        self.is_on_host = False
        """Whether the host has a copy of the weights that are away."""
        let_go_for(self)

    @property
    def is_away(self) -> bool:
        """Whether any of their memory is released."""
        return any(slab.is_away for slab in self.slabs)

    def forget_masters(self) -> None:
        """Trust no masters until they are compared with the weights again."""
        self.rounded_digests, self.is_rounded = None, False

    def has_host_copy(self, digests: Digests) -> bool:
        """Return whether the host's copy is of weights with these sums."""
        pairs = zip(self.slabs, digests, strict=True)
        return all(slab.host_digests == sums or not slab.copied_nbytes for slab, sums in pairs)

    def copy_out(self, digests: Digests) -> int:
        """Copy to the host what has changed since its copy was made, on the current stream; return the bytes.

        Args:
            digests: the weights' sums now.
        """
        copied = 0
        for slab, sums in zip(self.slabs, digests, strict=True):
            if slab.copied_nbytes and slab.host_digests != sums:
                slab.host_digests = None  # until the copy is queued, which may raise
                copied += slab.copy_out()
                slab.host_digests = sums
        return copied

    def empty(self) -> int:
        """Release their memory; return its bytes."""
        return sum(slab.empty() for slab in self.slabs)

    def fill(self) -> int:
        """Take memory again, zeroed (nobody copies the gaps between parameters), all or none; return its bytes.

        Raises:
            torch.OutOfMemoryError: there is no memory; they stay away.
        """
        return fill_all_or_none(self.slabs, zeroed=True)

    def copy_in(self) -> int:
        """Copy this rank's share from the host, on the current stream; return the bytes."""
        return sum(slab.copy_in() for slab in self.slabs)

    def close(self) -> None:
        """Release the host memory."""
        stop_for(self)
        for slab in self.slabs:
            slab.close()


def digests_of(groups: Sequence[WeightGroup]) -> list[Digests]:
    """Return the sums over what each group copies; the host waits for them once, for all groups."""
    parts = [part for group in groups for slab in group.slabs for part in slab.parts]
    sums = iter(())
    if parts:
        sums = iter(Digester(parts[0].device, max(part.numel() for part in parts)).of(parts).tolist())
    return [[tuple(next(sums) for _ in slab.ranges) for slab in group.slabs] for group in groups]


COMES_BY = "Residency.reload('params')"


def buffer_group(buffer: Any, name: str, names: Mapping[int, str], states: OptimizerStates | None) -> WeightGroup:
    """Return the parameters of one of mcore's `_ParamAndGradBuffer`s, of which each rank copies its shard.

    With the distributed optimizer each rank of the buffer's group owns a shard of each bucket. Between an optimizer
    step and the all-gather that follows only this shard is current.

    Args:
        buffer: mcore's, with parameters.
        name: what to call it in messages.
        names: of parameters, by their `id`.
        states: what moves the masters; None without an optimizer.
    """
    ranks = buffer.data_parallel_group
    ranges = own_ranges(buffer, ranks.size(), ranks.rank())
    slab = StorageSlab(buffer.param_data, f"{name}'s parameter buffer", COMES_BY, ranges, named_weights(buffer, names))

    def gather() -> None:
        for bucket in buffer.buckets if ranks.size() > 1 else ():
            # Not by `start_param_sync`: mcore's notes of which gathers are due stay as they were.
            own = bucket.param_data.chunk(ranks.size())[ranks.rank()]
            torch.distributed.all_gather_into_tensor(bucket.param_data, own, group=ranks)

    return WeightGroup([slab], gather, rounding_of(buffer, ranges, states))


def named_weights(buffer: Any, names: Mapping[int, str]) -> list[Named]:
    """Return a buffer's parameters and buckets; for quantized parameters the objects around what the buffer holds."""
    params = [(f"parameter {names.get(id(param), '')!r}", param) for param in buffer.params]
    return [*params, *(("a bucket of parameters", bucket.param_data) for bucket in buffer.buckets)]


def own_ranges(buffer: Any, ranks: int, rank: int) -> list[Range]:
    """Return the byte ranges of a rank's shard of each bucket in the storage of the parameter buffer, in order."""
    ranges = []
    for bucket in buffer.buckets:
        data = bucket.param_data
        size = data.numel() // ranks * data.element_size()
        first = data.storage_offset() * data.element_size() + rank * size
        ranges.append((first, first + size))
    return joined(ranges)


def joined(ranges: Iterable[Range]) -> list[Range]:
    """Return ranges in order, adjacent ones as one, since one copy moves them."""
    result: list[Range] = []
    for start, end in sorted(ranges):
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], end)
        elif end > start:
            result.append((start, end))
    return result


def outside_of_buffers(
    modules: Sequence[torch.nn.Module], in_buffers: Mapping[int, int], device: torch.device
) -> Iterator[tuple[str, int, torch.nn.Parameter]]:
    """Yield the parameters with storages of their own, each with its name and the `_cdata` of its storage.

    Args:
        modules: the model chunks.
        in_buffers: for each parameter of DDP's buffers its `id`, and the `_cdata` of its storage.
        device: parameters on another one do not move.

    Raises:
        ValueError: a parameter was taken out of DDP's buffer.
    """
    for module in modules:
        for name, parameter in module.named_parameters():
            if not parameter.numel() or parameter.device != device:
                continue
            if id(parameter) not in in_buffers:
                yield name, parameter.untyped_storage()._cdata, parameter
            elif type(parameter) in PLAIN and parameter.untyped_storage()._cdata != in_buffers[id(parameter)]:
                raise ValueError(
                    f"parameter {name!r} was given other memory than DDP's buffer, where the optimizer updates it and "
                    "Residency moves it: write into it (param.data.copy_()) in place of `param.data =`"
                )


def other_group(
    modules: Sequence[torch.nn.Module], in_buffers: Mapping[int, int], device: torch.device
) -> WeightGroup | None:
    """Return the parameters with storages of their own (frozen ones, models without DDP); None where there are none.

    Args:
        modules: as for `outside_of_buffers`.
        in_buffers: as there.
        device: as there.

    Raises:
        ValueError: as there; or a parameter is of a class with several tensors inside (FP8).
    """
    slabs: dict[int, StorageSlab] = {}
    for name, storage, parameter in outside_of_buffers(modules, in_buffers, device):
        if type(parameter) not in PLAIN or type(parameter.data) not in PLAIN:
            raise ValueError(
                f"parameter {name!r} outside of DDP's buffers is a {type(parameter.data).__name__}: only plain "
                "tensors can be offloaded there; leave this model out, or keep its weights in 16 or 32 bits"
            )
        if storage not in slabs:  # tied weights share one
            slabs[storage] = StorageSlab(parameter, f"parameter {name!r}", COMES_BY)
    return WeightGroup(list(slabs.values())) if slabs else None
