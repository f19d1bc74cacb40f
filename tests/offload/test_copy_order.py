"""Whether copies in go first, by waits of made-up times."""

import pytest
from made_up_gpu import Gpu

from bridge_fgo.memory.meters import WaitMeter
from bridge_fgo.offload.copy_order import MOST_STEPS, TIMED_STEPS, CopyOrder


class Steps:
    """Training steps: the update waits for copies in, and the next step's forward for the copies out of this one.

    Args:
        ins, outs: seconds of both waits, by whether copies in went first.
        late: steps that pass before the figures of one are here.
    """

    def __init__(self, ins, outs, late=0):
        self.gpu = Gpu([])
        self.waits = WaitMeter(self.gpu.event)
        self.said = []
        self.policy = CopyOrder(self.waits, self.said.append)
        self.ins, self.outs, self.late = ins, outs, late
        self.before, self.since = False, 0
        self.has_left = True  # the copies out, before this step
        self.timed = []

    def step(self, kind="a", by_plan=True, may_time=True, updated=True, passes=1):
        """Returns whether copies in went first."""
        self.since += 1
        self.gpu.done = self.since > self.late
        for again in range(passes):
            self.policy.begin_pass(kind, by_plan, may_time)
            self.has_left = self.has_left or again > 0
        way = self.policy.h2d_first
        if self.waits.is_timing:
            self.since = 0
            seconds = 0.0 if self.has_left else self.outs[self.before], self.ins[way]
            self.gpu._waits = iter(seconds)
            for _ in seconds:
                self.waits.around(self.gpu.wait, "stream")
            self.timed.append((way, sum(seconds)))
        self.policy.end_step(updated, by_plan)
        self.before, self.has_left = way, not updated
        return way

    def evaluate(self):
        """Has an evaluation wait for the copies out."""
        self.policy.begin_pass("evaluation", by_plan=False, may_time=True)
        self.has_left = True


BETTER = {False: 0.10, True: 0.04}, {False: 0.00, True: 0.03}
"""As on two H100: copies in that go first keep the update waiting for less, and the forward for more."""
WORSE = {False: 0.10, True: 0.04}, {False: 0.00, True: 0.30}
"""As where a forward is far too short for the copies out."""


@pytest.mark.parametrize("late", [0, 1, 3])
@pytest.mark.parametrize(("seconds", "first"), [(BETTER, True), (WORSE, False)], ids=["pays", "costs"])
def test_what_training_waits_less_with_stays(seconds, first, late):
    steps = Steps(*seconds, late=late)
    ways = [steps.step() for _ in range(MOST_STEPS)]
    assert set(ways[-5:]) == {first} and True in ways and False in ways
    assert len(steps.timed) == 2 * TIMED_STEPS
    ins, outs = seconds
    assert {waited for _, waited in steps.timed} == {ins[way] + outs[way] for way in (False, True)}, (
        "no step is timed whose copies out of before went the other way"
    )
    waited = "training waited 100.0 ms for copies in a step, and 70.0 where copies in went first: from now on they do"
    assert steps.said == [waited] * first
    assert steps.policy.is_better is first
    assert steps.policy.waited == pytest.approx([ins[way] + outs[way] for way in (False, True)])


def test_a_gain_as_small_as_noise_changes_nothing():
    steps = Steps({False: 0.10, True: 0.097}, {False: 0.0, True: 0.0})
    assert not [steps.step() for _ in range(MOST_STEPS)][-1]


def test_each_kind_of_step_is_tried_by_itself():
    steps = Steps(*BETTER)
    for _ in range(20):
        steps.step("a")
    steps.ins, steps.outs = WORSE
    for _ in range(20):
        steps.step("b")
    assert steps.step("a") and not steps.step("b")


def test_steps_without_a_plan_or_while_somebody_else_times_are_not_tried():
    steps = Steps(*BETTER)
    assert not any(steps.step(by_plan=False) for _ in range(9))
    assert not any(steps.step(may_time=False) for _ in range(9))
    assert not steps.timed and steps.policy.is_better is steps.policy.waited is None


def test_figures_that_somebody_else_has_taken_are_not_waited_for():
    steps = Steps(*BETTER, late=2)
    for _ in range(3):
        steps.step()
    assert steps.timed
    steps.step(may_time=False)
    steps.waits._ended = None
    assert [steps.step() for _ in range(MOST_STEPS - 4)][-1]


@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("odd", ["skipped", "run again", "after an evaluation"])
def test_a_step_in_which_no_copy_out_is_waited_for_is_not_timed(odd, first):
    steps = Steps(*BETTER)
    for number in range(MOST_STEPS - 1):
        if number % 3 != first:
            steps.step()
        elif odd == "skipped":
            steps.step(updated=False)
        elif odd == "run again":
            steps.step(passes=2)
        else:
            steps.evaluate()
    assert {round(waited, 3) for _, waited in steps.timed} == {0.10, 0.07}


def test_where_too_few_steps_could_be_timed_copies_go_as_they_come():
    steps = Steps(*BETTER, late=MOST_STEPS)
    assert not [steps.step() for _ in range(MOST_STEPS + 2)][-1]


def test_where_every_copy_is_waited_for_there_is_no_order():
    policy = CopyOrder(None, print)
    policy.begin_pass("a", True, True)
    policy.end_step(True, True)
    assert not policy.h2d_first
