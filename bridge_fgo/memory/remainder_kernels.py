"""CUDA kernels for the remainders of masters, a launch for a slab or several. NVRTC compiles them when training begins.

With PyTorch's operators a slab takes some ten launches a tensor, and the host's time for a step with 400 slabs would
be several times as much. By the driver a launch takes the host 5.7 us, by Triton 13.3, by
`torch.cuda._compile_kernel` 29.0. To compile takes 0.07 s, 1.6 s and 0.3 s (one kernel, H200, torch 2.11); Triton needs
a C compiler for that, and cannot take the places of several slabs as an argument.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import itemgetter

import torch

from bridge_fgo.memory.cuda_driver import Grid, Kernel, Module, current_stream, make_grid
from bridge_fgo.memory.state_tensor import WeightShard
from bridge_fgo.memory.strided_sums import THREADS, TYPES, blocks_over

EACH = 8  # elements that a thread takes at once: 16 bytes of weights, the widest load, and one whole byte of the bits

HASH_FACTORS = (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93)
"""Odd, of 64 bits with the highest set. Two rounds of them, so that changes do not cancel in a sum of hashes."""

MOST_TOGETHER = 16  # slabs of one launch, each with three words of its arguments, 4 KiB in old drivers

SOURCE = f"""{TYPES}
#define EACH {EACH}
#define MOST_TOGETHER {MOST_TOGETHER}
#define FIRST_FACTOR {HASH_FACTORS[0]}ull
#define SECOND_FACTOR {HASH_FACTORS[1]}ull
"""
SOURCE += r"""
__device__ u64 mixed(long long place, unsigned weight) {
    u64 x = (u64)place << 16 | weight;
    x *= FIRST_FACTOR;
    x ^= x >> 32;
    x *= SECOND_FACTOR;
    return x ^ x >> 32;
}

struct Segment { long long row, first, count; const u16 *weight; };

// The slabs of one launch have rows one after another.
struct Place { unsigned *masters; u16 *low; unsigned char *bits; };
struct Places { Place of[MOST_TOGETHER]; };

// What one thread takes at once: with loads of 2 and 4 bytes the memory is not kept busy.
union Halves { uint4 all; u16 one[EACH]; };
union Words { uint4 all[2]; unsigned one[EACH]; };

__device__ Halves weights_at(const Segment &s, long long i, int count) {
    Halves found;
    if (count == EACH && (u64)s.weight % sizeof(uint4) == 0) {  // nothing aligns a shard in DDP's buffer
        found.all = *(const uint4 *)(s.weight + i);
        return found;
    }
    #pragma unroll
    for (int k = 0; k < EACH; ++k) found.one[k] = k < count ? s.weight[i + k] : 0;
    return found;
}

#define FOR_EACH_GROUP(s) \
    for (long long i = EACH * ((long long)blockIdx.x * blockDim.x + threadIdx.x), \
                   stride = EACH * (long long)gridDim.x * blockDim.x; i < (s).count; i += stride)

extern "C" __global__ void pack(const Segment *segments, u64 *sums, long long first_row, const Places places) {
    const Segment s = segments[blockIdx.y];
    const Place at = places.of[s.row - first_row];
    u64 total = 0, differing = 0;
    FOR_EACH_GROUP(s) {
        const long long place = s.first + i;
        const int count = min((long long)EACH, s.count - i);
        const Halves weight = weights_at(s, i, count);
        Words master;
        if (count == EACH) {
            const uint4 *from = (const uint4 *)(at.masters + place);
            master.all[0] = from[0];
            master.all[1] = from[1];
        } else {  // beyond may be the end of the slab
            #pragma unroll
            for (int k = 0; k < EACH; ++k) master.one[k] = k < count ? at.masters[place + k] : 0;
        }
        Halves rest;
        unsigned up = 0;
        #pragma unroll
        for (int k = 0; k < EACH; ++k) {
            const unsigned above = (weight.one[k] - (master.one[k] >> 16)) & 0xFFFFu;
            up |= (above == 1) << k;
            differing += above > 1;
            rest.one[k] = (u16)master.one[k];
            if (k < count) total += mixed(place + k, weight.one[k]);
        }
        *(uint4 *)(at.low + place) = rest.all;  // there is room up to the next tensor, or to the bits
        at.bits[place / EACH] = up;
    }
    total = over_warp(total);
    differing = over_warp(differing);
    if (threadIdx.x % 32 == 0) {
        if (total) atomicAdd(&sums[2 * s.row], total);
        if (differing) atomicAdd(&sums[2 * s.row + 1], differing);
    }
}

