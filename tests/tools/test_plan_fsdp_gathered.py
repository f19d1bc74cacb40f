"""The plan's bytes of Megatron-FSDP's temporary buckets are those in mcore's allocators during training."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import children
import pytest
import rank_child
import torch

from bridge_fgo.tools.demo import missing_packages
from bridge_fgo.tools.job.parallel import Parallel
from bridge_fgo.tools.job.tensors import Tensor
from bridge_fgo.tools.plan.fsdp_gathered import gathered_of
from bridge_fgo.tools.plan.fsdp_layout import groups_of

pytestmark = [
    pytest.mark.skipif(bool(missing_packages()), reason="compares with Megatron"),
    pytest.mark.usefixtures("cpu_standins"),
]

WHOLE = {"fsdp": "optim_grads_params"}
DENSE_THEN_EXPERTS = {"moe_layer_freq": [0, 0, 1, 1, 1, 1]}
FP32 = {"megatron_fsdp_grad_comm_dtype": torch.float32}
DOUBLED = {"fsdp_double_buffer": True}
SMALL_BUCKETS = {"bucket_size": 100_000}
SEVERAL = {"overlap_grad_reduce": True, "microbatches": 4}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def unit(elements):
    """Return the setting by which fewer elements than a model's are gathered ahead, or wait; a layer has 200,000."""
    return {"suggested_communication_unit_size": elements}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "changes", "ddp", "model", "ratio"),
    [
        pytest.param(*case[1:], id=case[0])
        for case in [
            ("one rank", 1, WHOLE, {}, {}, 1),
            ("no_shard", 2, {"fsdp": "no_shard"}, {}, {}, 1),
            ("optim", 2, {"fsdp": "optim", "experts": True}, {}, {}, 1),
            ("layers wait", 2, WHOLE, unit(400_000), {}, 1),
            ("all wait", 2, WHOLE, {}, {}, 1),
            ("none waits", 2, WHOLE | {"swiglu": True}, unit(1), {}, 1),
            ("experts wait", 2, WHOLE | {"experts": True}, unit(200_000), {}, 1),
            ("dense layers, then experts", 2, WHOLE | {"experts": True}, unit(200_000), DENSE_THEN_EXPERTS, 1),
            ("frozen", 2, WHOLE | {"frozen": True}, unit(400_000), {}, 1),
            ("recomputed", 2, WHOLE, unit(400_000), RECOMPUTED, 1),
            # Which bucket ends first within a layer the plan does not know.
            ("buckets", 2, {"fsdp": "optim_grads"}, SMALL_BUCKETS | unit(400_000), {}, 1.2),
            ("buckets of experts", 2, {"fsdp": "optim_grads", "experts": True}, SMALL_BUCKETS, {}, 1),
            ("double buffers", 2, WHOLE | {"microbatches": 4}, DOUBLED, {}, 1),
            ("double buffers of some", 2, WHOLE | {"experts": True}, DOUBLED, DENSE_THEN_EXPERTS, 1),
            (
                "double buffers, the others persistent",
                2,
                WHOLE | {"experts": True},
                DOUBLED | {"fsdp_db_use_persist_buf_on_alloc_fail": True},
                DENSE_THEN_EXPERTS,
                1,
            ),
            (
                "largest double buffers",
                2,
                WHOLE | {"experts": True},
                DOUBLED | {"megatron_fsdp_max_pool_double_buffer": True},
                DENSE_THEN_EXPERTS,
                1,
            ),
            ("gradients in fp32", 2, WHOLE, FP32 | unit(400_000), {}, 1),
            ("of one rank in fp32", 1, WHOLE, FP32, {}, 1),
            ("no_shard in fp32", 2, SEVERAL | {"fsdp": "no_shard"}, FP32 | SMALL_BUCKETS | unit(400_000), {}, 1),
            ("optim in fp32, at the end", 2, {"fsdp": "optim"}, FP32, {}, 1),
            ("instances in fp32", 2, WHOLE | {"instances": 2, "microbatches": 4}, FP32, {}, 1),
            (
                "states between instances",
                2,
                WHOLE | {"instances": 2, "outer_sharding": "optim", "microbatches": 4},
                FP32,
                {},
                1,
            ),
        ]
    ],
)
def test_the_plan_has_the_most_bytes_of_buckets_of_a_training(tmp_path, ranks, changes, ddp, model, ratio):
    from fsdp_buckets import train_and_measure

    is_whole = ddp.keys().isdisjoint(FP32) and (ranks == 1 or "grads" not in changes["fsdp"])
    is_any = not (is_whole or changes == {"fsdp": "optim"})
    job = rank_child.Job(tmp_path / "ranks", ranks, False, None, 2, {"layers": 6, **changes})
    for seen in children.run_ranks(functools.partial(train_and_measure, ddp=ddp, model=model), job):
        planned, found = seen["planned"], seen["found"]
        assert found["most"] <= planned["most"] <= found["most"] * ratio
        assert [planned["kept"]] * job.steps == found["kept"]
        assert (found["most"] > 0) == is_any


