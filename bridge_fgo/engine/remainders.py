"""What of an fp32 master the model's bf16 weight does not say: 17 bits of 32, which are all that need be copied.

mcore rounds each updated master to the weight, which stays on the GPU. So a copy of the master's low 16 bits and of
one bit, whether the weight's bits are the master's high ones or these plus one, brings back every bit of it. TE's
FusedAdam keeps its masters in 16 such bits (`store_param_remainders`); mcore rounds ties to even, which takes one more.

The weights must be what they were when the masters left. A sum over their bits is kept for each slab and compared
before a master is brought back; and what a master differs from its weight by more than rounding is copied whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from bridge_fgo.engine.master_copy import WeightShard
from bridge_fgo.engine.plan import ALIGNMENT
from bridge_fgo.engine.remainder_kernels import HASH_FACTORS, RemainderKernels, RowMove, kernels_on
from bridge_fgo.engine.states import StateRef

CHUNK = 2**22
"""Elements that the operators without kernels of their own take at once: their temporaries are of 8 bytes each."""


def packed_bytes(slab_bytes: int) -> int:
    """Return the bytes that a slab of fp32 masters, gaps included, is copied as: low halves, then a bit for each."""
    return _aligned(slab_bytes // 2) + 4 * -(-slab_bytes // 128)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class SlabRemainders:
    """How the masters of one slab are copied.

    shards: the weight of each master; firsts: where each master begins in the slab, in elements.
    nbytes: size of the copied form; bits_at: where the bits are in it. In bytes.
    row: of the slab in the sums of its optimizer.
    """

    owner: MasterRemainders
    shards: list[WeightShard]
    firsts: list[int]
    nbytes: int
    bits_at: int
    row: int

    def differs(self) -> bool:
        """Return whether the newest `pack` met a master whose rounding is not its weight. The host waits for it."""
        return bool(self.owner.sums[self.row, 1].item())


Move = tuple[SlabRemainders, torch.Tensor, torch.Tensor]
"""A slab's remainders, its masters, uint8, and their copied form, uint8 [nbytes]."""


