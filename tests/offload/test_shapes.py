"""Shapes that change from step to step: no step's peak is above what releasing throughout has reached.

And peaks above a plan, and passes that no plan is for: what is said, what leaves, and that it ends.
"""

import pytest
import torch
from fake_training import WHOLE, Training, seen_at_changes, use_small_parts
from hypothesis import given, settings
from hypothesis import strategies as st
from spies import note

from bridge_fgo.memory.remainders import Remainders
from bridge_fgo.memory.slab import SlabState
from bridge_fgo.offload.policy import MOST_PROFILES, HoldPolicy
from bridge_fgo.offload.profile import Mark

MODEL = 0
"""Number of the model chunk: its embeddings need memory before any layer does, and have no point in backward."""


class World:
    """What is on the GPU beside the slabs, and the meter that sees the peaks of both together."""

    works = expands = True

    def __init__(self):
        self.others = self.seen = self.highest = 0
        self.schedule = None

    def look(self):
        now = self.others + self.schedule.ledger.nbytes
        self.seen, self.highest = max(self.seen, now), max(self.highest, now)

    def become(self, others):
        self.others = others
        self.look()

    def end_phase(self):
        return 0

    def end_interval(self):
        self.look()
        peak, self.seen = self.seen, self.others + self.schedule.ledger.nbytes
        return peak


def passing(microbatches, warmup=0, more=0):
    """Yield the marks of a pass, each with the bytes beside the slabs before it and from it on.

    A microbatch is a list of layers, each as (number, bytes). `warmup` forwards run before the first backward, as in a
    pipeline. A layer holds its bytes until its backward, and needs some times as many while it runs, by its number.
    Embeddings need three times what the first layer gets. `more` bytes are there throughout, of which no mark says
    anything.
    """
    order, ahead = [], []
    for microbatch in microbatches:
        order.append((microbatch, True))
        ahead.append(microbatch)
        if len(ahead) > warmup:
            order.append((ahead.pop(0), False))
    order += [(microbatch, False) for microbatch in ahead]
    live, before = 0, more
    for microbatch, is_forward in order:
        if is_forward:
            nbytes = microbatch[0][1]
            now = more + live + 3 * nbytes
            yield Mark(MODEL, nbytes, live), min(before, more + live), now
            before = now
        for number, nbytes in microbatch if is_forward else reversed(microbatch):
            live += nbytes if is_forward else -nbytes
            now = more + live + (number % 4 * nbytes if is_forward else 0)
            mark = Mark(number if is_forward else ~number, nbytes, live)
            yield mark, min(before, more + live - nbytes * is_forward), now
            before = now


class Shapes(Training):
    """A training whose passes are lists of microbatches, and keep to the highest peak of releasing throughout.

    Under a budget they keep to that. A 20th of the states is a part.
    """

    def __init__(self, monkeypatch, step=0, budget=None, **how):
        self.world = World()
        super().__init__(step=step, budget=budget, sizes=[340] * 20, meter=self.world, **how)
        self.step_others, self.allowed = step, budget or 0
        seen_at_changes(monkeypatch, self.world.look)

    @property
    def part(self):
        return max(part.transit_bytes for part in self.parts())

    @property
    def warnings_of_peaks(self):
        return [text for text in self.said if "a training step allocated" in text]

    def train(self, *microbatches, warmup=0):
        """Run a step; return its peak."""
        return self.train_by(list(passing(microbatches, warmup)))

    def train_by(self, points, foreseen=True):
        """Run a step with these points, as `passing` yields them; check that it is not above what is allowed."""
        world = self.world
        self.begin()
        world.become(0)
        world.highest = 0
        for mark, before, after in points:
            world.others = before
            self.engine.point(mark)
            world.become(after)
        world.become(0)
        self.engine.reload()
        world.become(self.step_others)
        self.update()
        world.become(0)
        peak = world.highest
        self.end_step()
        self.allowed = max(self.allowed, self.step_others + 2 * self.part, *(after for _, _, after in points))
        assert not foreseen or peak <= self.allowed + self.part
        return peak


def layers(nbytes, count=4, first=1):
    return [(number, nbytes) for number in range(first, first + count)]


