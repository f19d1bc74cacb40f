"""Parameters: this rank's shard of DDP's buffers, and storages of their own, with the copies that the host has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from bridge_fgo.memory.digest import Digester
from bridge_fgo.memory.storage_slab import Named, Range, StorageSlab
from bridge_fgo.sleep.checkpoint_workers import let_go_for, stop_for
from bridge_fgo.sleep.gradients import fill_all_or_none
from bridge_fgo.sleep.refusals import PLAIN


class Weights:
    """Weights that leave and return together: storages, the copies of them, and what makes them whole on a rank.

    Args:
        slabs: their storages; the ranges are what this rank copies.
        gather: makes what this rank does not copy from the other ranks; a collective.
        ranks: how many take part in it.
    """

    def __init__(self, slabs: Sequence[StorageSlab], gather: Callable[[], None] = lambda: None, ranks: int = 1) -> None:
        self.slabs = list(slabs)
        self.gather = gather
        self.ranks = ranks
        self._digests: list[tuple[int, ...]] | None = None
        let_go_for(self)

    @property
    def is_away(self) -> bool:
        """Whether their memory is gone."""
        return any(slab.is_away for slab in self.slabs)

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory that they take."""
        return sum(slab.nbytes for slab in self.slabs)

    @property
    def is_on_host(self) -> bool:
        """Whether the host's copy is what they were when `take_digests` was last called."""
        assert self._digests is not None
        return all(
            slab.host_digests == digests or not slab.copied_nbytes
            for slab, digests in zip(self.slabs, self._digests, strict=True)
        )

    def take_digests(self, digests: list[tuple[int, ...]]) -> None:
        """Take the sums over their bytes as they are now, as `digests_of` has them."""
        self._digests = digests

    @property
    def digests(self) -> list[tuple[int, ...]]:
        """The sums that were taken last."""
        assert self._digests is not None
        return self._digests

    def copy_out(self) -> int:
        """Copy to the host what has changed since its copy was made, on the current stream; return the bytes."""
        copied = 0
        for slab, digests in zip(self.slabs, self.digests, strict=True):
            if slab.copied_nbytes and slab.host_digests != digests:
                slab.host_digests = None  # until it is made: an error may come between
                copied += slab.copy_out()
                slab.host_digests = digests
        return copied

    def empty(self) -> int:
        """Let their memory go; return its bytes."""
        return sum(slab.empty() for slab in self.slabs)

    def fill(self) -> int:
        """Take memory again, zeroed, all of it or none; return its bytes.

        Zeroed, because of the gaps between parameters nobody has a copy.

        Raises:
            torch.OutOfMemoryError: there is none; they stay away.
        """
        return fill_all_or_none(self.slabs, zeroed=True)

    def copy_in(self) -> int:
        """Copy this rank's share from the host, on the current stream; return the bytes."""
        return sum(slab.copy_in() for slab in self.slabs)

    def close(self) -> None:
        """Let go of the host memory."""
        stop_for(self)
        for slab in self.slabs:
            slab.close()


def digests_of(several: Sequence[Weights]) -> Iterator[tuple[Weights, list[tuple[int, ...]]]]:
    """Yield weights and the sums over what each of their slabs copies; the host waits for them once, for all."""
    parts = [part for weights in several for slab in weights.slabs for part in slab.parts]
    if not parts:
        yield from ((weights, [() for _ in weights.slabs]) for weights in several)
        return
    digester = Digester(parts[0].device, max(part.numel() for part in parts))
    sums = iter(digester.of(parts).tolist())
    for weights in several:
        yield weights, [tuple(next(sums) for _ in slab.ranges) for slab in weights.slabs]


COME_BY = "Residency.reload('params')"


def buffer_weights(buffer: Any, name: str, names: Mapping[int, str]) -> Weights:
    """Return the parameters of one of mcore's `_ParamAndGradBuffer`s that has them, of which a rank copies its shard.

    With the distributed optimizer each rank of the buffer's group owns a shard of each bucket, and that alone is
    current between an optimizer step and the all-gather that follows.

    Args:
        buffer: theirs.
        name: what to call it in messages.
        names: of parameters, by their `id`.
    """
    group = buffer.data_parallel_group
    ranges = own_ranges(buffer, group.size(), group.rank())
    slab = StorageSlab(buffer.param_data, f"{name}'s parameter buffer", COME_BY, ranges, named_weights(buffer, names))

    def gather() -> None:
        if group.size() == 1:
            return
        for bucket in buffer.buckets:
            # Not by `start_param_sync`: mcore's notes of which gathers are due stay as they were.
            own = bucket.param_data.chunk(group.size())[group.rank()]
            torch.distributed.all_gather_into_tensor(bucket.param_data, own, group=group)

    return Weights([slab], gather, group.size())


def named_weights(buffer: Any, names: Mapping[int, str]) -> list[Named]:
    """Return a buffer's parameters and buckets; of quantized parameters the objects around what lies in it."""
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
    """Return ranges in order, those that follow one another as one: they are one copy."""
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
    """Yield the parameters that lie in storages of their own, each with its name and the `_cdata` of its storage.

    Args:
        modules: the model chunks.
        in_buffers: of the parameters that lie in DDP's buffers their `id`s, and the `_cdata`s of the storages.
        device: parameters on another one stay where they are.

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


def other_weights(modules: Sequence[torch.nn.Module], in_buffers: Mapping[int, int], device: torch.device) -> Weights:
    """Return the parameters that lie in storages of their own: frozen ones, and models without DDP.

    Args:
        modules: the model chunks.
        in_buffers: as for `outside_of_buffers`.
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
            slabs[storage] = StorageSlab(parameter, f"parameter {name!r}", COME_BY)
    return Weights(list(slabs.values()))
