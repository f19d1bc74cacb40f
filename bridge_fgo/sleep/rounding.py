"""Masters that round to weights: compared with them while both are on the GPU, and rounded again on reload."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from bridge_fgo.memory.state_tensor import WeightShard
from bridge_fgo.memory.storage_slab import Range
from bridge_fgo.memory.strided_sums import StridedSum, compile_sum
from bridge_fgo.sleep.state_offloader import StateOffloader
from bridge_fgo.states.distributed import MegatronSource

CHUNK = 2**24  # masters that PyTorch's operators compare at once: their temporaries take 48 MiB

SOURCE = r"""
// Rounds to nearest, ties to even, as mcore's copy does. A NaN counts as different, so that the weight is copied.
struct Differs {
    const unsigned *masters;
    const u16 *weights;
    __device__ u64 operator()(u64 place) const {
        const unsigned master = masters[place];
        if ((master & 0x7FFFFFFFu) > 0x7F800000u) return 1;
        return (master + 0x7FFFu + (master >> 16 & 1u)) >> 16 != weights[place];
    }
};

extern "C" __global__ void differing(const unsigned *masters, const u16 *weights, u64 count, u64 *found) {
    add_up(Differs{masters, weights}, count, found);
}
"""
"""Compares masters with bf16 weights, a launch for a master.

PyTorch's operators take five launches for each, with temporaries: for 1.6 billion parameters they took 11 to 14 ms of
host time on an H100, in which nothing moved.
"""


class Rounding:
    """The masters of one parameter buffer, which round to every weight of it that this rank owns.

    pairs: at least one: a source, a master, and its weights, which are of the buffer's dtype, all on its device.
    """

    def __init__(self, pairs: Sequence[tuple[MegatronSource, torch.Tensor, WeightShard]]) -> None:
        self.pairs = list(pairs)
        weights = pairs[0][2].tensor()
        self._kernel = kernel_for(weights.device) if weights.dtype is torch.bfloat16 else None

    def masters_are_here(self) -> bool:
        """Return whether every master is on the GPU and readable."""
        return all(master.untyped_storage().nbytes() for _, master, _ in self.pairs)

    def any_master_is_here(self) -> bool:
        """Return whether a master is on the GPU, so that it may be written."""
        return any(master.untyped_storage().nbytes() for _, master, _ in self.pairs)

    def agrees(self) -> torch.Tensor:
        """Return whether every master rounds to its weight, bit for bit: a bool on their device.

        They do not if weights were loaded or changed since the optimizer wrote them.
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


def kernel_for(device: torch.device) -> StridedSum | None:
    """Return the kernel, compiled once in a process; None if there is none for the device."""
    return compile_sum(SOURCE, "differing", arrays=2, device=device)


def differing(kernel: StridedSum, pairs: Iterable[tuple[torch.Tensor, int, int]], device: torch.device) -> torch.Tensor:
    """Return how many weights are not what their masters round to: an int64 scalar on `device`, their current stream's.

    pairs: each master, fp32 and contiguous, with the address of the first of its bf16 weights, and their number.
    """
    found = torch.zeros((), dtype=torch.int64, device=device)
    for master, weights, numel in pairs:
        assert master.dtype is torch.float32 and master.is_contiguous() and master.numel() == numel
        kernel.add(found, 0, numel, master.data_ptr(), weights)
    return found


def rounding_of(buffer: Any, own: Sequence[Range], states: StateOffloader) -> Rounding | None:
    """Return how masters round to the weights of a buffer; None unless they round to each that a rank owns.

    They do not for native fp32 and quantized parameters, and if Transformer Engine keeps them (precision-aware Adam) or
    they may be packed, which needs the weights themselves. `own` has the bytes of the buffer's storage that this rank
    owns.
    """
    data = buffer.param_data
    storage, size, begin = data.untyped_storage()._cdata, data.element_size(), data.storage_offset()
    of_buffer = [pair for pair in states.rounded_masters() if pair[2].buffer().untyped_storage()._cdata == storage]
    owned = [(start // size - begin, end // size - begin) for start, end in own]
    places = (buffer.param_index_map[param][:2] for param in buffer.params)
    numel = sum(max(0, min(end, last) - max(start, first)) for start, end in places for first, last in owned)
    rounded = sum(shard.numel for _, _, shard in of_buffer)
    return Rounding(of_buffer) if of_buffer and rounded == numel else None
