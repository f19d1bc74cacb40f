"""Checkpoints of one number of ranks loaded by another: DP 2 to 1 and back, each rank a process."""

from __future__ import annotations

import children
import pytest
import rank_child
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

pytestmark = pytest.mark.usefixtures("cpu_standins")


def run(folder, ranks, offload, loads=None):
    """Run the ranks to their end; return the folder, and what each rank saw."""
    return folder, children.run_ranks(rank_child.train, rank_child.Job(folder, ranks, offload, loads))


def tensors(folder):
    """Every tensor of a checkpoint, whole, by name."""
    (checkpoint,) = folder.glob("iter_*")
    dcp_to_torch_save(checkpoint, folder / "whole.pt")
    found = torch.load(folder / "whole.pt", weights_only=False)
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def assert_equal(mine, theirs):
    assert mine.keys() == theirs.keys()
    assert sum("exp_avg" in name for name in mine) > 10
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


@pytest.mark.slow
def test_dp_2_to_1_and_back_loses_no_bit_and_goes_on_as_a_resident_run(tmp_path):
    loads, trained = {True: None, False: None}, None
    for number, ranks in enumerate((2, 1, 2)):
        seen = {}
        for offload in (False, True):
            folder, seen[offload] = run(tmp_path / f"{number}-{offload}", ranks, offload, loads[offload])
            loads[offload] = folder / "trained"
        for resident, offloaded in zip(seen[False], seen[True], strict=True):
            assert offloaded["numbers"] == resident["numbers"]
            assert offloaded["digests"] == resident["digests"]
            assert max(offloaded["held"]) == 0 < min(resident["held"])
        if trained is not None:
            assert_equal(tensors(folder / "loaded"), trained)
        trained = tensors(folder / "trained")
        assert_equal(trained, tensors(loads[False]))
