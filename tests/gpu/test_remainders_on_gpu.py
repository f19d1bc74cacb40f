"""Kernels that pack masters match PyTorch's operators."""

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_lane import NEEDS_CUDA

from bridge_fgo.memory.layout import pack
from bridge_fgo.memory.remainder_kernels import MOST_TOGETHER
from bridge_fgo.memory.remainders import Remainders
from bridge_fgo.memory.state_tensor import State, WeightShard

RAN_ON = "one H200"

pytestmark = NEEDS_CUDA

SIZES = [1, 31, 32, 33, 4096, 1_000_003, 64, 5_000_000]


def slabs_on(
    device: torch.device, seed: int, first: int = 3, sizes: Sequence[int] = SIZES, count: int = 2
) -> tuple[Remainders, list[tuple[Any, torch.Tensor]]]:
    """Returns the remainders of ``count`` slabs of masters of every kind of bits, and the codec and bytes of each slab.

    first: elements from a multiple of 16 bytes to each weight. Nothing aligns a shard in DDP's buffer to more than its
        elements, though most are.
    """
    generator = torch.Generator().manual_seed(seed)
    bucket = SimpleNamespace(param_data=torch.zeros(count * (sum(sizes) + 100), dtype=torch.bfloat16, device=device))
    buffer = partial(getattr, bucket, "param_data")
    states = []
    for size in [*sizes] * count:
        words = torch.randint(-(2**31), 2**31, (size,), generator=generator, dtype=torch.int64).to(torch.int32)
        master = words.view(torch.float32).nan_to_num(1.5).to(device)
        master.view(torch.int32)[::7] &= ~0xFFFF
        master.view(torch.int32)[::7] |= 0x8000  # ties
        to = WeightShard(buffer, first, size)
        states.append(State("master", "master weight", master, master.dtype, lambda m=master: m, rounds_to=to))
        bucket.param_data[first : first + size].copy_(master)
        first += -(-size // 8) * 8
    remainders = Remainders(device)
    made = []
    for start in range(0, len(states), len(sizes)):
        of_slab = states[start : start + len(sizes)]
        (layout,) = pack([state.nbytes for state in of_slab], 2**40)
        slab = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
        for state, offset in zip(of_slab, layout.offsets, strict=True):
            slab[offset : offset + state.nbytes] = state.param.view(torch.uint8)
        made.append((remainders.codec_of(of_slab, layout), slab))
    remainders.ready()
    return remainders, made


@pytest.mark.parametrize("first", [0, 3, 8])
def test_kernels_pack_what_operators_pack_and_bring_every_bit_back(first: int) -> None:
    remainders, made = slabs_on(torch.device("cuda"), first, first)
    kernels = remainders._kernels
    assert kernels is not None
    for codec, masters in made:
        encoded = [torch.zeros(codec.staging_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
        remainders.encode([(codec, masters, encoded[0])])
        assert not codec.loses()
        by_kernels = remainders.sums[codec.row].tolist()
        back = torch.zeros_like(masters)
        remainders.decode([(codec, back, encoded[0])])
        assert torch.equal(back, masters)
        remainders._kernels = None
        remainders.encode([(codec, masters, encoded[1])])
        assert remainders.sums[codec.row].tolist() == by_kernels
        assert torch.equal(encoded[0], encoded[1])
        back.zero_()
        remainders.decode([(codec, back, encoded[0])])
        assert torch.equal(back, masters)
        remainders._kernels = kernels
    remainders.verify([codec for codec, _ in made])


def test_one_launch_for_several_slabs_does_what_one_for_each_does() -> None:
    remainders, made = slabs_on(torch.device("cuda"), 4, sizes=SIZES[:-1], count=MOST_TOGETHER + 3)

    def all_encoded() -> list[tuple[Any, torch.Tensor, torch.Tensor]]:
        return [
            (codec, masters, torch.full((codec.staging_bytes,), 7, dtype=torch.uint8, device="cuda"))
            for codec, masters in made
        ]

    each = all_encoded()
    for move in each:
        remainders.encode([move])
    sums = remainders.sums.clone()
    together = all_encoded()
    remainders.encode(together[::-1])
    assert torch.equal(remainders.sums, sums)
    assert all(torch.equal(one[2], other[2]) for one, other in zip(each, together, strict=True))
    back = [(codec, torch.full_like(masters, 7), encoded) for codec, masters, encoded in together]
    remainders.decode(back)
    for codec, masters, _ in back:
        for shard, first in zip(codec.shards, codec.firsts, strict=True):
            where = slice(4 * first, 4 * (first + shard.numel))
            assert torch.equal(masters[where], made[codec.row][1][where])
    assert not remainders.sums.any()


def test_kernels_notice_a_weight_that_was_changed_and_a_master_that_is_no_rounding() -> None:
    remainders, made = slabs_on(torch.device("cuda"), 2)
    for codec, masters in made:
        remainders.encode([(codec, masters, torch.zeros(codec.staging_bytes, dtype=torch.uint8, device="cuda"))])
    weight = made[1][0].shards[5].tensor()
    kept = weight[777].clone()
    weight[777] = kept + 1
    remainders.verify([made[0][0]])
    with pytest.raises(RuntimeError, match="weights of the model were changed"):
        remainders.verify([codec for codec, _ in made])
    remainders.encode([(*made[1], torch.zeros(made[1][0].staging_bytes, dtype=torch.uint8, device="cuda"))])
    assert made[1][0].loses()
    weight[777] = kept
    remainders.encode([(*made[1], torch.zeros(made[1][0].staging_bytes, dtype=torch.uint8, device="cuda"))])
    assert not made[1][0].loses()


def test_masters_that_arithmetic_made_nan_come_back_as_they_were() -> None:
    remainders, ((codec, masters), _) = slabs_on(torch.device("cuda"), 3)
    words = masters.view(torch.float32)
    for shard, first in zip(codec.shards, codec.firsts, strict=True):
        of_one = words[first : first + shard.numel]
        of_one.mul_(float("inf")).sub_(of_one.clone())  # inf - inf
        assert of_one.isnan().any()
        shard.tensor().copy_(of_one)
    encoded = torch.zeros(codec.staging_bytes, dtype=torch.uint8, device="cuda")
    remainders.encode([(codec, masters, encoded)])
    assert not codec.loses()
    back = torch.zeros_like(masters)
    remainders.decode([(codec, back, encoded)])
    assert torch.equal(back, masters)
