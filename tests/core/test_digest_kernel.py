"""The kernel that sums over bytes, compiled for the CPU: every word counts once, at its place, whatever the grid."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kernel_on_cpu import address, compiled

from bridge_fgo.core import digest
from bridge_fgo.core.digest import Digester

FIRST, SECOND = (np.uint64(factor) for factor in digest._FACTORS)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that runs the kernel over an array of uint64 with some blocks, and returns the sum."""
    folder = tmp_path_factory.mktemp("kernel")
    function = compiled(folder, digest.SOURCE, "const u64 *words, u64 count, u64 *sum", "digest(words, count, sum)")

    def run(words, blocks=3):
        total = ctypes.c_uint64()
        function(blocks, address(words), ctypes.c_uint64(len(words)), ctypes.byref(total))
        return total.value

    return run


def formula(words):
    """Return the sum as the kernel defines it."""
    with np.errstate(over="ignore"):
        x = words + np.arange(len(words), dtype=np.uint64) * FIRST
        x ^= x >> np.uint64(32)
        x *= SECOND
        x ^= x >> np.uint64(29)
        x *= FIRST
        return int((x ^ x >> np.uint64(32)).sum())


@pytest.mark.parametrize("count", [0, 1, 2, 11, 12, 13, 1000, 4097])
def test_every_word_counts_once_at_its_place_whatever_the_grid(run, count):
    words = np.random.default_rng(count).integers(2**64, size=count, dtype=np.uint64)
    assert {run(words, blocks) for blocks in (1, 3, 7, 2000)} == {formula(words)}


def test_each_bit_and_each_exchange_of_two_words_changes_the_sum(run):
    words = np.random.default_rng(0).integers(2**64, size=9, dtype=np.uint64)
    words[4] = 0
    before = run(words)
    for bit in range(64 * len(words)):
        changed = words.copy()
        changed[bit // 64] ^= np.uint64(1) << np.uint64(bit % 64)
        assert run(changed) != before
    for i in range(len(words) - 1):
        changed = words.copy()
        changed[[i, i + 1]] = changed[[i + 1, i]]
        assert run(changed) != before


def test_what_neither_begins_nor_ends_at_a_word_is_left_to_the_operators():
    launched = []
    digester = Digester(torch.device("cpu"), 64)
    by_operators = digester.of([torch.arange(12, dtype=torch.uint8)]).tolist()
    digester._kernel = SimpleNamespace(add=lambda *of: launched.append(of))
    base = torch.arange(64, dtype=torch.uint8)
    whole, begins_amid, ends_amid = base[8:48], base[4:12], base[:12]
    sums = digester.of([whole, begins_amid, ends_amid])
    assert [of[0] is sums for of in launched] == [True]
    assert launched[0][1:] == (0, whole.numel() // 8, whole.data_ptr())
    assert sums[0] == 0 and sums[1] != 0 and sums[2] == by_operators[0]
