"""Gradients that come and go have the values of tensors that never move, whatever asks for them, and whatever fails."""

import contextlib
import copy
import gc
import io
import pickle

import pytest
import torch
from debug_transfers import DebugTransfers
from fake_ddp import FakeDdp, backward, begin_microbatch, forward, layout_of, states, step, taken, with_memory
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from quantized_weights import Float8Tensor
from spies import before, fail

from bridge_fgo.engines import gradients as gradients_module
from bridge_fgo.engines.gradients import MANAGED
from bridge_fgo.memory.gradient_bucket import BUCKET, BucketState, GradientBucket
from bridge_fgo.memory.guard import is_guarded
from bridge_fgo.memory.transfers import Transfers
from bridge_fgo.offload.profile import Mark
from bridge_fgo.sleep.gradient_offloader import GradientOffloader

BUCKETS = (4, 2)
NUMBERS = st.integers(0, sum(BUCKETS) - 1)
PLACES = st.integers(0, 3 * sum(BUCKETS) - 1)


HOLDS = [None, lambda gradient: gradient, lambda gradient: gradient.detach(), lambda gradient: gradient.view(-1)[:5]]
"""What somebody holds of the gradients."""


class NoMemory:
    """Has the next allocations fail, but for the first that are spared, as long as it is asked to."""

    def __init__(self, patch):
        self.fails = False
        self.spared = 0
        before(patch, GradientBucket, "allocate", self.refuse)

    def refuse(self, bucket):
        if self.fails and bucket.gpu is None:
            if not self.spared:
                raise torch.OutOfMemoryError("CUDA out of memory")
            self.spared -= 1


class AnyOrder(RuleBasedStateMachine):
    """Whatever mcore, a model's hooks and a user do with gradients, in any order."""

    @initialize(
        debug=st.booleans(),
        seed=st.integers(0, 9),
        extra=st.sets(NUMBERS, max_size=2),
        lazy=st.booleans(),
        holds=st.sampled_from(HOLDS),
        make=st.sampled_from([torch.zeros, lambda *shape: Float8Tensor.of(torch.zeros(shape))]),
    )
    def take(self, debug, seed, extra, lazy, holds, make):
        self.patch = pytest.MonkeyPatch()
        self.no_memory = NoMemory(self.patch)
        self.ddp = FakeDdp(BUCKETS, extra, make)
        self.holds, self.held = holds, []
        self.hold_anew()
        self.patch.setattr(gc, "get_objects", lambda: list(self.held))
        self.before = layout_of(self.ddp)
        self.transfers = Transfers()
        if debug:
            self.transfers = DebugTransfers(self.transfers, seed)
        self.offloads = not lazy
        self.gradients = taken(self.ddp, self.transfers, self.offloads)
        self.sleeper = GradientOffloader(self.ddp.buffers, {})

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

    @rule()
    def hold_anew(self):
        if self.holds:
            self.held = [self.holds(param.main_grad) for param in self.ddp.params]

    @rule(place=PLACES)
    def read_what_is_held(self, place):
        assert not self.held or torch.equal(self.held[place], self.twin(place))

    def twin(self, place):
        """Return of a gradient's twin what is held of the gradient."""
        return self.ddp.twins[place].view(-1)[: self.held[place].numel()].view_as(self.held[place])

    @rule(place=PLACES, value=st.integers(-5, 5))
    def write_what_is_held(self, place, value):
        if self.held:
            self.held[place].add_(value)
            self.twin(place).add_(value)

    @rule(number=NUMBERS)
    def write_a_bucket(self, number):
        bucket, places = self.ddp.buckets[number], self.ddp.of_bucket(number)
        if not hasattr(bucket.params_list[0], "main_grad_copy_in_grad_buffer"):
            bucket.grad_data.mul_(2)
            for place in places:
                self.ddp.twins[place].mul_(2)

    @rule(is_last=st.booleans())
    def begin_a_microbatch(self, is_last):
        begin_microbatch(self.ddp, is_last)

    @rule()
    def zero(self):
        self.gradients.begin_pass()
        self.ddp.zero()
        self.gradients.guard_views()
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
        self.no_memory.fails, before = True, states(self.gradients)
        try:
            self.ddp.add(place, 1)
        except torch.OutOfMemoryError:
            assert states(self.gradients) == before
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
        self.sleeper.empty(keeps)
        assert self.sleeper.is_away and not self.sleeper.is_here and not with_memory(self.gradients)
        self.no_memory.fails, self.no_memory.spared = fails, spared
        try:
            self.sleeper.reload()
        except torch.OutOfMemoryError:
            assert self.sleeper.is_away and not with_memory(self.gradients), "all of them are away, and come later"
        self.no_memory.fails, self.no_memory.spared = False, 0
        self.sleeper.reload()
        assert self.sleeper.is_here and not self.sleeper.is_away
        for twin in () if keeps else self.ddp.twins:
            twin.zero_()

    @rule(place=PLACES)
    def copy_a_parameter(self, place):
        param, before = self.ddp.params[place], states(self.gradients)
        if isinstance(param, Float8Tensor) or BUCKET not in vars(param):
            return
        copied = copy.deepcopy({"of a model": param})["of a model"]
        assert type(copied) is torch.nn.Parameter and torch.equal(copied, param)
        assert not hasattr(copied, "main_grad") and states(self.gradients) == before
        torch.save(param, saved := io.BytesIO())
        saved.seek(0)
        for again in (pickle.loads(pickle.dumps(param)), torch.load(saved, weights_only=False)):
            assert type(again) is torch.nn.Parameter and torch.equal(again.main_grad, self.ddp.twins[place])
            assert vars(again).get(BUCKET) is None

    @rule(number=NUMBERS, closes=st.booleans(), reduces=st.booleans(), fails=st.sampled_from([None, None, -1, 0, 1]))
    def take_anew(self, number, closes, reduces, fails):
        before = self.gradients
        if closes:
            if fails is not None:
                self.fail_to_close(fails)
            self.close()
            if reduces:  # so that mcore has shards of what is taken
                self.ddp.reduce(number)()
        self.gradients = taken(self.ddp, self.transfers, self.offloads)
        assert before.buckets == []
        before.point(Mark(~1, 0, 0))
        before.close()
        assert len(self.gradients.buckets) == sum(BUCKETS)
        for twin in self.ddp.twins:
            twin.zero_()
        for buffer in self.ddp.buffers:
            for extra in buffer.extra_main_grads:
                extra.zero_()

    def fail_to_close(self, buffer):
        """Try to close without memory for a buffer, or for a bucket where that is -1: what is left is as it was."""
        self.no_memory.fails = buffer < 0
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(torch.OutOfMemoryError):
            fail(patch, gradients_module, "fill", torch.OutOfMemoryError, call=buffer + 1)
            self.gradients.close()
        self.no_memory.fails = False
        assert self.ddp.different() == []
        for each in self.ddp.buffers:
            if MANAGED in vars(each):
                with pytest.raises(RuntimeError, match="a whole DDP buffer"):
                    each.grad_data.sum()

    def close(self):
        buckets = self.gradients.buckets
        for _ in range(2):
            self.gradients.close()
            assert layout_of(self.ddp) == self.before and self.ddp.different() == []
        assert [bucket._storage.nbytes() for bucket in buckets] == [0] * len(buckets)

    @invariant()
    def memory_is_what_states_say(self):
        gone = {BucketState.ABSENT, BucketState.OFFLOADED}
        for bucket in self.gradients.buckets:
            assert (bucket.gpu is None) == (bucket.state in gone)

    def teardown(self):
        if hasattr(self, "patch"):
            self.patch.undo()
            assert self.ddp.different() == []
            self.close()


