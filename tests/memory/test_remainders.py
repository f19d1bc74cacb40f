"""What of a master the bf16 weight does not say: every bit comes back, or nothing is copied in part."""

from contextlib import contextmanager

import pytest
import torch
from fake_optimizer import make_distributed_optimizer, with_model
from fake_training import Meter, Training, masters_of, weights_of
from hypothesis import given, settings
from hypothesis import strategies as st
from spies import note

from bridge_fgo.config import OffloadConfig
from bridge_fgo.engines.native import NativeEngine
from bridge_fgo.memory import remainder_kernels, remainders
from bridge_fgo.memory.meters import PeakMeter
from bridge_fgo.memory.remainders import Remainders
from bridge_fgo.memory.slab import Slab, SlabState
from bridge_fgo.memory.state_tensor import WeightShard
from bridge_fgo.memory.transfers import Transfers
from bridge_fgo.states.distributed import McoreSource, MegatronSource

SIZES = [1000, 7, 70_000, 256, 33]
CHANGED = "weights of the model were changed while"
LOST = "failed; load a checkpoint"


@pytest.fixture(autouse=True)
def measures_nothing(monkeypatch):
    """Everything is released in every pass."""
    monkeypatch.setattr(Meter, "works", False)


def make(**how):
    return Training(**{"sizes": SIZES, **how})


def updated(**how):
    """Return a training of one update whose states are away, and the weights of the last optimizer's largest master."""
    training = make(**how)
    training.update()
    training.away()
    return training, weights_of(training.optimizers[-1])[2]


@contextmanager
def changed(weight):
    """A weight is another in the block."""
    kept = weight.clone()
    weight[0] += 1
    yield
    weight.copy_(kept)


def is_encoded(training):
    return any(slab.is_encoded for slab in training.slabs())


def counts_what_there_is(training):
    held = [storage for slab in training.slabs() for storage in (slab._storage, *(slab._staging_home or ())[1:])]
    return sum(storage.nbytes() for storage in held if storage is not None) == training.schedule.ledger.nbytes


def through(words):
    """Send masters of the given bits (int32) out and back; return their bits then, and whether they were encoded."""
    training = make(sizes=[len(words)])
    (master,), (weight,) = masters_of(training.optimizers[0]), weights_of(training.optimizers[0])
    master.view(torch.int32).copy_(words)
    weight.copy_(master)
    training.away()
    encoded = training.slabs()[0].is_encoded
    assert training.slabs()[0].gpu_bytes == 0
    training.engine.require_readable()
    return master.view(torch.int32).clone(), encoded


LOW_HALVES = torch.arange(2**16, dtype=torch.int32)


@pytest.mark.parametrize("high", [0, 1, 0x3F80, 0x3F81, 0x7F7F, 0x7F80 - 2, 0x8000, 0xBF81, 0xFF7F])
def test_every_low_half_comes_back_ties_and_overflows_included(high):
    words = ((high << 16) - (2**32 if high >= 0x8000 else 0)) + LOW_HALVES
    back, encoded = through(words.int())
    assert encoded and torch.equal(back, words.int())


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=600, max_size=700), st.sampled_from([64, remainders.CHUNK]))
def test_any_bits_that_are_no_nans_come_back_from_less_than_all_of_them_whatever_the_chunks(words, chunk):
    words = torch.tensor(words, dtype=torch.int32).view(torch.float32).nan_to_num(0.1).view(torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remainders, "CHUNK", chunk)
        back, encoded = through(words)
    assert encoded and torch.equal(back, words)


@pytest.mark.parametrize(("asked", "packs"), [(True, True), (True, False), (False, True)])
def test_masters_are_copied_in_part_if_asked_for_and_not_paused(asked, packs):
    training = make(master_remainders=asked)
    training.pack(packs)
    training.away()
    assert is_encoded(training) is (asked and packs)
    assert (training.engine.traffic.out >= 4 * sum(SIZES)) is not (asked and packs)


def test_what_no_weight_was_rounded_from_or_a_nan_with_a_payload_is_copied_whole_and_unchecked():
    training = make()
    for one in (*training.optimizers, *training.twins):
        weights_of(one)[0].mul_(1.5)
    training.away()
    assert not is_encoded(training)
    training.check()
    training, weight = updated(master_remainders=False)
    with changed(weight):
        training.engine.require_readable()
    training.check()
    words = torch.full((1000,), 0x7F800123, dtype=torch.int32)
    back, encoded = through(words)
    assert not encoded and torch.equal(back, words)


