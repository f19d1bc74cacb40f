"""Which copies of masters to the model may be divided, and which masters a weight is the rounding of."""

from types import SimpleNamespace

import pytest
import torch
from fake_optimizer import make_distributed_optimizer, with_model

from bridge_fgo.states.masters import MasterCopy


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("config", "reuse_grad_buf_for_mxfp8_param_ag"),
        ("ddp_config", "fp8_param_gather"),
        ("ddp_config", "fp4_param_gather"),
    ],
)
def test_masters_of_quantized_weights_are_copied_in_one_go_and_whole(where, name):
    optimizer = with_model(make_distributed_optimizer([10]))
    assert MasterCopy(optimizer).divides() and MasterCopy(optimizer).rounded_weights()
    setattr(optimizer, where, SimpleNamespace(**{name: True}))
    assert not MasterCopy(optimizer).divides()
    assert MasterCopy(optimizer).rounded_weights() == {}


@pytest.mark.parametrize("other", [lambda master: None, torch.Tensor.double], ids=["none", "fp64"])
def test_only_an_fp32_master_is_rounded_to_a_weight(other):
    optimizer = with_model(make_distributed_optimizer([10, 20]))
    masters = optimizer.shard_fp32_from_float16_groups[0]
    masters[0] = other(masters[0])  # none: of a precision-aware Adam
    assert set(MasterCopy(optimizer).rounded_weights()) == {id(masters[1])}


def test_a_weight_is_found_where_its_buffer_is_now():
    optimizer = with_model(make_distributed_optimizer([10, 20]))
    masters, bucket = optimizer.shard_fp32_from_float16_groups[0], optimizer.buffers[-1].buckets[0]
    shards = MasterCopy(optimizer).rounded_weights()
    first, second = (shards[id(master)] for master in masters)
    assert first.buffer is second.buffer, "one callable for each buffer"
    for _ in range(2):
        start = bucket.param_data.data_ptr()
        assert [shard.tensor().data_ptr() for shard in (first, second)] == [start, start + 20]
        assert torch.equal(second.tensor(), masters[1].bfloat16())
        bucket.param_data = bucket.param_data.clone()
