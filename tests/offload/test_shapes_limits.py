"""Peaks above a plan, and passes that no plan is for: what is said, what leaves, and that it ends."""

import pytest
import torch
from fake_training import WHOLE, use_small_parts
from test_shapes import LONG, SHORT, Shapes, layers, passing

from bridge_fgo.memory.remainders import Remainders
from bridge_fgo.memory.slab import Slab


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    use_small_parts(monkeypatch)


def told(training):
    said = []
    training.schedule.holding.warn = said.append
    return said


def beside(microbatches, more):
    """As `passing`, with some bytes more beside the slabs throughout, of which no mark says anything."""
    return [(mark, before + more, after + more) for mark, before, after in passing(microbatches)]


def test_states_that_were_read_between_two_steps_are_not_held_against_the_plan(monkeypatch):
    training = Shapes(monkeypatch)
    said = told(training)
    for _ in range(4):
        training.train([SHORT])
    limit = training.schedule.holding.limit
    training.engine.require_readable()
    training.train([SHORT])
    assert training.schedule.is_planned and not training.schedule._fresh
    training.engine.require_readable()
    training.train([layers(WHOLE // 60)])  # lost at the first point, and so measured from there
    training.train([layers(WHOLE // 60)])
    assert not said
    assert training.schedule.holding.limit < limit + WHOLE // 10


@pytest.mark.parametrize("skip", [False, True])
def test_under_a_budget_what_stays_leaves_in_the_first_step_of_another_kind(monkeypatch, skip):
    budget = 2 * WHOLE
    training = Shapes(monkeypatch, budget=budget)
    for _ in range(4):
        training.train([SHORT])
    assert all(part.stays for part in training.schedule.parts)
    training.schedule.signature = 2
    if skip:
        training.run_pass(points=0)
        training.end_step(False)
    for _ in range(3):
        peak, _ = training.train([layers(WHOLE // 4)])
        assert WHOLE < peak <= budget
    training.check()


@pytest.mark.parametrize("budget", [None, 2 * WHOLE])
def test_where_more_is_beside_the_states_than_was_measured_steps_hold_less_and_that_is_said_once(monkeypatch, budget):
    training = Shapes(monkeypatch, budget=budget)
    said = told(training)
    for _ in range(4):
        training.train([LONG])
    for _ in range(4):
        training.train_by(beside([LONG], WHOLE // 2))
    assert len([text for text in said if "a training step allocated" in text]) == 1
    for _ in range(2):
        peak, reached = training.train_by(beside([LONG], WHOLE // 2))
        assert training.schedule.is_planned and not training.schedule._fresh
        assert peak <= max(reached, budget or 0) + training.part
    if budget is None:
        assert max(training.schedule.holding.plans[0].leave) > WHOLE // 4, "and not held back more for it in the end"
    training.check()


@pytest.mark.parametrize("budget", [None, 3 * WHOLE // 2])
def test_a_peak_that_nothing_can_lower_is_let_be_in_the_end(monkeypatch, budget):
    # As where something reads all states in each pass, when activations are at their peak.
    training = Shapes(monkeypatch, budget=budget)
    said = told(training)
    points = list(passing([LONG]))
    most = max(range(len(points)), key=lambda i: points[i][2])
    for _ in range(3):
        training.train_by(points)
    point, passed = training.engine.point, []

    def read_at_the_peak(mark):
        passed.append(mark)
        if len(passed) % len(points) == most:
            training.engine.require_readable()
        return point(mark)

    training.engine.point = read_at_the_peak
    for _ in range(24):
        training.train_by(points)
    assert not training.schedule._fresh, "and is planned for no more"
    assert len([text for text in said if "a training step allocated" in text]) <= 1
    training.check()


def test_the_weights_are_checked_once_where_a_plan_holds_no_more(monkeypatch):
    training = Shapes(monkeypatch)
    for _ in range(4):
        training.train([SHORT])
    sums, checks = Remainders.sums_now, []

    def counted(family, slabs):
        checks.append(len(slabs))
        return sums(family, slabs)

    monkeypatch.setattr(Remainders, "sums_now", counted)
    point, at_points = training.engine.point, []

    def watched(mark):
        before = len(checks)
        moved = point(mark)
        at_points.extend(checks[before:])
        return moved

    training.engine.point = watched
    training.train([SHORT, LONG])
    assert len(at_points) == 1 < at_points[0]
    training.check()


def test_what_stays_and_found_no_memory_early_takes_the_place_of_what_leaves(monkeypatch):
    budget = 2 * WHOLE
    training = Shapes(monkeypatch, budget=budget, optimizers=2)
    for _ in range(3):
        training.train([layers(WHOLE // 12)])
    assert 10 < sum(part.stays for part in training.schedule.parts) < len(training.schedule.parts)
    training.schedule.signature = 2
    ahead, allocate, tried = training.schedule.queue.ahead_of_time, Slab.allocate, []

    def noted(bring):
        tried.append(1)
        ahead(bring)
        tried.clear()

    def refused(slab):
        if tried:
            raise torch.OutOfMemoryError("CUDA out of memory")
        allocate(slab)

    monkeypatch.setattr(training.schedule.queue, "ahead_of_time", noted)
    monkeypatch.setattr(Slab, "allocate", refused)
    peak, _ = training.train([layers(WHOLE // 12)])  # of another kind: all leaves, and has to come back
    assert peak <= budget + training.part
    assert training.engine.failed_fetches
    training.check()
