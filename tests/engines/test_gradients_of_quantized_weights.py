"""Gradients of quantized weights are allocated late and offloaded, while the weights stay of their exact class."""

import copy
import dataclasses
import gc

import pytest
import torch
from both import PACKED, SMALL, bits, both, exact, session_of, steps, training
from fake_ddp import FakeDdp, layout_of, states, step, taken
from lanes import in_lanes
from quantized_weights import Float8BlockwiseQTensor, Float8Tensor, NVFP4Tensor, have_mcore_quantize

import bridge_fgo
from bridge_fgo.memory.gradient_bucket import BUCKET
from bridge_fgo.memory.transfers import Transfers
from harness.arms.final_state import final_state, joined_digests

OPTIONS = SMALL | {"overlap_grad_reduce": True, "bucket_size": 20_000, "layers": 3, "microbatches": 3}
LAZY = dataclasses.replace(PACKED, master_remainders=False, gradients="lazy")
OFF = dataclasses.replace(LAZY, gradients=True)
KINDS = {
    Float8Tensor: {},
    Float8BlockwiseQTensor: {"overlap_param_gather": True, "rerun_steps": frozenset({2})},
    NVFP4Tensor: {},
}


@pytest.fixture(params=in_lanes(KINDS, [Float8Tensor]))
def quantized(request, monkeypatch):
    """Have trainings keep the matrices of their layers quantized; return the class and other options."""
    have_mcore_quantize(request.param, monkeypatch)
    is_fp4 = request.param is NVFP4Tensor
    gathered = {f"ddp.{'fp4' if is_fp4 else 'fp8'}_param_gather": True}
    configured = gathered | {"optimizer.fp8_recipe": None if is_fp4 else "tensorwise"}
    return request.param, OPTIONS | KINDS[request.param] | {"configured": configured}


@pytest.mark.usefixtures("cpu_standins")
def test_training_is_bitwise_equal_to_resident(quantized):
    kind, options = quantized
    ends = []
    for config in (None, LAZY, OFF):
        with training(config is not None, config or PACKED, **options) as run:
            weights = [weight for weight in run.model[0].parameters() if isinstance(weight, kind)]
            before = exact(weights)
            returned = steps(run, 3)
            assert {type(weight) for weight in weights} == {kind} and exact(weights) != before and len(weights) == 12
            ends.append((returned, bits(run), joined_digests(final_state(run.model, run.optimizer))))
            assert ends[-1] == ends[0]
            if config is not None:
                moved = session_of(run).gradients.traffic
                assert (moved.out > 0) is (moved.back > 0) is (config is OFF)
                assert all(BUCKET in vars(weight) for weight in weights) and "main_grad" in vars(kind)
                for chunk in run.model:
                    chunk.zero_grad_buffer()
                assert {bucket.gpu for bucket in session_of(run).gradients.buckets} == {None}
                bridge_fgo.uninstall()
        assert "main_grad" not in vars(kind) and not any(BUCKET in vars(weight) for weight in weights)


@pytest.mark.usefixtures("cpu_standins")
@pytest.mark.parametrize("quantized", [Float8Tensor], indirect=True)
@pytest.mark.parametrize("config", [pytest.param(LAZY, marks=pytest.mark.slow), OFF], ids=["lazy", "off"])
def test_training_that_sleeps_is_bitwise_equal_to_resident(quantized, config):
    _, options = quantized

    def train(run):
        res = bridge_fgo.Residency(run.model, run.optimizer) if run.options.offload else None
        for _ in range(2):
            yield steps(run)
            if res is not None:
                res.offload("params")
                res.offload()
                assert all(bucket.gpu is None for bucket in session_of(run).gradients.buckets)
                res.reload()

    both(lambda run: list(train(run)), config, **options)


def ddp_of(kind):
    return FakeDdp((5,), make=lambda *shape: kind.of(torch.zeros(shape)))


def test_a_class_is_as_before_once_no_bucket_needs_its_property_or_they_are_gone_and_another_closes():
    first, second = ddp_of(Float8Tensor), ddp_of(Float8Tensor)
    before, plain = layout_of(first), dict(vars(Float8Tensor))
    gradients = [taken(ddp, Transfers()) for ddp in (first, second)]
    for ddp in (first, second):
        step(ddp, gradients[ddp is second])
        assert ddp.different() == [] and {type(param) for param in ddp.params} == {Float8Tensor}
    gradients[0].close()
    assert layout_of(first) == before and first.different() == []
    second.zero()
    step(second, gradients[1])
    assert second.different() == []
    gradients[1].close()
    assert vars(Float8Tensor) == plain

    plain = dict(vars(Float8Tensor)), dict(vars(NVFP4Tensor))
    taken(ddp_of(Float8Tensor), Transfers())
    gc.collect()
    taken(ddp_of(NVFP4Tensor), Transfers()).close()
    assert (vars(Float8Tensor), vars(NVFP4Tensor)) == plain


def test_tensors_of_the_class_without_a_bucket_are_as_before():
    gradients = taken(ddp_of(Float8Tensor), Transfers())
    other, main_grad = Float8Tensor.of(torch.ones(2, 4)), torch.ones(2, 4)
    assert not hasattr(other, "main_grad")
    for _ in range(2):
        other.main_grad = main_grad
        assert other.main_grad is main_grad and torch.equal(copy.deepcopy(other).main_grad, main_grad)
        del other.main_grad
        assert getattr(other, "main_grad", None) is None
        with pytest.raises(AttributeError, match="main_grad"):
            del other.main_grad
    gradients.close()


def test_a_weight_is_copied_with_the_gradient_that_it_has_and_without_its_bucket():
    ddp = ddp_of(Float8Tensor)
    gradients = taken(ddp, Transfers())
    copied = copy.deepcopy(ddp.params[3])
    assert states(gradients)[1] == "HERE" and torch.equal(copied.main_grad, torch.zeros(2, 4))
    assert type(copied) is Float8Tensor and vars(copied)[BUCKET] is None
    ddp.add(3, 1.0)
    assert not copied.main_grad.any() and not hasattr(ddp.params[3].detach(), "main_grad")
    with pytest.raises(RuntimeError, match="was replaced"):
        ddp.params[3].main_grad = copied.main_grad
    with pytest.raises(RuntimeError, match="was replaced"):
        del ddp.params[3].main_grad
    gradients.close()


@pytest.mark.parametrize("name", ["GroupedTensor", "MXFP8Tensor"])  # the latter share memory with gradients
def test_weights_of_an_unknown_class_and_of_one_that_shares_memory_with_gradients_are_refused(name):

    ddp = FakeDdp((5,))
    before = layout_of(ddp)
    ddp.params[4].__class__ = type(name, (torch.nn.Parameter,), {})
    with pytest.raises(ValueError, match=rf"weights of {name}: .*Float8Tensor.*set OffloadConfig.gradients=False"):
        taken(ddp, Transfers())
    ddp.params[4].__class__ = torch.nn.Parameter
    assert layout_of(ddp) == before
