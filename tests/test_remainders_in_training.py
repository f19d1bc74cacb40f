"""Packed masters train bitwise; changed weights are an error."""

import pytest
import torch
from both import PACKED, WHOLE, as_resident, exact, session_of, steps, training

import bridge_fgo
from bridge_fgo.memory.slab import SlabState

pytestmark = pytest.mark.usefixtures("cpu_standins")


def packed_weight(run):
    """Return the weights of a master that is away and packed."""
    engine = session_of(run).engine
    slabs = [slab for part in engine._offloaded[engine.sources[-1]].parts for slab in part.slabs]
    slab = next(slab for slab in slabs if slab.is_encoded and slab.state is SlabState.RELEASED)
    return slab.codec.shards[0].tensor()


def masters_and_moments(run):
    inner = [leaf.optimizer for leaf in run.optimizer.chained_optimizers]
    masters = [(each.state, param) for each in inner for group in each.param_groups for param in group["params"]]
    moments = [state[param][name] for name in ("exp_avg", "exp_avg_sq") for state, param in masters]
    return [param for _, param in masters] + moments


def test_a_changed_weight_ends_the_step_before_any_update_and_training_goes_on_once_it_is_put_back():
    with as_resident(3, experts=True) as run:
        steps(run, 3)
        engine, weight = session_of(run).engine, packed_weight(run)
        kept = weight.clone()
        weight[5] += 1
        before = [parameter.detach().clone() for parameter in run.model[0].parameters()]
        with pytest.raises(RuntimeError, match="weights of the model were changed while"):
            run.step()
        assert len(engine.sources) == 2
        assert all(torch.equal(a, b) for a, b in zip(before, run.model[0].parameters(), strict=True))
        weight.copy_(kept)


def test_an_uninstall_gives_up_masters_whose_weights_were_changed_alone_and_the_next_training_works(capsys):
    with training(False) as resident:
        steps(resident, 3)
        expected = [exact(each) for each in masters_and_moments(resident)]
    with training(True) as run:
        steps(run, 3)
        packed_weight(run)[5] += 1
        with pytest.raises(RuntimeError, match="weights of the model were changed while"):
            bridge_fgo.reload_states()
        capsys.readouterr()
        bridge_fgo.uninstall()
        (said,) = [line for line in capsys.readouterr().out.splitlines() if "given up" in line]
        assert "of master weights were given up by bridge_fgo.uninstall()" in said and "resume from the last" in said
        lost = []
        for i, (state, as_resident_has_it) in enumerate(zip(masters_and_moments(run), expected, strict=True)):
            try:
                assert exact(state) == as_resident_has_it
            except RuntimeError as error:
                assert str(error) in said
                lost.append(i)
        assert 0 < len(lost) < len(expected) // 3 and max(lost) < len(expected) // 3, "some of the masters"
        with bridge_fgo.install(PACKED), pytest.raises(RuntimeError, match="master weights were given up"):
            run.step()
    with as_resident(3, WHOLE) as following:  # while the optimizer that was given up is there
        steps(following, 2)
        bridge_fgo.reload_states()
        steps(following)
    assert run.optimizer is not following.optimizer
