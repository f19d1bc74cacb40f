"""Weights are read from the host while everything is asleep: bit for bit those that would wake, and nothing moves."""

import pytest
from sleeping import WHOLE

import bridge_fgo
from bridge_fgo.sleep.weights import PLAIN

pytestmark = pytest.mark.usefixtures("cpu_standins", "poisoned")


def test_weights_that_were_rounded_on_the_host_are_not_taken_for_those_that_it_had_before(sleeper):
    me = sleeper(early=True)
    first = float(me.weight.view(-1)[3])
    for value in (2.0, first, 2.0):  # masters round to the weights as they are, once
        me.write(value)
        me.offload()
        me.read_asleep()
        me.reload()


@pytest.mark.parametrize("flag", [False, True], ids=["training_step", "the flag"])
def test_weights_can_be_read_between_steps_that_leave_states_on_the_host(sleeper, flag):
    from test_training_step import step

    with bridge_fgo.install(WHOLE):
        me = sleeper(0, flag=WHOLE if flag else None)
        for _ in range(3):
            me.train() if flag else step(me.training, context=me.res.training_step)
            me.own = me.weights()
            me.offload("params")
            me.read_asleep()
            me.reload("params")
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
