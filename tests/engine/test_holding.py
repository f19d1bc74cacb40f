"""What may be held when: the arithmetic of the schedule's plan."""

from hypothesis import given
from hypothesis import strategies as st

from bridge_fgo.engine.holding import MemoryProfile, budget_refusal, choose_staying, least_budget, plan_holding

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
