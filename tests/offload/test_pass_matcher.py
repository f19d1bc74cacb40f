"""A pass is compared with the measured ones as it runs: where every state stays, by its forwards alone."""

import pytest
from fake_training import WHOLE, use_small_parts
from test_shapes import SHORT, Shapes, layers, plans, profile

from bridge_fgo.memory.slab import SlabState
from bridge_fgo.offload.profile import Mark, MemoryProfile, PassMatcher


@pytest.fixture
def training(monkeypatch):
    """Return a training under a budget that has room for everything, once it is planned."""
    use_small_parts(monkeypatch)
    training = Shapes(monkeypatch, budget=2 * WHOLE)
    for _ in range(4):
        training.train([SHORT, SHORT])
    assert all(part.stays for part in training.schedule.parts)
    return training


def measured(*forwards):
    """Return the profile of a pass with these forwards, (layer, bytes), each with its backward right behind it."""
    marks = [mark for layer, nbytes in forwards for mark in (Mark(layer, nbytes, nbytes), Mark(~layer, nbytes, 0))]
    return MemoryProfile([0] * (len(marks) + 1), 0, marks)


def watched(matcher, *forwards):
    """Pass these forwards; return the profile of the plan that holds then."""
    for forward in forwards:
        matcher.forward(*forward)
    return None if matcher.plan is None else matcher.plan.profile


def test_a_pass_of_the_same_layers_that_get_no_more_is_covered():
    one = measured((0, 5), (1, 3), (0, 4))
    assert watched(PassMatcher(plans(one)), (0, 5), (1, 2), (0, 4)) is one
    assert watched(PassMatcher(plans(one)), (0, 5)) is one


@pytest.mark.parametrize(
    "forwards",
    [
        [(0, 6)],
        [(0, 4), (1, 3), (0, 5)],  # no larger than the measured pass's first, but than its second
        [(0, 5), (0, 4)],
        [(0, 5), (1, 3), (0, 4), (1, 0)],
    ],
    ids=["larger", "larger_later", "another_layer", "one_more"],
)
def test_a_pass_that_may_need_more_is_not_covered_nor_what_follows_in_it(forwards):
    matcher = PassMatcher(plans(measured((0, 5), (1, 3), (0, 4))))
    assert watched(matcher, *forwards) is None
    assert watched(matcher, (0, 0)) is None


def test_of_several_measured_passes_one_must_cover_all_of_it():
    one, other = measured((0, 5), (1, 3)), measured((0, 4), (1, 9))
    assert watched(PassMatcher(plans(one, other)), (0, 4), (1, 9)) is other
    assert watched(PassMatcher(plans(one, other)), (0, 5), (1, 9)) is None


def test_backwards_are_no_forwards():
    assert [mark.nbytes for mark in measured((0, 5), (1, 3)).forwards] == [5, 3]
    assert profile(7).forwards == [Mark(0, 7, 7)]


def test_passes_in_which_nothing_moves_are_watched_and_reported_otherwise(training):
    schedule, before = training.schedule, training.engine.traffic.back
    reported = []
    schedule.recorder.point = lambda: reported.append(1)
    training.train([SHORT, SHORT])
    assert schedule.checks_inputs_only and schedule.is_planned and not reported
    assert training.engine.traffic.back == before
    training.check()


def test_a_larger_pass_has_everything_leave_at_once_and_the_next_one_is_measured(training):
    schedule, states = training.schedule, []
    forward, large = training.engine.forward, layers(WHOLE // 4)

    def watch(layer, nbytes):
        forward(layer, nbytes)
        states.append({slab.state for slab in training.slabs()})

    training.engine.forward = watch
    training.train([SHORT, large])
    assert states[len(SHORT)] == {SlabState.RESIDENT}, "the last forward of the short microbatch"
    assert states[len(SHORT) + 1] == {SlabState.RELEASED}, "the model's own forward, before any layer's"
    training.train([SHORT, large])
    assert not schedule.checks_inputs_only
    profiles = [plan.profile for plan in schedule.holding.plans]
    assert max(mark.nbytes for each in profiles for mark in each.marks) == WHOLE // 4
    training.check()


def test_what_was_measured_anew_is_watched_again_where_everything_stays(monkeypatch):
    use_small_parts(monkeypatch)
    training = Shapes(monkeypatch, budget=4 * WHOLE)
    for batch in (*[SHORT] * 4, *[layers(WHOLE // 4)] * 4):
        peak, _ = training.train([batch])
        assert peak <= 4 * WHOLE
    assert training.schedule.checks_inputs_only
    training.check()


def test_a_pass_that_is_run_again_is_watched_from_its_begin(training):
    training.engine.begin_pass()
    training.engine.forward(9, 1)
    assert not training.schedule.is_planned
    training.train([SHORT, SHORT])
    assert not training.schedule.checks_inputs_only, "points are reported until a pass of them was measured"
    training.check()
