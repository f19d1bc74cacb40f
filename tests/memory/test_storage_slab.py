"""Storages that are emptied in place, and the sums that tell whether their host copy is what they are."""

import pytest
import torch

from bridge_fgo.memory.digest import byte_sums
from bridge_fgo.memory.slab import StillShared
from bridge_fgo.memory.storage_slab import StorageSlab

CPU = torch.device("cpu")


def sums(*tensors):
    return byte_sums(tensors).tolist()


def test_views_of_an_emptied_storage_are_valid_again_and_ranges_come_back():
    buffer = torch.arange(100, dtype=torch.int16)
    view = buffer[10:20].view(2, 5)
    slab = StorageSlab(view, "it", "reload()", [(0, 40), (60, 80)])
    slab.map_host()
    assert slab.copy_out() == 60
    assert slab.empty() == 200 and slab.empty() == 0 and view.untyped_storage().nbytes() == 0
    assert slab.fill(zeroed=True) == 200 and slab.fill() == 0
    assert not buffer.any()
    assert slab.copy_in() == 60
    expected = torch.arange(100, dtype=torch.int16)
    expected[20:30] = expected[40:] = 0
    assert torch.equal(buffer, expected) and torch.equal(view, expected[10:20].view(2, 5))


def test_memory_that_numpy_shares_is_not_emptied():
    tensor = torch.zeros(8)
    slab = StorageSlab(tensor, "it", "reload()")
    shared = tensor.numpy()
    with pytest.raises(StillShared, match="it cannot be emptied"):
        slab.empty()
    assert shared.size == 8 and not slab.is_away


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1000, 4096])
def test_equal_bytes_have_equal_sums_wherever_they_lie(size):
    data = torch.randint(256, (size + 3,), dtype=torch.uint8)
    assert sums(data[3:]) == sums(data[3:].clone())


def test_every_change_of_a_bit_changes_the_sum_and_zeros_of_other_lengths_have_others():
    data = torch.randint(256, (61,), dtype=torch.uint8)
    before = sums(data)
    for place in range(8 * data.numel()):
        changed = data.clone()
        changed[place // 8] ^= 1 << (place % 8)
        assert sums(changed) != before
    assert len(set(sums(*(torch.zeros(n, dtype=torch.uint8) for n in (8, 15, 16, 24))))) == 4
