"""Two ranks train, save and load bitwise as resident ones."""

from functools import partial

import children
import gated_delta_net
import pytest
import rank_child
import torch
from both import CONFIGURED
from saving import assert_same_shards, newest
from storage_meter import SMALL
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

pytestmark = [pytest.mark.usefixtures("cpu_standins"), pytest.mark.slow]

FSDP = {"fsdp": "optim_grads_params"}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}


def run_both(folder, changes, loads=(None, None), steps=2, ranks=2, target=rank_child.train):
    """As `rank_child.run_both`; steps differ from each other, and every state is off in every forward."""
    folders, both = rank_child.run_both(folder, target, changes, loads, steps, ranks)
    for resident, offloaded in zip(*both, strict=True):
        assert len({tuple(of_step) for of_step in resident["numbers"]}) == len(resident["numbers"])
        assert max(offloaded["held"]) == 0 < min(resident["held"])
    return folders, both


def named(changes):
    return "-".join(f"{name}={value}" for name, value in changes.items() if name != "distributed") or "adam"


@pytest.mark.parametrize(
    "changes",
    [
        FSDP,
        FSDP | {"experts": True},
        FSDP | {"swiglu": True},
        {"fsdp": "no_shard", "experts": True},  # upstream cannot save SwiGLU of it: no `megatron_fsdp_slice`
        {"fsdp": "optim", "experts": True},
        {"fsdp": "optim_grads", "swiglu": True},
        FSDP | {"swiglu": True} | OVERLAP,
        FSDP | {"swiglu": True, "instances": 2},
        FSDP | {"swiglu": True, "instances": 2, "outer_sharding": "optim"},
    ],
    ids=named,
)
def test_two_ranks_train_6_steps_and_save_as_resident_ones(tmp_path, changes):
    (resident, offloaded), _ = run_both(tmp_path, changes, steps=6)
    assert_same_shards(offloaded / "trained", resident / "trained")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer": "muon"},
        {"optimizer": "dist_muon"},
        {"optimizer": "dist_muon", "experts": True},
        {"optimizer": "dist_muon"} | OVERLAP,
        {"optimizer": "muon", "tp": 2, "muon_tp_mode": "duplicated"},
        {"optimizer": "dist_muon", "tp": 2, "muon_tp_mode": "distributed"},
        {"optimizer": "muon", "tp": 2},
    ],
    ids=named,
)
def test_two_ranks_with_masters_of_whole_parameters_train_save_and_resume_as_resident_ones(tmp_path, changes):
    changes = {"distributed": False, **changes}
    trouble = {"rerun_steps": frozenset({3}), "grad_norm_skip_steps": frozenset({5})}
    (resident, offloaded), (_, seen) = run_both(tmp_path / "saved", changes | trouble, steps=6)
    assert_same_shards(offloaded / "trained", resident / "trained")
    if changes.get("optimizer") == "dist_muon" or "tp" in changes:
        assert len({rank["digests"]["masters"] for rank in seen}) == 2, "each rank has masters of its own"
    loads = [offloaded / "trained"] * 2
    (resident, offloaded), _ = run_both(tmp_path / "loaded", changes, loads)
    for name in ("trained", "loaded"):
        assert_same_shards(offloaded / name, resident / name)


def tensors(folder):
    """Every tensor of a checkpoint, whole, by name; those of `fsdp_dtensor` are dictionaries of dictionaries."""
    (checkpoint,) = folder.glob("iter_*")
    dcp_to_torch_save(checkpoint, folder / "whole.pt")
    pairs, found = [("", torch.load(folder / "whole.pt", weights_only=False))], {}
    while pairs:
        name, value = pairs.pop()
        if isinstance(value, dict):
            pairs += [(f"{name}.{key}", each) for key, each in value.items()]
        elif isinstance(value, torch.Tensor):
            found[name] = value
    assert sum("exp_avg" in name for name in found) > 10
    return found


def assert_equal(mine, theirs):
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


