"""When masters are packed, by waits of made-up times."""

import pytest
from made_up_gpu import Gpu

from bridge_fgo.memory.meters import WaitMeter
from bridge_fgo.offload.packing_policy import IN_A_ROW, MOST_TIMED, MOST_UNPLANNED, WATCHED_STEPS, PackingPolicy


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
        assert not policy.pays
        assert not train("short")
    assert policy.pays and not said


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
    assert steps.policy.pays


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
    assert not steps.policy.pays


def test_only_steps_in_a_row_without_a_plan_decide_and_skipped_ones_do_not_count():
    policy = PackingPolicy(WaitMeter(Gpu([]).event), lambda text: None)
    policy.packable_bytes = 1
    for i in range(3 * MOST_UNPLANNED):
        policy.end_step(updated=True, by_plan=i % (MOST_UNPLANNED - 1) == 0)
    for _ in range(3 * MOST_UNPLANNED):
        policy.end_step(updated=False, by_plan=False)
    assert not policy.pays
    for _ in range(MOST_UNPLANNED):
        policy.end_step(updated=True, by_plan=False)
    assert policy.pays


@pytest.mark.parametrize("when", ["it begins", "it ends"])
def test_a_step_that_no_plan_holds_for_is_not_timed(when):
    waits = WaitMeter(Gpu([]).event)
    policy = PackingPolicy(waits, lambda text: None)
    policy.packable_bytes = 1
    policy.begin_pass("kind", by_plan=when == "it ends")
    assert waits.is_timing == (when == "it ends")
    policy.end_step(updated=True, by_plan=False)
    assert waits.take() is None


class Watched:
    """Steps of a training in which packing pays from the start; what was announced, and warned of."""

    def __init__(self, waits=None):
        self.announced, self.warned = [], []
        self.policy = PackingPolicy(waits, self.announced.append, self.warned.append)
        self.policy.packable_bytes = 1

    def step(self, updated=True, by_plan=False):
        """Return whether the weights were watched."""
        self.policy.begin_pass("kind", by_plan)
        watched = self.policy.checks_weights
        self.policy.end_step(updated, by_plan)
        return watched


def test_masters_are_packed_once_weights_were_compared_in_so_many_steps_in_a_row():
    steps = Watched()
    for _ in range(1 + WATCHED_STEPS):  # after the first there is nothing to compare with yet
        assert not steps.policy.can_decide
        assert steps.step()
        assert steps.step(updated=False)  # counts for nothing
    assert steps.policy.can_decide and not steps.policy.packs
    steps.policy.decide(have_changed=False)
    assert steps.policy.packs and not steps.policy.can_decide
    assert not steps.step()
    assert (len(steps.announced), steps.warned) == (1, [])


def test_masters_are_never_packed_where_weights_have_changed_and_that_is_said_once():
    steps = Watched()
    for _ in range(1 + WATCHED_STEPS):
        steps.step()
    steps.policy.decide(have_changed=True)
    for _ in range(2 * WATCHED_STEPS):
        assert not steps.step()
        assert not steps.policy.packs and not steps.policy.can_decide
    assert steps.announced == []
    (line,) = steps.warned
    assert "OffloadConfig.master_remainders" in line


def test_weights_are_watched_as_long_as_packing_may_follow_soon_and_anew_where_that_is_later():
    gpu = Gpu([])
    steps = Watched(WaitMeter(gpu.event))
    waits = steps.policy._waits

    def timed_step(kind, seconds):
        steps.policy.begin_pass(kind, by_plan=True)
        if waits.is_timing:
            gpu._waits = iter([seconds])
            waits.around(gpu.wait, "stream")
        watched = steps.policy.checks_weights
        steps.policy.end_step(updated=True, by_plan=True)
        return watched

    for _ in range(MOST_TIMED):
        assert timed_step("quick", 0.0)
    for _ in range(3):
        assert not timed_step("quick", 0.0)  # no more waits are timed
    for _ in range(IN_A_ROW):
        assert timed_step("waiting", 1.0)
    for _ in range(1 + WATCHED_STEPS - IN_A_ROW):
        assert not steps.policy.can_decide
        assert timed_step("quick", 0.0)
    assert steps.policy.can_decide
