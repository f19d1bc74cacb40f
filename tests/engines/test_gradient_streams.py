"""No two streams meet in the gradients of a bucket, whatever a training does with them; and each wait is needed."""

import random
import threading
from contextlib import nullcontext, suppress

import pytest
import torch
from debug_transfers import DebugTransfers
from fake_ddp import FakeDdp, begin_microbatch, step, taken, with_memory
from stream_order import SIDE, TRAINING, Race, install

from bridge_fgo.engines.gradients import Gradients
from bridge_fgo.memory.gradient_bucket import BucketState, GradientBucket
from bridge_fgo.memory.transfers import CudaTransfers, Transfers
from bridge_fgo.offload.profile import Mark

COLLECTIVES = 4000
"""The stream of NCCL."""
BESIDE = 5000
"""The stream on which DDP was built: on it autograd adds, and the training stream waits for it after a backward."""


@pytest.fixture
def order(monkeypatch):
    return install(monkeypatch)


class Training:
    """Steps with errors, rereads and reductions in flight, on the training stream and beside it."""

    def __init__(self, order, seed, debug, offloads=True):
        self.order, self.random = order, random.Random(seed)
        self.transfers = CudaTransfers(torch.device("cpu"), 40)
        self.transfers.has_left = lambda bucket: self.happens(0.3)
        release = self.transfers.release

        def releases(bucket):
            if not debug and self.happens(0.05):
                raise KeyboardInterrupt
            release(bucket)

        self.transfers.release = releases
        self.ddp = FakeDdp((7,))
        self.held = [param.main_grad for param in self.ddp.params]
        self.gradients = taken(self.ddp, DebugTransfers(self.transfers, seed) if debug else self.transfers, offloads)
        self.of = self.gradients.buckets

    def somewhere(self, share=0.2):
        return self.order.aside() if self.random.random() < share else nullcontext()

    def happens(self, share):
        return self.random.random() < share

    def add(self, number):
        """A layer's kernels add to the gradients of a bucket, on the training stream, a side stream or beside it."""
        if self.happens(0.1):
            return self.fork(number)
        self.order.wait(BESIDE, self.order.clock(self.order.current))
        with self.order.on(BESIDE) if self.happens(0.3) else self.somewhere():
            for place in self.ddp.of_bucket(number):
                self.order.wait(self.order.current, self.order.clock(BESIDE))  # as autograd has it from node to node
                self.ddp.add(place, 1.0)
                self.order.write(("whole", self.of[number]))

    def fork(self, number):
        """A side stream of the model's adds to some gradients, beside the training stream, which adds to one first."""
        bucket = ("whole", self.of[number])
        first, *others = self.ddp.of_bucket(number)
        self.end_backward()  # as autograd has it from node to node
        with self.order.aside():
            with self.order.on(TRAINING):
                self.ddp.add(first, 1.0)
                self.order.read(bucket)  # as the clock has it, for which a bucket is one: they may meet the others
            for place in others:
                self.ddp.add(place, 1.0)
                self.order.read(bucket)
        self.order.write(bucket)

    def read(self, number):
        self.end_backward()  # whoever reads in the midst of one has to wait for it, also where gradients stay
        twin = self.ddp.twins[3 * number]
        with self.somewhere(0.5):
            if self.happens(0.5):
                grad = self.ddp.buckets[number].grad_data[: twin.numel()].view_as(twin)
            else:
                grad = self.ddp.params[3 * number].main_grad
            assert torch.equal(grad, twin)
            self.order.read(("whole", self.of[number]))

    def log(self):
        """Read gradients that are held, on a side stream that the training stream waits for before a backward."""
        self.order.wait(SIDE, self.order.clock(TRAINING))
        with self.order.on(SIDE):
            for number, bucket in enumerate(self.of):
                assert torch.equal(self.held[3 * number], self.ddp.twins[3 * number])
                self.order.read(("whole", bucket))

    def point(self, layer):
        with self.somewhere(), suppress(KeyboardInterrupt):
            self.gradients.point(Mark(layer, 0, 0))

    def end_backward(self):
        self.order.wait(self.order.current, self.order.clock(BESIDE))

    def reduce(self, number):
        """Start a reduction on NCCL's stream."""
        finish, order = self.ddp.reduce(number), self.order
        order.wait(COLLECTIVES, order.clock(order.current))
        order.read(("whole", self.of[number]), COLLECTIVES)
        order.write(("whole", self.of[number]), COLLECTIVES)
        finish()

    def step(self):
        layers = len(self.of)
        self.gradients.begin_pass()
        self.ddp.zero()
        microbatches = self.random.randrange(1, 5)
        idle = self.random.randrange(layers) if self.happens(0.3) else None  # experts that get no token
        for microbatch in range(microbatches):
            begin_microbatch(self.ddp, microbatch == microbatches - 1)
            for layer in range(layers):
                self.point(layer)
                if self.happens(0.03):
                    self.read(self.random.randrange(layers))
                if self.happens(0.01):
                    return  # with an error
            self.order.wait(TRAINING, self.order.clock(SIDE))
            for number in range(layers):
                if number != idle:
                    self.add(number)
                self.point(~(layers - 1 - number))
                if self.happens(0.1):
                    self.add(number)  # once more, as its copy out is under way
                if self.happens(0.03):
                    self.read(self.random.randrange(layers))
                if self.happens(0.02):
                    return  # with an error, after which autograd waits for nothing
            self.end_backward()
            if microbatch < microbatches - 1 and self.happens(0.1):
                self.log()
        for number in range(layers):
            with self.somewhere():
                self.reduce(number)
        begin_microbatch(self.ddp)
        self.point(~0)
        if self.happens(0.1):
            self.gradients.interrupted = True
            return  # with an error, after which nobody waits for the reductions
        self.order.wait(self.order.current, self.order.clock(COLLECTIVES))
        for number in range(layers):
            self.read(number)

    def run(self, steps=12):
        for _ in range(steps):
            self.step()
            if self.happens(0.2):
                self.gradients.begin_pass()
                with self.somewhere():
                    self.ddp.zero()
        with self.somewhere():
            self.gradients.close()
        assert self.ddp.different() == []