extern "C" __global__ void unpack(const Segment *segments, u64 *sums, long long first_row, const Places places) {
    const Segment s = segments[blockIdx.y];
    const Place at = places.of[s.row - first_row];
    if (blockIdx.x == 0 && threadIdx.x < 2) sums[2 * s.row + threadIdx.x] = 0;
    FOR_EACH_GROUP(s) {
        const long long place = s.first + i;
        const int count = min((long long)EACH, s.count - i);
        const Halves weight = weights_at(s, i, count);
        const Halves rest = { *(const uint4 *)(at.low + place) };
        const unsigned up = at.bits[place / EACH];
        Words master;
        #pragma unroll
        for (int k = 0; k < EACH; ++k) master.one[k] = (weight.one[k] - (up >> k & 1u)) << 16 | rest.one[k];
        if (count == EACH) {
            uint4 *to = (uint4 *)(at.masters + place);
            to[0] = master.all[0];
            to[1] = master.all[1];
        } else {
            #pragma unroll
            for (int k = 0; k < EACH; ++k) if (k < count) at.masters[place + k] = master.one[k];
        }
    }
}

extern "C" __global__ void sum(const Segment *segments, u64 *sums) {
    const Segment s = segments[blockIdx.y];
    u64 total = 0;
    FOR_EACH_GROUP(s) {
        const int count = min((long long)EACH, s.count - i);
        const Halves weight = weights_at(s, i, count);
        #pragma unroll
        for (int k = 0; k < EACH; ++k) if (k < count) total += mixed(s.first + i + k, weight.one[k]);
    }
    total = over_warp(total);
    if (threadIdx.x % 32 == 0 && total) atomicAdd(&sums[s.row], total);
}
"""
Place = tuple[Sequence[WeightShard], Sequence[int]]  # weights of a slab's masters, and each one's first element there

RowMove = tuple[int, torch.Tensor, torch.Tensor, int]
"""A slab's row of the sums, its masters, their copied form (uint8 both), and where the bits are in that, in bytes."""

WORDS_OF_PLACE = 3
SEGMENT_BYTES = 32
MOST_SEGMENTS = 65535  # segments of one launch at most: the grid's second dimension


