"""Gradients that come and go have the values of tensors that never move, whatever asks for them, and whatever fails."""

import contextlib
import copy
import io
import pickle

import pytest
import torch
from fake_ddp import FakeDdp, backward, begin_microbatch, forward, layout_of, states, step, taken, with_memory
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from quantized_weights import Float8Tensor

from bridge_fgo.engines import gradients as gradients_module
from bridge_fgo.engines.gradients import AHEAD, Gradients
from bridge_fgo.memory.gradient_bucket import BUCKET, BucketState, GradientBucket
from bridge_fgo.memory.transfers import Transfers
from bridge_fgo.offload.debug import DebugTransfers
from bridge_fgo.offload.profile import Mark
from bridge_fgo.sleep.gradients import Gradients as SleepingGradients

BUCKETS = (4, 2)
NUMBERS = st.integers(0, sum(BUCKETS) - 1)
PLACES = st.integers(0, 3 * sum(BUCKETS) - 1)


class NoMemory:
    """Has the next allocations fail, but for the first that are spared, as long as it is asked to."""

    def __init__(self, patch):
        self.fails = False
        self.spared = 0
        allocate = GradientBucket.allocate

        def allocates(bucket):
            if self.fails and bucket.gpu is None:
                if not self.spared:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                self.spared -= 1
            allocate(bucket)

        patch.setattr(GradientBucket, "allocate", allocates)


class AnyOrder(RuleBasedStateMachine):
    """Whatever mcore, a model's hooks and a user do with gradients, in any order."""

    @initialize(
        debug=st.booleans(),
        seed=st.integers(0, 9),
        extra=st.sets(NUMBERS, max_size=2),
        lazy=st.booleans(),
        make=st.sampled_from([torch.zeros, lambda *shape: Float8Tensor.of(torch.zeros(shape))]),
    )
    def take(self, debug, seed, extra, lazy, make):
        self.patch = pytest.MonkeyPatch()
        self.no_memory = NoMemory(self.patch)
        self.ddp = FakeDdp(BUCKETS, extra, make)
        self.before = layout_of(self.ddp)
        self.transfers = Transfers()
        if debug:
            self.transfers = DebugTransfers(self.transfers, seed)
        self.offloads = not lazy
        self.gradients = taken(self.ddp, self.transfers, self.offloads)
        self.sleeper = SleepingGradients(self.ddp.buffers, {})

    @rule(place=PLACES, value=st.integers(-5, 5))
    def add(self, place, value):
        self.ddp.add(place, value)

    @rule(number=NUMBERS)
    def add_to_a_bucket(self, number):
        for place in self.ddp.of_bucket(number):
            self.ddp.add(place, 1)

    @rule(value=st.integers(1, 3))
    def run_backward(self, value):
        backward(self.ddp, self.gradients, value)

    @rule()
    def run_forward(self):
        forward(self.ddp, self.gradients)

    @rule(layer=NUMBERS, ended=st.booleans())
    def pass_a_point(self, layer, ended):
        self.gradients.point(Mark(~layer if ended else layer, 0, 0))

    @rule(number=NUMBERS)
    def read_a_bucket(self, number):
        twins = [self.ddp.twins[place] for place in self.ddp.of_bucket(number)]
        if not hasattr(self.ddp.buckets[number].params_list[0], "main_grad_copy_in_grad_buffer"):
            assert torch.equal(self.ddp.buckets[number].grad_data, torch.cat([twin.view(-1) for twin in twins]))

    @rule(place=PLACES)
    def read(self, place):
        assert torch.equal(self.ddp.params[place].main_grad, self.ddp.twins[place])

    @rule(is_last=st.booleans())
    def begin_a_microbatch(self, is_last):
        begin_microbatch(self.ddp, is_last)

    @rule()
    def zero(self):
        self.gradients.begin_pass()
        self.ddp.zero()
        assert set(states(self.gradients)) == {"ABSENT"} and not with_memory(self.gradients)

    @rule(factor=st.sampled_from([0.5, 2.0]))
    def scale(self, factor):
        self.ddp.scale(factor)

    @rule(number=NUMBERS, layer=NUMBERS, ended=st.booleans())
    def reduce_while_points_pass(self, number, layer, ended):
        finish = self.ddp.reduce(number)
        self.pass_a_point(layer, ended)
        finish()

    @rule(place=PLACES)
    def fail_to_add(self, place):
        self.no_memory.fails = True
        try:
            self.ddp.add(place, 1)
        except torch.OutOfMemoryError:
            pass
        finally:
            self.no_memory.fails = False

    @rule(layer=NUMBERS)
    def begin_a_layer_without_memory_for_what_comes_early(self, layer):
        self.no_memory.fails = True
        self.gradients.point(Mark(layer, 0, 0))
        self.no_memory.fails = False

    @rule(keeps=st.booleans(), fails=st.booleans(), spared=st.integers(0, 2))
    def sleep_and_wake(self, keeps, fails, spared):
        if keeps:
            self.sleeper.map_hosts()
            self.sleeper.copy_out()
        self.sleeper.is_kept = keeps
        self.sleeper.empty()
        assert self.sleeper.is_away and not self.sleeper.is_here and not with_memory(self.gradients)
        self.no_memory.fails, self.no_memory.spared = fails, spared
        with contextlib.suppress(torch.OutOfMemoryError):
            self.sleeper.reload()
        self.no_memory.fails, self.no_memory.spared = False, 0
        self.sleeper.reload()
        assert self.sleeper.is_here and not self.sleeper.is_away
        for twin in () if keeps else self.ddp.twins:
            twin.zero_()

    @rule(closes=st.booleans())
    def take_anew(self, closes):
        if closes:
            self.gradients.close()
            assert layout_of(self.ddp) == self.before
            assert self.ddp.different() == []
        self.gradients = taken(self.ddp, self.transfers, self.offloads)
        for twin in self.ddp.twins:
            twin.zero_()
        for buffer in self.ddp.buffers:
            for extra in buffer.extra_main_grads:
                extra.zero_()

    @invariant()
    def memory_is_what_states_say(self):
        gone = {BucketState.ABSENT, BucketState.OFFLOADED}
        for bucket in self.gradients.buckets:
            assert (bucket.gpu is None) == (bucket.state in gone)

    def teardown(self):
        if hasattr(self, "patch"):
            self.patch.undo()
            assert self.ddp.different() == []
            self.gradients.close()
            assert self.ddp.different() == []
            assert layout_of(self.ddp) == self.before


