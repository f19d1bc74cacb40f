"""Masters that are copied in part, in Bridge's own step: who may change the weights meanwhile, and who may not."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from saving import save
from test_checkpoints import SMALL_SLABS, session_of, training

from bridge_fgo.memory.slab import SlabState
from bridge_fgo.offload.packing_policy import WATCHED_STEPS

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
    with training(False) as resident:
        for _ in range(3):
            resident.step()
        resident = resident.digests()
    with training(True) as run:
        for _ in range(3):
            run.step()
        weight = packed_weight(run)
        kept = weight.clone()
        weight[5] += 1
        assert_a_step_fails_and_updates_nothing(run)
        weight.copy_(kept)
        assert run.digests() == resident


def test_a_changed_weight_is_an_error_of_a_save_too(tmp_path):
    with training(True) as run:
        for _ in range(2):
            run.step()
        weight = packed_weight(run)
        kept = weight.clone()
        weight[0] += 1
        with pytest.raises(RuntimeError, match=CHANGED):
            save(run, tmp_path, "fully_reshardable")
        with pytest.raises(RuntimeError, match=CHANGED):
            session_of(run).close()
        weight.copy_(kept)


def test_masters_made_anew_from_changed_weights_are_those_of_a_resident_run():
    digests = []
    for offload in (False, True):
        with training(offload) as run:
            for _ in range(3):
                run.step()
            with torch.no_grad():
                for parameter in run.model[0].parameters():
                    parameter.mul_(0.5)
            run.optimizer.reload_model_params()
            run.step()
            digests.append(run.digests())
    assert digests[0] == digests[1]


def test_whole_masters_allow_any_change_of_the_weights():
    digests = []
    for offload in (False, True):
        with training(offload, dataclasses.replace(SMALL_SLABS, master_remainders=False)) as run:
            for _ in range(3):
                run.step()
            with torch.no_grad():
                next(iter(run.model[0].parameters())).mul_(0.5)
            run.step()
            digests.append(run.digests())
    assert digests[0] == digests[1]


def test_a_callback_that_writes_weights_between_steps_keeps_masters_whole_by_default_and_that_is_said_once(capsys):
    # Without offload the next update overwrites what it wrote.
    ends = []
    for offload in (False, True):
        with training(offload, dataclasses.replace(SMALL_SLABS, master_remainders=None)) as run:
            losses = []
            for _ in range(2 * WATCHED_STEPS):
                losses.append(run.step().loss)
                with torch.no_grad():
                    next(iter(run.model[0].parameters())).mul_(0.5)
            ends.append((losses, run.digests()))
    assert ends[0] == ends[1]
    said = [line for line in capsys.readouterr().out.splitlines() if "master_remainders" in line]
    assert len(said) == 1 and "masters go on being copied whole" in said[0]


def test_masters_are_packed_by_default_where_nothing_else_writes_weights(capsys):
    ends = []
    for offload in (False, True):
        with training(offload, dataclasses.replace(SMALL_SLABS, master_remainders=None), experts=True) as run:
            for _ in range(1 + WATCHED_STEPS):
                run.step()
            assert not offload or not any(slab.is_encoded for slab in session_of(run).engine.slabs)
            run.step()
            assert not offload or any(slab.is_encoded for slab in session_of(run).engine.slabs)
            run.step()
            ends.append(run.digests())
    assert ends[0] == ends[1]
    said = [line for line in capsys.readouterr().out.splitlines() if "master_remainders" in line]
    assert len(said) == 1 and "copied in part" in said[0]


def test_no_optimizer_of_a_chain_is_updated_where_a_later_ones_weights_have_changed():
    with training(True, experts=4) as run:
        for _ in range(2):
            run.step()
        engine = session_of(run).engine
        assert len(engine.sources) == 2
        parts = engine.parts_of(engine.sources[-1])
        slab = next(slab for part in parts for slab in part.slabs if slab.is_encoded)
        weight = slab.codec.shards[0].tensor()
        kept = weight.clone()
        weight[0] += 1
        assert_a_step_fails_and_updates_nothing(run)
        weight.copy_(kept)
        run.step()
