"""Kernels that sum and compare memory match their formulas."""

import pytest
import torch
from gpu_lane import NEEDS_CUDA

from bridge_fgo.memory import digest
from bridge_fgo.memory.digest import byte_sums, digest_kernel
from bridge_fgo.sleep.rounding import differing, kernel_for

RAN_ON = "one H200"

pytestmark = NEEDS_CUDA

FIRST, SECOND = (factor - 2**64 for factor in digest._FACTORS)


def folded(x: torch.Tensor) -> torch.Tensor:
    """Return x ^ x >> 32 of unsigned words."""
    return x ^ (x >> 32) & (2**32 - 1)


def formula(data: torch.Tensor) -> int:
    """Return the sum as the kernel defines it, by PyTorch's operators."""
    words = data.view(torch.int64)
    x = words + torch.arange(words.numel(), device=data.device) * FIRST
    return int(folded(folded(folded(x) * SECOND) * FIRST).sum())


def random_bytes(nbytes: int) -> torch.Tensor:
    return torch.randint(256, (nbytes,), dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("words", [0, 1, 31, 32, 33, 1023, 1024, 1025, 2**20 + 7, 2**23 - 1])
def test_the_kernel_sums_as_its_formula_and_a_changed_bit_shows(words: int) -> None:
    data = random_bytes(8 * words)
    assert digest_kernel(data.device) is not None
    (before,) = byte_sums([data]).tolist()
    assert before == formula(data)
    for place in {0, 4 * words, 8 * words - 1} if words else ():
        data[place] ^= 0x10
        (after,) = byte_sums([data]).tolist()
        assert after == formula(data) != before
        data[place] ^= 0x10


def test_several_tensors_and_what_begins_amid_a_word_are_summed_in_one_call() -> None:
    base = random_bytes(2**20)
    tensors = [base, base[8:], base[4:100], base[:12]]
    sums = byte_sums(tensors).tolist()
    assert sums[:2] == [formula(base), formula(base[8:])]
    assert byte_sums(tensors).tolist() == sums
    base[9] ^= 1
    changed = byte_sums(tensors).tolist()
    assert all(before != after for before, after in zip(sums, changed, strict=True))


def test_a_kernel_finds_each_weight_that_is_not_what_its_master_is_rounded_to() -> None:
    masters = torch.randn(2**22 + 3, device="cuda")
    weights = torch.zeros(masters.numel() + 1, dtype=torch.bfloat16, device="cuda")[1:]  # begins amid four bytes
    weights.copy_(masters)
    kernel = kernel_for(masters.device)
    assert kernel is not None

    def found() -> int:
        return int(differing(kernel, [(masters, weights.data_ptr(), masters.numel())] * 2, masters.device))

    assert found() == 0
    for place in (0, 1, 2**21, masters.numel() - 1):
        weights.view(torch.int16)[place] ^= 1
    assert found() == 8
    masters[5] = torch.nan
    assert found() == 10
