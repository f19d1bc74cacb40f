"""The codec that copies of an fp32 master only what the model's bf16 weight does not say: 17 bits of 32.

mcore rounds each updated master to the weight, which stays on the GPU. So a copy of the master's low 16 bits and of
one bit, whether the weight's bits are the master's high ones or these plus one, brings back every bit of it. TE's
FusedAdam keeps its masters in 16 such bits (`store_param_remainders`); mcore rounds ties to even, which takes one more.

The weights must be what they were when the masters left. A sum over their bits is kept for each slab and compared
before a master is brought back; and what a master differs from its weight by more than rounding is copied whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch

from bridge_fgo.memory.cuda_driver import compile_for
from bridge_fgo.memory.layout import Codec, SlabLayout, aligned
from bridge_fgo.memory.remainder_kernels import HASH_FACTORS, SOURCE, RemainderKernels, RowMove
from bridge_fgo.memory.state_tensor import State, WeightShard

CHUNK = 2**22  # elements that operators without kernels take at once, with temporaries of 8 bytes each


def encoded_bytes(slab_bytes: int) -> int:
    """Return the bytes that a slab of fp32 masters, gaps included, is copied as: low halves, then a bit for each."""
    return aligned(slab_bytes // 2) + 4 * -(-slab_bytes // 128)


class SlabRemainders(Codec):
    """The codec of one slab of masters; `row` is the slab's in the sums of its family."""

    def __init__(self, family: Remainders, shards: list[WeightShard], layout: SlabLayout, row: int) -> None:
        super().__init__(encoded_bytes(layout.nbytes))
        self.staging_bytes = self.link_bytes
        self.family = self._remainders = family
        self.shards, self.row = shards, row
        self.firsts = [offset // 4 for offset in layout.offsets]  # start of each master in the slab, in elements
        self.bits_at = aligned(layout.nbytes // 2)  # start of the bits in the encoded form, in bytes

    @property
    def encodes(self) -> bool:  # type: ignore[override]
        """Whether a slab that is offloaded now is to be encoded."""
        return not self._remainders.is_paused


MastersMove = tuple[Any, torch.Tensor, torch.Tensor]  # a slab's codec, its memory and its staging memory, both uint8


class Remainders:
    """The remainders of a rank's masters."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_paused = False  # whether slabs that are offloaded now are to be copied whole
        self.slabs: list[SlabRemainders] = []
        self.sums = torch.zeros(0, 2, dtype=torch.int64)
        """[slabs, 2]: the sum over the weights' bits when the slab was encoded, and how many masters differed."""
        # None if PyTorch's operators have to do: without a GPU, a slab or NVRTC
        self._kernels: RemainderKernels | None = None
        self._verified: frozenset[int] = frozenset()  # rows of the slabs that need no check now

    def codec_of(self, states: Sequence[State], layout: SlabLayout) -> Codec:
        """Return the codec of a slab of these states: one that copies whole if one rounds to no weight."""
        shards = [state.rounds_to for state in states if state.rounds_to is not None]
        if len(shards) != len(states) or encoded_bytes(layout.nbytes) >= layout.nbytes:
            return Codec(layout.nbytes)
        slab = SlabRemainders(self, shards, layout, row=len(self.slabs))
        self.slabs.append(slab)
        return slab

    def ready(self) -> None:
        """Take what memory the sums need, once every slab is known."""
        self.sums = torch.zeros(len(self.slabs), 2, dtype=torch.int64, device=self._device)
        module = compile_for(SOURCE, self.sums.device) if self._device.type == "cuda" and self.slabs else None
        if module is not None:
            self._kernels = RemainderKernels(module, [(slab.shards, slab.firsts) for slab in self.slabs], self.sums)
        self.locate()

    def locate(self) -> None:
        """Find where the weights are now, before a pass first encodes or decodes; RuntimeError if there are none."""
        if self._kernels is not None:
            self._kernels.look_up(required=not self.is_paused)

    def encode(self, moves: Sequence[MastersMove]) -> None:
        """Write the staging memory of slabs from their masters, on the current stream."""
        if self._kernels is not None:
            self._kernels.pack(_by_row(moves))
            return
        for slab, masters, staging in moves:
            words, low, bits = _planes(slab, masters, staging)
            sums = self.sums[slab.row].zero_()
            for weights, here, bits_here in _chunks(slab):
                up = (weights - (words[here] >> 16)) & 0xFFFF
                low[here] = words[here].to(torch.int16)
                bits[bits_here] = _packed_bits(up == 1)
                sums[0] += _sum(weights, here.start)
                sums[1] += (up > 1).sum()

    def lossy(self, codecs: Sequence[Codec]) -> list[Codec]:
        """Return the codecs of slabs whose newest encoding cannot be undone. The host waits for it."""
        sums = self.sums.tolist()
        return [codec for codec in cast("Sequence[SlabRemainders]", codecs) if sums[codec.row][1]]

    def decode(self, moves: Sequence[MastersMove]) -> None:
        """Write the masters of slabs from their staging memory, on the current stream."""
        if self._kernels is not None:
            self._kernels.unpack(_by_row(moves))
            return
        for slab, masters, staging in moves:
            words, low, bits = _planes(slab, masters, staging)
            for weights, here, bits_here in _chunks(slab):
                high = weights - _unpacked_bits(bits[bits_here], weights.numel())
                words[here] = (high << 16) | (low[here].int() & 0xFFFF)

    @contextmanager
    def verified(self, codecs: Sequence[Codec]) -> Iterator[None]:
        """Take these slabs, inside the block, as checked already, or as about to be overwritten."""
        self.locate()
        before = self._verified
        self._verified = before | {slab.row for slab in cast("Sequence[SlabRemainders]", codecs)}
        try:
            yield
        finally:
            self._verified = before

    def verify(self, codecs: Sequence[Codec]) -> None:
        """Have the host wait, and raise RuntimeError, which says why, if slabs that are away cannot be decoded."""
        if why := self._trouble(codecs, self._verified):
            raise RuntimeError(f"OffloadConfig.master_remainders: {why}")

    def can_decode(self, codecs: Sequence[Codec]) -> bool:
        """Return whether the masters of slabs that are away can be brought back; the host waits."""
        return not self._trouble(codecs)

    def _trouble(self, codecs: Sequence[Codec], verified: frozenset[int] = frozenset()) -> str:
        packed = [slab for slab in cast("Sequence[SlabRemainders]", codecs) if slab.row not in verified]
        if not packed:
            return ""
        now = self.sums_now(packed).tolist()
        then = self.sums.tolist()
        if any(then[slab.row][1] for slab in packed):
            return (
                "a master weight is not what its bf16 weight was rounded from, though the optimizer copied it there "
                "just before it was offloaded (a NaN?), so that it cannot be brought back. Resume from a checkpoint "
                "with OffloadConfig(master_remainders=False), which copies masters whole"
            )
        if any(then[slab.row][0] != now[slab.row] for slab in packed):
            return (
                "weights of the model were changed while their master weights were offloaded, and by something else "
                "than the optimizer, so that the masters cannot be brought back. Put the weights back as they were, or "
                "resume from a checkpoint with OffloadConfig(master_remainders=False), which copies masters whole"
            )
        return ""

    def sums_now(self, slabs: Sequence[SlabRemainders]) -> torch.Tensor:
        """Return the sums over the bits of these slabs' weights now, int64 [rows], valid until the next call."""
        if self._kernels is not None:
            return self._kernels.weight_sums()
        now = torch.zeros_like(self.sums[:, 0])  # tensors wrap around, Python's integers do not
        for slab in slabs:
            for bits, here, _ in _chunks(slab):
                now[slab.row] += _sum(bits, here.start)
        return now


def _by_row(moves: Sequence[MastersMove]) -> list[RowMove]:
    return [(slab.row, masters, staging, slab.bits_at) for slab, masters, staging in moves]


def _planes(slab: SlabRemainders, masters: torch.Tensor, staging: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return masters.view(torch.int32), staging[: slab.bits_at].view(torch.int16), staging[slab.bits_at :]


def _chunks(slab: SlabRemainders) -> Iterator[tuple[torch.Tensor, slice, slice]]:
    """Yield the bits of some weights, as int32, where their masters are in the slab, and where in the slab's bits."""
    for shard, first in zip(slab.shards, slab.firsts, strict=True):
        for bits in shard.tensor().view(torch.int16).split(CHUNK):
            end = first + bits.numel()
            yield bits.int(), slice(first, end), slice(first // 8, -(-end // 8))
            first = end


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
