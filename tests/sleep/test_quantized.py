"""FP8 parameters sleep, and their columnwise copies are made again.

Stand-ins for Transformer Engine's tensors have their names and verbs; mcore lays them out and the rest is real.
"""

import pytest
import torch
from cpu_training import CpuTraining
from quantized_weights import Float8BlockwiseQTensor, Float8Tensor, have_mcore_know_them
from sleeping import options

import bridge_fgo

pytestmark = pytest.mark.usefixtures("cpu_standins", "poisoned")


class RowBlocks(Float8BlockwiseQTensor):
    _is_2D_scaled = False


@pytest.fixture
def mcore_knows_them(monkeypatch):
    have_mcore_know_them(monkeypatch)


def in_ddp(kind):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    model = torch.nn.Module()
    data = torch.arange(48, dtype=torch.uint8)
    model.register_parameter("weight", torch.nn.Parameter(kind(data.view(6, 8))))
    model.register_parameter("norm", torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16)))
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, bf16=True)
    return DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)


@pytest.mark.usefixtures("mcore_knows_them")
@pytest.mark.parametrize(
    ("kind", "has_copy"),
    [(Float8Tensor, True), (Float8Tensor, False), (Float8BlockwiseQTensor, True), (RowBlocks, True)],
)
def test_fp8_parameters_leave_and_return_with_what_was_made_of_them(kind, has_copy):
    with CpuTraining(options()), bridge_fgo.install():
        ddp = in_ddp(kind)
        weight = ddp.module.weight
        assert type(weight) is kind and len(ddp.buffers) == 2
        weight.update_usage(True, has_copy)
        before = weight._rowwise_data.clone(), has_copy and weight._columnwise_data.clone()
        derived = kind is not RowBlocks
        res = bridge_fgo.Residency(ddp)
        moved = res.offload("params")
        assert moved.copied == moved.freed == sum(buffer.param_data.nbytes for buffer in ddp.buffers)
        assert weight._rowwise_data.untyped_storage().nbytes() == 0
        assert (weight._columnwise_data is None) == derived  # of others nobody could make it again
        res.reload()
        assert torch.equal(weight._rowwise_data, before[0])
        assert torch.equal(weight._columnwise_data, before[1]) if has_copy else weight._columnwise_data is None
        own = {buffer.param_data.untyped_storage()._cdata for buffer in ddp.buffers}
        assert weight._rowwise_data.untyped_storage()._cdata in own


@pytest.mark.usefixtures("mcore_knows_them")
def test_what_is_made_of_fp8_parameters_goes_and_returns_with_their_own_buffer_alone():
    with CpuTraining(options()):
        ddp = in_ddp(Float8Tensor)
        weight, res = ddp.module.weight, bridge_fgo.Residency(ddp)
        weight.update_usage(True, True)
        before = weight._columnwise_data.clone()
        res.offload("params", where=lambda name, _: "norm" in name)
        assert torch.equal(weight._columnwise_data, before)
        res.offload("params")
        assert weight._columnwise_data is None
        res.reload("params", where=lambda name, _: "norm" in name)
        assert weight._columnwise_data is None
        res.reload("params", where=lambda name, _: "weight" in name)
        assert torch.equal(weight._columnwise_data, before) and not res.away & {"params"}
        res.close()
