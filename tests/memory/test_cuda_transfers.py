"""What holds what, with CUDA's streams and events mocked: a session that is over must keep no memory."""

import copy
import ctypes
import gc
import weakref
from collections import deque
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from debug_transfers import delay
from fake_optimizer import make_distributed_optimizer, step, with_model

from bridge_fgo.config import OffloadConfig
from bridge_fgo.engines.native import NativeEngine
from bridge_fgo.memory import cuda_driver, transfers
from bridge_fgo.memory.meters import PeakMeter
from bridge_fgo.memory.transfers import CudaTransfers, Lane
from bridge_fgo.states.distributed import MegatronSource

CPU = torch.device("cpu")


class Event:
    place = 0

    def __init__(self, is_timed=False):
        self.waiting = []

    def record(self, stream):
        pass

    def block(self, stream):
        self.waiting.append(stream)

    def has_happened(self):
        return True


class Stream:
    cuda_stream = device_index = 0

    def __init__(self, *which):
        pass

    def synchronize(self):
        pass


@pytest.fixture
def mocked(monkeypatch):
    """Copies that copy nothing, on streams that are none; returns the copies as (target, source, bytes)."""
    copies = []
    monkeypatch.setattr(transfers, "Event", Event)
    monkeypatch.setattr(transfers, "current_stream", lambda index: 0)
    copier = mock.Mock(copy=lambda *args: copies.append(args[:3]))
    monkeypatch.setattr(transfers, "Copier", lambda to_gpu: copier)
    monkeypatch.setattr(transfers, "Stream", lambda: mock.Mock(handle=ctypes.c_void_p(1)))
    monkeypatch.setattr(torch.cuda, "ExternalStream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    return copies


def slab_at(host, gpu, nbytes):
    memory = mock.Mock(**{"data_ptr.return_value": host})
    return mock.Mock(
        host=mock.Mock(address=host, to_fill=lambda: memory, to_empty=lambda: memory),
        moving=mock.Mock(**{"data_ptr.return_value": gpu, "numel.return_value": nbytes}),
    )


def engine_of(optimizer, remainders):
    config = OffloadConfig(engine="native", master_remainders=remainders)
    moves = CudaTransfers(CPU, 2**20)
    return NativeEngine([MegatronSource(optimizer)], config, PeakMeter(), transfers=moves)


def engine_in_mid_pass(optimizer, remainders):
    engine = engine_of(optimizer, remainders)
    engine.begin_pass()
    engine.release()
    return engine


def test_lanes_copy_on_streams_of_their_own_which_go_when_their_copies_are_done(monkeypatch):
    # Those of PyTorch's pool are handed out to others too.
    made, calls = iter(range(100, 104)), []

    def create(stream, flags):
        stream._obj.value = next(made)
        return calls.append(("create", stream._obj.value, flags)) or 0

    library = mock.MagicMock(
        cuStreamCreate=create,
        cuStreamDestroy_v2=lambda stream: calls.append(("destroy", stream.value)),
        **{f"{name}.return_value": 0 for name in ("cuEventCreate", "cuEventRecord", "cuStreamWaitEvent")},
        cuMemcpyDtoHAsync_v2=lambda *of_copy: calls.append(("out", of_copy[3].value)),
        cuMemcpyHtoDAsync_v2=lambda *of_copy: calls.append(("in", of_copy[3].value)),
    )
    monkeypatch.setattr(cuda_driver, "_library", lambda: library)
    monkeypatch.setattr(transfers, "current_stream", lambda index: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(
        torch.cuda, "ExternalStream", lambda *of: mock.Mock(synchronize=lambda: calls.append(("synchronize", *of)))
    )
    moves = CudaTransfers(CPU, 100)
    slab = slab_at(1000, 5000, 250)
    moves.copy_out(slab)
    moves.copy_in(slab)
    out, back = (100, 101), (102, 103)
    assert calls == [
        *(("create", stream, cuda_driver.STREAM_NON_BLOCKING) for stream in out + back),
        *(("out", stream) for stream in (100, 101, 100)),
        *(("in", stream) for stream in (102, 103, 102)),
    ]
    calls.clear()
    del moves
    gc.collect()
    assert calls[:4] == [("synchronize", stream, CPU) for stream in out + back]
    assert sorted(calls[4:]) == [("destroy", stream) for stream in out + back]


@pytest.mark.parametrize("remainders", [False, True])
def test_an_optimizer_that_is_dropped_keeps_no_state_alive(mocked, monkeypatch, remainders):
    # The finalizer that drains the lanes is in a registry for good: what it holds must not lead back to the transfers,
    # by whatever way. In training the weights know their model, its config and by that the optimizer.
    optimizer = with_model(make_distributed_optimizer([1000, 70_000]))
    step(optimizer, 1)
    optimizer.engine = engine_in_mid_pass(optimizer, remainders)
    optimizer.buffers[-1].buckets[0].config = SimpleNamespace(grad_scale_func=lambda held=optimizer: held)
    host = optimizer.engine.slabs[0].host
    found = [host.tensor, host, optimizer.optimizer, optimizer.buffers[-1].param_data]
    alive = [weakref.ref(one) for one in found]
    drained = []
    monkeypatch.setattr(Stream, "synchronize", lambda stream: drained.append(alive[0]() is not None))
    del optimizer, found, host
    gc.collect()
    assert [one() for one in alive] == [None] * 4
    assert drained == [True] * 4  # of each lane's two streams, before the memory that a copy may still write goes


@pytest.mark.parametrize("remainders", [False, True])
def test_a_session_that_is_closed_lets_go_at_once(mocked, remainders):
    # Not when Python looks for cycles, which may be long after: the next session would hold as much again beside it.
    optimizer = with_model(make_distributed_optimizer([1000, 70_000]))
    step(optimizer, 1)
    gc.disable()
    try:
        engine = engine_in_mid_pass(optimizer, remainders)
        engine.require_writable()
        alive = [weakref.ref(memory) for slab in engine.slabs for memory in (slab.gpu, slab.host.tensor)]
        engine.close()
        del engine
        assert [one() for one in alive] == [None] * len(alive)
    finally:
        gc.enable()


def test_memory_of_states_that_were_replaced_goes_at_once(mocked):
    optimizer = make_distributed_optimizer([1000, 70_000])
    step(optimizer, 1)
    engine = engine_in_mid_pass(optimizer, True)
    engine.require_writable()
    (moments,) = [slab for slab in engine.slabs if slab.states[0].late]
    gpu = weakref.ref(moments.gpu)
    optimizer.optimizer.load_state_dict(copy.deepcopy(optimizer.optimizer.state_dict()))
    engine.states_replaced(*engine.sources)
    assert gpu() is None


def test_streams_take_turns_after_at_most_a_piece_of_copies_that_are_cut_without_a_gap(mocked):
    handles = []
    copier = mock.Mock(copy=lambda target, source, nbytes, stream: handles.append((stream, nbytes)))
    lane = Lane(CPU, 100, copier)
    lane._handles = ("a", "b")
    for nbytes in (250, 50, 30, 20, 1, 100):
        lane.copy(0, 0, nbytes, Event())
    assert handles == [("a", 100), ("b", 100), ("a", 50), ("a", 50), ("b", 30), ("b", 20), ("b", 1), ("a", 100)]
    slab = slab_at(1000, 5000, 250)
    transfers = CudaTransfers(CPU, 100)
    transfers.copy_out(slab)
    assert mocked == [(1000, 5000, 100), (1100, 5100, 100), (1200, 5200, 50)]
    for limit, pieces in ((200, [100, 100, 50]), (125, [100, 100, 50]), (90, [90, 90, 70])):
        mocked.clear()
        transfers.limit_pieces(limit)
        transfers.copy_in(slab)
        assert [nbytes for *_, nbytes in mocked] == pieces


class LoggingLane(Lane):
    """A lane of pieces of 100 bytes on streams "a" and "b", whose calls are in `log`; the next of a kind may fail."""

    def __init__(self):
        self.log, self.fails = [], None
        copier = mock.Mock(copy=lambda target, source, nbytes, stream: self.call("copy", nbytes, stream))
        super().__init__(CPU, 100, copier)
        self._handles, self._ends = ("a", "b"), (self.event("end of a"), self.event("end of b"))

    def call(self, kind, *rest):
        if self.fails == kind:
            self.fails = None
            raise RuntimeError
        self.log.append((kind, *rest))

    def event(self, name):
        return mock.Mock(
            place=0,
            record=lambda stream: self.call("record", name, stream),
            block=lambda stream: self.call("block", name, stream),
        )


@pytest.mark.parametrize("nbytes", [30, 80, 130])
def test_a_lane_stays_one_sequence_where_the_driver_refuses_an_event_or_to_wait(mocked, nbytes):
    lane = LoggingLane()
    lane.fails = "record"
    with pytest.raises(RuntimeError):
        lane.copy(0, 0, nbytes, lane.event("first"))
    left = min(nbytes, 100)
    assert lane.log == [("copy", left, "a")]
    if left + 80 > 100:
        lane.fails = "block"
        with pytest.raises(RuntimeError):
            lane.copy(0, 0, 80, lane.event("second"))
    lane.copy(0, 0, 80, lane.event("second"))
    between = [] if left + 80 <= 100 else [("record", "end of a", "a"), ("block", "end of a", "b")]
    stream = "b" if between else "a"
    assert lane.log[1:] == [*between, ("copy", 80, stream), ("record", "second", stream)]


def served(log, others, after):
    """Return the copies as (stream, bytes), in the order in which a copy engine serves them.

    It serves a stream for as long as that has copies ready, and then the next one that has any (`Lane`).

    Args:
        log: of a `LoggingLane`, all of which is enqueued at the start.
        others: bytes of copies that are enqueued on stream "activations" together.
        after: how many copies are done, and one more has begun, when these are enqueued.
    """
    queues, newest, happened = {"a": deque(), "b": deque(), "activations": deque()}, {}, set()
    for number, (kind, what, stream) in enumerate(log):
        if kind == "record":
            newest[what] = number
        queues[stream].append((kind, what if kind == "copy" else newest[what]))

    def has_copy(stream):
        queue = queues[stream]
        while queue and (queue[0][0] == "record" or (queue[0][0] == "block" and queue[0][1] in happened)):
            kind, event = queue.popleft()
            if kind == "record":
                happened.add(event)
        return queue and queue[0][0] == "copy"

    done, order = [], deque(queues)
    while turn := next((stream for stream in order if has_copy(stream)), None):
        order.rotate(-order.index(turn))
        done.append((turn, queues[turn].popleft()[1]))
        if len(done) == after + 1:
            queues["activations"] += [("copy", nbytes) for nbytes in others]
    return done


@pytest.mark.parametrize("sizes", [(1000,), (30,) * 40, (130, 250, 70, 100) * 4])
def test_copies_of_activations_go_together_between_pieces_of_states_after_two_at_most(mocked, sizes):
    lane = LoggingLane()
    for number, nbytes in enumerate(sizes):
        lane.copy(0, 0, nbytes, lane.event(number))
    copies = sum(kind == "copy" for kind, *_ in lane.log)
    for after in range(copies):
        done = served(lane.log, (300, 20), after)
        assert len(done) == copies + 2
        first = next(i for i, (stream, _) in enumerate(done) if stream == "activations")
        assert sum(nbytes for _, nbytes in done[after:first]) <= 2 * 100, "what is under way, and the next stream"
        assert done[first : first + 2] == [("activations", 300), ("activations", 20)]
    on_one = [(kind, what, "a") for kind, what, _ in lane.log]
    assert served(on_one, (300,), 0)[-1] == ("activations", 300), "else states would go first, all of them"


@pytest.mark.parametrize("tried_before", [False, True])
def test_a_pass_on_another_stream_waits_for_what_the_one_before_has_waited_for(mocked, monkeypatch, tried_before):
    # Else a copy in would read a host buffer that a copy out between the steps still writes.
    moves = CudaTransfers(CPU, 100)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: mock.Mock(cuda_stream=7))
    if tried_before:
        with (
            mock.patch.object(moves._here[0], "record", side_effect=RuntimeError("refused")),
            pytest.raises(RuntimeError, match="refused"),
        ):
            moves.begin_pass()
    assert moves._here[0].waiting == []
    moves.begin_pass()
    assert moves._here[0].waiting == [7]


def test_what_delays_a_copy_delays_it_also_on_the_other_stream(mocked, monkeypatch):
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextmanager(lambda: (yield))())
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    lane = Lane(CPU, 100, mock.Mock())
    lane._handles = ("a", "b")
    lane.copy(0, 0, 100, Event())
    delay(lane, 1000)
    lane.copy(0, 0, 100, Event())
    assert lane._ends[0].waiting == ["b"]


