"""The kernel that compares masters with weights rounds as PyTorch does."""

import ctypes

import numpy as np
import pytest
import torch
from cpu_training import CpuTraining
from kernel_on_cpu import address, compiled
from sleeping import options, residency

from bridge_fgo.memory import strided_sums
from bridge_fgo.memory.strided_sums import StridedSum
from bridge_fgo.sleep import rounding

TIES_AND_ENDS = [0x00000000, 0x80000000, 0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x7F7FFFFF, 0x7F800000,
                 0xFF800000, 0x00000001, 0x00008000, 0x00018000, 0x807FFFFF]  # fmt: skip
NANS = [0x7FC00000, 0x7F800001, 0xFFC00001]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that runs the kernel: of a number of blocks, and its arguments."""
    folder = tmp_path_factory.mktemp("kernel")
    parameters = "const unsigned *masters, const u16 *weights, u64 count, u64 *found"
    return compiled(folder, rounding.SOURCE, parameters, "differing(masters, weights, count, found)")


@pytest.fixture
def count(run):
    """Return a function that counts with some blocks the weights that are not what their masters are rounded to."""

    def count(masters, weights, blocks=3):
        found = ctypes.c_uint64()
        run(blocks, address(masters), address(weights), ctypes.c_uint64(len(masters)), ctypes.byref(found))
        return found.value

    return count


def rounded(masters):
    """Return the bits of the bf16 weights that PyTorch rounds fp32 masters (their bits, uint32) to."""
    weights = torch.from_numpy(masters.view(np.float32).copy()).to(torch.bfloat16)
    return weights.view(torch.int16).numpy().view(np.uint16).copy()


@pytest.mark.parametrize("numel", [0, 1, 11, 12, 13, 5000])
def test_what_masters_are_rounded_to_does_not_differ_and_each_other_weight_does(count, numel):
    masters = np.random.default_rng(numel).integers(2**32, size=numel, dtype=np.uint64).astype(np.uint32)
    masters[(masters & 0x7FFFFFFF) > 0x7F800000] = 0x3F808000  # no NaNs here
    masters[: len(TIES_AND_ENDS)] = TIES_AND_ENDS[:numel]
    weights = rounded(masters)
    for blocks in (1, 3, 2000):
        assert count(masters, weights, blocks) == 0
    for changed in range(0, numel, 7):
        weights[changed] ^= 1
    assert count(masters, weights) == len(range(0, numel, 7))


def test_a_zero_of_the_other_sign_and_every_nan_differ(count):
    masters = np.array([0x00000000, *NANS], dtype=np.uint32)
    assert count(masters, np.array([0x8000, *rounded(masters)[1:]], dtype=np.uint16)) == len(masters)


@pytest.mark.usefixtures("cpu_standins")
@pytest.mark.parametrize("changes", [{}, {"experts": True}, {"chunks": 2, "overlap_grad_reduce": True}])
def test_every_master_is_compared_with_its_own_weights_in_every_bucket(run, monkeypatch, changes):
    class OnCpu:
        def launch(self, grid, stream, masters, weights, numel, found):
            run(3, *map(ctypes.c_uint64, (masters, weights, numel, found)))

    monkeypatch.setattr(strided_sums, "current_stream", lambda index: 0)
    with CpuTraining(options(**changes)) as training:
        training.step()
        roundings = [slab.rounding for slab in residency(training)._memory.weights.slabs if slab.rounding is not None]
        assert roundings
        for rounding in roundings:
            rounding._kernel = StridedSum(OnCpu())
            assert rounding.agrees()
            for _, _, shard in rounding.pairs:
                bits = shard.tensor().view(torch.int16)
                for place in {0, shard.numel // 2, shard.numel - 1}:
                    bits[place] ^= 1
                    assert not rounding.agrees()
                    bits[place] ^= 1
            assert rounding.agrees()
