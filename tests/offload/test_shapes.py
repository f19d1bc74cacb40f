"""Shapes that change from step to step: no step's peak is above what releasing throughout has reached."""

import pytest
import torch
from fake_training import WHOLE, Training, use_small_parts
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_fgo.memory.meters import Ledger
from bridge_fgo.offload.policy import MOST_LOST, MOST_PROFILES, HoldPolicy, PartBytes, plan_holding
from bridge_fgo.offload.profile import Mark, MemoryProfile, PassMatcher

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


def passing(microbatches, warmup=0):
    """Yield the marks of a pass, each with the bytes beside the slabs before it and from it on.

    A microbatch is a list of layers, each as (number, bytes). `warmup` forwards run before the first backward, as in a
    pipeline. A layer holds its bytes until its backward, and needs some times as many while it runs, by its number.
    Embeddings need three times what the first layer gets.
    """
    order, ahead = [], []
    for microbatch in microbatches:
        order.append((microbatch, True))
        ahead.append(microbatch)
        if len(ahead) > warmup:
            order.append((ahead.pop(0), False))
    order += [(microbatch, False) for microbatch in ahead]
    live = before = 0
    for microbatch, is_forward in order:
        if is_forward:
            nbytes = microbatch[0][1]
            yield Mark(MODEL, nbytes, live), min(before, live), live + 3 * nbytes
            before = live + 3 * nbytes
        for number, nbytes in microbatch if is_forward else reversed(microbatch):
            live += nbytes if is_forward else -nbytes
            now = live + number % 4 * nbytes if is_forward else live
            yield Mark(number if is_forward else ~number, nbytes, live), min(before, live - nbytes * is_forward), now
            before = now


class Shapes(Training):
    """A training whose passes are lists of microbatches."""

    def __init__(self, monkeypatch, step=0, **how):
        super().__init__(0, step, sizes=[340] * 20, **how)  # a 20th of the states to a part
        self.world = self.schedule.recorder._meter = World()
        self.world.schedule = self.schedule
        self.step_others, self.reached, self.seed = step, 0, 0
        change = Ledger.change

        def watched(ledger, *how):
            result = change(ledger, *how)
            self.world.look()
            return result

        monkeypatch.setattr(Ledger, "change", watched)

    @property
    def part(self):
        return max(part.transit_bytes for part in self.schedule.parts)

    def train(self, microbatches, warmup=0):
        """Run a step; return its peak, and the highest that releasing throughout has reached up to it."""
        return self.train_by(list(passing(microbatches, warmup)))

    def train_by(self, points):
        """Run a step with these points, as `passing` yields them."""
        world = self.world
        self.engine.begin_pass()
        self.engine.release()
        world.become(0)
        world.highest = 0
        for mark, before, after in points:
            world.others = before
            if not self.engine.checks_inputs_only:
                self.engine.point(mark)
            elif mark.layer >= 0:
                self.engine.forward(mark.layer, mark.nbytes)
            world.become(after)
        world.become(0)
        self.engine.reload()
        world.become(self.step_others)
        in_pass = world.highest
        self.update(self.seed)
        self.seed += 1
        world.become(0)
        peak = world.highest
        self.end_step(True)
        throughout = max([after for _, _, after in points])
        self.reached = max(self.reached, throughout, self.step_others + 2 * self.part)
        return max(peak, in_pass), self.reached


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    use_small_parts(monkeypatch)


def layers(nbytes, count=4, first=1):
    return [(number, nbytes) for number in range(first, first + count)]