class MasterRemainders:
    """The remainders of one optimizer's masters.

    Args:
        weights: see `MasterCopy.rounded_weights`; without any, everything is copied as it is.
        device: where the masters are when resident.
        wanted: says whether to copy the remainders of slabs that leave now, or the slabs as they are.
    """

    def __init__(
        self, weights: Mapping[int, WeightShard], device: torch.device, wanted: Callable[[], bool] = lambda: True
    ) -> None:
        self._weights = weights
        self._device = device
        self.wanted = wanted
        self.slabs: list[SlabRemainders] = []
        self.sums = torch.zeros(0, 2, dtype=torch.int64)
        """[slabs, 2]: the sum over the weights' bits when the slab was packed, and how many masters differed."""
        self._kernels: RemainderKernels | None = None
        self._trusted = False
        self.is_stepping = False
        """Whether masters that are brought back leave again as soon as they are updated."""

    def of_slab(self, refs: Sequence[StateRef], offsets: Sequence[int], nbytes: int) -> SlabRemainders | None:
        """Return how to copy a slab of these states, or None where it holds others than such masters, or too few."""
        shards = [self._weights.get(id(ref.param)) for ref in refs if ref.key is None]
        known = [shard for shard in shards if shard is not None]
        if not refs or len(known) != len(refs) or packed_bytes(nbytes) >= nbytes:
            return None
        slab = SlabRemainders(
            self,
            known,
            firsts=[offset // 4 for offset in offsets],
            nbytes=packed_bytes(nbytes),
            bits_at=_aligned(nbytes // 2),
            row=len(self.slabs),
        )
        self.slabs.append(slab)
        return slab

    @property
    def are_fast(self) -> bool:
        """Whether there are kernels for them, where they are on a GPU."""
        return self._kernels is not None or self._device.type != "cuda"

    def ready(self) -> None:
        """Take what memory the sums need, once every slab is known."""
        self.sums = torch.zeros(len(self.slabs), 2, dtype=torch.int64, device=self._device)
        self._kernels = kernels_on([(slab.shards, slab.firsts) for slab in self.slabs], self.sums)
        self.look_up()

    def look_up(self) -> None:
        """Find where the weights are now; to be called before the first `pack` of a pass."""
        if self._kernels is not None:
            self._kernels.look_up(required=self.wanted())

    def pack(self, moves: Sequence[Move]) -> None:
        """Write the copied form of the masters of slabs, and remember their weights' sums; on the current stream."""
        if self._kernels is not None:
            self._kernels.pack(_by_row(moves))
            return
        for move in moves:
            self._pack(*move)

    def _pack(self, slab: SlabRemainders, masters: torch.Tensor, packed: torch.Tensor) -> None:
        sums = self.sums[slab.row]
        sums.zero_()
        words, low, bits = masters.view(torch.int32), *_planes(packed, slab.bits_at)
        for weight, first, start, end in _chunks(slab):
            bits_of_weight = weight[start:end].view(torch.int16).int()
            word = words[first + start : first + end]
            up = (bits_of_weight - (word >> 16)) & 0xFFFF
            low[first + start : first + end] = word.to(torch.int16)
            bits[(first + start) // 8 : -(-(first + end) // 8)] = _packed_bits(up == 1)
            sums[0] += _sum(bits_of_weight, first + start)
            sums[1] += (up > 1).sum()

    def unpack(self, moves: Sequence[Move]) -> None:
        """Write the masters of slabs from their copied form and the weights; on the current stream."""
        if self._kernels is not None:
            self._kernels.unpack(_by_row(moves))
            return
        for move in moves:
            self._unpack(*move)

    def _unpack(self, slab: SlabRemainders, masters: torch.Tensor, packed: torch.Tensor) -> None:
        words, low, bits = masters.view(torch.int32), *_planes(packed, slab.bits_at)
        for weight, first, start, end in _chunks(slab):
            up = _unpacked_bits(bits[(first + start) // 8 : -(-(first + end) // 8)], end - start)
            high = weight[start:end].view(torch.int16).int() - up
            words[first + start : first + end] = (high << 16) | (low[first + start : first + end].int() & 0xFFFF)

    @contextmanager
    def trusted(self) -> Iterator[None]:
        """Bring back masters inside the block without a check: of all there was one, or all are about to be written."""
        self.look_up()
        before, self._trusted = self._trusted, True
        try:
            yield
        finally:
            self._trusted = before

    def require_unchanged(self, packed: Sequence[SlabRemainders]) -> None:
        """Have the host wait, and check that the masters of some slabs can be brought back.

        Raises:
            RuntimeError: weights are not what they were when the masters left.
        """
        if not self._trusted and (why := self._trouble(packed)):
            raise RuntimeError(f"OffloadConfig.master_remainders: {why}")

    def are_unchanged(self, packed: Sequence[SlabRemainders]) -> bool:
        """Return whether the masters of some slabs can be brought back; the host waits."""
        return not self._trouble(packed)

    def _trouble(self, packed: Sequence[SlabRemainders]) -> str:
        if not packed:
            return ""
        now = self._sums_now(packed)
        then = self.sums.tolist()
        if any(then[slab.row][1] for slab in packed):
            return (
                "a master weight is not what its bf16 weight was rounded from, though the optimizer copied it there "
                "just before it was offloaded (a NaN?), so that it cannot be brought back. Resume from a checkpoint "
                "with OffloadConfig(master_remainders=False), which copies masters whole"
            )
        if any(then[slab.row][0] != found for slab, found in zip(packed, now, strict=True)):
            return (
                "weights of the model were changed while their master weights were offloaded, and by something else "
                "than the optimizer, so that the masters cannot be brought back. Put the weights back as they were, or "
                "resume from a checkpoint with OffloadConfig(master_remainders=False), which copies masters whole"
            )
        return ""

    def _sums_now(self, packed: Sequence[SlabRemainders]) -> list[int]:
        if self._kernels is not None:
            found = self._kernels.weight_sums().tolist()
            return [found[slab.row] for slab in packed]
        totals = []
        for slab in packed:
            total = torch.zeros((), dtype=torch.int64, device=self._device)
            for weight, first, start, end in _chunks(slab):
                total += _sum(weight[start:end].view(torch.int16).int(), first + start)
            totals.append(int(total))
        return totals


def _by_row(moves: Sequence[Move]) -> list[RowMove]:
    return [(slab.row, masters, packed, slab.bits_at) for slab, masters, packed in moves]


def _planes(packed: torch.Tensor, bits_at: int) -> tuple[torch.Tensor, torch.Tensor]:
    return packed[:bits_at].view(torch.int16), packed[bits_at:]


def _chunks(slab: SlabRemainders) -> Iterator[tuple[torch.Tensor, int, int, int]]:
    """Yield each weight with where its master begins in the slab and the range of a chunk, all in elements."""
    for shard, first in zip(slab.shards, slab.firsts, strict=True):
        weight = shard.tensor()
        for start in range(0, shard.numel, CHUNK):
            yield weight, first, start, min(start + CHUNK, shard.numel)


def _sum(bits: torch.Tensor, first: int) -> torch.Tensor:
    """Return the sum of a hash of each weight's bits and place, modulo 2**64; see `mixed` in the kernels' source."""
    places = torch.arange(first, first + bits.numel(), device=bits.device)
    mixed = (places << 16) | (bits & 0xFFFF)
    for factor in HASH_FACTORS:
        mixed = mixed * (factor - 2**64)
        mixed = mixed ^ ((mixed >> 32) & 0xFFFFFFFF)
    return mixed.sum()


def _packed_bits(flags: torch.Tensor) -> torch.Tensor:
    """Return one bit for each flag as uint8, the first the lowest."""
    padded = torch.nn.functional.pad(flags.to(torch.uint8), (0, -flags.numel() % 8)).view(-1, 8)
    powers = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=flags.device)
    return (padded * powers).sum(1, dtype=torch.uint8)


def _unpacked_bits(packed: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first `count` bits as int32 zeros and ones."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> places) & 1).view(-1)[:count].int()