AnyOrder.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestAnyOrder = AnyOrder.TestCase


@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.parametrize("debug", [False, True])
def test_buckets_leave_in_a_step_and_gradients_are_those_of_tensors_that_never_move(microbatches, debug):
    ddp = FakeDdp((6,), extra={1})
    transfers = Transfers()
    gradients = taken(ddp, DebugTransfers(transfers, 1) if debug else transfers)
    for number in range(3):
        step(ddp, gradients, microbatches)
        assert ddp.different() == []
        assert gradients.traffic.out == gradients.traffic.back == (number + 1) * gradients.nbytes * (microbatches - 1)


def test_at_the_end_of_a_forward_only_what_comes_early_has_memory():
    ddp = FakeDdp((8,))
    gradients = taken(ddp, Transfers())
    step(ddp, gradients)
    ddp.zero()
    begin_microbatch(ddp)
    for microbatch in range(4):
        assert len(with_memory(gradients)) <= gradients_module.MOST_LEAVING + 1
        forward(ddp, gradients)
        assert len(with_memory(gradients)) == (gradients_module.AHEAD if microbatch else 0)
        backward(ddp, gradients, 1.0)


def test_a_bucket_leaves_once_all_its_gradients_were_added_to_and_not_before():
    ddp = FakeDdp((5,))
    gradients = taken(ddp, Transfers())
    begin_microbatch(ddp)
    first, second, third = ddp.of_bucket(2)
    bucket, ended = gradients.buckets[2], Mark(~1, 0, 0)
    for microbatch in range(2):
        for place in (first, second, None, third):  # an expert gets no token in the first microbatch
            if place is not None:
                ddp.add(place, 1.0)
            gradients.point(ended)
            assert (bucket.state is BucketState.HERE) is (place != third)
        assert gradients.traffic.out == (microbatch + 1) * bucket.nbytes
        forward(ddp, gradients)
    assert ddp.different() == []


def test_what_is_being_reduced_does_not_leave_though_another_microbatch_is_said_to_come():
    # As where mcore aligns the reductions of pipeline stages: `is_last_microbatch` is reset once they have begun.
    ddp = FakeDdp((5,))
    gradients = taken(ddp, Transfers())
    begin_microbatch(ddp)
    backward(ddp, gradients, 1.0)
    finish = ddp.reduce(4)
    gradients.point(Mark(~0, 0, 0))
    assert gradients.buckets[4].state is BucketState.HERE
    finish()
    assert ddp.different() == []


def test_gradients_are_scaled_wherever_they_are():
    ddp = FakeDdp((5,), extra={0, 2})
    gradients = taken(ddp, Transfers())
    backward(ddp, gradients, 1.0)
    forward(ddp, gradients)
    ddp.scale(0.5)
    assert ddp.different() == []


