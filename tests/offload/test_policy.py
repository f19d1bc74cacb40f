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
    assert list(plan.come) == [min([*plan.leave[i:], plan.step]) for i in range(len(plan.leave))]


@given(PARTS, st.integers(0, 300))
def test_parts_that_stay_fit_and_none_of_the_others_would_fit_beside_them(parts, room):
    staying = choose_staying(parts, room)
    left = room - sum(parts[i] for i in staying)
    assert left >= 0
    assert all(size > left for i, size in enumerate(parts) if i not in staying)
    assert choose_staying([7] * 4, 20) == {2, 3}, "the last ones"


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


def gradients(nbytes):
    """Return what chooses, once in a run, how many of so many bytes of gradients stay, in buckets of 10."""
    moving = [nbytes]

    def stay(room):
        left = moving.pop()
        more = min(left, room // 10 * 10)
        return more, left - more

    return stay


GRADIENTS = [([100], 0), ([90], 0)]  # of the second kind, what stays of the gradients has been measured
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
    "no room for all gradients: every state leaves, and as many gradients as must": (
        110, {"gradients_stay": gradients(30)}, GRADIENTS, 0, [((0,), 100), ((20,), 110)]),
    "states leave before any gradient": (
        150, {"gradients_stay": gradients(30)}, GRADIENTS, 20, [((20,), 120), ((60,), 150)]),
    "room for all gradients and most states": (
        220, {"gradients_stay": gradients(30)}, GRADIENTS, 90, [((90,), 190), ((130,), 220)]),
    "room for all": (400, {"gradients_stay": gradients(30)}, GRADIENTS, 100, [((270,), 370), ((310,), 400)]),
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


MARKS = st.lists(st.builds(Mark, st.integers(-1, 1), st.integers(0, 2), st.integers(0, 2)), max_size=4)
PASSES = MARKS.flatmap(
    lambda marks: st.builds(
        MemoryProfile,
        st.lists(SIZES, min_size=len(marks) + 1, max_size=len(marks) + 1),
        SIZES,
        st.just(marks),
        st.integers(1, 2),
        SIZES,
    )
)


def is_covered(marks, measured):
    """Whether each mark is of the same layer as the measured one, which got no less, and no less was live."""
    pairs = zip(marks, measured, strict=False)
    are_bounded = (a.layer == b.layer and a.nbytes <= b.nbytes and a.live <= b.live for a, b in pairs)
    return len(marks) <= len(measured) and all(are_bounded)


@given(st.lists(PASSES, min_size=1, max_size=3), MARKS | st.none(), st.integers(0, 1))
def test_the_plan_of_the_pass_that_needed_least_is_followed_of_those_that_cover_all_so_far(profiles, marks, less):
    if marks is None:  # one that a measured pass covers, perhaps
        marks = [mark._replace(nbytes=max(0, mark.nbytes - less)) for mark in profiles[0].marks]
    matcher = PassMatcher([plan_holding(each, 1000, 0, [1]) for each in profiles])
    passed = []
    for mark in [None, *marks]:
        before = matcher.plan
        if mark is not None:
            passed.append(mark)
            changed = matcher.point(mark)
            assert changed is (None if matcher.plan is before else before)
        fitting = [each for each in profiles if is_covered(passed, each.marks)]
        plan = min(fitting, key=lambda each: sum(each.intervals), default=None)
        assert plan is (None if matcher.plan is None else matcher.plan.profile)
        is_shorter = bool(fitting) and all(len(each.marks) > len(passed) for each in fitting)
        assert matcher.is_shorter is is_shorter
    assert matcher.marks == passed


@given(PASSES, PASSES, MARKS, st.integers(-1, 2))
def test_passes_merge_where_each_mark_of_one_bounds_the_others_and_are_their_maximum(one, other, marks, more):
    if more >= 0:  # else it hardly ever is of the same layers
        other.marks = [mark._replace(nbytes=mark.nbytes + more) for mark in one.marks]
        other.intervals = (other.intervals * len(one.intervals))[: len(one.intervals)]
    merge = one.can_merge(other)
    assert merge is other.can_merge(one)
    pairs = list(zip(one.marks, other.marks, strict=False))
    are_comparable = all(is_covered([a], [b]) or is_covered([b], [a]) for a, b in pairs)
    assert merge is (one.kind == other.kind and len(one.marks) == len(other.marks) and are_comparable)
    if merge:
        merged = one.merged(other)
        assert merged.intervals == [max(pair) for pair in zip(one.intervals, other.intervals, strict=True)]
        assert all(mark in pair for mark, pair in zip(merged.marks, pairs, strict=True))
        assert is_covered(one.marks, merged.marks) and is_covered(other.marks, merged.marks)
        assert (merged.step, merged.beyond) == (max(one.step, other.step), max(one.beyond, other.beyond))
        assert merged.kind == one.kind


def test_passes_that_can_merge_are_kept_as_one():
    policy = HoldPolicy()
    for sizes in ((10, 30), (20, 10), (15, 40)):
        policy.add(marked(*sizes, kind=1))
    (merged,) = policy._profiles
    assert merged.intervals == [0, 20, 40]


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
    (last,) = policy.plans_for(2)
    assert last.leave[1] == max(0, plan.leave[1] - 40) and last.step == plan.step - 40


@pytest.mark.parametrize(
    ("budget", "room", "awaits"),
    [(2**30, None, True), (None, SimpleNamespace(budget_bytes=lambda: 2**30), True), (None, None, False)],
    ids=["GiB", "auto", "none"],
)
def test_ranks_choose_once_together_what_stays_where_there_is_a_budget(parts, budget, room, awaits):
    holding = HoldPolicy(budget, room)
    assert not holding.awaits_ranks  # alone
    holding.all_can = lambda own: own
    assert holding.awaits_ranks is awaits
    add(holding, 0, MemoryProfile([100], 0), parts)
    assert not holding.awaits_ranks