def test_the_training_stream_waits_once_for_copies_that_end_one_after_another(mocked):
    moves = CudaTransfers(CPU, 100)
    slabs = [slab_at(i, i, 8) for i in range(3)]
    landed = [moves._events(slab)[1] for slab in slabs]
    for slab in slabs:
        moves.copy_in(slab)
    for slab in (slabs[1], slabs[0], slabs[2]):
        moves.wait_in(slab)
    assert [event.waiting for event in landed] == [[], [0], [0]]
    moves.begin_pass()  # it may be another stream now
    moves.wait_in(slabs[0])
    assert landed[0].waiting == [0]


@pytest.mark.parametrize("asks", [0, 7], ids=["training", "side"])
def test_waits_of_the_training_stream_are_timed_on_it_whichever_stream_asks(mocked, monkeypatch, asks):
    current, timed = [asks], []
    monkeypatch.setattr(transfers, "current_stream", lambda index: current[-1])

    @contextmanager
    def on(stream):
        current.append(stream.cuda_stream)
        yield
        current.pop()

    @contextmanager
    def timing():
        before = list(landed.waiting)
        yield
        timed.append((current[-1], [stream for stream in landed.waiting if stream not in before]))

    monkeypatch.setattr(torch.cuda, "stream", on)
    moves, slab = CudaTransfers(CPU, 100), slab_at(0, 0, 8)
    moves.timing = timing
    landed = moves._events(slab)[1]
    moves.copy_in(slab)
    moves.wait_in(slab)
    assert timed == [(0, [0])]


