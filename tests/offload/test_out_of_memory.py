"""Copies back for which there is no GPU memory: what could wait does, and what the update needs is asked for twice."""

import pytest
import torch
from fake_training import POINTS, WHOLE, Training, mark, use_small_parts

from bridge_fgo.memory.slab import Slab, SlabState


@pytest.fixture
def training(monkeypatch):
    """Three steps old: states come early."""
    use_small_parts(monkeypatch)
    training = Training(layer=WHOLE // 4)
    for seed in range(3):
        training.step(seed)
    training.said = []
    training.schedule.holding.warn = training.said.append
    return training


def run_out(monkeypatch, when):
    """Have slabs get no memory as long as `when` says so; return a list of the attempts."""
    allocate, asked = Slab.allocate, []

    def refused(slab):
        asked.append(slab)
        if when(slab):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        allocate(slab)

    monkeypatch.setattr(Slab, "allocate", refused)
    return asked


def test_a_step_whose_early_fetch_finds_no_memory_goes_on_without(monkeypatch, training):
    schedule = training.schedule
    with monkeypatch.context() as patch:
        asked = run_out(patch, lambda slab: not schedule.recorder.in_step)
        training.run_pass()
        assert len(asked) == 1, "nothing more was asked for ahead of its time"
        assert training.held[-1] == 0, "what could be given back was"
    training.update(3)
    training.end_step(True)
    assert training.engine.failed_fetches == 1
    (said,) = training.said
    assert "ahead of its time" in said and "gpu_memory_budget_gib" in said and "Tried to allocate" in said
    training.check()


def test_the_next_pass_tries_again_and_says_no_more(monkeypatch, training):
    schedule = training.schedule
    with monkeypatch.context() as patch:
        run_out(patch, lambda slab: not schedule.recorder.in_step)
        for seed in (3, 4):
            training.step(seed)
    assert training.engine.failed_fetches == 2 and len(training.said) == 1
    training.step(5)
    assert training.held[-1] > 0 and training.engine.failed_fetches == 2
    training.check()


def test_what_comes_at_the_end_of_the_pass_and_in_the_step_may_come_later(monkeypatch, training):
    ahead, tried = training.schedule.queue.ahead_of_time, []

    def only_now(bring):
        tried.append(True)
        ahead(bring)
        tried.pop()

    monkeypatch.setattr(training.schedule.queue, "ahead_of_time", only_now)
    with monkeypatch.context() as patch:
        run_out(patch, lambda slab: bool(tried))
        training.step(3)
    assert training.engine.failed_fetches == 1
    training.check()


@pytest.mark.parametrize("failures", [1, 2])
def test_what_the_update_needs_is_asked_for_once_more_when_the_rest_was_given_back(monkeypatch, training, failures):
    schedule, left = training.schedule, [failures]
    given_back = []
    give_back = schedule.queue.give_back
    monkeypatch.setattr(schedule.queue, "give_back", lambda: (given_back.append(schedule.ledger.nbytes), give_back()))
    training.engine.begin_pass()
    training.engine.release()
    for i in range(1, POINTS + 1):
        training.engine.point(mark(i, WHOLE // 4))
    schedule.queue.is_short = True  # so that the step has to ask for all
    training.engine.reload()

    def when(slab):
        left[0] -= 1
        return left[0] >= 0

    with monkeypatch.context() as patch:
        asked = run_out(patch, when)
        if failures == 2:
            with pytest.raises(torch.OutOfMemoryError):
                training.update(3)
            assert asked[0] is asked[1] and len(asked) == 2
        else:
            training.update(3)
            training.end_step(True)
            training.check()
    assert len(given_back) == 1


def test_what_stays_comes_back_in_the_step_where_there_was_no_memory_before(monkeypatch):
    use_small_parts(monkeypatch)
    training = Training(WHOLE // 2, budget=3 * WHOLE)
    for seed in range(2):
        training.step(seed)
    assert any(part.stays for part in training.schedule.parts)
    ahead, tried = training.schedule.queue.ahead_of_time, []
    monkeypatch.setattr(
        training.schedule.queue, "ahead_of_time", lambda bring: (tried.append(1), ahead(bring), tried.clear())
    )
    with monkeypatch.context() as patch:
        run_out(patch, lambda slab: bool(tried))
        training.step(3)
    assert training.engine.failed_fetches == 1
    staying = [slab for part in training.schedule.parts for slab in part.slabs if part.stays]
    assert {slab.state for slab in staying} == {SlabState.RESIDENT}
    training.check()
