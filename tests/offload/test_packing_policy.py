"""When masters are packed, by waits of made-up times: the policy alone, and in trainings."""

import pytest
from fake_training import SIZES, WHOLE, Training, masters_of, weights_of
from made_up_gpu import Gpu

from bridge_fgo.memory.meters import WaitMeter
from bridge_fgo.offload.packing_policy import (
    IN_A_ROW,
    MOST_TIMED,
    MOST_UNPLANNED,
    PACKING_SECONDS_A_BYTE,
    WATCHED_STEPS,
    PackingPolicy,
)


class Steps:
    """Training steps of kinds that wait for so many seconds each; the figures of a step come `late` steps after.

    With waits=False every copy is waited for, so that packing pays from the start.
    """

    def __init__(self, late=0, waits=True, **seconds):
        self.gpu, self.seconds, self.late = Gpu([]), seconds, late
        self.waits = WaitMeter(self.gpu.event) if waits else None
        self.announced, self.warned = [], []
        self.policy = PackingPolicy(self.waits, self.announced.append, self.warned.append)
        self.policy.packable_bytes = 1
        self.since = 0

    def begin(self, kind, by_plan=True):
        """Return whether the step is timed."""
        self.since += 1
        self.gpu.done = self.since > self.late
        self.policy.begin_pass(kind, by_plan)
        if self.waits is None or not self.waits.is_timing:
            return False
        self.gpu._waits = iter([self.seconds[kind]])
        self.waits.around(self.gpu.wait, "stream")
        self.since = 0
        return True

    def step(self, kind="kind", updated=True, by_plan=True):
        timed = self.begin(kind, by_plan)
        self.policy.end_step(updated, by_plan)
        return timed

    def watched(self, kind="kind", updated=True):
        """Run a step; return whether the weights were watched."""
        self.begin(kind)
        watched = self.policy.checks_weights
        self.policy.end_step(updated, by_plan=True)
        return watched


def test_each_kind_of_pass_is_timed_so_often_and_may_be_the_one_that_waits():
    # The kinds that come first never wait; one that comes after, as where the number of microbatches grows, does.
    steps = Steps(short=0.0, shorter=0.0, long=1.0)
    for kind in ("short", "shorter"):
        assert all(steps.step(kind) for _ in range(MOST_TIMED))
    for _ in range(IN_A_ROW):
        assert steps.step("long")
        assert not steps.policy.pays
        assert not steps.step("short")
    assert steps.policy.pays and not steps.announced


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
        steps.step()
    assert not steps.policy.pays


def test_only_steps_in_a_row_without_a_plan_decide_and_skipped_ones_do_not_count():
    steps = Steps(kind=0.0)
    for i in range(3 * MOST_UNPLANNED):
        steps.policy.end_step(updated=True, by_plan=i % (MOST_UNPLANNED - 1) == 0)
    for _ in range(3 * MOST_UNPLANNED):
        steps.policy.end_step(updated=False, by_plan=False)
    assert not steps.policy.pays
    for _ in range(MOST_UNPLANNED):
        steps.policy.end_step(updated=True, by_plan=False)
    assert steps.policy.pays


@pytest.mark.parametrize("when", ["it begins", "it ends"])
def test_a_step_that_no_plan_holds_for_is_not_timed(when):
    steps = Steps(kind=0.0)
    assert steps.begin("kind", by_plan=when == "it ends") is (when == "it ends")
    steps.policy.end_step(updated=True, by_plan=False)
    assert steps.waits.take() is None


@pytest.mark.parametrize("have_changed", [False, True])
def test_masters_are_packed_once_weights_were_compared_in_so_many_steps_in_a_row_unless_they_have_changed(have_changed):
    steps = Steps(waits=False)
    for _ in range(1 + WATCHED_STEPS):  # after the first there is nothing to compare with yet
        assert not steps.policy.can_decide
        assert steps.watched()
        assert steps.watched(updated=False)  # counts for nothing
    assert steps.policy.can_decide and not steps.policy.packs
    steps.policy.decide(have_changed)
    for _ in range(2 * WATCHED_STEPS):
        assert steps.policy.packs is not have_changed and not steps.policy.can_decide
        assert not steps.watched()
    assert (len(steps.announced), len(steps.warned)) == (not have_changed, have_changed)
    assert all("OffloadConfig.master_remainders" in line for line in steps.announced + steps.warned)


def test_weights_are_watched_as_long_as_packing_may_follow_soon_and_anew_where_that_is_later():
    steps = Steps(quick=0.0, waiting=1.0)
    for _ in range(MOST_TIMED):
        assert steps.watched("quick")
    for _ in range(3):
        assert not steps.watched("quick")  # no more waits are timed
    for _ in range(IN_A_ROW):
        assert steps.watched("waiting")
    for _ in range(1 + WATCHED_STEPS - IN_A_ROW):
        assert not steps.policy.can_decide
        assert steps.watched("quick")
    assert steps.policy.can_decide


# In trainings.


