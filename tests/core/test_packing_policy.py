"""When masters are packed, by waits of made-up times."""

import pytest
from made_up_gpu import Gpu

from bridge_fgo.core.meters import WaitMeter
from bridge_fgo.core.packing_policy import IN_A_ROW, MOST_TIMED, MOST_UNPLANNED, PackingPolicy


def test_each_kind_of_pass_is_timed_so_often_and_may_be_the_one_that_waits():
    # The kinds that come first never wait; one that comes after, as where the number of microbatches grows, does.
    gpu, said = Gpu([0.0] * 2 * MOST_TIMED + [1.0] * IN_A_ROW), []
    waits = WaitMeter(gpu.event)
    policy = PackingPolicy(waits, said.append)
    policy.packable_bytes = 1

    def train(kind):
        policy.begin_pass(kind, by_plan=True)
        timed = waits.is_timing
        if timed:
            waits.around(gpu.wait, "stream")
        policy.end_step(updated=True, by_plan=True)
        return timed

    for kind in ("short", "shorter"):
        assert all(train(kind) for _ in range(MOST_TIMED))
    for _ in range(IN_A_ROW):
        assert train("long")
        assert not policy.packs
        assert not train("short")
    assert policy.packs and len(said) == 1


class Steps:
    """Training steps of kinds that wait for so many seconds each; the figures of a step come `late` steps after."""

    def __init__(self, late=0, **seconds):
        self.gpu, self.seconds, self.late = Gpu([]), seconds, late
        self.waits = WaitMeter(self.gpu.event)
        self.policy = PackingPolicy(self.waits, lambda text: None)
        self.policy.packable_bytes = 1
        self.since = 0

    def begin(self, kind):
        """Returns whether the step is timed."""
        self.since += 1
        self.gpu.done = self.since > self.late
        self.policy.begin_pass(kind, by_plan=True)
        if not self.waits.is_timing:
            return False
        self.gpu._waits = iter([self.seconds[kind]])
        self.waits.around(self.gpu.wait, "stream")
        self.since = 0
        return True

    def step(self, kind):
        timed = self.begin(kind)
        self.policy.end_step(updated=True, by_plan=True)
        return timed


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("kinds", [("waiting", "quick"), ("quick", "waiting")])
def test_a_kind_that_waits_is_found_among_others_that_do_not(kinds, late):
    steps = Steps(late, waiting=1.0, quick=0.0)
    for i in range(8 * MOST_TIMED):
        steps.step(kinds[i % 2])
    assert steps.policy.packs


def test_a_step_that_an_error_ended_is_not_timed_on():
    steps = Steps(spent=0.0, other=0.0)
    for _ in range(MOST_TIMED):
        assert steps.step("spent")
    steps.policy.begin_pass("spent", by_plan=True)  # takes the last figures
    assert steps.begin("other")
    assert not steps.step("spent")


def test_only_steps_in_a_row_that_waited_decide():
    steps = Steps(kind=0.0)
    for i in range(IN_A_ROW * 2):
        steps.seconds["kind"] = float(i % IN_A_ROW != 0)
        steps.step("kind")
    assert not steps.policy.packs


def test_only_steps_in_a_row_without_a_plan_decide_and_skipped_ones_do_not_count():
    policy = PackingPolicy(WaitMeter(Gpu([]).event), lambda text: None)
    policy.packable_bytes = 1
    for i in range(3 * MOST_UNPLANNED):
        policy.end_step(updated=True, by_plan=i % (MOST_UNPLANNED - 1) == 0)
    for _ in range(3 * MOST_UNPLANNED):
        policy.end_step(updated=False, by_plan=False)
    assert not policy.packs
    for _ in range(MOST_UNPLANNED):
        policy.end_step(updated=True, by_plan=False)
    assert policy.packs


@pytest.mark.parametrize("when", ["it begins", "it ends"])
def test_a_step_that_no_plan_holds_for_is_not_timed(when):
    waits = WaitMeter(Gpu([]).event)
    policy = PackingPolicy(waits, lambda text: None)
    policy.packable_bytes = 1
    policy.begin_pass("kind", by_plan=when == "it ends")
    assert waits.is_timing == (when == "it ends")
    policy.end_step(updated=True, by_plan=False)
    assert waits.take() is None
