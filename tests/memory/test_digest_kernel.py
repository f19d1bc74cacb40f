"""The sum over bytes: the kernel, compiled for the CPU, and PyTorch's operators, by one formula, blind to no change."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_on_cpu import address, compiled

from bridge_fgo.memory import digest
from bridge_fgo.memory.digest import byte_sums

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
        x ^= x >> np.uint64(32)
        x *= FIRST
        return int((x ^ x >> np.uint64(32)).sum())


def by_operators(words):
    (total,) = byte_sums([torch.from_numpy(words.view(np.uint8))]).tolist()
    return total % 2**64


SPECIAL = (0, 1, 2**31, 2**32, 2**63, 2**64 - 1, 0x3F8000003F800000)
WORD = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from(SPECIAL), st.sampled_from(SPECIAL))
WORDS = st.lists(WORD, min_size=1, max_size=40)

CHANGES = {
    "complemented": lambda words: ~words,
    "signs flipped": lambda words: words ^ np.uint64(0x8000000080000000),
    "high signs flipped": lambda words: words ^ np.uint64(2**63),
    "one more": lambda words: words + np.uint64(1),
    "halves exchanged": lambda words: words << np.uint64(32) | words >> np.uint64(32),
    "doubled": lambda words: words << np.uint64(1),
    "halved": lambda words: words >> np.uint64(1),
    "zeroed": np.zeros_like,
}


@pytest.mark.parametrize("count", [0, 1, 2, 11, 12, 13, 1000, 4097])
def test_every_word_counts_once_at_its_place_whatever_the_grid(run, count):
    words = np.random.default_rng(count).integers(2**64, size=count, dtype=np.uint64)
    assert {run(words, blocks) for blocks in (1, 3, 7, 2000)} == {formula(words)}


@settings(deadline=None)  # on a busy machine a first call takes longer
@given(words=WORDS, blocks=st.integers(1, 5), chunk=st.integers(1, 50))
def test_the_kernel_and_the_operators_have_one_formula(run, words, blocks, chunk):
    words = np.array(words, dtype=np.uint64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest, "CHUNK_WORDS", chunk)
        assert run(words, blocks) == by_operators(words) == formula(words)


@settings(deadline=None)
@given(words=WORDS, change=st.sampled_from(sorted(CHANGES)), data=st.data())
def test_what_changes_one_word_or_some_alike_changes_the_sum(words, change, data):
    words = np.array(words, dtype=np.uint64)
    chosen = data.draw(st.sets(st.integers(0, len(words) - 1), min_size=1), label="places")
    changed = words.copy()
    places = sorted(chosen)
    changed[places] = CHANGES[change](words[places])
    assert (by_operators(changed) == by_operators(words)) == bool((changed == words).all())


@settings(deadline=None)
@given(words=WORDS, data=st.data())
def test_words_in_another_order_have_another_sum(words, data):
    words = np.array(words, dtype=np.uint64)
    moved = np.roll(words, data.draw(st.integers(1, 3)))
    exchanged = words.copy()
    i, j = (data.draw(st.integers(0, len(words) - 1)) for _ in range(2))
    exchanged[[i, j]] = exchanged[[j, i]]
    for changed in (moved, exchanged, words[::-1].copy()):
        assert (by_operators(changed) == by_operators(words)) == bool((changed == words).all())


def test_what_neither_begins_nor_ends_at_a_word_is_left_to_the_operators(monkeypatch):
    launched = []
    mine = byte_sums([torch.arange(12, dtype=torch.uint8)]).tolist()
    kernel = SimpleNamespace(add=lambda *of: launched.append(of))
    monkeypatch.setattr(digest, "digest_kernel", lambda device: kernel)
    base = torch.arange(64, dtype=torch.uint8)
    whole, begins_amid, ends_amid = base[8:48], base[4:12], base[:12]
    sums = byte_sums([whole, begins_amid, ends_amid])
    assert [of[0] is sums for of in launched] == [True]
    assert launched[0][1:] == (0, whole.numel() // 8, whole.data_ptr())
    assert sums[0] == 0 and sums[1] != 0 and sums[2] == mine[0]


def sums(*tensors):
    return byte_sums(tensors).tolist()


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