def save(training):
    with training.engine.saving(*training.sources, copies=True):
        pass


def settle(training):
    for slab in training.slabs():
        slab.reload()
    training.engine.settle()


def hand_out(training):
    training.handed(*training.sources)


ASK = {
    "read": lambda training: training.engine.require_readable(),
    "step": lambda training: training.update(),
    "save": save,
    "settle": settle,
    "hand out": hand_out,
    "copy to the model": lambda training: training.engine.write_back(*training.sources, lambda: None),
}


@pytest.mark.parametrize("ask", ASK)
def test_weights_changed_meanwhile_are_an_error_and_nothing_is_lost_when_they_are_put_back(ask):
    training, weight = updated()
    with changed(weight), pytest.raises(RuntimeError, match=CHANGED):
        ASK[ask](training)
    training.check()


def test_weights_changed_between_two_steps_of_one_pass_are_an_error_too():
    training, weight = updated()
    training.update()
    training.engine.offload_now()
    with changed(weight), pytest.raises(RuntimeError, match=CHANGED):
        training.update()
    training.check()


def test_weights_changed_after_a_close_that_found_no_memory_are_an_error_too(monkeypatch):
    training, weight = updated()
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(Slab, "allocate", fails(torch.OutOfMemoryError))
        training.engine.close()
    with changed(weight), pytest.raises(RuntimeError, match=CHANGED):
        training.engine.close()
    training.check()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([1.0, 2.0], [2.0, 1.0]),
        # Negated, their bits change by amounts that a linear sum does not see.
        ([1.0, -1.0, -1.0, 1.0], [-1.0, 1.0, 1.0, -1.0]),
    ],
    ids=["change_places", "cancel_in_a_sum"],
)
def test_changes_that_a_plain_sum_does_not_see_are_noticed(before, after):
    training = make()
    weight, master = weights_of(training.optimizers[0])[2], masters_of(training.optimizers[0])[2]
    weight[: len(before)] = torch.tensor(before)
    master[: len(before)] = torch.tensor(before)
    training.away()
    assert is_encoded(training)
    weight[: len(after)] = torch.tensor(after)
    with pytest.raises(RuntimeError, match=CHANGED):
        training.engine.require_readable()


def test_weights_in_another_place_are_found_and_an_offload_given_up_leaves_no_memory_behind():
    training, weight = updated()
    bucket = training.optimizers[0].buffers[-1].buckets[0]
    bucket.param_data = bucket.param_data.clone()
    with changed(weight):  # the old place
        training.engine.require_readable()
    training.check()
    training = make()
    training.engine.begin_pass()
    assert any(slab.staging is not None for slab in training.slabs())
    training.engine.require_writable()
    assert all(slab.staging is None and not slab.is_encoded for slab in training.slabs())
    assert counts_what_there_is(training)
    training.check()


class Quantized(torch.nn.Parameter):
    pass


@pytest.mark.parametrize("change", [torch.Tensor.half, lambda model: Quantized(model, requires_grad=False)])
def test_fp16_and_quantized_weights_have_no_remainders(change):
    optimizer = with_model(make_distributed_optimizer(SIZES))
    models = weights_of(optimizer)
    models[:] = map(change, models)
    engine = NativeEngine([MegatronSource(optimizer)], OffloadConfig(engine="native"), PeakMeter())
    assert engine.slabs and not any(slab.codec.family for slab in engine.slabs)


def test_masters_that_turn_out_to_be_no_rounding_after_the_step_are_an_error_of_their_own(monkeypatch):
    training = make()
    round_masters = McoreSource.copy_part

    def wrong(self, ids):
        round_masters(self, ids)
        weights_of(training.optimizers[0])[2][0] += 1

    monkeypatch.setattr(McoreSource, "copy_part", wrong)
    training.update()
    with pytest.raises(RuntimeError, match="is not what its bf16 weight was rounded from"):
        training.engine.require_readable()


def fail_to_overwrite(training, source):
    with pytest.raises(OSError, match="no such file"), training.engine.overwriting_masters(source):
        raise OSError("no such file")


def test_nothing_is_lost_where_a_writer_fails_and_the_weights_are_as_they_were():
    training, _ = updated()
    fail_to_overwrite(training, *training.sources)
    training.engine.require_whole(*training.sources, "saved")
    training.check()


def fails(kind=RuntimeError):
    def act(*_):
        raise kind("no")

    return act


