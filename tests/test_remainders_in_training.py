"""Masters that are copied in part, in Bridge's own step: who may change the weights meanwhile, and who may not."""

import dataclasses

import pytest
import torch
from both import PACKED, WHOLE, as_resident, both, session_of, steps, training

from bridge_fgo.engines.packed_masters import WATCHED_STEPS
from bridge_fgo.memory.slab import SlabState

pytestmark = pytest.mark.usefixtures("cpu_standins")

CHANGED = "weights of the model were changed while"


def packed_weight(run):
    """A weight of the model whose master is away, copied in part."""
    slabs = session_of(run).engine.slabs
    slab = next(slab for slab in slabs if slab.is_encoded and slab.state is SlabState.RELEASED)
    return slab.codec.shards[0].tensor()


def assert_a_step_fails_and_updates_nothing(run):
    before = [parameter.detach().clone() for parameter in run.model[0].parameters()]
    with pytest.raises(RuntimeError, match=CHANGED):
        run.step()
    assert all(torch.equal(a, b) for a, b in zip(before, run.model[0].parameters(), strict=True))


def test_a_changed_weight_ends_the_step_before_any_update_and_training_goes_on_when_it_is_put_back():
    with as_resident(3) as run:
        steps(run, 3)
        weight = packed_weight(run)
        kept = weight.clone()
        weight[5] += 1
        assert_a_step_fails_and_updates_nothing(run)
        weight.copy_(kept)


def halve(parameters):
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(0.5)


@pytest.mark.parametrize("made_anew", [True, False], ids=["masters made anew", "masters whole"])
def test_weights_that_change_give_what_they_give_a_resident_run_where(made_anew):
    def changed(run):
        seen = steps(run, 3)
        if made_anew:
            halve(run.model[0].parameters())
            run.optimizer.reload_model_params()
        else:
            halve([next(run.model[0].parameters())])
        return seen, steps(run)

    both(changed, PACKED if made_anew else dataclasses.replace(WHOLE, master_remainders=False))


def said_of_remainders(capsys):
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "master_remainders" in line]
    return said


def test_a_callback_that_writes_weights_between_steps_keeps_masters_whole_by_default_and_that_is_said_once(capsys):
    # Without offload the next update overwrites what it wrote.
    def written(run):
        seen = []
        for _ in range(2 * WATCHED_STEPS):
            seen += steps(run)
            halve([next(run.model[0].parameters())])
        return seen

    both(written, WHOLE)
    assert "masters go on being copied whole" in said_of_remainders(capsys)


def test_masters_are_packed_by_default_where_nothing_else_writes_weights(capsys):
    def trained(run):
        def is_packed():
            return any(slab.is_encoded for slab in session_of(run).engine.slabs)

        seen = steps(run, 1 + WATCHED_STEPS)
        assert not run.options.offload or not is_packed()
        seen += steps(run)
        assert not run.options.offload or is_packed()
        return seen, steps(run)

    both(trained, WHOLE, experts=True)
    assert "copied in part" in said_of_remainders(capsys)


def test_no_optimizer_of_a_chain_is_updated_where_a_later_ones_weights_have_changed():
    with training(True, experts=4) as run:
        steps(run, 2)
        engine = session_of(run).engine
        assert len(engine.sources) == 2
        parts = engine._offloaded[engine.sources[-1]].parts
        slab = next(slab for part in parts for slab in part.slabs if slab.is_encoded)
        weight = slab.codec.shards[0].tensor()
        kept = weight.clone()
        weight[0] += 1
        assert_a_step_fails_and_updates_nothing(run)
        weight.copy_(kept)
        run.step()
