"""Ranks of a training whose gradients come and go: what they train is bitwise what resident ones do."""

from functools import partial

import pytest
import rank_child
from both import SMALL
from test_two_ranks import run_both

pytestmark = [pytest.mark.usefixtures("cpu_standins"), pytest.mark.slow]

BUCKETS = SMALL | {"overlap_grad_reduce": True, "bucket_size": 20_000, "microbatches": 4}
TIED = {"model.share_embeddings_and_output_weights": True}
FP32_LOCAL = {
    "ddp.param_name_patterns_for_fp32_local_accumulation": ("*linear_fc1*", "*word_embeddings*"),
    "ddp.grad_reduce_in_fp32": False,
}
RECOMPUTED = {
    "model.recompute_granularity": "full",
    "model.recompute_method": "uniform",
    "model.recompute_num_layers": 1,
}
RANKS = {
    "dp": ({}, {}),
    "dp_gathered_in_forward": ({"overlap_param_gather": True}, {}),
    "dp_adam_not_distributed": ({"distributed": False}, {}),
    "dp_fp32_local_accumulation": ({}, FP32_LOCAL),
    "dp_recomputed": ({}, RECOMPUTED),
    "dp_experts": ({"experts": True}, {}),
    "dp_two_instances": ({"instances": 2}, {}),
    "tp": ({"tp": 2}, {}),
    "pp": ({"pp": 2, "layers": 8}, {}),
    "pp_tied_embeddings": ({"pp": 2, "layers": 8}, TIED),
    "pp_recomputed": ({"pp": 2, "layers": 8}, RECOMPUTED),
}


@pytest.mark.parametrize("gradients", ["lazy", True])
@pytest.mark.parametrize("kind", RANKS)
def test_two_ranks_train_as_resident_ones(tmp_path, kind, gradients):
    changes, configured = RANKS[kind]
    target = partial(rank_child.train_with_gradients, gradients=gradients, configured=configured)
    _, (_, offloaded) = run_both(tmp_path, BUCKETS | changes, steps=3, target=target)
    moved = [rank["gradients"] for rank in offloaded]
    if gradients == "lazy":
        assert not any(rank["out"] for rank in moved)
    elif "pp" in changes:
        # A later stage has one bucket of all, and one of embeddings that are tied to those of the first.
        assert moved[0]["out"] > 0 and (moved[1]["out"] > 0) is (configured is TIED)
    else:
        passes = 3 * (4 // (1 if "tp" in changes else 2) - 1)
        assert all(rank["out"] == passes * rank["moving"] > 0 for rank in moved)