@pytest.mark.parametrize(("of", "failing"), [(Remainders, "encode"), (Transfers, "copy_out")])
def test_a_copy_out_that_fails_can_be_tried_again(monkeypatch, of, failing):
    training = make()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no"):
        patch.setattr(of, failing, fails())
        training.engine.begin_pass()
    with changed(weights_of(training.optimizers[0])[2]):  # nothing has left: this is nobody's business
        training.engine.require_readable()
    training.away()
    training.check()
    assert counts_what_there_is(training)


def test_a_slab_is_copied_whole_without_memory_for_more_and_the_ledger_stays_right(monkeypatch):
    training = make()
    with monkeypatch.context() as patch:
        patch.setattr(Slab, "_take_staging", fails(torch.cuda.OutOfMemoryError))
        training.away()
    assert not is_encoded(training)
    training.check()
    training, _ = updated()
    with monkeypatch.context() as patch, pytest.raises(torch.cuda.OutOfMemoryError):
        patch.setattr(Slab, "_take_staging", fails(torch.cuda.OutOfMemoryError))  # the slab's own is there by then
        training.engine.require_readable()
    assert counts_what_there_is(training)
    released = [slab for slab in training.slabs() if slab.state is SlabState.RELEASED]
    assert released and not any(slab.gpu_bytes for slab in released)  # nobody would give it back
    training.check()
    assert counts_what_there_is(training)


def test_before_masters_leave_between_steps_the_weights_are_looked_up(monkeypatch):
    # A parameter buffer may have been let go of and taken again: a kernel would read where it was.
    training, calls = make(), []
    for name in ("locate", "encode"):
        note(monkeypatch, calls, Remainders, name, name)
    for _ in range(2):  # the second time nothing is here
        training.engine.offload_now()
        assert calls == ["locate", "encode"]


def test_slabs_whose_rows_follow_one_another_are_packed_by_one_launch(monkeypatch):
    launches = []

    class Kernel:
        def __init__(self, module, name, words, threads):
            self.name, self.words = name, words

        def launch(self, grid, stream, *words):
            assert len(words) <= sum(self.words)
            launches.append((self.name, grid, words))

    monkeypatch.setattr(remainder_kernels, "Kernel", Kernel)
    monkeypatch.setattr(remainder_kernels, "make_grid", lambda x, y: (x, y))
    monkeypatch.setattr(remainder_kernels, "current_stream", lambda index: 0)
    count = remainder_kernels.MOST_TOGETHER + 4
    weights = torch.zeros(10_000, dtype=torch.bfloat16)
    shards = [[WeightShard(weights.detach, 100 * row, 100)] * (1 + row % 2) for row in range(count)]
    sums = torch.ones(count, 2, dtype=torch.int64)
    kernels = remainder_kernels.RemainderKernels("module", [(of, [0] * len(of)) for of in shards], sums)
    kernels.look_up()
    masters = [torch.zeros(512, dtype=torch.uint8) for _ in range(count)]
    packed = [torch.zeros(300, dtype=torch.uint8) for _ in range(count)]
    moves = [(row, masters[row], packed[row], 256) for row in range(count)]
    rows = [row for row in range(count) if row != 2]
    kernels.pack([moves[row] for row in reversed(rows)])

    def launch(name, first, end):
        start = kernels._table.data_ptr() + 32 * sum(len(of) for of in shards[:first])
        at = [(masters[i].data_ptr(), packed[i].data_ptr(), packed[i].data_ptr() + 256) for i in range(first, end)]
        of = sum(len(of) for of in shards[first:end])
        return name, (1, of), (start, sums.data_ptr(), first, *(word for place in at for word in place))

    most = 3 + remainder_kernels.MOST_TOGETHER
    assert launches == [launch("pack", 0, 2), launch("pack", 3, most), launch("pack", most, count)]
    assert sums.all()
    launches.clear()
    kernels.unpack(moves[:2])
    kernels.pack(moves[1:4])
    assert launches == [launch("unpack", 0, 2), launch("pack", 1, 4)]
    assert [row for row in range(count) if not sums[row].any()] == [3]  # which was packed and not unpacked
    launches.clear()
    monkeypatch.setattr(remainder_kernels, "MOST_SEGMENTS", 3)
    kernels.unpack(moves[:4])
    assert launches == [launch("unpack", 0, 2), launch("unpack", 2, 4)]


