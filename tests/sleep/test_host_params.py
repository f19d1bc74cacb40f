"""Weights are read from the host while everything is asleep: bit for bit those that would wake, and nothing moves."""

import pytest
import torch
from both import PACKED, exact
from sleeping import KINDS, WHOLE

import bridge_fgo
from bridge_fgo.sleep.weights import PLAIN

pytestmark = pytest.mark.usefixtures("cpu_standins", "poisoned")

MODELS = {
    "dense": {},
    "experts": {"experts": True},
    "chunks": {"chunks": 2},
    "frozen": {"frozen": True},
    "native_fp32_parameters": {"precision": "fp32_params"},
    "muon": {"distributed": False, "optimizer": "muon"},
}


def on_gpu(res):
    """Return all weights by their parameters' `id`, as `exact`."""
    return exact({id(param): param.detach() for chunk in res._chunks for param in chunk.parameters()})


def on_host(res):
    """Return the same from the host, where this rank has all of each."""
    found = {}
    for name, param, first, values in res.host_params():
        assert first == 0 and values.numel() == param.numel() and param in dict_of(res, name)
        found[id(param)] = values.view(param.shape)
    return exact(found)


def dict_of(res, name):
    return {dict(chunk.named_parameters()).get(name) for chunk in res._chunks}


@pytest.mark.parametrize("config", [None, PACKED], ids=["whole masters", "packed masters"])
@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_the_host_has_the_weights_that_would_wake_and_reading_them_moves_nothing(sleeper, changes, config):
    me = sleeper(config=config, early=True, **changes)
    for kinds in ("all", "params", ["params", "grads"]):
        expected = on_gpu(me.res)
        me.res.offload(kinds)
        away, held = me.res.away, me.training.live_state_bytes()
        assert on_host(me.res) == expected == on_host(me.res)
        assert me.res.away == away and me.training.live_state_bytes() == held
        me.res.reload("params")
        assert on_gpu(me.res) == expected
        me.res.offload()
        assert on_host(me.res) == expected and me.gone() == set(KINDS)
        me.res.reload()
        me.train()
    me.assert_as_resident()


def test_weights_that_were_rounded_on_the_host_are_not_taken_for_those_that_it_had_before(sleeper):
    me = sleeper(early=True)
    weights = me.weight.detach().clone()
    for factor in (2, 1, 2):  # masters round to the weights as they are, once
        with torch.no_grad():
            me.weight.copy_(factor * weights)
        expected = on_gpu(me.res)
        me.res.offload()
        assert on_host(me.res) == expected
        me.res.reload()
        assert on_gpu(me.res) == expected


@pytest.mark.parametrize("flag", [False, True], ids=["training_step", "the flag"])
def test_weights_can_be_read_between_steps_that_leave_states_on_the_host(sleeper, flag):
    from test_training_step import step

    with bridge_fgo.install(WHOLE):
        me = sleeper(0, offload=flag)
        for _ in range(3):
            me.train() if flag else step(me.training, context=me.res.training_step)
            expected = on_gpu(me.res)
            me.res.offload("params")
            assert on_host(me.res) == expected
            me.res.reload("params")
        me.res.close()


def test_what_cannot_be_read_on_the_host_is_refused_by_name(sleeper, monkeypatch):
    me = sleeper(early=True)
    with pytest.raises(RuntimeError, match=r"on the GPU: read them there, or offload\('params'\)"):
        me.res.host_params()
    me.res.offload()
    monkeypatch.setattr("bridge_fgo.sleep.weights.PLAIN", PLAIN[:1])
    with pytest.raises(ValueError, match=r"'module.module.*': only weights in 16 or 32 bits"):
        me.res.host_params()
    monkeypatch.undo()
    me.res.close()
    with pytest.raises(RuntimeError, match=r"after close\(\)"):
        me.res.host_params()
