"""No two streams use the same memory at once, and each wait is needed."""

import random
from collections import deque
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from debug_transfers import DebugTransfers
from fake_meter import have_clocks_rest
from fake_training import MANY_SIZES, POINTS, SIZES, WHOLE, Training, mark
from spies import before
from stream_order import HOST, TRAINING, Race, install

from bridge_fgo.memory.slab import SlabState, decode_together, encode_together
from bridge_fgo.memory.transfers import CudaTransfers, Lane
from bridge_fgo.offload import schedule
from bridge_fgo.offload.slab_queue import SlabQueue
from bridge_fgo.states.inner_step import InnerStep

RAN_ON = "CPU"

PIECE_BYTES = 3000
GATHERS = 4000  # Megatron-FSDP's stream of all-gathers


@pytest.fixture
def order(monkeypatch):
    monkeypatch.setattr(Training, "made", deque(maxlen=0))  # `train` checks them itself
    have_clocks_rest(monkeypatch.setattr)
    return install(monkeypatch)


class RandomTraining(Training):
    """A training that runs passes again, skips steps, and whose states are read on any stream at any time.

    `given` is not left to chance.
    """

    def __init__(self, order, seed, debug, **given):
        self.order, self.random = order, random.Random(seed)
        choose = self.random.choice
        layer = choose([0, WHOLE // 10, WHOLE // 4, WHOLE])
        step = choose([0, WHOLE // 2])
        budget = choose([None, None, int(4 * layer + step + WHOLE * self.random.uniform(0.9, 2.2))])
        transfers = CudaTransfers(torch.device("cpu"), PIECE_BYTES)
        transfers.shares_link |= choose([True, False])  # whether copies in go first
        self.lacks_memory = random.Random(seed)
        left = {
            "optimizers": choose([1, 2]),
            "transfers": DebugTransfers(transfers, seed) if debug else transfers,
            "master_remainders": choose([True, True, False]),
            "sizes": choose([SIZES, SIZES, MANY_SIZES]),
            "together": choose([None, WHOLE // 2, 2 * WHOLE]),
        }
        super().__init__(layer, step, **{"budget": budget} | left | given)
        self.schedule.queue._bring_up_to = partial(self.bring_up_to, self.schedule.queue)

    def use_gathered_weights(self):
        """A layer uses weights as Megatron-FSDP has them: in memory of the stream that gathers."""
        weights = ("gathered", None)
        self.order.wait(GATHERS, self.order.clock(TRAINING))
        with self.order.on(GATHERS):
            self.order.take(weights)
            self.order.write(weights)
        self.order.wait(TRAINING, self.order.clock(GATHERS))
        self.order.read(weights, TRAINING)
        self.order.let_go(weights)

    def bring_up_to(self, queue, limit):
        """Prefetch, until there is no memory, now and then."""
        SlabQueue._bring_up_to(queue, limit)
        if self.lacks_memory.random() < 0.01:
            raise torch.OutOfMemoryError("no memory")

    def somewhere(self):
        return self.order.aside() if self.random.random() < 0.3 else nullcontext()

    def read(self):
        self._access(self.engine.require_readable, self.order.read)

    def overwrite(self):
        self._access(self.engine.require_writable, self.order.write)

    def _access(self, require, access):
        with self.somewhere():
            for source in self.sources:
                require(source)
                for slab in self.slabs(source):
                    if slab.gpu is not None:
                        access(("whole", slab))

    def pairs(self, source):
        """Return them in an order of their own, as mcore asks for them in that of its buffers."""
        pairs = super().pairs(source)
        self.random.shuffle(pairs)
        return pairs

    def hand_out(self, source, param, twin):
        """Hand out states to a reader who reads them at once."""
        handed, expected = super().hand_out(source, param, twin)
        for tensor in handed.values():
            self.order.read_by_the_host(tensor)
        return handed, expected

    def save(self):
        for source in self.sources:
            with self.somewhere():
                self.saved(source, copies=self.random.random() < 0.5)

    def run_pass(self, points=POINTS):
        self._call(self.engine.begin_pass)
        if self.random.random() < 0.2:
            self.read()
        self._call(self.engine.release)
        larger = self.random.choice([1, 1, 1, 2])  # then what was planned holds no more, and all goes
        for i in range(1, points + 1):
            with self.somewhere():
                self.engine.point(mark(i, larger * self.meter.layer))
            self.use_gathered_weights()
            if self.random.random() < 0.03:
                self.random.choice([self.read, self.save])()
        if self.random.random() < 0.95:
            with self.somewhere():
                self._call(self.engine.reload)

    def _call(self, verb):
        for _ in range(self.random.choice([1, 1, 2])):
            verb()

    def between_steps(self):
        nothing, release = (lambda: None), self.engine.offload_now
        with self.somewhere():
            self.random.choice([nothing, nothing, release, self.read, self.overwrite, self.save])()
            if self.random.random() < 0.1:
                release()


@pytest.fixture
def updates_are_seen(order, monkeypatch):
    """An update writes the slabs of its part."""

    def write(inner, owner):
        for slab in () if owner is None else owner.slabs:
            if slab.gpu is not None:
                order.write(("whole", slab))

    before(monkeypatch, InnerStep, "update", write)


def train(order, seed, debug=False, **given):
    training = RandomTraining(order, seed, debug, **given)
    choose = training.random.random
    packs_from = training.random.randrange(8)
    for step in range(9):
        training.pack(step >= packs_from)
        training.step(step, passes=2 if choose() < 0.15 else 1, skip=choose() < 0.15)
        training.between_steps()
    training.check()


def seeds(first, of, debug):
    """Return the seeds below `of`; those from `first` on are for the slow lane."""
    return [pytest.param(seed, debug, marks=pytest.mark.slow if seed >= first else ()) for seed in range(of)]


@pytest.mark.parametrize(("seed", "debug"), [*seeds(6, of=30, debug=False), *seeds(3, of=10, debug=True)])
@pytest.mark.usefixtures("updates_are_seen")
def test_no_two_streams_meet_in_the_same_memory(order, seed, debug):
    try:
        train(order, seed, debug)
    except Race as race:  # without a traceback: it would show tensors whose memory is gone
        pytest.fail(str(race), pytrace=False)


@pytest.mark.usefixtures("updates_are_seen")
def test_points_that_pass_on_a_side_stream_move_slabs_on_the_training_stream(order, monkeypatch):
    seen = set()
    for name in ("_change_plan", "_hold_to"):
        move = getattr(schedule.Schedule, name)
        watched = lambda of, plan, name=name, move=move: (seen.add((name, order.current)), move(of, plan))[1]  # noqa: E731
        monkeypatch.setattr(schedule.Schedule, name, watched)
    for seed in range(4):
        train(order, seed)
    assert seen == {("_change_plan", TRAINING), ("_hold_to", TRAINING)}


def release_some(order, seed, waits):
    """Release some slabs, in any order and on any stream, whatever copies began first; return the clocks of theirs."""
    training = RandomTraining(order, seed, debug=False)
    training.step(0)
    choose, moves = training.random, training.schedule.transfers
    training.engine.require_writable()
    slabs = [slab for slab in order.slabs if slab.exists()]
    for slab in choose.sample(slabs, len(slabs)):
        with training.somewhere():
            slab.offload()
    released = choose.sample(slabs, choose.randrange(1, len(slabs) + 1))
    with training.somewhere():
        for slab in released:
            slab.release()
        if waits:
            moves.await_released()
    return {slab: moves._events(slab)[0].clock for slab in released}


def require_for_the_driver(order, copied):
    for slab, clock in copied.items():
        order._require(HOST, clock, "the driver's use", slab)


def test_what_was_released_may_go_to_the_driver_once_the_host_has_waited_and_not_before(order):
    for seed in range(8):
        require_for_the_driver(order, release_some(order, seed, waits=True))
    copied = release_some(order, 1, waits=False)
    with pytest.raises(Race):
        require_for_the_driver(order, copied)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.usefixtures("updates_are_seen")
def test_a_load_overwrites_masters_on_the_host_once_they_have_been_copied_in_to_make_weights_of(
    order, monkeypatch, waits
):
    training = RandomTraining(order, 0, debug=False)
    training.pack(False)  # as under Megatron-FSDP, where alone weights are made anew
    training.step()
    training.away()
    if not waits:
        monkeypatch.setattr(CudaTransfers, "finish_in", lambda transfers: None)
    for source in training.sources:
        training.engine.rewrite_weights(source, source.optimizer._copy_main_params_to_model_params.args[1])
        with training.engine.loading(source, everything=True), nullcontext() if waits else pytest.raises(Race):
            for slab in training.slabs(source):
                assert slab.state is SlabState.RELEASED
                order.write(("host", slab), HOST)


class Nothing:
    """An event that nobody waits for."""

    def block(self, stream):
        pass


def replaced(label, name, replacement):
    """Return a fault that has another function in the place of one of `CudaTransfers`."""

    def fault(patch):
        patch.setattr(CudaTransfers, name, replacement)

    fault.__name__ = label
    return fault


without_wait_for_what_landed = replaced("without_wait_for_what_landed", "wait_in", lambda transfers, slab: None)


def without_order_before_copies_out(patch):
    patch.setattr(CudaTransfers, "copy_out", with_lane_that_waits_for_nothing("_out", CudaTransfers.copy_out))


def without_order_before_copies_in(patch):
    patch.setattr(CudaTransfers, "copy_in", with_lane_that_waits_for_nothing("_in", CudaTransfers.copy_in))


def with_lane_that_waits_for_nothing(name, move):
    def moves(transfers, *args):
        lane = getattr(transfers, name)
        lane.copy = lambda *of_copy: Lane.copy(lane, *of_copy[:4])  # but the events to come after
        move(transfers, *args)

    return moves


def without_wait_for_a_copy_that_was_given_up(patch):
    wait_out = CudaTransfers.wait_out
    patch.setattr(CudaTransfers, "release", lambda transfers, slab: (wait_out(transfers, slab), slab.free()))
    patch.setattr(CudaTransfers, "wait_out", lambda transfers, slab: None)


def without_order_of_the_pieces(patch):
    before(patch, Lane, "copy", lambda lane, *args: setattr(lane, "_last", Nothing()))


def with_a_readers_wait_that_counts_as_the_training_streams(patch):
    def wait_for(transfers, lane, copied):
        transfers._is_ordered = False
        for stream in transfers._streams():
            if copied.place > lane.awaited:
                copied.block(stream)
                lane.awaited = copied.place

    patch.setattr(CudaTransfers, "_wait_for", wait_for)


def with_a_copy_that_counts_as_one_before(patch):
    copy = Lane.copy

    def copies(lane, target, source, nbytes, done, after):
        copy(lane, target, source, nbytes, done, after)
        done.place -= 1

    patch.setattr(Lane, "copy", copies)


def with_an_order_that_outlives_its_block(patch):
    def leave(transfers, *exception):
        transfers._is_back_to_back = False

    patch.setattr(CudaTransfers, "__exit__", leave)


def with_what_was_written_not_ordered(patch):
    copy_out = CudaTransfers.copy_out
    patch.setattr(CudaTransfers, "copy_out", lambda transfers, slab, written=True: copy_out(transfers, slab, False))


def with_masters_made_together_before_they_have_landed(patch):
    def decodes(slabs):
        with patch.context() as inside:
            without_wait_for_what_landed(inside)
            decode_together(slabs)

    patch.setattr(schedule, "decode_together", decodes)


def with_masters_packed_together_once_copies_are_ordered(patch):
    def encodes(slabs):
        slabs = list(slabs)
        moves = slabs[0].transfers
        for event in moves._now(moves._streams()):  # the updates are over, but not what packs
            for stream in moves._out._handles:
                event.block(stream)
        encoded = encode_together(slabs)
        moves._is_ordered = bool(encoded)
        return encoded

    patch.setattr(schedule, "encode_together", encodes)


with_masters_packed_together_once_copies_are_ordered.given = {  # for which chance alone takes some fifty trainings
    "budget": None, "master_remainders": True, "sizes": MANY_SIZES, "together": 2 * WHOLE,
}  # fmt: skip


def with_a_wait_for_copies_out_alone(patch):
    patch.setattr(CudaTransfers, "await_released", CudaTransfers.finish_out)


FAULTS = [
    without_order_before_copies_out, without_order_before_copies_in, without_wait_for_what_landed,
    replaced("without_wait_for_what_left", "release", lambda transfers, slab: slab.free()),
    without_wait_for_a_copy_that_was_given_up, without_order_of_the_pieces,
    with_a_readers_wait_that_counts_as_the_training_streams, with_a_copy_that_counts_as_one_before,
    with_an_order_that_outlives_its_block, with_what_was_written_not_ordered,
    replaced("with_a_readers_stream_alone", "_streams", lambda transfers: (torch.cuda.current_stream().cuda_stream,)),
    replaced("with_a_release_that_does_not_wait_for_who_asks_for_it", "computing", CudaTransfers.on_compute_stream),
    replaced("with_memory_of_the_readers_stream", "on_compute_stream", lambda transfers: nullcontext()),
    replaced("with_a_save_that_reads_at_once", "finish_out", lambda transfers: None),
    replaced("with_memory_that_the_driver_gets_at_once", "await_released", lambda transfers: None),
    with_a_wait_for_copies_out_alone,
    with_masters_made_together_before_they_have_landed,
    with_masters_packed_together_once_copies_are_ordered,
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.usefixtures("updates_are_seen")
def test_without_one_of_the_waits_two_streams_meet(order, monkeypatch, fault):
    fault(monkeypatch)
    with pytest.raises(Race):
        for seed in range(100):  # few are enough for most, but which ones depends on the order of sets
            train(order, seed, **getattr(fault, "given", {}))
