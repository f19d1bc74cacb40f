"""Megatron-FSDP on two ranks, each a process: 30 steps, saves, and checkpoints of one number of ranks in another."""

from __future__ import annotations

import children
import pytest
import rank_child
import torch
from test_checkpoints import assert_same_shards
from test_resharding import assert_equal
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

pytestmark = [pytest.mark.usefixtures("cpu_standins"), pytest.mark.slow]

STEPS = 30
WHOLE = {"fsdp": "optim_grads_params"}


def run(folder, ranks, offload, changes, loads=None, steps=STEPS):
    """Run the ranks to their end; return the folder, and what each rank saw."""
    return folder, children.run_ranks(rank_child.train, rank_child.Job(folder, ranks, offload, loads, steps, changes))


def tensors(folder):
    """Every tensor of a checkpoint, whole, by name; a dictionary of dictionaries, unlike those of mcore's formats."""
    (checkpoint,) = folder.glob("iter_*")
    dcp_to_torch_save(checkpoint, folder / "whole.pt")
    pairs, found = [("", torch.load(folder / "whole.pt", weights_only=False))], {}
    while pairs:
        name, value = pairs.pop()
        if isinstance(value, dict):
            pairs += [(f"{name}.{key}", each) for key, each in value.items()]
        elif isinstance(value, torch.Tensor):
            found[name] = value
    return found


def assert_as_resident(seen):
    """Compare what each rank saw offloaded with what it saw resident."""
    for resident, offloaded in zip(seen[False], seen[True], strict=True):
        assert offloaded["numbers"] == resident["numbers"]
        assert len({loss for loss, _ in resident["numbers"]}) == len(resident["numbers"])
        assert offloaded["digests"] == resident["digests"]
        assert max(offloaded["held"]) == 0 < min(resident["held"])


@pytest.mark.parametrize(
    "changes",
    [
        WHOLE,
        WHOLE | {"experts": True},
        WHOLE | {"swiglu": True},
        {"fsdp": "no_shard", "experts": True},  # upstream cannot save SwiGLU of it: no `megatron_fsdp_slice`
        {"fsdp": "optim", "experts": True},
        {"fsdp": "optim_grads", "swiglu": True},
        WHOLE | {"swiglu": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
        WHOLE | {"swiglu": True, "instances": 2},
        WHOLE | {"swiglu": True, "instances": 2, "outer_sharding": "optim"},
    ],
    ids=lambda changes: "-".join(map(str, changes)) + "-" + "-".join(map(str, changes.values())),
)
def test_two_ranks_train_and_save_as_resident_ones(tmp_path, changes):
    seen = {}
    for offload in (False, True):
        _, seen[offload] = run(tmp_path / str(offload), 2, offload, changes)
    assert_as_resident(seen)
    assert_same_shards(tmp_path / "True" / "trained", tmp_path / "False" / "trained")


@pytest.mark.parametrize("kind", ["swiglu", "experts"])
def test_dp_2_to_1_and_back_loses_no_bit_and_goes_on_as_a_resident_run(tmp_path, kind):
    changes = WHOLE | {kind: True}
    loads, trained = {True: None, False: None}, None
    for number, ranks in enumerate((2, 1, 2)):
        seen = {}
        for offload in (False, True):
            folder, seen[offload] = run(tmp_path / f"{number}-{offload}", ranks, offload, changes, loads[offload], 2)
            loads[offload] = folder / "trained"
        assert_as_resident(seen)
        if trained is not None:
            assert_equal(tensors(folder / "loaded"), trained)
        trained = tensors(folder / "trained")
        assert_equal(trained, tensors(loads[False]))
