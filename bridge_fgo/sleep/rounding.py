"""Weights that their masters tell: compared while both are on the GPU, and rounded anew when they return."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bridge_fgo.memory.state import WeightShard
from bridge_fgo.sleep.parameters import own_ranges
from bridge_fgo.sleep.rounding_kernel import differing, kernel_for
from bridge_fgo.sleep.states import OptimizerStates
from bridge_fgo.states.megatron import MegatronSource

CHUNK = 2**24
"""Masters that are compared at once: their temporaries take 48 MiB."""

Pair = tuple[MegatronSource, torch.Tensor, WeightShard]


class Rounding:
    """The masters of one parameter buffer, which are rounded to every weight of it that this rank owns.

    Args:
        pairs: at least one; the weights are of the buffer's dtype, all on its device.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.pairs = list(pairs)
        weights = pairs[0][2].tensor()
        self._kernel = kernel_for(weights.device) if weights.dtype is torch.bfloat16 else None

    def masters_are_here(self) -> bool:
        """Return whether every master is on the GPU and readable."""
        return all(master.untyped_storage().nbytes() for _, master, _ in self.pairs)

    def agrees(self) -> torch.Tensor:
        """Return whether every weight is, bit for bit, what its master is rounded to: a bool on their device.

        It is not where somebody has loaded or changed weights since the optimizer wrote them.
        """
        if self._kernel is not None:
            return differing(self._kernel, self._addresses(), self.pairs[0][1].device) == 0
        differ = [
            (part.to(weights.dtype).view(torch.int16) != weights.view(torch.int16)).any()
            for _, master, shard in self.pairs
            for part, weights in zip(master.view(-1).split(CHUNK), shard.tensor().split(CHUNK), strict=True)
        ]
        return ~torch.stack(differ).any()

    def _addresses(self) -> Iterator[tuple[torch.Tensor, int, int]]:
        """Yield each master, the address of its weights, and their number."""
        starts: dict[int, int] = {}  # of buckets: to make a tensor of each range takes the host longer
        for _, master, shard in self.pairs:
            start = starts.get(id(shard.buffer))
            if start is None:
                bucket = shard.buffer()
                assert bucket.is_contiguous() and bucket.dtype is torch.bfloat16
                start = starts[id(shard.buffer)] = bucket.data_ptr()
            yield master, start + 2 * shard.first, shard.numel


def round_again(roundings: Sequence[Rounding], states: OptimizerStates) -> int:
    """Write the weights of several buffers, by mcore's own copy; return the bytes of masters that crossed the link.

    Of all buffers together: a slab may have masters of several, and comes once.
    """
    of_source: dict[MegatronSource, list[torch.Tensor]] = {}
    for source, master, _ in (pair for rounding in roundings for pair in rounding.pairs):
        of_source.setdefault(source, []).append(master)
    return sum(states.round_again(source, masters) for source, masters in of_source.items())


def rounding_of(buffer: Any, states: OptimizerStates | None) -> Rounding | None:
    """Return how masters are rounded to the weights of a buffer; None where they do not tell each that a rank owns.

    They do not for native fp32 and quantized parameters, and where Transformer Engine keeps them (precision-aware
    Adam) or they may leave packed, by the weights themselves.
    """
    if states is None:
        return None
    storage = buffer.param_data.untyped_storage()._cdata
    of_buffer = [pair for pair in states.rounded_masters() if pair[2].buffer().untyped_storage()._cdata == storage]
    group = buffer.data_parallel_group
    size, begin = buffer.param_data.element_size(), buffer.param_data.storage_offset()
    owned = [
        (start // size - begin, end // size - begin) for start, end in own_ranges(buffer, group.size(), group.rank())
    ]
    places = (buffer.param_index_map[param][:2] for param in buffer.params)
    numel = sum(max(0, min(end, last) - max(start, first)) for start, end in places for first, last in owned)
    told = sum(shard.numel for _, _, shard in of_buffer)
    return Rounding(of_buffer) if of_buffer and told == numel else None