def test_a_parameter_buffer_without_memory_is_an_error():
    kernels = remainder_kernels.RemainderKernels.__new__(remainder_kernels.RemainderKernels)
    buffer = torch.zeros(8)
    bucket = buffer[4:]  # of an emptied storage its address is not 0
    buffer.untyped_storage().resize_(0)
    assert bucket.data_ptr() != 0
    kernels._buffers, kernels._addresses = [lambda: bucket], []
    assert not kernels.look_up(required=False)  # they may be there by the time that masters are packed
    with pytest.raises(RuntimeError, match="has no GPU memory now"):
        kernels.look_up()


def test_masters_that_came_for_an_update_which_never_began_are_saved_as_they_are(monkeypatch):
    # Outside of a training step nothing calls the step torn; the host still has the encoded form of what has come.
    training, _ = updated()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no"):
        patch.setattr(Slab, "require_writable", fails())
        with training.engine.stepping(*training.sources):
            training.optimizers[0].optimizer.step()
    masters = [slab for slab in training.slabs() if slab.codec.family]
    assert not any(slab.state is SlabState.RELOADING and not slab.is_encoded for slab in masters)
    training.saved(*training.sources)


# Of two sources.


def test_the_slabs_of_all_sources_are_rows_of_one_table():
    training, _ = updated(optimizers=2)
    masters = [slab for slab in training.slabs() if slab.codec.family]
    (family,) = {slab.codec.family for slab in masters}
    assert [slab.codec.row for slab in masters] == list(range(len(family.sums))) == [0, 1]
    assert all(slab.is_encoded for slab in masters)


def test_changed_weights_of_one_source_are_no_trouble_to_the_masters_of_another():
    training, weight = updated(optimizers=2)
    engine, (source, other) = training.engine, training.sources
    with changed(weight):
        engine.require_readable(source)
        training.check_one(source)
        training.saved(source)
        for ask in (lambda: engine.require_readable(other), engine.require_readable, engine.updating, engine.close):
            with pytest.raises(RuntimeError, match=CHANGED):
                ask()
    training.check()


@pytest.mark.parametrize("inside", ["a step", "a save", "a trusted read"])
def test_trust_in_one_sources_weights_is_none_in_anothers(inside):
    training, weight = updated(optimizers=2)
    engine, (source, other) = training.engine, training.sources
    contexts = {
        "a step": lambda: engine.stepping(source),
        "a save": lambda: engine.saving(source, copies=True),
        "a trusted read": lambda: engine.masters.verified(source),
    }
    with changed(weight), contexts[inside](), pytest.raises(RuntimeError, match=CHANGED):
        engine.require_readable(other)
    training.check()


def left_as_they_are(training, source):
    pass


def touched(training, source):
    with pytest.raises(RuntimeError, match=CHANGED):
        max(masters_of(source.optimizer), key=len).sum()


@pytest.mark.parametrize("before", [left_as_they_are, touched, fail_to_overwrite])
def test_masters_that_are_given_up_are_errors_and_a_close_brings_all_the_others(before):
    training, weight = updated(optimizers=2)
    engine, (source, lost) = training.engine, training.sources
    weight[0] += 1
    before(training, lost)
    nbytes = engine.give_up_masters("given up")
    engine.close()
    training.check_one(source)
    given_up = []
    for state, twin in training.states(lost):
        try:
            assert torch.equal(state, twin)
        except RuntimeError as error:
            assert str(error) == "given up"
            given_up.append(state)
    assert nbytes == sum(each.nbytes for each in given_up) > 0
    assert {id(each) for each in given_up} <= {id(each) for each in masters_of(lost.optimizer)}
    for again in ({}, {"master_remainders": False}):
        with pytest.raises(RuntimeError, match="given up"):
            NativeEngine([lost], OffloadConfig(engine="native", **again), PeakMeter())


def test_masters_that_a_source_has_lost_forbid_all_steps_and_its_own_saves_until_they_are_written():
    training, weight = updated(optimizers=2)
    engine, (source, lost) = training.engine, training.sources
    weight[0] += 1
    fail_to_overwrite(training, lost)
    for attempt in (
        engine.updating,
        lambda: training.update_one(lost),
        lambda: engine.require_whole(lost, "saved"),
        engine.close,
    ):
        with pytest.raises(RuntimeError, match=LOST):
            attempt()
    engine.require_whole(source, "saved")
    with engine.overwriting_masters(source):
        pass
    with pytest.raises(RuntimeError, match=LOST):
        engine.updating()  # another's masters were written
    with engine.overwriting_masters(lost):
        for master, weight in zip(masters_of(training.optimizers[1]), weights_of(training.optimizers[1]), strict=True):
            master.copy_(weight)
    engine.updating()