def test_shards_that_mcore_keeps_of_gradients_before_they_were_taken_are_made_anew():
    ddp = FakeDdp((5,))
    ddp.reduce(3)()
    gradients = taken(ddp, Transfers())
    step(ddp, gradients)
    assert ddp.different() == []


def test_a_bucket_larger_than_its_share_stays():
    ddp = FakeDdp((3,))
    gradients = taken(ddp, Transfers())
    step(ddp, gradients)
    assert gradients.moving_bytes == gradients.traffic.out == 0 and ddp.different() == []


# Faults.


class Failing(Transfers):
    """Counts the calls of its verbs, and has one of them end with an error, before or after it is done."""

    VERBS = ("copy_out", "release", "copy_in", "wait_in", "wait_out", "computing", "on_compute_stream", "begin_pass")

    def __init__(self, fails_at=None, late=False):
        self.calls, self.fails_at, self.late = [], fails_at, late
        for name in self.VERBS:
            setattr(self, name, self._counted(name, getattr(self, name)))

    def _counted(self, name, verb):
        def call(*args):
            self.calls.append(name)
            fails = self.fails_at == len(self.calls)
            if fails and not self.late:
                raise KeyboardInterrupt
            result = verb(*args)
            if fails:
                raise KeyboardInterrupt
            return result

        return call


def calls_of_two_steps():
    transfers = Failing()
    ddp = FakeDdp((5,))
    gradients = taken(ddp, transfers)
    step(ddp, gradients)
    step(ddp, gradients)
    assert {"copy_out", "release", "copy_in", "wait_in", "wait_out"} <= set(transfers.calls)
    return len(transfers.calls)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("then_zeroes", [False, True])
def test_an_interruption_at_any_call_of_the_transfers_loses_no_gradient_and_the_next_step_is_right(late, then_zeroes):
    for call in range(1, calls_of_two_steps() + 1):
        ddp = FakeDdp((5,))
        transfers = Failing(call, late)
        gradients = taken(ddp, transfers)
        with pytest.raises(KeyboardInterrupt):
            step(ddp, gradients)
            step(ddp, gradients)
        if then_zeroes or ddp.is_zeroing:
            ddp.zero()
            assert not with_memory(gradients), call
        assert ddp.different() == [], call
        step(ddp, gradients)
        assert ddp.different() == [], call


def test_an_early_bucket_without_memory_comes_when_the_backward_needs_it(monkeypatch):
    ddp = FakeDdp((5,))
    gradients = taken(ddp, Transfers())
    no_memory, prefetch = NoMemory(monkeypatch), Gradients._prefetch
    asked = []

    def prefetches(self, buckets):
        asked.extend(bucket for bucket in buckets[:AHEAD] if bucket.state is BucketState.OFFLOADED)
        no_memory.fails = True
        prefetch(self, buckets)
        no_memory.fails = False

    monkeypatch.setattr(Gradients, "_prefetch", prefetches)
    step(ddp, gradients)
    assert ddp.different() == [] and len(asked) == 10
    assert gradients.traffic.out == 2 * gradients.nbytes


@pytest.mark.parametrize("microbatch", [1, 2])
def test_a_bucket_that_is_needed_and_finds_no_memory_is_an_error_that_loses_nothing(monkeypatch, microbatch):
    ddp = FakeDdp((5,))
    gradients = taken(ddp, Transfers())
    no_memory = NoMemory(monkeypatch)
    step(ddp, gradients, microbatch)
    for number in range(microbatch):
        ddp.zero() if number == 0 else None
        begin_microbatch(ddp)
        forward(ddp, gradients)
        if number < microbatch - 1:
            backward(ddp, gradients, 1.0)
    before = states(gradients)
    no_memory.fails = True
    with pytest.raises(torch.OutOfMemoryError):
        ddp.add(ddp.of_bucket(2)[0], 1.0)
    assert states(gradients) == before
    no_memory.fails = False
    assert ddp.different() == []
    step(ddp, gradients)
    assert ddp.different() == []


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("offloads", [False, True])
def test_buckets_that_find_no_memory_on_a_wake_are_all_away_and_come_later(monkeypatch, seed, offloads):
    ddp = FakeDdp((5,))
    gradients = taken(ddp, DebugTransfers(Transfers(), seed), offloads)
    no_memory, sleeper = NoMemory(monkeypatch), SleepingGradients(ddp.buffers, {})
    step(ddp, gradients)
    sleeper.map_hosts()
    assert sleeper.copy_out() == gradients.nbytes
    sleeper.is_kept = True
    assert sleeper.empty() == gradients.nbytes
    no_memory.fails, no_memory.spared = True, 3
    with pytest.raises(torch.OutOfMemoryError):
        sleeper.reload()
    assert sleeper.is_away and not with_memory(gradients)
    no_memory.fails = False
    assert sleeper.reload() == (gradients.nbytes, gradients.nbytes) and ddp.different() == []


