"""mcore's own verbs of sleep are refused for this package's memory."""

import contextlib
from functools import partial

import both
import pytest
import torch
from sleeping import KINDS, WHOLE, buffers

import bridge_fgo

pytestmark = pytest.mark.usefixtures("cpu_standins", "poisoned")

OF_RESIDENCY = r"mcore's \w+\(\) on a model that has a Residency: call the Residency's offload\(\) and reload\(\)"
OF_FLAG = r"mcore's \w+\(\) with optimizer\.offload_optimizer_states=True.*bridge_fgo\.Residency"


def of_optimizer(training):
    return [training.optimizer.offload_to_cpu, training.optimizer.restore_from_cpu]


def of_gradients(training):
    return [
        partial(v, synchronize=False)
        for ddp in training.model
        for v in (ddp.offload_grad_buffers, ddp.restore_grad_buffers)
    ]


def of_buffers(training):
    return [verb for buffer in buffers(training) for verb in (buffer.offload_to_cpu, buffer.reload_from_cpu)]


@pytest.mark.parametrize("flag", [None, WHOLE])
@pytest.mark.parametrize("is_installed", [False, True])
def test_a_model_with_a_residency_refuses_them_awake_and_asleep_and_trains_on_bitwise(sleeper, is_installed, flag):
    with bridge_fgo.install(flag) if is_installed else contextlib.nullcontext():
        me = sleeper(flag=flag, experts=True)
        for away in ((), KINDS):
            me.offload(away)
            verbs = [*of_gradients(me.training), *of_buffers(me.training), *of_optimizer(me.training)]
            for verb in verbs:
                with me.as_before(), pytest.raises(RuntimeError, match=OF_RESIDENCY):
                    verb()
        me.end()


@pytest.mark.parametrize(
    "changes",
    [{}, {"adam": {"store_param_remainders": False}}, both.OPTIMIZERS["muon"]],
    ids=["adam", "precision-aware", "muon"],
)
def test_an_optimizer_with_the_flag_refuses_them_and_trains_on_bitwise(sleeper, changes):
    me = sleeper(2, flag=WHOLE, **changes)
    for verb in of_optimizer(me.training):
        with pytest.raises(RuntimeError, match=OF_FLAG):
            verb()
    me.train(2)
    me.assert_as_resident()


@pytest.mark.parametrize("flag", [WHOLE, both.PACKED], ids=["whole", "packed"])
def test_beside_the_flag_buffers_sleep_by_them_bitwise(sleeper, monkeypatch, flag):
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)  # what is on the CPU is no copy otherwise
    me = sleeper(2, flag=flag)
    for offload, reload in zip(of_buffers(me.training)[::2], of_buffers(me.training)[1::2], strict=True):
        offload()
        assert not me.weights_here()
        reload()
    me.train(2)
    me.assert_as_resident()


def test_a_residency_of_gradients_that_they_have_sent_away_is_refused(sleeper):
    me = sleeper()
    offload, restore = of_gradients(me.training)
    offload()
    with pytest.raises(ValueError, match="gradients whose memory is away: mcore's offload_to_cpu"):
        assert me.res
    restore()
    me.offload()
    me.end()
