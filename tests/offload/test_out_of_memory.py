"""Copies back for which there is no GPU memory: what could wait does, and what the update needs is asked for twice."""

from unittest import mock

import pytest
import torch
from fake_training import WHOLE, seen_at_changes, trained

from bridge_fgo.memory.slab import Slab, SlabState


@pytest.fixture
def training():
    """Three steps old: states come early."""
    return trained(layer=WHOLE // 4)


@pytest.fixture
def run_out(monkeypatch):
    """A function that has slabs get no memory as long as something says so, and returns a list of the attempts."""
    allocate = Slab.allocate

    def begin(when):
        asked = []

        def refused(slab):
            asked.append(slab)
            if when(slab):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            allocate(slab)

        monkeypatch.setattr(Slab, "allocate", refused)
        return asked

    return begin


def ahead_of_time(training):
    """Return a function that says whether states come that may come later."""
    ahead, tried = training.schedule.queue.ahead_of_time, []

    def noted(bring):
        tried.append(True)
        ahead(bring)
        tried.pop()

    training.schedule.queue.ahead_of_time = noted
    return lambda slab: bool(tried)


def test_a_step_whose_early_fetch_finds_no_memory_goes_on_without_and_the_next_tries_again(run_out, training):
    asked = run_out(lambda slab: not training.schedule.recorder.in_step)
    training.run_pass()
    assert len(asked) == 1, "nothing more was asked for ahead of its time"
    assert training.held[-1] == 0, "what could be given back was"
    training.finish()
    assert training.engine.failed_fetches == 1
    (said,) = training.said
    assert "ahead of its time" in said and "gpu_memory_budget_gib" in said and "Tried to allocate" in said
    training.step()
    assert training.engine.failed_fetches == 2 and len(training.said) == 1
    run_out(lambda slab: False)
    training.step()
    assert training.held[-1] > 0 and training.engine.failed_fetches == 2


def test_another_error_than_a_lack_of_memory_comes_out_ahead_of_time_too(monkeypatch, training):
    refused = mock.Mock(side_effect=RuntimeError("refused"))
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="refused"):
        patch.setattr(training.schedule.transfers, "copy_in", refused)
        training.run_pass()
    assert refused.call_count == 1 and not training.schedule.recorder.in_step


def test_what_stays_comes_back_in_the_step_where_there_was_no_memory_before(run_out):
    training = trained(2, layer=WHOLE // 2, budget=3 * WHOLE)
    assert training.staying
    run_out(ahead_of_time(training))
    training.step()
    assert training.engine.failed_fetches == 1
    staying = [slab for part in training.parts() for slab in part.slabs if part.stays]
    assert {slab.state for slab in staying} == {SlabState.RESIDENT}


def test_what_stays_and_found_no_memory_early_takes_the_place_of_what_leaves(run_out, monkeypatch):
    budget = 2 * WHOLE
    training = trained(layer=WHOLE // 4, budget=budget, optimizers=2)
    assert 0 < training.staying < training.whole
    run_out(ahead_of_time(training))
    training.schedule.kind = 2  # of another kind: all leaves, and has to come back
    peaks = seen_at_changes(monkeypatch, training.meter.end_interval)
    training.run_pass()
    held = seen_at_changes(monkeypatch, lambda: training.schedule.ledger.nbytes)
    training.finish()
    assert training.engine.failed_fetches
    assert max(peaks) <= budget + max(part.transit_bytes for part in training.parts())
    assert max(held) <= training.schedule.step_limit


@pytest.mark.parametrize("failures", [1, 2])
def test_what_the_update_needs_is_asked_for_once_more_when_the_rest_was_given_back(run_out, training, failures):
    queue, left, given_back = training.schedule.queue, [failures], []
    give_back = queue.give_back
    queue.give_back = lambda: (given_back.append(training.schedule.ledger.nbytes), give_back())
    reload = training.engine.reload
    # So that the step has to ask for all.
    training.engine.reload = lambda: (setattr(queue, "is_short", True), reload())
    training.run_pass()

    def when(slab):
        left[0] -= 1
        return left[0] >= 0

    asked = run_out(when)
    if failures == 2:
        with pytest.raises(torch.OutOfMemoryError):
            training.update()
        assert asked[0] is asked[1] and len(asked) == 2
        training.made.clear()  # the twins are not a step ahead
    else:
        training.finish()
    assert len(given_back) == 1
