"""What cannot leave in phases is refused by name, and nothing has moved or is hooked then."""

from __future__ import annotations

import pytest
import torch
from sleeping import options, residency

import bridge_fgo
from bridge_fgo.tools.arms.cpu_training import CpuTraining

pytestmark = pytest.mark.usefixtures("cpu_standins")


@pytest.fixture(scope="module")
def training(cpu_standins):
    with CpuTraining(options()) as training:
        training.step()
        yield training


def buffer_of(training):
    return training.model[0].buffers[0]


def leaf_of(training):
    return training.optimizer.chained_optimizers[0]


REFUSED = {
    "ddp.nccl_ub=True": lambda t: (buffer_of(t), "nccl_ub", True),
    "ddp.fp8_param_gather=True": lambda t: (buffer_of(t), "shared_buffer", torch.zeros(1)),
    "model.cuda_graph_impl='local'": lambda t: (t.model[0].config, "cuda_graph_impl", "local"),
    "optimizer.optimizer_cuda_graph=False": lambda t: (leaf_of(t).config, "optimizer_cuda_graph", True),
    "ddp.use_megatron_fsdp=False": lambda t: (leaf_of(t).ddp_config, "use_megatron_fsdp", True),
    "optimizer.optimizer_cpu_offload=False": lambda t: (
        leaf_of(t), "optimizer", type("HybridDeviceOptimizer", (), {})(),
    ),
    "set optimizer.optimizer='adam'": lambda t: (leaf_of(t).config, "optimizer", "muon"),
}  # fmt: skip


@pytest.mark.parametrize("named", REFUSED)
def test_what_cannot_leave_is_refused_by_name(training, monkeypatch, named):
    before = dict(vars(training.model[0])), dict(vars(training.optimizer))
    with monkeypatch.context() as patch:
        owner, name, value = REFUSED[named](training)
        patch.setattr(owner, name, value, raising=False)
        with pytest.raises(ValueError, match=named.replace(".", r"\.")):
            residency(training)
    assert (dict(vars(training.model[0])), dict(vars(training.optimizer))) == before
    assert all(t.untyped_storage().nbytes() for t in training.model[0].parameters())


def test_an_optimizer_that_is_not_distributed_is_refused_and_parameters_move_without_it(training):
    from megatron.core.optimizer.optimizer import FP32Optimizer

    fp32 = object.__new__(FP32Optimizer)
    with pytest.raises(ValueError, match=r"use_distributed_optimizer=True, or pass optimizer=None"):
        bridge_fgo.Residency(training.model, fp32)
    res = bridge_fgo.Residency(training.model)
    res.offload()
    assert res.away == {"params", "grads"}
    res.close()


def test_memory_that_somebody_shares_is_refused_before_anything_moves(training):
    res = residency(training)
    shared = buffer_of(training).grad_data.numpy()
    try:
        with pytest.raises(RuntimeError, match="gradient buffer cannot be emptied"):
            res.offload()
        assert res.away == set() and shared.size
    finally:
        res.close()


def test_a_frozen_parameter_with_tensors_inside_is_refused():
    class Quantized(torch.nn.Parameter):
        pass

    model = torch.nn.Linear(3, 2)
    model.weight = Quantized(model.weight.data)
    with pytest.raises(ValueError, match=r"parameter 'weight' outside of DDP's buffers is a"):
        bridge_fgo.Residency(model)
