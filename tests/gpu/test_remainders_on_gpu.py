"""The kernels of masters' remainders against PyTorch's operators, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bridge_fgo.engine.master_copy import WeightShard
from bridge_fgo.engine.plan import pack
from bridge_fgo.engine.remainder_kernels import MOST_TOGETHER
from bridge_fgo.engine.remainders import MasterRemainders

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = [1, 31, 32, 33, 4096, 1_000_003, 64, 5_000_000]


def slabs_on(
    device: torch.device, seed: int, first: int = 3, sizes: Sequence[int] = SIZES, count: int = 2
) -> tuple[MasterRemainders, list[tuple[Any, torch.Tensor]]]:
    """Returns the remainders of ``count`` slabs of masters of every kind of bits, and the slabs, uint8.

    first: elements from a multiple of 16 bytes to each weight. Nothing aligns a shard in DDP's buffer to more than its
        elements, though most are.
    """
    generator = torch.Generator().manual_seed(seed)
    bucket = SimpleNamespace(param_data=torch.zeros(count * (sum(sizes) + 100), dtype=torch.bfloat16, device=device))
    masters, weights = [], {}
    for size in [*sizes] * count:
        words = torch.randint(-(2**31), 2**31, (size,), generator=generator, dtype=torch.int64).to(torch.int32)
        master = words.view(torch.float32).nan_to_num(1.5).to(device)
        master.view(torch.int32)[::7] &= ~0xFFFF
        master.view(torch.int32)[::7] |= 0x8000  # ties
        masters.append(master)
        weights[id(master)] = WeightShard(bucket, first, size)
        bucket.param_data[first : first + size].copy_(master)
        first += -(-size // 8) * 8
    remainders = MasterRemainders(weights, device)
    made = []
    for start in range(0, len(masters), len(sizes)):
        of_slab = masters[start : start + len(sizes)]
        (layout,) = pack([4 * master.numel() for master in of_slab], 2**40)
        slab = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
        for master, offset in zip(of_slab, layout.offsets, strict=True):
            slab[offset : offset + 4 * master.numel()] = master.view(torch.uint8)
        refs: Any = [SimpleNamespace(key=None, param=master) for master in of_slab]
        made.append((remainders.of_slab(refs, layout.offsets, layout.nbytes), slab))
    remainders.ready()
    return remainders, made


@pytest.mark.parametrize("first", [0, 3, 8])
def test_kernels_pack_what_operators_pack_and_bring_every_bit_back(first: int) -> None:
    remainders, made = slabs_on(torch.device("cuda"), first, first)
    kernels = remainders._kernels
    assert kernels is not None
    for slab, masters in made:
        packed = [torch.zeros(slab.nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
        remainders.pack([(slab, masters, packed[0])])
        assert not slab.differs()
        by_kernels = remainders.sums[slab.row].tolist()
        back = torch.zeros_like(masters)
        remainders.unpack([(slab, back, packed[0])])
        assert torch.equal(back, masters)
        remainders._kernels = None
        remainders.pack([(slab, masters, packed[1])])
        assert remainders.sums[slab.row].tolist() == by_kernels
        assert torch.equal(packed[0], packed[1])
        back.zero_()
        remainders.unpack([(slab, back, packed[0])])
        assert torch.equal(back, masters)
        remainders._kernels = kernels
    remainders.require_unchanged([slab for slab, _ in made])


def test_one_launch_for_several_slabs_does_what_one_for_each_does() -> None:
    remainders, made = slabs_on(torch.device("cuda"), 4, sizes=SIZES[:-1], count=MOST_TOGETHER + 3)

    def all_packed() -> list[tuple[Any, torch.Tensor, torch.Tensor]]:
        return [
            (slab, masters, torch.full((slab.nbytes,), 7, dtype=torch.uint8, device="cuda")) for slab, masters in made
        ]

    each = all_packed()
    for move in each:
        remainders.pack([move])
    sums = remainders.sums.clone()
    together = all_packed()
    remainders.pack(together[::-1])
    assert torch.equal(remainders.sums, sums)
    assert all(torch.equal(one[2], other[2]) for one, other in zip(each, together, strict=True))
    back = [(slab, torch.full_like(masters, 7), packed) for slab, masters, packed in together]
    remainders.unpack(back)
    for slab, masters, _ in back:
        for shard, first in zip(slab.shards, slab.firsts, strict=True):
            where = slice(4 * first, 4 * (first + shard.numel))
            assert torch.equal(masters[where], made[slab.row][1][where])
    assert not remainders.sums.any()


def test_kernels_notice_a_weight_that_was_changed_and_a_master_that_is_no_rounding() -> None:
    remainders, made = slabs_on(torch.device("cuda"), 2)
    for slab, masters in made:
        remainders.pack([(slab, masters, torch.zeros(slab.nbytes, dtype=torch.uint8, device="cuda"))])
    weight = made[1][0].shards[5].tensor()
    kept = weight[777].clone()
    weight[777] = kept + 1
    remainders.require_unchanged([made[0][0]])
    with pytest.raises(RuntimeError, match="weights of the model were changed"):
        remainders.require_unchanged([slab for slab, _ in made])
    remainders.pack([(*made[1], torch.zeros(made[1][0].nbytes, dtype=torch.uint8, device="cuda"))])
    assert made[1][0].differs()
    weight[777] = kept
    remainders.pack([(*made[1], torch.zeros(made[1][0].nbytes, dtype=torch.uint8, device="cuda"))])
    assert not made[1][0].differs()


def test_masters_that_arithmetic_made_nan_come_back_as_they_were() -> None:
    remainders, ((slab, masters), _) = slabs_on(torch.device("cuda"), 3)
    words = masters.view(torch.float32)
    for shard, first in zip(slab.shards, slab.firsts, strict=True):
        of_one = words[first : first + shard.numel]
        of_one.mul_(float("inf")).sub_(of_one.clone())  # inf - inf
        assert of_one.isnan().any()
        shard.tensor().copy_(of_one)
    packed = torch.zeros(slab.nbytes, dtype=torch.uint8, device="cuda")
    remainders.pack([(slab, masters, packed)])
    assert not slab.differs()
    back = torch.zeros_like(masters)
    remainders.unpack([(slab, back, packed)])
    assert torch.equal(back, masters)