class Waits:
    """A meter that has found the same seconds in every step that was timed."""

    def __init__(self, seconds):
        self.seconds, self.timed, self.is_timing, self._ended = seconds, 0, False, False

    def begin(self):
        self.is_timing = True

    def end(self):
        self._ended, self.is_timing = self.is_timing, False
        self.timed += self._ended

    def drop(self):
        self.is_timing = False

    def take(self):
        ended, self._ended = self._ended, False
        return self.seconds if ended else None


def timed(seconds, layer=WHOLE // 4, master_remainders=None, **how):
    """Return a training that packs as on a GPU where it waits that long for copies, the meter and what is said."""
    training = Training(layer, master_remainders=master_remainders, **how)
    waits, said = Waits(seconds), []
    packing = training.schedule.packing
    packing._waits, packing._announce, packing._why = waits, said.append, ""
    return training, waits, said


@pytest.mark.parametrize("packing_pays", [True, False])
def test_masters_are_copied_in_part_once_training_waits_longer_than_packing_takes(packing_pays):
    seconds = PACKING_SECONDS_A_BYTE * 4 * sum(SIZES)
    training, waits, said = timed(seconds * (1.1 if packing_pays else 0.9))
    copied = []
    for _ in range(14):
        before = training.engine.traffic.out
        training.step()
        copied.append(training.engine.traffic.out - before)
    training.check()
    whole = sum(slab.nbytes for slab in training.slabs())
    # Steps 1 and 2 are measured, 3 is the first by a plan and brings nothing back early: 4 and 5 are timed.
    assert copied[4] == whole
    assert copied[-1] == (sum(slab.codec.link_bytes for slab in training.slabs()) if packing_pays else whole)
    assert waits.timed == (IN_A_ROW if packing_pays else MOST_TIMED)
    assert len(said) == packing_pays


def scale_weights(*optimizers):
    for weight in (weight for optimizer in optimizers for weight in weights_of(optimizer)):
        weight.mul_(1.5)


@pytest.mark.parametrize("when", ["between steps", "in the pass"])
@pytest.mark.parametrize("every", [1, WATCHED_STEPS])
def test_masters_are_copied_whole_for_good_where_something_else_changes_weights(when, every):
    training, _, said = timed(1.0)
    for number in range(14):
        if when == "in the pass":
            training.run_pass()
        if number % every == 0:
            scale_weights(*training.optimizers, *training.twins)
        training.step()
    assert not any(slab.is_encoded for slab in training.slabs())
    assert (len(training.said), said) == (1, [])


@pytest.mark.parametrize("writes_masters", [False, True])
def test_a_change_of_weights_that_packed_masters_would_allow_does_not_keep_them_whole(writes_masters):
    training, _, _ = timed(1.0)
    (source,) = training.sources
    both = training.both(source)
    for number in range(9):
        training.step(skip=number == 2, passes=1 + number % 2)
        if number % 3 == 0 and writes_masters:
            scale_weights(*both)
            with training.engine.overwriting_masters(source):
                for one in both:
                    for master, weight in zip(masters_of(one), weights_of(one), strict=True):
                        master.copy_(weight)
        elif number % 3 == 0:
            training.engine.require_writable(source)
            scale_weights(*both)
    assert training.schedule.packing.packs
    assert any(slab.is_encoded for slab in training.slabs())


@pytest.mark.parametrize("packing_pays", [True, False])
def test_under_a_budget_only_masters_that_move_are_weighed(packing_pays):
    training, waits, _ = timed(0.0, layer=WHOLE // 8, budget=int(1.3 * WHOLE))
    training.steps(3)
    slabs = [slab for part in training.parts() if not part.stays for slab in part.slabs]
    moving = sum(slab.nbytes for slab in slabs if slab.codec.family is not None)
    assert 0 < moving < 4 * sum(SIZES)
    waits.seconds = PACKING_SECONDS_A_BYTE * moving * (1.1 if packing_pays else 0.9)
    training.steps(5)
    assert training.schedule.packing.packs is packing_pays


def test_a_step_that_is_skipped_says_nothing_of_waits():
    training, waits, _ = timed(1.0)
    training.steps(3)
    training.step(skip=True)
    assert waits.timed == 0
    training.step()
    assert waits.timed == 1


def test_where_no_plan_holds_masters_are_packed_all_the_same():
    training, waits, said = timed(0.0)
    for _ in range(MOST_UNPLANNED):
        assert not training.schedule.packing.packs
        training.step()
        training.meter.layer += 4  # each larger than all before
    assert training.schedule.packing.packs
    assert (waits.timed, len(said)) == (0, 1)
    training.step()


@pytest.mark.parametrize(
    "settings", [{"master_remainders": True}, {"master_remainders": False}, {"master_weights": False}]
)
def test_nothing_is_timed_where_no_choice_is_left(settings):
    training, waits, said = timed(1.0, **settings)
    training.steps(6)
    assert (waits.timed, said) == (0, [])