@pytest.mark.parametrize("changes", [{}, FSDP | {"swiglu": True}, FSDP | {"experts": True}], ids=named)
def test_dp_2_to_1_and_back_loses_no_bit_and_goes_on_as_a_resident_run(tmp_path, changes):
    loads, trained = (None, None), None
    for number, ranks in enumerate((2, 1, 2)):
        (resident, offloaded), _ = run_both(tmp_path / str(number), changes, loads, ranks=ranks)
        if trained is not None:
            assert_equal(tensors(offloaded / "loaded"), trained)
        trained = tensors(offloaded / "trained")
        assert_equal(trained, tensors(resident / "trained"))
        loads = resident / "trained", offloaded / "trained"


@pytest.mark.parametrize("changes", [{"swiglu": True}, {"experts": True, "layers": 6}], ids=named)
def test_two_ranks_load_with_two_parts_each_and_go_on_as_resident_ones(tmp_path, changes):
    changes = SMALL | FSDP | changes
    saved = rank_child.Job(tmp_path / "saved", 2, False, None, 2, changes)
    children.run_ranks(rank_child.train, saved)
    loads = [saved.folder / "trained"] * 2
    _, both = run_both(tmp_path, changes, loads, target=rank_child.load_with_few_parts)
    for resident, offloaded in zip(*both, strict=True):
        assert offloaded["left"] == 0 < resident["left"]
        assert 0 < offloaded["peak"] <= offloaded["allowed"] < offloaded["state_bytes"] / 3 < resident["peak"] / 3


@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim"])
def test_two_ranks_save_a_gated_delta_net_split_in_resident_bytes_and_load_it_as_resident_ones(tmp_path, strategy):
    changes = {"fsdp": strategy, "swiglu": True}
    first, _ = run_both(tmp_path / "first", changes, steps=3, target=gated_delta_net.train)
    loads = [folder / "trained" for folder in first]
    again, _ = run_both(tmp_path / "again", changes, loads, target=gated_delta_net.train)
    for resident, offloaded in (first, again):
        assert_same_shards(offloaded / "trained", resident / "trained")
        gated_delta_net.assert_split(newest(offloaded / "trained"))


# Gradients that come and go.

BUCKETS = {"overlap_grad_reduce": True, "bucket_size": 20_000, "microbatches": 4}
RANKS = {
    "dp": ({}, {}),
    "dp_gathered_in_forward": ({"overlap_param_gather": True}, {}),
    "dp_adam_not_distributed": ({"distributed": False}, {}),
    "dp_fp32_local_accumulation": ({}, CONFIGURED["fp32_local_accumulation"]),
    "dp_recomputed": ({}, CONFIGURED["full_recompute"]),
    "dp_experts": ({"experts": True}, {}),
    "dp_two_instances": ({"instances": 2}, {}),
    "tp": ({"tp": 2}, {}),
    "pp": ({"pp": 2, "layers": 8}, {}),
    "pp_tied_embeddings": ({"pp": 2, "layers": 8}, CONFIGURED["tied_embeddings"]),
    "pp_recomputed": ({"pp": 2, "layers": 8}, CONFIGURED["full_recompute"]),
}


@pytest.mark.parametrize("gradients", ["lazy", True])
@pytest.mark.parametrize("kind", RANKS)
def test_two_ranks_whose_gradients_come_and_go_train_as_resident_ones(tmp_path, kind, gradients):
    changes, configured = RANKS[kind]
    target = partial(rank_child.train_with_gradients, gradients=gradients, configured=configured)
    _, (_, offloaded) = run_both(tmp_path, BUCKETS | changes, steps=3, target=target)
    moved = [rank["gradients"] for rank in offloaded]
    if gradients == "lazy":
        assert not any(rank["out"] for rank in moved)
    elif "pp" in changes:
        # A later stage has one bucket of all, and one of embeddings that are tied to those of the first.
        assert moved[0]["out"] > 0 and (moved[1]["out"] > 0) is (configured is CONFIGURED["tied_embeddings"])
    else:
        passes = 3 * (4 // (1 if "tp" in changes else 2) - 1)
        assert all(rank["out"] == passes * rank["moving"] > 0 for rank in moved)
