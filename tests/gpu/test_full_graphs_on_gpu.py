"""Full-iteration CUDA graphs through Bridge's own ``pretrain()``: bitwise, and the graph's memory is no larger."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_pretrain import MANY_ACTIVATIONS, SMALL, assert_bitwise_equal, both_arms

STEPS = 30
GRAPHS = ("--full-graphs",)
EXPERTS = (*SMALL, "--experts", "4")
NARROW = ("--vocab", "2048")
"""The step takes whole tensors, some at a time: an embedding that is a quarter of all states would be its peak."""
SLACK = 64 * 2**20
"""Bytes by which the allocator may round in one run and not in the other."""


@pytest.mark.gpu
@pytest.mark.parametrize("size", [SMALL, MANY_ACTIVATIONS, EXPERTS], ids=["small", "many_activations", "experts"])
def test_replayed_passes_are_bitwise_resident_ones_and_the_graph_keeps_no_more_memory(
    tmp_path: Path, size: tuple[str, ...]
) -> None:
    resident, offloaded = both_arms(tmp_path, *size, *NARROW, *GRAPHS, steps=STEPS)
    assert_bitwise_equal(resident, offloaded, STEPS)
    kept = [arm.result["graph_pool_bytes"] for arm in (resident, offloaded)]
    assert 0 < kept[1] <= kept[0] + SLACK
    reserved = [arm.result["peak_reserved_bytes"] for arm in (resident, offloaded)]
    print(f"\ngraphs keep {kept}, reserved at most {reserved}, states {offloaded.result['state_bytes']}")
    assert reserved[1] <= reserved[0] - offloaded.result["state_bytes"] // 2
