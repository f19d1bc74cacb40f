"""Which parts stay under a budget, and what each kind of pass may hold, from made-up profiles."""

from types import SimpleNamespace

import pytest

from bridge_fgo.engine.holding import MemoryProfile, least_budget, plan_holding
from bridge_fgo.engine.planner import HoldPlanner


@pytest.fixture
def parts():
    """Ten of 10 bytes each, 11 on their way."""
    return [SimpleNamespace(nbytes=10, transit_bytes=11, stays=False) for _ in range(10)]


def planned(budget, parts, *profiles):
    """A planner that has seen a pass of each kind, 0, 1 and so on."""
    planner = HoldPlanner(budget)
    planner.warn = lambda text: None
    for kind, profile in enumerate(profiles):
        planner.add(kind, profile, parts, expands=True)
    return planner


def staying(parts):
    return sum(part.nbytes for part in parts if part.stays)


def test_a_peak_counts_the_step():
    assert MemoryProfile([3, 5], step=7).peak == 7


def test_masters_that_are_held_count_in_the_step_and_in_the_least_budget():
    plan = plan_holding(MemoryProfile([0], step=100), limit=50, staying=20, part_bytes=[5, 7], masters_held=9)
    assert plan.step == 20 + 9 + 2 * 7
    assert least_budget(MemoryProfile([20], step=10), [5, 7], masters_held=9) == 10 + 9 + 2 * 7


def test_a_plan_has_room_for_masters_that_are_held(parts):
    planner = HoldPlanner()
    planner.margin_bytes, planner.masters_held_bytes = 50, 30  # the margin leaves less than is held in any case
    planner.add(0, MemoryProfile([0], 100), parts, expands=True)
    assert planner.plans[0].step == 30 + 2 * 11


@pytest.mark.parametrize("short", [0, 1])
def test_a_budget_that_has_no_room_for_masters_that_are_held_is_refused(parts, short):
    planner = HoldPlanner(100 + 30 + 2 * 11 - short)
    planner.masters_held_bytes = 30
    if short:
        with pytest.raises(ValueError, match="cannot be met"):
            planner.add(0, MemoryProfile([0], 100), parts, expands=True)
    else:
        planner.add(0, MemoryProfile([0], 100), parts, expands=True)


def test_no_more_stays_than_the_optimizer_step_has_room_for(parts):
    planned(200, parts, MemoryProfile([100], 130))
    assert staying(parts) == 40  # of 200 - 130 - 2 * 11


def test_a_kind_of_pass_that_is_measured_later_and_needs_less_changes_nothing(parts):
    planned(200, parts, MemoryProfile([150], 100), MemoryProfile([20], 10))
    assert staying(parts) == 50


def test_a_kind_of_pass_that_is_measured_later_and_needs_more_lets_fewer_stay(parts):
    planner = planned(200, parts, MemoryProfile([150], 100), MemoryProfile([170], 10))
    assert staying(parts) == 30
    assert planner.plans[0].leave == (50,) and planner.plans[1].leave == (30,)


def test_a_rank_with_room_keeps_to_what_ranks_agreed_on(parts):
    planner = HoldPlanner(200)
    planner.agree = lambda room, least: (0, least)
    planner.add(0, MemoryProfile([50], 50), parts, expands=True)
    planner.agree = None  # ranks agree on the first kind only
    planner.add(1, MemoryProfile([50], 50), parts, expands=True)
    assert staying(parts) == 0


def test_a_kind_that_was_forgotten_gives_no_other_room(parts):
    planner = planned(None, parts, MemoryProfile([150], 100), MemoryProfile([20], 10))
    assert planner.plans[1].leave == (150 - 20,)
    planner.forget(0)
    planner.add(1, MemoryProfile([20], 10), parts, expands=True)
    assert set(planner.plans) == {1} and planner.plans[1].leave == (10 + 2 * 11 - 20,)


def test_the_least_margin_is_kept_free(parts):
    planner = HoldPlanner()
    planner.margin_bytes = 30
    planner.add(0, MemoryProfile([100, 50], 0), parts, expands=True)
    assert planner.plans[0].leave == (0, 20)
