"""What may be held when, which parts stay under a budget, and which measured pass covers one that runs: arithmetic."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge_fgo.offload.policy import (
    MOST_PROFILES,
    HoldPolicy,
    PartBytes,
    budget_refusal,
    choose_staying,
    plan_holding,
)
from bridge_fgo.offload.profile import Mark, MemoryProfile, PassMatcher

SIZES = st.integers(0, 100)
PROFILES = st.builds(MemoryProfile, st.lists(SIZES, min_size=1, max_size=20), SIZES)
PARTS = st.lists(st.integers(1, 30), min_size=1, max_size=10)


@given(PROFILES, st.integers(0, 200), PARTS)
def test_what_is_held_stays_under_the_limit_and_what_comes_back_need_not_leave_again(profile, limit, parts):
    plan = plan_holding(profile, limit, staying=0, part_bytes=parts)
    for held, peak in zip(plan.leave, profile.intervals, strict=True):
        assert held == 0 or held + peak <= limit
    assert plan.step + profile.step <= max(limit, profile.step + 2 * max(parts))
    assert profile.peak == max(*profile.intervals, profile.step), "the step counts too"
    plan = plan_holding(profile, limit, staying=0, part_bytes=parts)
    for i, come in enumerate(plan.come):
        assert come == min([*plan.leave[i:], plan.step])


@given(PARTS, st.integers(0, 300))
def test_parts_that_stay_fit_and_none_of_the_others_would_fit_beside_them(parts, room):
    staying = choose_staying(parts, room)
    left = room - sum(parts[i] for i in staying)
    assert left >= 0
    assert all(size > left for i, size in enumerate(parts) if i not in staying)


@given(st.integers(1, 2**38))
def test_the_budget_that_a_refusal_asks_for_is_enough(least):
    asked = float(budget_refusal(0, least).split("needs ")[1].split(" GiB")[0])
    assert least <= int(asked * 2**30) < least + 2**30 // 50


@pytest.fixture
def parts():
    """Ten of 10 bytes each, 11 on their way."""
    return [PartBytes(10, transit_bytes=11) for _ in range(10)]


def add(policy, kind, profile, parts):
    """Have a policy see a pass; the parts that it says stay do so from then on, and no others."""
    profile.kind = kind
    policy.add(profile)
    staying = policy.plan(parts, expands=True)
    for position, part in enumerate(parts):
        part.stays = position in staying


def staying(parts):
    return sum(part.nbytes for part in parts if part.stays)


TWO_PARTS = 2 * 11
PLANNED = {
    # Budget, attributes of the policy, (intervals, step) of each kind of pass; what stays; leave and step of each plan.
    "masters that are held, whatever the margin leaves": (
        None, {"margin_bytes": 50, "held_through_step": 30}, [([0], 100)], 0, [((102,), 30 + TWO_PARTS)]),
    "the least margin is kept free": (None, {"margin_bytes": 30}, [([100, 50], 0)], 0, [((0, 20), 70)]),
    "no more stays than the step has room for": (200, {}, [([100], 130)], 40, [((100,), 70)]),
    "what stays is in the plan whatever the margin": (
        200, {"margin_bytes": 50}, [([150], 100)], 50, [((50,), 50 + TWO_PARTS)]),
    "a later kind that needs less changes nothing": (
        200, {}, [([150], 100), ([20], 10)], 50, [((50,), 100), ((180,), 190)]),
    "a later kind that needs more lets fewer stay": (
        200, {}, [([150], 100), ([170], 10)], 30, [((50,), 100), ((30,), 190)]),
    "a rank with room keeps to what ranks agreed on, of the first kind only": (
        200, {"agree": Mock(side_effect=[(0, 50 + TWO_PARTS)])}, [([50], 50)] * 2, 0, [((150,), 150)] * 2),
    "room for masters that are held": (130 + TWO_PARTS, {"held_through_step": 30}, [([0], 100)], 0, None),
    "no room for masters that are held": (129 + TWO_PARTS, {"held_through_step": 30}, [([0], 100)], None, None),
    "another rank cannot meet it": (200, {"agree": lambda room, least: (room, 201)}, [([50], 50)], None, None),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANNED)
def test_what_stays_what_is_planned_and_which_budget_is_refused(parts, name):
    budget, attributes, passes, stays, plans = PLANNED[name]
    policy = HoldPolicy(budget)
    policy.warn = lambda text: None
    vars(policy).update(attributes)
    with pytest.raises(ValueError, match="cannot be met") if stays is None else nullcontext():
        for kind, profile in enumerate(passes):
            add(policy, kind, MemoryProfile(*profile), parts)
    if plans is not None:
        assert staying(parts) == stays
        assert [(plan.leave, plan.step) for plan in policy.plans] == plans


# Which measured pass covers one that runs.


def marked(*sizes, kind=None):
    """Return a profile of a pass of layers 0, 1 and so on, which get as many bytes and need as many."""
    return MemoryProfile([0, *sizes], 0, [Mark(i, size, size) for i, size in enumerate(sizes)], kind)


def measured(*forwards):
    """Return the profile of a pass with these forwards, (layer, bytes), each with its backward right behind it."""
    marks = [mark for layer, nbytes in forwards for mark in (Mark(layer, nbytes, nbytes), Mark(~layer, nbytes, 0))]
    return MemoryProfile([0] * (len(marks) + 1), 0, marks)


def matcher_of(*profiles):
    return PassMatcher([plan_holding(each, 1000, 0, [1]) for each in profiles])


def watched(matcher, *forwards):
    """Pass these forwards; return the profile of the plan that holds then."""
    for forward in forwards:
        matcher.forward(*forward)
    return None if matcher.plan is None else matcher.plan.profile


def test_the_plan_of_the_pass_that_needed_least_is_followed_as_long_as_it_holds():
    small, large = marked(1, 2, 3), marked(4, 4, 4)
    matcher = matcher_of(large, small)
    assert matcher.plan.profile is small
    assert matcher.point(Mark(0, 1, 1)) is None
    assert matcher.point(Mark(1, 3, 3)).profile is small and matcher.plan.profile is large
    assert matcher.point(Mark(2, 5, 5)).profile is large and matcher.plan is None
    assert matcher.point(Mark(3, 1, 1)) is None
    assert matcher.marks == [Mark(0, 1, 1), Mark(1, 3, 3), Mark(2, 5, 5), Mark(3, 1, 1)]


@pytest.mark.parametrize("other", [Mark(1, 2, 2), Mark(0, 3, 2), Mark(0, 2, 3), Mark(~0, 2, 2)])
def test_another_layer_a_larger_one_or_more_in_flight_is_not_covered(other):
    assert marked(2).covers(1, Mark(0, 2, 2)) and marked(2).covers(1, Mark(0, 1, 1))
    assert not marked(2).covers(1, other) and not marked(2).covers(2, Mark(0, 2, 2))


@pytest.mark.parametrize(
    ("forwards", "covered"),
    [
        ([(0, 5)], True),
        ([(0, 5), (1, 2), (0, 4)], True),
        ([(0, 6)], False),
        ([(0, 4), (1, 3), (0, 5)], False),  # no larger than the measured pass's first, but than its second
        ([(0, 5), (0, 4)], False),
        ([(0, 5), (1, 3), (0, 4), (1, 0)], False),
    ],
    ids=["begun", "no_more", "larger", "larger_later", "another_layer", "one_more"],
)
def test_forwards_of_the_same_layers_that_get_no_more_are_covered_and_what_follows_others_is_not(forwards, covered):
    one = measured((0, 5), (1, 3), (0, 4))
    assert [mark.nbytes for mark in one.forwards] == [5, 3, 4], "backwards are no forwards"
    matcher = matcher_of(one)
    assert watched(matcher, *forwards) is (one if covered else None)
    assert covered or watched(matcher, (0, 0)) is None


def test_of_several_profiles_one_must_cover_a_whole_pass_and_passes_of_the_same_layers_are_their_maximum():
    one, other = measured((0, 5), (1, 3)), measured((0, 4), (1, 9))
    assert watched(matcher_of(one, other), (0, 4), (1, 9)) is other
    assert watched(matcher_of(one, other), (0, 5), (1, 9)) is None
    policy = HoldPolicy()
    for sizes in ((10, 30), (20, 10), (15, 40)):
        policy.add(marked(*sizes, kind=1))
    (merged,) = policy._profiles
    assert merged.intervals == [0, 20, 40]
    assert merged.marks == [Mark(0, 20, 20), Mark(1, 40, 40)]


@pytest.mark.parametrize(
    "other",
    [
        MemoryProfile([0, 7], 0, [Mark(0, 3, 9)], kind=1),  # more in flight, and a smaller layer
        MemoryProfile([0, 7], 0, [Mark(1, 5, 6)], kind=1),
        MemoryProfile([0, 7], 0, [Mark(0, 5, 6)], kind=2),
        MemoryProfile([0, 7, 7], 0, [Mark(0, 5, 6), Mark(1, 5, 6)], kind=1),
    ],
    ids=["not_comparable", "another_layer", "another_kind", "longer"],
)
def test_passes_of_which_none_bounds_the_other_do_not_merge(other):
    one = MemoryProfile([0, 7], 0, [Mark(0, 5, 6)], kind=1)
    assert one.can_merge(one) and not one.can_merge(other) and not other.can_merge(one)


def test_where_there_are_too_many_profiles_the_least_recently_used_goes(parts):
    policy = HoldPolicy()
    for kind in range(MOST_PROFILES):
        policy.add(marked(10, kind=kind))
    policy.plan(parts, expands=True)
    policy.is_exceeded(policy.plans[0], 0, parts)  # used: so the second is the oldest
    policy.add(marked(10, kind=MOST_PROFILES))
    assert [one.kind for one in policy._profiles] == [*range(2, MOST_PROFILES), 0, MOST_PROFILES]


def test_a_peak_above_the_plan_is_said_and_its_kind_holds_as_much_less():
    policy, parts, said = HoldPolicy(), [PartBytes(10, 10), PartBytes(10, 10)], []
    policy.warn = said.append
    for kind, size in ((1, 100), (2, 60)):
        policy.add(marked(size, kind=kind))
    policy.plan(parts, expands=True)
    (plan,) = policy.plans_for(2)
    assert plan.leave[1] == 100 - 60 - policy._margin(plan.profile, True)
    assert not policy.is_exceeded(plan, 110, parts) and not said
    assert policy.is_exceeded(plan, 125, parts) and len(said) == 1
    policy.plan(parts, expands=True)
    assert policy.limit == 100, "what went wrong raises no limit"
    assert policy.plans_for(2)[0].leave[1] == plan.leave[1] - 25
    assert policy.plans_for(1)[0].leave[0] == 100 - policy._margin(marked(100), True)
    assert policy.is_exceeded(policy.plans_for(2)[0], 115, parts) and len(said) == 1, "it is said once"
    policy.plan(parts, expands=True)
    assert policy.plans_for(2)[0].leave[1] == max(0, plan.leave[1] - 40)


class Gradients:
    """Gradients in buckets of 10 bytes."""

    def __init__(self, moving):
        self.moving_bytes, self.asked = moving, 0

    def stay(self, room):
        self.asked += 1
        more = min(self.moving_bytes, room // 10 * 10)
        self.moving_bytes -= more
        return more, self.moving_bytes


@pytest.mark.parametrize(
    ("budget", "gradients_left", "states_that_stay"),
    [
        (110, 20, 0),  # no room for all gradients: every state leaves, and as many gradients as must
        (150, 0, 20),  # states leave before any gradient
        (220, 0, 90),
        (400, 0, 100),  # all fits
    ],
)
def test_gradients_leave_only_once_all_states_do(parts, budget, gradients_left, states_that_stay):
    moving = 30
    policy = HoldPolicy(budget)
    gradients = Gradients(moving)
    policy.gradients_stay = gradients.stay
    add(policy, 0, MemoryProfile([100], 0), parts)
    assert gradients.moving_bytes == gradients_left
    assert staying(parts) == states_that_stay
    (plan,) = policy.plans
    assert plan.profile.intervals == [100 + moving - gradients_left]
    add(policy, 1, MemoryProfile([90], 0), parts)
    assert gradients.asked == 1, "gradients are chosen once in a run"


@pytest.mark.parametrize(
    ("budget", "room", "awaits"),
    [(2**30, None, True), (None, SimpleNamespace(), True), (None, None, False)],
    ids=["GiB", "auto", "none"],
)
def test_ranks_choose_together_what_stays_where_there_is_a_budget_and_are_not_asked_without(budget, room, awaits):
    holding = HoldPolicy(budget, room)
    assert not holding.awaits_ranks  # alone
    holding.all_can = lambda own: own
    assert holding.awaits_ranks is awaits