AnyOrder.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestAnyOrder = AnyOrder.TestCase


def test_a_bucket_leaves_once_all_its_gradients_were_added_to_and_one_larger_than_its_share_stays():
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

    ddp = FakeDdp((3,))
    gradients = taken(ddp, Transfers())
    step(ddp, gradients)
    assert gradients.moving_bytes == gradients.traffic.out == 0 and ddp.different() == []


def test_a_use_of_a_held_gradient_brings_its_bucket_until_the_next_point_and_others_have_no_guard():
    ddp, transfers = FakeDdp((5,)), Transfers()
    transfers.has_left = lambda bucket: False
    gradients = taken(ddp, transfers)
    held = ddp.params[4].main_grad
    begin_microbatch(ddp)
    backward(ddp, gradients, 1.0)
    gradients.point(Mark(0, 0, 0))
    gradients._release(0)
    assert set(states(gradients)) == {"OFFLOADED"}
    guarded = [place for place, param in enumerate(ddp.params) if is_guarded(vars(param)["main_grad"])]
    assert guarded == [4] and all(is_guarded(bucket.grad_data) for bucket in ddp.buckets)
    assert torch.equal(held, ddp.twins[4]) and states(gradients).count("HERE") == 1
    gradients.point(Mark(0, 0, 0))
    assert gradients.buckets[1].state is BucketState.OFFLOADING and is_guarded(held)
    held.add_(1.0)
    ddp.twins[4].add_(1.0)
    assert gradients.buckets[1].state is BucketState.HERE and ddp.different() == []


def test_copies_of_four_buckets_at_most_are_under_way_however_slow_and_none_at_the_end_of_a_forward():
    transfers, ddp, under_way = Transfers(), FakeDdp((7,)), []
    transfers.has_left = lambda bucket: False
    gradients = taken(ddp, transfers)
    point = gradients.point

    def passes(mark):
        point(mark)
        under_way.append(states(gradients).count("OFFLOADING"))

    gradients.point = passes
    begin_microbatch(ddp)
    forward(ddp, gradients)
    backward(ddp, gradients, 1.0)
    forward(ddp, gradients)
    assert under_way == [0] * 7 + [1, 2, 3, 4, 4, 4] + [4] * 5 + [0] * 2


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
def test_an_interruption_at_any_call_of_the_transfers_loses_no_gradient_and_the_next_step_is_right(late):
    for call in range(1, calls_of_two_steps() + 1):
        ddp = FakeDdp((5,))
        transfers = Failing(call, late)
        gradients = taken(ddp, transfers)
        with pytest.raises(KeyboardInterrupt):
            step(ddp, gradients)
            step(ddp, gradients)
        if (call + late) % 2 or ddp.is_zeroing:
            ddp.zero()
            assert not with_memory(gradients), call
        assert ddp.different() == [], call
        step(ddp, gradients)
        assert ddp.different() == [], call
