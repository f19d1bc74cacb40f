"""What the schedule measures of a step, where the allocator's peak is over by the time that it is asked."""

import pytest
from fake_training import WHOLE, mark, trained

BESIDE = 7 * WHOLE


@pytest.fixture
def training():
    """One step old: the next is measured."""
    return trained(1, layer=WHOLE // 4)


def measured(training):
    (profile,) = training.schedule.holding._profiles
    return profile


def spike(training):
    training.meter.spike = training.schedule.ledger.nbytes + BESIDE


def test_a_peak_in_an_update_counts_however_little_the_next_one_needs(training):
    training.run_pass()
    inner = training.sources[0]._inner_step
    update, updates = inner.update, []

    def first_is_large(owner):
        update(owner)
        if owner is not None and not updates:
            updates.append(owner)
            spike(training)

    inner.update = first_is_large
    training.finish()
    assert measured(training).step == BESIDE


def test_a_peak_in_the_pass_counts_where_a_reader_has_slabs_come_after_it(training):
    training.begin()
    training.engine.point(mark(1, WHOLE // 4))
    spike(training)
    training.engine.require_readable()
    training.engine.point(mark(2, WHOLE // 4))
    assert training.schedule.recorder.profile.intervals[1] == BESIDE


def test_what_was_needed_between_steps_is_of_no_interval_nor_of_the_step_before(training):
    spike(training)  # an evaluation
    training.step()
    before = [*measured(training).intervals, measured(training).step]
    assert before[0] == 0
    spike(training)
    training.check()
    assert [*measured(training).intervals, measured(training).step] == before


def test_the_peak_of_a_pass_that_goes_by_a_plan_is_none_of_the_pass_before(training):
    training.steps(2)
    peaks = []
    for beside in (BESIDE, 0):
        training.begin()
        training.meter.spike = beside
        peaks.append(training.schedule.recorder.peak())
    assert training.schedule.is_planned and peaks[0] == BESIDE > peaks[1]


def test_the_change_of_a_slab_itself_does_not_count(training):
    # It takes in what it adopts, which is there twice for a moment, of the next step no more.
    change = training.schedule.ledger.change

    def spiky(difference, action, *args):
        def act(*args):
            result = action(*args)
            training.meter.spike = training.schedule.ledger.nbytes + max(0, difference) + BESIDE
            return result

        return change(difference, act, *args)

    training.schedule.ledger.change = spiky
    training.step()
    assert measured(training).step < BESIDE


def test_a_skipped_step_measures_no_update_and_a_pass_given_up_leaves_the_next_to_its_plan(training):
    training.step(skip=True)
    assert not training.schedule.holding.plans
    training.step()
    assert training.schedule.holding.plans
    training.steps(2)
    training.schedule.kind = 2
    training.run_pass(points=3)
    training.schedule.kind = 1
    training.step()
    assert training.held[0] > training.held[4] == 0 and training.schedule.is_planned
