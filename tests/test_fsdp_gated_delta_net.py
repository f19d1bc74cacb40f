"""Gated delta nets under Megatron-FSDP: in checkpoints the states of fused parameters are split as these are."""

from __future__ import annotations

import itertools

import children
import fused_adam
import gated_delta_net
import pytest
import rank_child
from saving import newest
from test_checkpoints import assert_same_shards
from test_fsdp import trained
from torch.distributed.checkpoint import FileSystemReader

pytestmark = pytest.mark.usefixtures("cpu_standins")

WHOLE = {"fsdp": "optim_grads_params", "swiglu": True}


@pytest.fixture
def gdn(monkeypatch):
    """Models have a gated delta net, and the Adam inside counts as Transformer Engine's does."""
    gated_delta_net.have_the_first_layer_take_it(monkeypatch.setattr)
    fused_adam.have_mcore_take_it(monkeypatch.setattr)
    with gated_delta_net.uncompiled():
        yield


def assert_split(checkpoint):
    """Check that a checkpoint has each part of a fused parameter, of the model and of each moment, and no whole one."""
    names = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    for fused, parts in gated_delta_net.PARTS.items():
        of_model = {name for name in names if name.startswith("model.") and fused in name}
        assert {name.rpartition(f"{fused}.")[2] for name in of_model} == set(parts), of_model
        for moment in ("exp_avg", "exp_avg_sq"):
            of_states = {name for name in names if fused in name and name.endswith(f".{moment}")}
            assert {name.rpartition(f"{fused}.")[2] for name in of_states} == {f"{part}.{moment}" for part in parts}


@pytest.mark.parametrize(
    ("strategy", "loads"),
    [
        ("optim_grads_params", [(True, "resident")]),
        pytest.param("optim", [(True, "resident"), (False, "offloaded")], marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_is_split_and_has_a_resident_runs_bytes_and_loads(tmp_path, gdn, strategy, loads):
    options = WHOLE | {"fsdp": strategy}
    resident = trained(options, tmp_path / "resident")
    offloaded = trained({**options, "offload": True}, tmp_path / "offloaded")
    assert offloaded == {**resident, "held": [], "most": 0}
    assert_same_shards(tmp_path / "offloaded", tmp_path / "resident")
    assert_split(newest(tmp_path / "offloaded"))
    for offload, saved in loads:
        again = trained({**options, "offload": offload}, steps=1, loads=tmp_path / saved)
        assert again["numbers"] == [resident["after"]] and again["digests"] == resident["digests"]


@pytest.mark.slow
def test_two_ranks_save_it_split_in_resident_bytes_and_load_it_as_resident_ones(tmp_path):
    seen = {}
    for offload in (False, True):
        first = rank_child.Job(tmp_path / f"first-{offload}", 2, offload, None, 3, WHOLE)
        again = rank_child.Job(tmp_path / f"again-{offload}", 2, offload, first.folder / "trained", 2, WHOLE)
        seen[offload] = [children.run_ranks(gated_delta_net.train, job) for job in (first, again)]
    pairs = zip(itertools.chain(*seen[False]), itertools.chain(*seen[True]), strict=True)
    for resident, offloaded in pairs:
        assert (offloaded["numbers"], offloaded["digests"]) == (resident["numbers"], resident["digests"])
        assert max(offloaded["held"]) == 0 < min(resident["held"])
    for name in ("first", "again"):
        assert_same_shards(tmp_path / f"{name}-True" / "trained", tmp_path / f"{name}-False" / "trained")
        assert_split(newest(tmp_path / f"{name}-True" / "trained"))
