"""Optimizers with masters of whole parameters on two ranks, each a process: data or tensor parallelism."""

from __future__ import annotations

import json

import children
import pytest
import rank_child
from test_checkpoints import assert_same_shards

pytestmark = [pytest.mark.usefixtures("cpu_standins"), pytest.mark.slow]

STEPS = 10
TROUBLE = {"rerun_steps": frozenset({3}), "grad_norm_skip_steps": frozenset({5})}


def run(folder, offload, changes, loads=None, steps=STEPS):
    """Run both ranks to their end; return the folder, and what each rank saw."""
    folder.mkdir(parents=True)
    job = rank_child.Job(folder, 2, offload, loads, steps, {"distributed": False, **changes})
    started = [children.start(rank_child.train, rank, job) for rank in range(2)]
    assert [children.join(child, "as one of 2 ranks") for child in started] == [0, 0]
    return folder, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer": "muon"},
        {"optimizer": "dist_muon"},
        {"optimizer": "dist_muon", "experts": True},
        {"optimizer": "dist_muon", "overlap_grad_reduce": True, "overlap_param_gather": True},
        {"optimizer": "muon", "tp": 2, "muon_tp_mode": "duplicated"},
        {"optimizer": "dist_muon", "tp": 2, "muon_tp_mode": "distributed"},
        {"optimizer": "muon", "tp": 2},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())) or "adam",
)
def test_two_ranks_train_save_and_resume_as_resident_ones(tmp_path, changes):
    saved, loaded = {}, {}
    for offload in (False, True):
        saved[offload] = run(tmp_path / f"saved-{offload}", offload, changes | TROUBLE)
    for offload in (False, True):
        loaded[offload] = run(tmp_path / f"loaded-{offload}", offload, changes, saved[True][0] / "trained", steps=2)
    for seen in (saved, loaded):
        for resident, offloaded in zip(seen[False][1], seen[True][1], strict=True):
            assert offloaded["numbers"] == resident["numbers"]
            assert len({loss for loss, _ in resident["numbers"]}) == len(resident["numbers"])
            assert offloaded["digests"] == resident["digests"]
            assert max(offloaded["held"]) == 0 < min(resident["held"])
        for name in ("trained", "loaded") if seen is loaded else ("trained",):
            assert_same_shards(seen[True][0] / name, seen[False][0] / name)
    if changes.get("optimizer") == "dist_muon" or "tp" in changes:
        assert len({seen["digests"]["masters"] for seen in saved[True][1]}) == 2, "each rank has masters of its own"