LAYERS = [Tensor(f"decoder.layers.{n}.weight", 10_000, row=100, unit=n) for n in range(10)]
WITHIN = [Tensor(layer.name, layer.numel, row=100) for layer in LAYERS]
EMBEDDING = Tensor("embedding.weight", 50_000, row=100)
OF_EMBEDDING, OF_LAYER = 2 * 50_400, 2 * 10_400
"""Bytes of their buckets on 8 ranks, in whole rows."""


def gathered(strategy, tensors, gpus=8, **settings):
    config = SimpleNamespace(data_parallel_sharding_strategy=strategy, overlap_grad_reduce=False, **settings)
    parallel = Parallel(gpus, 1, 1, 1, 1, 1)
    found = gathered_of(groups_of(tensors, True, config, parallel), config, parallel)
    return found.most, found.kept


def test_an_embedding_stays_gathered_and_its_gradient_comes_when_those_of_layers_still_wait():
    tensors = [EMBEDDING, *LAYERS]
    assert gathered("optim_grads_params", tensors) == (2 * OF_EMBEDDING + 10 * OF_LAYER, OF_EMBEDDING)
    few = unit(20_000)
    assert gathered("optim_grads_params", tensors, **few) == (2 * OF_EMBEDDING + 2 * OF_LAYER, OF_EMBEDDING)
    assert gathered("optim_grads", [EMBEDDING, *WITHIN], bucket_size=10_000, **few) == (OF_EMBEDDING + 2 * OF_LAYER, 0)


def test_the_setting_says_how_much_is_gathered_ahead_and_how_much_waits():
    assert gathered("optim_grads_params", LAYERS, **unit(20_000)) == (5 * OF_LAYER, 0)
    assert gathered("optim_grads_params", LAYERS, **unit(2)) == (4 * OF_LAYER, 0)
    assert gathered("optim_grads_params", LAYERS, **unit(1)) == (3 * OF_LAYER, 0)  # nothing is gathered ahead


def test_double_buffers_are_there_in_the_optimizer_step_too():
    found = gathered("optim_grads_params", [EMBEDDING, *LAYERS], **DOUBLED)
    assert found == (2 * OF_EMBEDDING + 4 * OF_LAYER, OF_EMBEDDING + 4 * OF_LAYER)
    assert gathered("optim_grads_params", LAYERS[:1], **DOUBLED) == (2 * OF_LAYER, 2 * OF_LAYER)


def test_of_layers_larger_than_the_least_unit_one_is_gathered_ahead_and_two_may_wait():
    large = [Tensor(f"{n}", 10**9, row=10**6, unit=n) for n in range(8)]
    # Two at work in weights, and in gradients the one at work, and three that wait: one more than the two of the queue.
    assert gathered("optim_grads_params", large) == (2 * 10**9 * (2 + 4), 0)


def test_one_rank_and_whole_gradients_need_no_bucket():
    assert gathered("optim_grads_params", LAYERS, gpus=1) == (0, 0)
    assert gathered("optim", LAYERS) == (0, 0)
