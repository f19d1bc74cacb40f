"""FP8 parameters in mcore's DDP buffers leave and return with their columnwise copies, which cross no link.

Stand-ins for Transformer Engine's tensors have their names and verbs; mcore lays them out and the rest is real.
"""

import pytest
import torch
from cpu_training import CpuTraining
from sleeping import options

import bridge_fgo

pytestmark = pytest.mark.usefixtures("cpu_standins", "poisoned")


class Quantized(torch.Tensor):
    """A tensor of bytes, with its transpose beside it; nobody computes with it."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.bfloat16, requires_grad=True)

    def __init__(self, data):
        self._data, self._transpose = data, data.T.contiguous()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return args[0]
        return torch.zeros(args[0].shape, dtype=torch.bfloat16)  # DDP expands it to find its gradient's node

    def get_usages(self):
        return {"rowwise": True, "columnwise": self._transpose is not None}

    def update_usage(self, rowwise_usage, columnwise_usage):
        assert rowwise_usage
        if not columnwise_usage:
            self._transpose = None
        elif self._transpose is None:
            self._transpose = self._data.T.contiguous()


class Float8Tensor(Quantized):
    pass


class Float8BlockwiseQTensor(Quantized):
    _is_2D_scaled = True


class RowBlocks(Float8BlockwiseQTensor):
    _is_2D_scaled = False


@pytest.fixture
def mcore_knows_them(monkeypatch):
    from megatron.core import fp8_utils

    def replace(tensor, new):
        new.copy_(tensor._data)
        tensor._data = new

    monkeypatch.setattr(fp8_utils, "HAVE_TE_FP8_TENSOR_CLASS", True)
    monkeypatch.setattr(fp8_utils, "FP8_TENSOR_CLASS", Quantized, raising=False)
    monkeypatch.setattr(fp8_utils, "_modify_underlying_storage_impl", replace, raising=False)


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
@pytest.mark.parametrize("by", ["Residency", "mcore's verbs"])
@pytest.mark.parametrize(
    ("kind", "has_copy"),
    [(Float8Tensor, True), (Float8Tensor, False), (Float8BlockwiseQTensor, True), (RowBlocks, True)],
)
def test_fp8_parameters_and_what_is_made_of_them_leave_and_return_and_what_was_not_there_is_not_made(
    kind, has_copy, by
):
    with CpuTraining(options()), bridge_fgo.install():
        ddp = in_ddp(kind)
        weight = ddp.module.weight
        assert type(weight) is kind and len(ddp.buffers) == 2
        weight.update_usage(True, has_copy)
        before = weight._data.clone(), has_copy and weight._transpose.clone()
        derived = kind is not RowBlocks
        if by == "Residency":
            res = bridge_fgo.Residency(ddp)
            moved = res.offload("params")
            assert moved.copied == moved.freed == sum(buffer.param_data.nbytes for buffer in ddp.buffers)
        else:
            for buffer in ddp.buffers:
                buffer.offload_to_cpu()
        assert weight._data.untyped_storage().nbytes() == 0
        assert (weight._transpose is None) == derived  # of others nobody could make it again
        if by == "Residency":
            res.reload()
        else:
            for buffer in ddp.buffers:
                buffer.reload_from_cpu()
        assert torch.equal(weight._data, before[0])
        assert torch.equal(weight._transpose, before[1]) if has_copy else weight._transpose is None
        own = {buffer.param_data.untyped_storage()._cdata for buffer in ddp.buffers}
        assert weight._data.untyped_storage()._cdata in own


@pytest.mark.usefixtures("mcore_knows_them")
def test_what_is_made_of_fp8_parameters_goes_and_returns_with_their_own_buffer_alone():
    with CpuTraining(options()):
        ddp = in_ddp(Float8Tensor)
        weight, res = ddp.module.weight, bridge_fgo.Residency(ddp)
        before = weight._transpose.clone()
        res.offload("params", where=lambda name, _: "norm" in name)
        assert torch.equal(weight._transpose, before)
        res.offload("params")
        assert weight._transpose is None
        res.reload("params", where=lambda name, _: "norm" in name)
        assert weight._transpose is None
        res.reload("params", where=lambda name, _: "weight" in name)
        assert torch.equal(weight._transpose, before) and not res.away & {"params"}
        res.close()
