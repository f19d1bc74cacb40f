"""The plan's bounds of Megatron-FSDP's temporary buckets against mcore's allocators during training."""

import functools

import children
import pytest
import rank_child
import torch

from bridge_fgo.tools.demo import missing_packages

pytestmark = [
    pytest.mark.skipif(bool(missing_packages()), reason="compares with Megatron"),
    pytest.mark.usefixtures("cpu_standins"),
    pytest.mark.slow,
]

WHOLE = {"fsdp": "optim_grads_params"}
DENSE_THEN_EXPERTS = {"moe_layer_freq": [0, 0, 1, 1, 1, 1]}
FP32 = {"megatron_fsdp_grad_comm_dtype": torch.float32}
DOUBLED = {"fsdp_double_buffer": True}
SMALL_BUCKETS = {"bucket_size": 100_000}
PERSISTENT = {"fsdp_db_use_persist_buf_on_alloc_fail": True}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def unit(elements):
    """Return the setting by which fewer elements than a model's are gathered ahead, or wait; a layer has 200,000."""
    return {"suggested_communication_unit_size": elements}


@pytest.mark.parametrize(
    ("ranks", "changes", "ddp", "model"),
    [
        pytest.param(*case[1:], id=case[0])
        for case in [
            ("one rank", 1, WHOLE, {}, {}),
            ("no_shard", 2, {"fsdp": "no_shard"}, {}, {}),
            ("all wait", 2, WHOLE, {}, {}),
            ("none waits", 2, WHOLE | {"swiglu": True}, unit(1), {}),
            ("experts wait", 2, WHOLE | {"experts": True}, unit(200_000), DENSE_THEN_EXPERTS),
            ("frozen, recomputed", 2, WHOLE | {"frozen": True}, unit(400_000), RECOMPUTED),
            ("buckets", 2, {"fsdp": "optim_grads"}, SMALL_BUCKETS | unit(400_000), {}),
            ("double buffers of some", 2, WHOLE | {"experts": True}, DOUBLED, DENSE_THEN_EXPERTS),
            ("others persistent", 2, WHOLE | {"experts": True}, DOUBLED | PERSISTENT, DENSE_THEN_EXPERTS),
            ("gradients in fp32", 2, WHOLE | {"instances": 2, "microbatches": 4}, FP32 | unit(400_000), {}),
        ]
    ],
)
def test_no_training_has_more_bytes_of_buckets_than_the_bound(tmp_path, ranks, changes, ddp, model):
    from fsdp_buckets import train_and_measure

    job = rank_child.Job(tmp_path / "ranks", ranks, False, None, 2, {"layers": 6, **changes})
    for seen in children.run_ranks(functools.partial(train_and_measure, ddp=ddp, model=model), job):
        planned, found = seen["planned"], seen["found"]
        assert found["most"] <= planned["most"] <= 3 * found["most"]
        assert all(kept <= planned["kept"] for kept in found["kept"])
