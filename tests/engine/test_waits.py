"""Timing the training stream's waits, with events that tell made-up times."""

import pytest

from bridge_fgo.engine.waits import IN_A_ROW, LEAST_SECONDS, MOST_TIMED, MOST_UNPLANNED, PackingChoice, WaitMeter


class Gpu:
    """A stream on which each wait takes the next of the given seconds, and its events."""

    def __init__(self, waits):
        self.now, self.done = 0.0, True
        self._waits = iter(waits)

    def event(self):
        gpu = self

        class Event:
            def record(self, stream):
                self.time = gpu.now

            def query(self):
                return gpu.done

            def elapsed_time(self, other):
                return (other.time - self.time) * 1e3

        return Event()

    def wait(self):
        self.now += next(self._waits)


def step(meter, gpu, waits):
    meter.begin()
    for _ in range(waits):
        meter.around(gpu.wait, "stream")
    meter.end()


def test_a_steps_waits_are_summed_but_for_what_events_take_themselves():
    gpu = Gpu([0.25, LEAST_SECONDS / 2, 0.5])
    meter = WaitMeter(gpu.event)
    step(meter, gpu, 3)
    assert meter.take() == pytest.approx(0.75)
    assert meter.take() is None


def test_a_step_without_waits_took_none():
    meter = WaitMeter(Gpu([]).event)
    step(meter, Gpu([]), 0)
    assert meter.take() == 0.0


def test_figures_come_when_the_gpu_is_done_and_the_step_meanwhile_is_not_timed():
    gpu = Gpu([0.25, 1.0])
    meter = WaitMeter(gpu.event)
    step(meter, gpu, 1)
    gpu.done = False
    assert meter.take() is None
    meter.begin()
    assert not meter.is_timing
    meter.end()
    gpu.done = True
    assert meter.take() == pytest.approx(0.25)
    step(meter, gpu, 1)
    assert meter.take() == pytest.approx(1.0)


def test_a_dropped_step_says_nothing():
    gpu = Gpu([0.5])
    meter = WaitMeter(gpu.event)
    assert not meter.is_timing
    meter.begin()
    assert meter.is_timing
    meter.around(gpu.wait, "stream")
    meter.drop()
    meter.end()
    assert meter.take() is None


def test_each_kind_of_pass_is_timed_so_often_and_may_be_the_one_that_waits():
    # The kinds that come first never wait; one that comes after, as where the number of microbatches grows, does.
    gpu, said = Gpu([0.0] * 2 * MOST_TIMED + [1.0] * IN_A_ROW), []
    waits = WaitMeter(gpu.event)
    choice = PackingChoice(waits, said.append)
    choice.packable_bytes = 1

    def train(kind):
        choice.begin_pass(kind, by_plan=True)
        timed = waits.is_timing
        if timed:
            waits.around(gpu.wait, "stream")
        choice.end_step(updated=True, by_plan=True)
        return timed

    for kind in ("short", "shorter"):
        assert all(train(kind) for _ in range(MOST_TIMED))
    for _ in range(IN_A_ROW):
        assert train("long")
        assert not choice.packs
        assert not train("short")
    assert choice.packs and len(said) == 1


class Steps:
    """Training steps of kinds that wait for so many seconds each; the figures of a step come `late` steps after."""

    def __init__(self, late=0, **seconds):
        self.gpu, self.seconds, self.late = Gpu([]), seconds, late
        self.waits = WaitMeter(self.gpu.event)
        self.choice = PackingChoice(self.waits, lambda text: None)
        self.choice.packable_bytes = 1
        self.since = 0

    def begin(self, kind):
        """Returns whether the step is timed."""
        self.since += 1
        self.gpu.done = self.since > self.late
        self.choice.begin_pass(kind, by_plan=True)
        if not self.waits.is_timing:
            return False
        self.gpu._waits = iter([self.seconds[kind]])
        self.waits.around(self.gpu.wait, "stream")
        self.since = 0
        return True

    def step(self, kind):
        timed = self.begin(kind)
        self.choice.end_step(updated=True, by_plan=True)
        return timed


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("kinds", [("waiting", "quick"), ("quick", "waiting")])
def test_a_kind_that_waits_is_found_among_others_that_do_not(kinds, late):
    steps = Steps(late, waiting=1.0, quick=0.0)
    for i in range(8 * MOST_TIMED):
        steps.step(kinds[i % 2])
    assert steps.choice.packs


def test_a_step_that_an_error_ended_is_not_timed_on():
    steps = Steps(spent=0.0, other=0.0)
    for _ in range(MOST_TIMED):
        assert steps.step("spent")
    steps.choice.begin_pass("spent", by_plan=True)  # takes the last figures
    assert steps.begin("other")
    assert not steps.step("spent")


def test_only_steps_in_a_row_that_waited_decide():
    steps = Steps(kind=0.0)
    for i in range(IN_A_ROW * 2):
        steps.seconds["kind"] = float(i % IN_A_ROW != 0)
        steps.step("kind")
    assert not steps.choice.packs


def test_only_steps_in_a_row_without_a_plan_decide_and_skipped_ones_do_not_count():
    choice = PackingChoice(WaitMeter(Gpu([]).event), lambda text: None)
    choice.packable_bytes = 1
    for i in range(3 * MOST_UNPLANNED):
        choice.end_step(updated=True, by_plan=i % (MOST_UNPLANNED - 1) == 0)
    for _ in range(3 * MOST_UNPLANNED):
        choice.end_step(updated=False, by_plan=False)
    assert not choice.packs
    for _ in range(MOST_UNPLANNED):
        choice.end_step(updated=True, by_plan=False)
    assert choice.packs


@pytest.mark.parametrize("when", ["it begins", "it ends"])
def test_a_step_that_no_plan_holds_for_is_not_timed(when):
    waits = WaitMeter(Gpu([]).event)
    choice = PackingChoice(waits, lambda text: None)
    choice.packable_bytes = 1
    choice.begin_pass("kind", by_plan=when == "it ends")
    assert waits.is_timing == (when == "it ends")
    choice.end_step(updated=True, by_plan=False)
    assert waits.take() is None