LONG, SHORT = layers(WHOLE // 5), layers(WHOLE // 80)


def test_long_and_short_that_change_places_keep_to_the_peak_of_the_activations(monkeypatch):
    training = Shapes(monkeypatch)
    for _ in range(4):
        training.train([LONG, SHORT])
    for _ in range(3):
        peak, reached = training.train([SHORT, LONG])
        assert peak <= reached + training.part
    assert training.schedule.is_planned, "and is planned for"
    training.check()


def test_a_step_without_some_layers_does_not_use_the_room_of_others(monkeypatch):
    vision, text = layers(WHOLE // 400, first=9), layers(WHOLE // 5)
    training = Shapes(monkeypatch)
    for _ in range(4):
        training.train([vision + text])
    for _ in range(3):
        peak, reached = training.train([text])
        assert peak <= reached + training.part
    training.check()


def test_a_larger_batch_is_seen_before_its_embeddings(monkeypatch):
    training = Shapes(monkeypatch)
    large = layers(WHOLE // 80)
    large[0] = (4, WHOLE)
    for batch in (SHORT, SHORT, SHORT, large):
        peak, reached = training.train([batch])
    assert peak <= reached + training.part


def test_another_layer_of_the_same_size_has_no_room_of_the_measured_one(monkeypatch):
    training = Shapes(monkeypatch)
    for _ in range(4):
        training.train([layers(WHOLE // 6, first=4, count=1)])
    peak, reached = training.train([layers(WHOLE // 6, first=3, count=1)])
    assert peak <= reached + training.part


def test_what_came_early_leaves_again_where_another_layer_follows(monkeypatch):
    # The measured pass ends after these layers; then this one's next microbatch begins.
    training = Shapes(monkeypatch)
    for _ in range(4):
        training.train([SHORT])
    held = training.schedule.ledger.nbytes
    assert held > 0
    peak, reached = training.train([SHORT, LONG])
    assert peak <= reached + training.part
    training.check()


def test_lengths_at_random_are_covered_once_the_longest_were_seen(monkeypatch):
    training, generator = Shapes(monkeypatch), torch.Generator().manual_seed(1)

    def batch():
        return [layers(int(n)) for n in torch.randint(100, WHOLE // 5, (3,), generator=generator)]

    for _ in range(40):
        peak, reached = training.train(batch())
        assert peak <= reached + training.part
    planned = 0
    for _ in range(20):
        training.train(batch())
        planned += training.schedule.is_planned
    assert planned >= 15
    assert len(training.schedule.holding.plans) == 1


def test_passes_that_do_not_compare_are_planned_for_each_by_itself(monkeypatch):
    # As of a pipeline, whose forwards run ahead: of each pass there is less in one respect, and more in the other.
    training = Shapes(monkeypatch)
    for batch in [[LONG, SHORT]] * 3 + [[SHORT, LONG]] * 3:
        training.train(batch, warmup=1)
    assert len(training.schedule.holding.plans) == 2
    for batch in ([LONG, SHORT], [SHORT, LONG]):
        peak, reached = training.train(batch, warmup=1)
        assert peak <= reached + training.part
        assert training.schedule.is_planned
    training.check()


@pytest.mark.parametrize("is_last", [False, True])
def test_layers_that_report_no_more_are_planned_for_by_what_they_needed(monkeypatch, is_last):
    # As layers do that are captured into CUDA graphs. The first such step cannot be foreseen.
    points = list(passing([layers(WHOLE // 4)]))
    _, _, most = max(points, key=lambda point: point[2])
    (begin, *_), end = points[0], Mark(9, WHOLE // 4, WHOLE // 4)
    replayed = [(begin, 0, most)] if is_last else [(begin, 0, most), (end, 0, 0)]
    training = Shapes(monkeypatch)
    for _ in range(4):
        training.train_by(points)
    training.train_by(replayed)
    for _ in range(3):
        peak, reached = training.train_by(replayed)
        assert peak <= reached + training.part
        assert training.schedule.is_planned
    training.check()


def test_under_a_budget_what_stays_goes_too_where_a_step_needs_its_room(monkeypatch):
    budget = 2 * WHOLE
    training = Shapes(monkeypatch, budget=budget)
    for _ in range(4):
        training.train([SHORT])
    assert all(part.stays for part in training.schedule.parts)
    for _ in range(3):
        peak, _ = training.train([layers(WHOLE // 4)])
        assert WHOLE < peak <= budget
    assert 0 < sum(part.stays for part in training.schedule.parts) < len(training.schedule.parts)
    training.check()


MICROBATCH = st.lists(st.integers(0, WHOLE // 4), min_size=1, max_size=4).map(lambda sizes: list(enumerate(sizes, 1)))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(MICROBATCH, min_size=1, max_size=3), min_size=1, max_size=4),
    st.data(),
    st.integers(0, 2),
    st.sampled_from([None, 0.3, 0.8, 1.2]),
    st.sampled_from([1, 2, MOST_PROFILES]),
)
def test_no_step_is_above_what_releasing_throughout_has_reached(kinds, data, warmup, share, profiles):
    order = data.draw(st.lists(st.integers(0, len(kinds) - 1), min_size=4, max_size=10))
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_small_parts(monkeypatch)
        monkeypatch.setattr("bridge_fgo.offload.policy.MOST_PROFILES", profiles)
        training = Shapes(monkeypatch, step=WHOLE // 8)
        budget = None
        if share is not None:
            most = max(after for kind in kinds for _, _, after in passing(kind, warmup))
            budget = max(most, WHOLE // 8 + 2 * training.part) + int(share * WHOLE)
            training = Shapes(monkeypatch, step=WHOLE // 8, budget=budget)
        for kind in order:
            peak, reached = training.train(kinds[kind], warmup)
            assert peak <= max(reached, budget or 0) + training.part
        training.check()


# The parts.


def profile(*sizes, kind=None, scale=1):
    marks = [Mark(i, size, size) for i, size in enumerate(sizes)]
    return MemoryProfile([0, *(scale * size for size in sizes)], 0, marks, kind)


def plans(*profiles):
    return [plan_holding(each, 1000, 0, [1]) for each in profiles]


def test_the_plan_of_the_pass_that_needed_least_is_followed_as_long_as_it_holds():
    small, large = profile(1, 2, 3), profile(4, 4, 4)
    matcher = PassMatcher(plans(large, small))
    assert matcher.plan.profile is small
    assert matcher.point(Mark(0, 1, 1)) is None
    assert matcher.point(Mark(1, 3, 3)).profile is small and matcher.plan.profile is large
    assert matcher.point(Mark(2, 5, 5)).profile is large and matcher.plan is None
    assert matcher.point(Mark(3, 1, 1)) is None
    assert matcher.marks == [Mark(0, 1, 1), Mark(1, 3, 3), Mark(2, 5, 5), Mark(3, 1, 1)]


@pytest.mark.parametrize("other", [Mark(1, 2, 2), Mark(0, 3, 2), Mark(0, 2, 3), Mark(~0, 2, 2)])
def test_another_layer_a_larger_one_or_more_in_flight_is_not_covered(other):
    assert profile(2).covers(1, Mark(0, 2, 2)) and profile(2).covers(1, Mark(0, 1, 1))
    assert not profile(2).covers(1, other) and not profile(2).covers(2, Mark(0, 2, 2))


def test_passes_of_the_same_layers_are_one_profile_the_maximum_of_all():
    policy = HoldPolicy()
    for sizes in ((10, 30), (20, 10), (15, 40)):
        policy.add(profile(*sizes, kind=1))
    (merged,) = policy._profiles
    assert merged.intervals == [0, 20, 40]
    assert merged.marks == [Mark(0, 20, 20), Mark(1, 40, 40)]


@pytest.mark.parametrize(
    "other",
    [
        MemoryProfile([0, 7], 0, [Mark(0, 3, 9)], kind=1),  # more in flight, and a smaller layer
        MemoryProfile([0, 7], 0, [Mark(1, 5, 6)], kind=1),
        MemoryProfile([0, 7], 0, [Mark(0, 5, 6)], kind=2),
        MemoryProfile([0, 7, 7], 0, [Mark(0, 5, 6), Mark(1, 5, 6)], kind=1),
    ],
    ids=["not_comparable", "another_layer", "another_kind", "longer"],
)
def test_passes_of_which_none_bounds_the_other_do_not_merge(other):
    one = MemoryProfile([0, 7], 0, [Mark(0, 5, 6)], kind=1)
    assert one.can_merge(one) and not one.can_merge(other) and not other.can_merge(one)


def test_where_there_are_too_many_profiles_the_least_recently_used_goes():
    policy, parts = HoldPolicy(), [PartBytes(10, 10)]
    for kind in range(MOST_PROFILES):
        policy.add(profile(10, kind=kind))
    policy.plan(parts, expands=True)
    policy.is_exceeded(policy.plans[0], 0, parts)  # used: so the second is the oldest
    policy.add(profile(10, kind=MOST_PROFILES))
    assert [one.kind for one in policy._profiles] == [*range(2, MOST_PROFILES), 0, MOST_PROFILES]


def test_a_peak_above_the_plan_is_said_and_its_kind_holds_as_much_less():
    policy, parts, said = HoldPolicy(), [PartBytes(10, 10), PartBytes(10, 10)], []
    policy.warn = said.append
    for kind, size in ((1, 100), (2, 60)):
        policy.add(profile(size, kind=kind))
    policy.plan(parts, expands=True)
    (plan,) = policy.plans_for(2)
    assert plan.leave[1] == 100 - 60 - policy._margin(plan.profile, True)
    assert not policy.is_exceeded(plan, 110, parts) and not said
    assert policy.is_exceeded(plan, 125, parts) and len(said) == 1
    policy.plan(parts, expands=True)
    assert policy.limit == 100, "what went wrong raises no limit"
    assert policy.plans_for(2)[0].leave[1] == plan.leave[1] - 25
    assert policy.plans_for(1)[0].leave[0] == 100 - policy._margin(profile(100), True)
    assert policy.is_exceeded(policy.plans_for(2)[0], 115, parts) and len(said) == 1, "it is said once"
    policy.plan(parts, expands=True)
    assert policy.plans_for(2)[0].leave[1] == max(0, plan.leave[1] - 40)


def test_where_no_profile_covers_the_next_pass_only_some_are_measured(monkeypatch):
    training, measured = Shapes(monkeypatch), []
    add = HoldPolicy.add
    monkeypatch.setattr(HoldPolicy, "add", lambda policy, one: (measured.append(one), add(policy, one)))
    for number in range(4 * MOST_LOST):
        training.train([layers(WHOLE // 50, count=1, first=number + 1), SHORT])
    assert MOST_LOST < len(measured) <= 1 + MOST_LOST + 3
    training.check()