class CountingEvent(Event):
    recorded = 0

    def record(self, stream):
        CountingEvent.recorded += 1


@pytest.mark.parametrize("way", ["out", "in"])
def test_copies_back_to_back_are_ordered_once_unless_something_is_enqueued_between(mocked, monkeypatch, way):
    moves = CudaTransfers(CPU, 1000)
    moves._here = CountingEvent(), CountingEvent()
    slabs = [slab_at(0, 0, 8) for _ in range(2)]

    def copy(slab, written=False):
        before = CountingEvent.recorded
        moves.copy_out(slab, written) if way == "out" else moves.copy_in(slab)
        return CountingEvent.recorded - before

    assert copy(slabs[0]) == copy(slabs[1]) == 1, "not in a block"
    with moves.back_to_back():
        assert copy(slabs[0]) == 1
        assert copy(slabs[1]) == 0
        moves.release(slabs[0])  # the stream waits before it gives the memory to the next
        assert copy(slabs[1]) == 1
        moves.wait_out(slabs[0])
        assert copy(slabs[1]) == 1
        moves.wait_in(slabs[0])
        assert copy(slabs[1]) == 1
        assert copy(slabs[1], written=True) == (way == "out")
    assert copy(slabs[0]) == 1, "what is enqueued after a block is not known to it"


def test_what_is_computed_for_a_side_streams_reader_runs_in_between_also_where_it_ends_in_an_error(monkeypatch, mocked):
    order = []

    class Ordering(Event):
        def record(self, stream):
            order.append(("record", stream))

        def block(self, stream):
            order.append(("block", stream))

    moves = CudaTransfers(CPU, 100)
    moves._here = Ordering(), Ordering()
    monkeypatch.setattr(transfers, "current_stream", lambda index: 7)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextmanager(lambda: (yield order.append("inside")))())
    # What came back before an error counts as readable, so the reader has to wait for it all the same.
    with pytest.raises(RuntimeError, match="refused"), moves.computing():
        raise RuntimeError("refused")
    assert order == [("record", 7), ("block", 0), "inside", ("record", 0), ("block", 7)]
