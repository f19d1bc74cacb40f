"""What may be held when, and which parts stay under a budget: arithmetic on generated sizes and made-up profiles."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge_fgo.offload.policy import (
    HoldPolicy,
    PartBytes,
    budget_refusal,
    choose_staying,
    least_budget,
    plan_holding,
)
from bridge_fgo.offload.profile import MemoryProfile

SIZES = st.integers(0, 100)
PROFILES = st.builds(MemoryProfile, st.lists(SIZES, min_size=1, max_size=20), SIZES)
PARTS = st.lists(st.integers(1, 30), min_size=1, max_size=10)


@given(PROFILES, st.integers(0, 200), PARTS)
def test_what_is_held_and_what_is_there_stay_under_the_limit(profile, limit, parts):
    plan = plan_holding(profile, limit, staying=0, part_bytes=parts)
    for held, peak in zip(plan.leave, profile.intervals, strict=True):
        assert held == 0 or held + peak <= limit
    assert plan.step + profile.step <= max(limit, profile.step + 2 * max(parts))


@given(PROFILES, st.integers(0, 200), PARTS)
def test_what_comes_back_need_not_leave_again(profile, limit, parts):
    plan = plan_holding(profile, limit, staying=0, part_bytes=parts)
    for i, come in enumerate(plan.come):
        assert come == min([*plan.leave[i:], plan.step])


def test_memory_that_grows_and_shrinks_lets_slabs_leave_late_and_come_early():
    profile = MemoryProfile([10, 40, 70, 100, 70, 40], step=10)
    plan = plan_holding(profile, limit=100, staying=0, part_bytes=[5, 5])
    assert plan.leave == (90, 60, 30, 0, 30, 60)
    assert plan.come == (0, 0, 0, 0, 30, 60)
    assert plan.step == 90


def test_what_stays_is_held_in_any_case():
    plan = plan_holding(MemoryProfile([100], step=100), limit=50, staying=20, part_bytes=[5, 7])
    assert (plan.leave, plan.come, plan.step) == ((20,), (20,), 34)


@given(PARTS, st.integers(0, 300))
def test_parts_that_stay_fit_and_none_of_the_others_would_fit_beside_them(parts, room):
    staying = choose_staying(parts, room)
    left = room - sum(parts[i] for i in staying)
    assert left >= 0
    assert all(size > left for i, size in enumerate(parts) if i not in staying)


def test_the_least_budget_is_the_larger_of_the_passes_and_of_two_parts_in_the_step():
    assert least_budget(MemoryProfile([100], step=10), [5, 7]) == 100
    assert least_budget(MemoryProfile([20], step=10), [5, 7]) == 24


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


def planned(budget, parts, *profiles):
    """A policy that has seen a pass of each kind, 0, 1 and so on."""
    policy = HoldPolicy(budget)
    policy.warn = lambda text: None
    for kind, profile in enumerate(profiles):
        add(policy, kind, profile, parts)
    return policy


def staying(parts):
    return sum(part.nbytes for part in parts if part.stays)


def test_a_peak_counts_the_step():
    assert MemoryProfile([3, 5], step=7).peak == 7


def test_masters_that_are_held_count_in_the_step_and_in_the_least_budget():
    plan = plan_holding(MemoryProfile([0], step=100), limit=50, staying=20, part_bytes=[5, 7], masters_held=9)
    assert plan.step == 20 + 9 + 2 * 7
    assert least_budget(MemoryProfile([20], step=10), [5, 7], masters_held=9) == 10 + 9 + 2 * 7


def test_a_plan_has_room_for_masters_that_are_held(parts):
    policy = HoldPolicy()
    policy.margin_bytes, policy.held_through_step = 50, 30  # the margin leaves less than is held in any case
    add(policy, 0, MemoryProfile([0], 100), parts)
    assert policy.plans[0].step == 30 + 2 * 11


@pytest.mark.parametrize("short", [0, 1])
def test_a_budget_that_has_no_room_for_masters_that_are_held_is_refused(parts, short):
    policy = HoldPolicy(100 + 30 + 2 * 11 - short)
    policy.held_through_step = 30
    if short:
        with pytest.raises(ValueError, match="cannot be met"):
            add(policy, 0, MemoryProfile([0], 100), parts)
    else:
        add(policy, 0, MemoryProfile([0], 100), parts)


def test_no_more_stays_than_the_optimizer_step_has_room_for(parts):
    planned(200, parts, MemoryProfile([100], 130))
    assert staying(parts) == 40  # of 200 - 130 - 2 * 11


def test_parts_that_stay_are_in_the_plan_though_the_margin_has_no_room_for_them(parts):
    policy = HoldPolicy(200)
    policy.margin_bytes = 50
    add(policy, 0, MemoryProfile([150], 100), parts)
    assert policy.plans[0].leave == policy.plans[0].come == (staying(parts),) == (50,)
    assert policy.plans[0].step == 50 + 2 * 11


def test_a_kind_of_pass_that_is_measured_later_and_needs_less_changes_nothing(parts):
    planned(200, parts, MemoryProfile([150], 100), MemoryProfile([20], 10))
    assert staying(parts) == 50


def test_a_kind_of_pass_that_is_measured_later_and_needs_more_lets_fewer_stay(parts):
    policy = planned(200, parts, MemoryProfile([150], 100), MemoryProfile([170], 10))
    assert staying(parts) == 30
    assert policy.plans[0].leave == (50,) and policy.plans[1].leave == (30,)


def test_a_rank_with_room_keeps_to_what_ranks_agreed_on(parts):
    policy = HoldPolicy(200)
    policy.agree = lambda room, least: (0, least)
    add(policy, 0, MemoryProfile([50], 50), parts)
    policy.agree = None  # ranks agree on the first kind only
    add(policy, 1, MemoryProfile([50], 50), parts)
    assert staying(parts) == 0


def test_the_least_margin_is_kept_free(parts):
    policy = HoldPolicy()
    policy.margin_bytes = 30
    add(policy, 0, MemoryProfile([100, 50], 0), parts)
    assert policy.plans[0].leave == (0, 20)