class RemainderKernels:
    """The kernels, and tables on the GPU of where weights are. All work goes to the current stream.

    `slabs` come in the order of the rows of `sums` (`Remainders.sums`), zeros on the GPU.
    """

    def __init__(self, module: Module, slabs: Sequence[Place], sums: torch.Tensor) -> None:
        words = (1, 1, 1, WORDS_OF_PLACE * MOST_TOGETHER)
        self._pack, self._unpack = (Kernel(module, name, words, THREADS) for name in ("pack", "unpack"))
        self._sum = Kernel(module, "sum", (1, 1), THREADS)
        self._slabs = slabs
        self._sums, self._first_sum = sums, sums.data_ptr()
        self._now = torch.zeros_like(sums[:, 0])
        self._index = sums.get_device()
        self._packed: set[int] = set()  # rows of slabs that were packed and not unpacked since
        self._buffers = list({id(shard.buffer): shard.buffer for shards, _ in slabs for shard in shards}.values())
        self._addresses: list[int] = []
        self._most_blocks = max(_blocks(shards) for shards, _ in slabs)
        self._table = torch.zeros(0, dtype=torch.int64, device=sums.device)
        self._starts: list[int] = []  # address of the first segment of each slab's weights, and the end of the table
        self._grids: dict[tuple[int, int], Grid] = {}  # by the first of the rows of a launch, and how many they are

    def look_up(self, required: bool = True) -> bool:
        """Write the table anew if weights are elsewhere now: a buffer may be let go of, and taken again.

        If weights have no memory it returns False, or raises RuntimeError if they are `required` for packed masters.
        """
        buffers = [buffer() for buffer in self._buffers]
        # Without memory the start of a view is its offset, not 0.
        addresses = [buffer.data_ptr() if buffer.untyped_storage().nbytes() else 0 for buffer in buffers]
        if addresses == self._addresses:
            return True
        if not all(addresses):
            if not required:
                return False
            raise RuntimeError(
                "OffloadConfig.master_remainders: a parameter buffer of DDP's has no GPU memory now, and without "
                "the weights masters can neither leave nor come back; set it to False where weights are offloaded too"
            )
        self._addresses = addresses
        segments = [
            [row, first, shard.numel, shard.tensor().data_ptr()]
            for row, (shards, firsts) in enumerate(self._slabs)
            for shard, first in zip(shards, firsts, strict=True)
        ]
        self._table = torch.tensor(segments, dtype=torch.int64, device=self._table.device)
        sizes = (SEGMENT_BYTES * len(shards) for shards, _ in self._slabs)
        self._starts = list(accumulate(sizes, initial=self._table.data_ptr()))
        return True

    def pack(self, moves: Sequence[RowMove]) -> None:
        """Write the encoded form of the masters of slabs, and remember their weights' sums."""
        stream = current_stream(self._index)
        for row, *_ in moves:
            if row in self._packed:  # and not unpacked, which zeroes the sums
                self._sums[row].zero_()
            self._packed.add(row)
        self._launch(self._pack, moves, stream)

    def unpack(self, moves: Sequence[RowMove]) -> None:
        """Write the masters of slabs from their encoded form. The slabs' rows of the sums are zero afterwards."""
        self._launch(self._unpack, moves, current_stream(self._index))
        self._packed.difference_update(row for row, *_ in moves)

    def _launch(self, kernel: Kernel, moves: Sequence[RowMove], stream: int) -> None:
        for run in self._runs(moves):
            first = run[0][0]
            words = [self._starts[first], self._first_sum, first]
            for _, masters, packed, bits_at in run:
                low = packed.data_ptr()
                words += masters.data_ptr(), low, low + bits_at
            kernel.launch(self._grid(first, len(run)), stream, *words)

    def _runs(self, moves: Sequence[RowMove]) -> Iterator[list[RowMove]]:
        """Yield the moves in the order of their rows, as many at once as one launch may have."""
        run: list[RowMove] = []
        segments = 0
        for move in sorted(moves, key=itemgetter(0)):
            of_slab = len(self._slabs[move[0]][0])
            follows = run and move[0] == run[-1][0] + 1
            if run and not (follows and len(run) < MOST_TOGETHER and segments + of_slab <= MOST_SEGMENTS):
                yield run
                run, segments = [], 0
            run.append(move)
            segments += of_slab
        if run:
            yield run

    def _grid(self, first: int, slabs: int) -> Grid:
        grid = self._grids.get((first, slabs))
        if grid is None:
            shards = [shard for of_slab, _ in self._slabs[first : first + slabs] for shard in of_slab]
            grid = self._grids[first, slabs] = make_grid(_blocks(shards), len(shards))
        return grid

    def weight_sums(self) -> torch.Tensor:
        """Return the sum over the bits of the weights of each slab as they are now, int64 [slabs]."""
        self.look_up()
        self._now.zero_()
        for segments in self._table.split(MOST_SEGMENTS):
            grid = make_grid(self._most_blocks, len(segments))
            self._sum.launch(grid, current_stream(self._index), segments.data_ptr(), self._now.data_ptr())
        return self._now


def _blocks(shards: Sequence[WeightShard]) -> int:
    return blocks_over(max(shard.numel for shard in shards), EACH)