LONG, SHORT, LARGE = layers(WHOLE // 5), layers(WHOLE // 80), layers(WHOLE // 4)


def planned(monkeypatch, *microbatches, steps=4, **how):
    """Return a training that has run some steps of the same microbatches."""
    training = Shapes(monkeypatch, **how)
    for _ in range(steps):
        training.train(*microbatches)
    return training


def test_lengths_at_random_are_covered_once_the_longest_were_seen(monkeypatch):
    training, generator = Shapes(monkeypatch), torch.Generator().manual_seed(1)
    are_planned = []
    for _ in range(40):
        training.train(*(layers(int(n)) for n in torch.randint(100, WHOLE // 5, (3,), generator=generator)))
        are_planned.append(training.schedule.is_planned)
    assert sum(are_planned[25:]) >= 10
    assert len(training.schedule.holding.plans) == 1


def test_passes_that_do_not_compare_are_planned_for_each_by_itself(monkeypatch):
    # As of a pipeline, whose forwards run ahead: of each pass there is less in one respect, and more in the other.
    training = Shapes(monkeypatch)
    for batch in [[LONG, SHORT]] * 3 + [[SHORT, LONG]] * 3:
        training.train(*batch, warmup=1)
    assert len(training.schedule.holding.plans) == 2
    for batch in ([LONG, SHORT], [SHORT, LONG]):
        training.train(*batch, warmup=1)
        assert training.schedule.is_planned


@pytest.mark.parametrize("is_last", [False, True])
def test_layers_that_report_no_more_are_planned_for_by_what_they_needed(monkeypatch, is_last):
    # As layers do that are captured into CUDA graphs. The first such step cannot be foreseen.
    training, points = planned(monkeypatch, LARGE), list(passing([LARGE]))
    _, _, most = max(points, key=lambda point: point[2])
    (begin, *_), end = points[0], Mark(9, WHOLE // 4, WHOLE // 4)
    replayed = [(begin, 0, most)] if is_last else [(begin, 0, most), (end, 0, 0)]
    training.train_by(replayed, foreseen=False)
    for _ in range(3):
        training.train_by(replayed)
        assert training.schedule.is_planned


@pytest.mark.parametrize("kind", [1, 2])
@pytest.mark.parametrize("skip", [False, True])
def test_under_a_budget_what_stays_goes_too_where_a_step_needs_its_room(monkeypatch, kind, skip):
    training = planned(monkeypatch, SHORT, budget=2 * WHOLE)
    assert all(part.stays for part in training.parts())
    training.schedule.kind = kind
    if skip:
        training.run_pass(points=0)
        training.end_step(False)
    for _ in range(3):
        assert WHOLE < training.train(LARGE) <= 2 * WHOLE
    assert 0 < training.staying < training.whole


SIZES = st.sampled_from([WHOLE // 400, WHOLE // 80, WHOLE // 5, WHOLE]) | st.integers(0, WHOLE // 4)
MICROBATCH = st.dictionaries(st.integers(1, 5), SIZES, min_size=1, max_size=4).map(lambda sizes: sorted(sizes.items()))


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.lists(MICROBATCH, min_size=1, max_size=3), min_size=1, max_size=4),
    st.data(),
    st.integers(0, 2),
    st.sampled_from([None, 0.3, 0.8, 1.2]),
    st.sampled_from([1, 2, MOST_PROFILES]),
)
def test_no_step_is_above_what_releasing_throughout_has_reached_and_what_comes_again_is_planned_for(
    kinds, data, warmup, share, profiles
):
    order = data.draw(st.lists(st.integers(0, len(kinds) - 1), min_size=4, max_size=10))
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_small_parts(monkeypatch)
        monkeypatch.setattr("bridge_fgo.offload.policy.MOST_PROFILES", profiles)
        training = Shapes(monkeypatch, step=WHOLE // 8)
        if share is not None:
            most = max(after for kind in kinds for _, _, after in passing(kind, warmup))
            budget = max(most, WHOLE // 8 + 2 * training.part) + int(share * WHOLE)
            training = Shapes(monkeypatch, step=WHOLE // 8, budget=budget)
        for kind in (*order, order[-1], order[-1]):
            training.train(*kinds[kind], warmup=warmup)
        assert training.schedule.is_planned
        training.check()


# Peaks above a plan.


def test_where_no_profile_covers_the_next_pass_only_some_are_measured(monkeypatch):
    monkeypatch.setattr("bridge_fgo.offload.policy.MOST_LOST", 4)
    training, measured = Shapes(monkeypatch), []
    note(monkeypatch, measured, HoldPolicy, "add", lambda policy, one: one)
    for number in range(16):
        training.train(layers(WHOLE // 50, count=1, first=number + 1), SHORT)
    assert 4 < len(measured) <= 1 + 4 + 3


def test_states_that_were_read_between_two_steps_are_not_held_against_the_plan(monkeypatch):
    training = planned(monkeypatch, SHORT)
    limit = training.schedule.holding.limit
    training.engine.require_readable()
    training.train(SHORT)
    assert training.schedule.is_planned and not training.schedule._fresh
    training.engine.require_readable()
    for _ in range(2):
        training.train(longer := layers(WHOLE // 60))  # lost at the first point, and so measured from there
    assert not training.said
    assert training.schedule.holding.limit < limit + WHOLE // 10
    (plan,) = training.schedule.holding.plans
    assert max(plan.profile.intervals[1:]) == max(after for _, _, after in passing([longer])), "states do not count"


@pytest.mark.parametrize("budget", [None, 2 * WHOLE])
def test_where_more_is_beside_the_states_than_was_measured_steps_hold_less_and_that_is_said_once(monkeypatch, budget):
    training, more = planned(monkeypatch, LONG, budget=budget), list(passing([LONG], more=WHOLE // 2))
    for _ in range(4):
        training.train_by(more, foreseen=False)
    assert len(training.warnings_of_peaks) == 1
    for _ in range(2):
        training.train_by(more)
        assert training.schedule.is_planned and not training.schedule._fresh
    if budget is None:
        assert max(training.schedule.holding.plans[0].leave) > WHOLE // 4, "and not held back more for it in the end"


@pytest.mark.parametrize("budget", [None, 3 * WHOLE // 2])
def test_a_peak_that_nothing_can_lower_is_let_be_in_the_end(monkeypatch, budget):
    # As where something reads all states in each pass, when activations are at their peak.
    training, points = planned(monkeypatch, LONG, steps=3, budget=budget), list(passing([LONG]))
    most = max(range(len(points)), key=lambda i: points[i][2])
    point, passed = training.engine.point, []

    def read_at_the_peak(mark):
        passed.append(mark)
        if len(passed) % len(points) == most:
            training.engine.require_readable()
        return point(mark)

    training.engine.point = read_at_the_peak
    for _ in range(24):
        training.train_by(points, foreseen=False)
    assert not training.schedule._fresh, "and is planned for no more"
    assert len(training.warnings_of_peaks) <= 1


def test_the_weights_are_checked_once_where_a_plan_holds_no_more(monkeypatch):
    training = planned(monkeypatch, SHORT)
    checks = []
    note(monkeypatch, checks, Remainders, "sums_now", lambda family, slabs: len(slabs))
    point, at_points = training.engine.point, []

    def watched(mark):
        before = len(checks)
        moved = point(mark)
        at_points.extend(checks[before:])
        return moved

    training.engine.point = watched
    training.train(SHORT, LONG)
    assert len(at_points) == 1 < at_points[0]


def test_where_all_stays_a_pass_that_is_larger_has_everything_leave_at_once(monkeypatch):
    staying = planned(monkeypatch, SHORT, SHORT, budget=2 * WHOLE)
    assert staying.staying == staying.whole
    before = staying.engine.traffic.back
    staying.train(SHORT, SHORT)
    assert staying.schedule.is_planned and staying.engine.traffic.back == before

    point, states = staying.engine.point, []
    staying.engine.point = lambda mark: (point(mark), mark.layer >= 0 and states.append(staying.residencies))
    staying.train(SHORT, LARGE)
    assert states[len(SHORT)] == {SlabState.RESIDENT}, "the last forward of the short microbatch"
    assert states[len(SHORT) + 1] == {SlabState.RELEASED}, "the model's own forward, before any layer's"
    profiles = [plan.profile for plan in staying.schedule.holding.plans]
    assert max(mark.nbytes for each in profiles for mark in each.marks) == WHOLE // 4