# Closing, and copies.


@pytest.mark.parametrize("when", ["at once", "in a forward", "in a backward", "after a step", "zeroed"])
@pytest.mark.parametrize("debug", [False, True])
def test_closing_gives_back_one_storage_with_the_same_views_and_values(when, debug):
    ddp = FakeDdp((5, 4), extra={1})
    before = layout_of(ddp)
    transfers = Transfers()
    gradients = taken(ddp, DebugTransfers(transfers, 3) if debug else transfers)
    buckets = gradients.buckets
    if when != "at once":
        step(ddp, gradients)
    if when != "after a step":
        ddp.zero()
    if when.startswith("in"):
        begin_microbatch(ddp)
        forward(ddp, gradients)
        backward(ddp, gradients, 1.0)
        forward(ddp, gradients)
    if when == "in a backward":
        for place in ddp.of_bucket(0):
            ddp.add(place, 1.0)
        gradients.point(Mark(~8, 0, 0))
    gradients.close()
    assert layout_of(ddp) == before and ddp.different() == []
    assert [bucket._storage.nbytes() for bucket in buckets] == [0] * len(buckets)
    ddp.reduce(3)()
    assert ddp.different() == []
    gradients.close()
    assert layout_of(ddp) == before and ddp.different() == []


@pytest.mark.parametrize("at", ["_bytes of a bucket", "the second buffer"])
def test_closing_without_memory_leaves_a_buffer_as_it_is_and_may_be_tried_again(monkeypatch, at):
    ddp = FakeDdp((5, 4))
    before = layout_of(ddp)
    gradients = taken(ddp, Transfers())
    step(ddp, gradients)
    ddp.zero()
    begin_microbatch(ddp)
    backward(ddp, gradients, 1.0)
    if at == "the second buffer":
        fill, asked = gradients_module.fill, []

        def fills(*args):
            asked.append(args)
            if len(asked) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            fill(*args)

        monkeypatch.setattr(gradients_module, "fill", fills)
    else:
        forward(ddp, gradients)
        NoMemory(monkeypatch).fails = True
    with pytest.raises(torch.OutOfMemoryError):
        gradients.close()
    monkeypatch.undo()
    ddp.reduce(1)()
    ddp.reduce(7)()
    assert ddp.different() == []
    with pytest.raises(RuntimeError, match="a whole DDP buffer"):
        ddp.buffers[1].grad_data.sum()
    gradients.close()
    assert layout_of(ddp) == before and ddp.different() == []


def test_who_takes_gradients_that_others_have_takes_them_from_these():
    ddp = FakeDdp((5,))
    first = taken(ddp, Transfers())
    step(ddp, first)
    second = taken(ddp, Transfers(), offloads=False)
    assert first.buckets == []
    step(ddp, second)
    assert ddp.different() == []
    first.point(Mark(~1, 0, 0))
    first.close()
    assert len(second.buckets) == 5 and ddp.different() == []


@pytest.mark.parametrize("state", ["ABSENT", "HERE", "OFFLOADED"])
def test_a_parameter_is_copied_and_pickled_as_one_whose_gradient_stays(state):
    ddp = FakeDdp((5,))
    gradients = taken(ddp, Transfers())
    if state != "ABSENT":
        step(ddp, gradients)
    if state == "OFFLOADED":
        ddp.zero()
        begin_microbatch(ddp)
        backward(ddp, gradients, 1.0)
        forward(ddp, gradients)
    assert gradients.buckets[3].state.name == state
    place = ddp.of_bucket(3)[0]
    param, twin = ddp.params[place], ddp.twins[place]
    copied = copy.deepcopy({"of a model": param})["of a model"]
    assert type(copied) is torch.nn.Parameter and torch.equal(copied, param)
    assert not hasattr(copied, "main_grad") and gradients.buckets[3].state.name == state
    saved = io.BytesIO()
    torch.save(param, saved)
    saved.seek(0)
    for again in (pickle.loads(pickle.dumps(param)), torch.load(saved, weights_only=False)):
        assert type(again) is torch.nn.Parameter and torch.equal(again.main_grad, twin)
        assert vars(again).get(BUCKET) is None