@pytest.mark.parametrize(("debug", "offloads"), [(False, True), (True, True), (False, False)])
def test_no_two_streams_meet_in_the_gradients_of_a_bucket(order, debug, offloads):
    for seed in range(6):
        training = Training(order, seed, debug, offloads)
        try:
            training.run()
        except Race as race:  # without a traceback: it would show tensors whose memory is gone
            pytest.fail(f"seed {seed}: {race}", pytrace=False)
        assert bool(training.gradients.traffic.out) is offloads


REPLACED = {
    "order_around": ("computing", lambda transfers: nullcontext()),
    "order_behind": ("computing", CudaTransfers.on_compute_stream),
    "wait_in": ("wait_in", lambda transfers, bucket: None),
    "wait_out": ("wait_out", lambda transfers, bucket: None),
    "forget": ("forget", lambda transfers, address: None),
    "joining": ("join", lambda transfers, streams: streams.add(transfers._index)),
    "wait_for_all": ("finish_all", lambda transfers: None),
    "wait_for_those_that_add": ("wait_for", lambda transfers, streams: None),
}
"""Each wait: the method of `Transfers` that waits, and a function that does nothing in its place."""


def without(what, name, of=GradientBucket):
    """Have a wait not be done in one method of a class."""

    def fault(patch):
        original = getattr(of, name)

        def unordered(bucket, *args):
            with pytest.MonkeyPatch.context() as inside:
                inside.setattr(CudaTransfers, *REPLACED[what])
                return original(bucket, *args)

        patch.setattr(of, name, unordered)

    fault.__name__ = f"{of.__name__}_{name}_without_{what}"
    return fault


def a_release_that_only_frees(patch):
    def release(bucket):
        bucket.state = BucketState.OFFLOADED
        bucket.free()

    patch.setattr(GradientBucket, "release", release)


def a_release_that_does_not_wait_at_first(patch):
    def release(bucket):
        bucket.state = BucketState.OFFLOADED
        bucket._transfers.release(bucket)

    patch.setattr(GradientBucket, "release", release)


def an_end_on_the_callers_stream(patch):
    close = Gradients.close

    def closes(gradients):
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(gradients.transfers, "computing", nullcontext)
            close(gradients)

    patch.setattr(Gradients, "close", closes)


FAULTS = [
    without("order_around", "require"), without("order_behind", "require"), without("wait_in", "require"),
    without("joining", "note"), without("joining", "_touched"), without("wait_for_those_that_add", "offload"),
    without("wait_for_those_that_add", "zero"), a_release_that_only_frees, a_release_that_does_not_wait_at_first,
    without("wait_out", "zero"), without("wait_in", "zero"), without("forget", "close"), an_end_on_the_callers_stream,
    without("wait_for_all", "begin_pass", of=Gradients), without("wait_for_all", "close", of=Gradients),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_without_one_of_the_waits_two_streams_meet(order, monkeypatch, fault):
    fault(monkeypatch)
    with pytest.raises(Race):
        for seed in range(60):
            Training(order, seed, debug=False).run()


@pytest.mark.parametrize("end", [lambda of: of.gradients.close(), lambda of: of.ddp.zero()], ids=["close", "zero"])
def test_after_an_error_in_a_backward_memory_goes_once_those_that_add_are_over(order, end):
    training = Training(order, 0, debug=False)
    training.gradients.begin_pass()
    training.ddp.zero()
    with order.on(BESIDE):
        training.ddp.add(0, 1.0)
        order.write(("whole", training.of[0]))
    end(training)  # autograd has had the training stream wait for nothing


def test_an_end_that_waits_for_a_reduction_which_never_ends_raises_and_gives_nothing_back(monkeypatch):
    transfers, is_over = Transfers(), threading.Event()
    gradients = taken(ddp := FakeDdp(), transfers)
    step(ddp, gradients)
    transfers.finish_all = is_over.wait
    with monkeypatch.context() as patch, pytest.raises(TimeoutError, match="a collective perhaps, has not ended in"):
        patch.setattr("bridge_fgo.memory.transfers.PATIENCE", 0.1)
        gradients.close()
    assert with_memory(gradients) == gradients.buckets and not ddp.buffers[0].grad_data.untyped_storage().nbytes()
    is_over.set()
    gradients.close()
    assert ddp.buffers[0].grad_data.any() and ddp.different() == []
