"""Adam that is not distributed, and Muon, through Bridge's own ``pretrain()``: bitwise, and the states' memory is free.

Muon needs emerging-optimizers. AdaptiveMuon is on the CPU lane alone: that of mcore 0.19.2 looks for an attribute that
emerging-optimizers 0.3.0 does not set, and a resident run ends with an AttributeError too.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from test_pretrain import MANY_ACTIVATIONS, assert_bitwise_equal, both_arms, needs_gpus

STEPS = 30


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adam", "muon", "dist_muon"])
def test_30_steps_are_bitwise_equal_and_the_peak_falls_by_the_bytes_offloaded(tmp_path: Path, optimizer: str) -> None:
    options = (*MANY_ACTIVATIONS, "--no-distributed", "--optimizer", optimizer)
    resident, offloaded = both_arms(tmp_path, *options, steps=STEPS)
    assert_bitwise_equal(resident, offloaded, STEPS)
    fallen = resident.result["peak_allocated_bytes"] - offloaded.result["peak_allocated_bytes"]
    print(f"\n{optimizer}: fallen {fallen}, released {offloaded.result['released_bytes']}")
    assert offloaded.result["released_bytes"] >= 0.9 * offloaded.result["state_bytes"]
    assert fallen >= 0.95 * offloaded.result["released_bytes"]


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [(), ("--tp", "2")], ids=["data_parallel", "tensor_parallel"])
@pytest.mark.parametrize("optimizer", ["muon", "dist_muon"])
def test_two_ranks_of_muon_are_bitwise_equal(tmp_path: Path, optimizer: str, spread: tuple[str, ...]) -> None:
    needs_gpus(2)
    options = (*MANY_ACTIVATIONS, *spread, "--no-distributed", "--optimizer", optimizer)
    resident, offloaded = both_arms(tmp_path, *options, steps=STEPS, ranks=2)
    assert_bitwise_equal(resident, offloaded, STEPS)
