"""What of a master the bf16 weight does not say: every bit comes back, or nothing is copied in part."""

from types import SimpleNamespace

import pytest
import torch
from fake_optimizer import make_distributed_optimizer, state_bytes, step, with_model
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_fgo.config import OffloadConfig
from bridge_fgo.engine import remainder_kernels, remainders
from bridge_fgo.engine.debug import debugged
from bridge_fgo.engine.master_copy import WeightShard
from bridge_fgo.engine.native import NativeOffloader
from bridge_fgo.engine.peaks import PeakMeter
from bridge_fgo.engine.remainders import MasterRemainders
from bridge_fgo.engine.residency import Residency
from bridge_fgo.engine.schedule import Schedule
from bridge_fgo.engine.slab import Slab
from bridge_fgo.engine.transfers import HostTransfers

SIZES = [1000, 7, 70_000, 256, 33]
CHANGED = "weights of the model were changed while"


def make(**settings):
    optimizer = with_model(make_distributed_optimizer(SIZES))
    config = OffloadConfig(engine="native", slab_bytes=2**20, piece_bytes=65536, **settings)
    offloader = NativeOffloader(optimizer, config, Schedule(debugged(HostTransfers(65536)), PeakMeter()))
    wrapped = optimizer._copy_main_params_to_model_params
    optimizer._copy_main_params_to_model_params = lambda: offloader.copy_masters(wrapped)
    return optimizer, offloader


def update(optimizer, offloader, seed):
    with offloader.stepping():
        step(optimizer, seed)
        optimizer._copy_main_params_to_model_params()


def masters_of(optimizer):
    return optimizer.shard_fp32_from_float16_groups[0]


def weights_of(optimizer):
    return optimizer.model_float16_groups[0]


def send_away(offloader):
    offloader.offload()
    for slab in offloader._slabs:
        slab.tracker.release()


def through(words):
    """Send masters of the given bits (int32) out and back; return their bits then, and whether they were packed."""
    optimizer = with_model(make_distributed_optimizer([len(words)]))
    (master,), (weight,) = masters_of(optimizer), weights_of(optimizer)
    master.view(torch.int32).copy_(words)
    weight.copy_(master)
    schedule = Schedule(HostTransfers(65536), PeakMeter())
    offloader = NativeOffloader(optimizer, OffloadConfig(engine="native"), schedule)
    send_away(offloader)
    packed = offloader.slabs[0].is_packed
    assert offloader.slabs[0].gpu_bytes == 0
    offloader.require_readable()
    return master.view(torch.int32).clone(), packed


LOW_HALVES = torch.arange(2**16, dtype=torch.int32)


@pytest.mark.parametrize("high", [0, 1, 0x3F80, 0x3F81, 0x7F7F, 0x7F80 - 2, 0x8000, 0xBF81, 0xFF7F])
def test_every_low_half_comes_back_ties_and_overflows_included(high):
    words = ((high << 16) - (2**32 if high >= 0x8000 else 0)) + LOW_HALVES
    back, packed = through(words.int())
    assert packed
    assert torch.equal(back, words.int())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=600, max_size=700))
def test_any_bits_that_are_no_nans_come_back_from_less_than_all_of_them(words):
    words = torch.tensor(words, dtype=torch.int32).view(torch.float32).nan_to_num(0.1).view(torch.int32)
    back, packed = through(words)
    assert packed
    assert torch.equal(back, words)


def test_a_nan_with_a_payload_is_no_rounding_and_is_copied_whole():
    words = torch.full((1000,), 0x7F800123, dtype=torch.int32)
    back, packed = through(words)
    assert not packed
    assert torch.equal(back, words)


def test_chunks_do_not_change_what_is_packed(monkeypatch):
    words = torch.randint(-(2**31), 2**31 - 1, (5000,), dtype=torch.int64).int()
    words = words.view(torch.float32).nan_to_num(1.0).view(torch.int32)
    monkeypatch.setattr(remainders, "CHUNK", 64)
    back, packed = through(words)
    assert packed
    assert torch.equal(back, words)


def test_twenty_steps_have_the_bits_of_a_resident_run_and_a_sixth_less_is_copied():
    resident = with_model(make_distributed_optimizer(SIZES))
    optimizer, offloader = make()
    update(optimizer, offloader, 0)
    step(resident, 0)
    resident._copy_main_params_to_model_params()
    for seed in range(1, 20):
        send_away(offloader)
        offloader.reload()
        before = offloader.bytes_out
        update(optimizer, offloader, seed)
        assert 0.83 < (offloader.bytes_out - before) / (12 * sum(SIZES)) < 0.86  # 10 + 1/8 bytes of 12, and gaps
        step(resident, seed)
        resident._copy_main_params_to_model_params()
    assert state_bytes(optimizer) == state_bytes(resident)


@pytest.mark.parametrize(
    ("asked", "packs", "packed"), [(True, False, True), (None, False, False), (False, True, False)]
)
def test_masters_are_copied_whole_or_in_part_as_asked_for_and_else_as_the_schedule_says(asked, packs, packed):
    _, offloader = make(master_remainders=asked)
    offloader._schedule.packing.packs = packs
    send_away(offloader)
    assert any(slab.is_packed for slab in offloader.slabs) is packed
    assert (offloader.bytes_out >= 4 * sum(SIZES)) is not packed


def test_masters_that_left_whole_and_weights_that_change_need_no_check():
    optimizer, offloader = make(master_remainders=None)
    offloader._schedule.packing.packs = False
    before = [master.clone() for master in masters_of(optimizer)]
    send_away(offloader)
    weights_of(optimizer)[2][0] += 1
    offloader.require_readable()
    assert all(torch.equal(a, b) for a, b in zip(before, masters_of(optimizer), strict=True))


def test_masters_that_are_not_what_the_weights_were_rounded_from_are_copied_whole():
    optimizer, offloader = make()
    weights_of(optimizer)[0].mul_(1.5)
    before = state_bytes(optimizer)
    send_away(offloader)
    assert not any(slab.is_packed for slab in offloader.slabs if slab.remainders is not None)
    offloader.require_readable()
    assert state_bytes(optimizer) == before


@pytest.mark.parametrize("ask", ["read", "step", "save", "settle"])
def test_weights_changed_meanwhile_are_an_error_and_nothing_is_lost_when_they_are_put_back(ask):
    optimizer, offloader = make()
    update(optimizer, offloader, 1)
    before = state_bytes(optimizer)
    send_away(offloader)
    kept = weights_of(optimizer)[2].clone()
    weights_of(optimizer)[2][123] += 1
    if ask == "settle":
        for slab in offloader._slabs:
            slab.tracker.reload()
    with pytest.raises(RuntimeError, match=CHANGED):
        if ask == "read":
            offloader.require_readable()
        elif ask == "settle":
            offloader.settle()
        elif ask == "save":
            with offloader.saving(copies=True):
                pass
        else:
            update(optimizer, offloader, 2)
    weights_of(optimizer)[2].copy_(kept)
    offloader.require_readable()
    assert state_bytes(optimizer) == before


def test_weights_that_change_places_are_noticed():
    optimizer, offloader = make()
    send_away(offloader)
    weight = weights_of(optimizer)[2]
    weight[:2] = weight[:2].flip(0).clone()
    with pytest.raises(RuntimeError, match=CHANGED):
        offloader.require_readable()


def test_weights_in_another_place_than_before_are_found():
    optimizer, offloader = make()
    before = state_bytes(optimizer)
    send_away(offloader)
    bucket = optimizer.buffers[-1].buckets[0]
    bucket.param_data = bucket.param_data.clone()
    weights_of(optimizer)[0].zero_()  # the old place
    offloader.require_readable()
    assert state_bytes(optimizer) == before


def test_whoever_overwrites_all_masters_need_not_keep_the_weights():
    optimizer, offloader = make()
    send_away(offloader)
    for weight in weights_of(optimizer):
        weight.fill_(3)
    with offloader.overwriting_masters():
        for master in masters_of(optimizer):
            master.fill_(3)
    send_away(offloader)
    offloader.require_readable()
    assert all((master == 3).all() for master in masters_of(optimizer))


def test_an_offload_given_up_leaves_no_memory_behind():
    optimizer, offloader = make()
    before = state_bytes(optimizer)
    offloader.offload()
    assert any(slab.packed is not None for slab in offloader.slabs)
    offloader.require_writable()
    assert all(slab.packed is None and not slab.is_packed for slab in offloader.slabs)
    assert sum(slab.gpu_bytes for slab in offloader.slabs) == offloader._schedule.ledger.nbytes
    assert state_bytes(optimizer) == before


def test_fp16_and_quantized_weights_have_no_remainders():
    for change in ("dtype", "class"):
        optimizer = with_model(make_distributed_optimizer(SIZES))
        models = optimizer.model_float16_groups[0]
        if change == "dtype":
            models[:] = [model.half() for model in models]
        else:

            class Quantized(torch.nn.Parameter):
                pass

            models[:] = [Quantized(model, requires_grad=False) for model in models]
        schedule = Schedule(HostTransfers(65536), PeakMeter())
        offloader = NativeOffloader(optimizer, OffloadConfig(engine="native"), schedule)
        assert all(slab.remainders is None for slab in offloader.slabs)


def test_changes_that_would_cancel_in_a_sum_are_noticed():
    # Four neighbours whose signs are + - - +: negated, their bits change by amounts that a linear sum does not see.
    optimizer, offloader = make()
    weight = weights_of(optimizer)[2]
    weight[:4] = torch.tensor([1.0, -1.0, -1.0, 1.0])
    masters_of(optimizer)[2][:4] = weight[:4].float()
    send_away(offloader)
    weight[:4].neg_()
    with pytest.raises(RuntimeError, match=CHANGED):
        offloader.require_readable()


def test_who_reads_one_parameter_or_copies_masters_is_told_of_changed_weights_too():
    for read in ("hand_out", "copy_masters"):
        optimizer, offloader = make()
        send_away(offloader)
        weights_of(optimizer)[2][0] += 1
        with pytest.raises(RuntimeError, match=CHANGED):
            if read == "hand_out":
                offloader.hand_out(masters_of(optimizer)[2], dict)
            else:
                offloader.copy_masters(lambda: None)


def test_masters_that_turn_out_to_be_no_rounding_after_the_step_are_an_error_of_their_own(monkeypatch):
    optimizer, offloader = make()
    round_masters = type(offloader._master_copy).copy_part

    def wrong(self, ids):
        round_masters(self, ids)
        weights_of(optimizer)[2][0] += 1

    monkeypatch.setattr(type(offloader._master_copy), "copy_part", wrong)
    update(optimizer, offloader, 1)
    with pytest.raises(RuntimeError, match="is not what its bf16 weight was rounded from"):
        offloader.require_readable()


def test_masters_are_lost_where_their_writer_fails_after_the_weights_changed_until_they_are_written():
    optimizer, offloader = make()
    send_away(offloader)
    weights_of(optimizer)[2][0] += 1
    with pytest.raises(OSError, match="no such file"), offloader.overwriting_masters():
        raise OSError("no such file")
    for attempt in (lambda: update(optimizer, offloader, 1), lambda: offloader.require_whole("saved"), offloader.close):
        with pytest.raises(RuntimeError, match="failed; load a checkpoint"):
            attempt()
    with offloader.overwriting_masters():
        for master, weight in zip(masters_of(optimizer), weights_of(optimizer), strict=True):
            master.copy_(weight)
    update(optimizer, offloader, 1)


def test_nothing_is_lost_where_a_writer_fails_and_the_weights_are_as_they_were():
    optimizer, offloader = make()
    before = state_bytes(optimizer)
    send_away(offloader)
    with pytest.raises(OSError, match="no such file"), offloader.overwriting_masters():
        raise OSError("no such file")
    assert state_bytes(optimizer) == before
    offloader.require_whole("saved")


@pytest.mark.parametrize("failing", ["pack", "copy_out"])
def test_a_copy_out_that_fails_can_be_tried_again(monkeypatch, failing):
    optimizer, offloader = make()
    before = state_bytes(optimizer)
    of = MasterRemainders if failing == "pack" else HostTransfers

    def fails(*_):
        raise RuntimeError("no")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no"):
        patch.setattr(of, failing, fails)
        offloader.offload()
    weights_of(optimizer)[2][0] += 1  # nothing has left: this is nobody's business
    offloader.require_readable()
    weights_of(optimizer)[2][0] -= 1
    send_away(offloader)
    offloader.require_readable()
    assert state_bytes(optimizer) == before
    assert sum(slab.gpu_bytes for slab in offloader.slabs) == offloader._schedule.ledger.nbytes


def test_a_slab_is_copied_whole_where_there_is_no_memory_for_more(monkeypatch):
    optimizer, offloader = make()
    before = state_bytes(optimizer)

    def full(self):
        raise torch.cuda.OutOfMemoryError("full")

    monkeypatch.setattr(Slab, "_take_packed", full)
    send_away(offloader)
    assert not any(slab.is_packed for slab in offloader.slabs)
    offloader.require_readable()
    assert state_bytes(optimizer) == before


def test_the_ledger_stays_right_where_memory_runs_out_on_the_way_back(monkeypatch):
    optimizer, offloader = make()
    before = state_bytes(optimizer)
    send_away(offloader)

    def full(self):
        raise torch.cuda.OutOfMemoryError("full")

    with monkeypatch.context() as patch, pytest.raises(torch.cuda.OutOfMemoryError):
        patch.setattr(Slab, "_take_packed", full)  # the slab's own memory is there by then
        offloader.require_readable()
    assert sum(slab.gpu_bytes for slab in offloader.slabs) == offloader._schedule.ledger.nbytes
    released = [slab.slab for slab in offloader._slabs if slab.tracker.state is Residency.RELEASED]
    assert released and not any(slab.gpu_bytes for slab in released)  # nobody would give it back
    offloader.require_readable()
    assert sum(slab.gpu_bytes for slab in offloader.slabs) == offloader._schedule.ledger.nbytes
    assert state_bytes(optimizer) == before


def test_before_masters_leave_between_steps_the_weights_are_looked_up(monkeypatch):
    # A parameter buffer may have been let go of and taken again: a kernel would read where it was.
    _, offloader = make(master_remainders=True)
    calls = []
    for name in ("look_up", "pack"):
        real = getattr(MasterRemainders, name)
        monkeypatch.setattr(MasterRemainders, name, lambda *a, n=name, r=real: (calls.append(n), r(*a))[1])
    offloader._schedule.release_everything()
    assert calls == ["look_up", "pack"]
    offloader._schedule.release_everything()  # nothing is here
    assert calls == ["look_up", "pack"]


def test_slabs_whose_rows_follow_one_another_are_packed_by_one_launch(monkeypatch):
    launches, zeroed = [], []

    class Kernel:
        def __init__(self, module, name, words, threads):
            self.name, self.words = name, words

        def launch(self, grid, stream, *words):
            assert len(words) <= sum(self.words)
            launches.append((self.name, grid, words))

    monkeypatch.setattr(remainder_kernels, "Kernel", Kernel)
    monkeypatch.setattr(remainder_kernels, "make_grid", lambda x, y: (x, y))
    monkeypatch.setattr(remainder_kernels, "current_stream", lambda index: 0)
    monkeypatch.setattr(remainder_kernels, "fill_with_zeros", lambda *of: zeroed.append(of))
    count = remainder_kernels.MOST_TOGETHER + 4
    bucket = SimpleNamespace(param_data=torch.zeros(10_000, dtype=torch.bfloat16))
    shards = [[WeightShard(bucket, 100 * row, 100)] * (1 + row % 2) for row in range(count)]
    sums = torch.zeros(count, 2, dtype=torch.int64)
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
    assert zeroed == []
    launches.clear()
    kernels.unpack(moves[:2])
    kernels.pack(moves[1:4])
    assert launches == [launch("unpack", 0, 2), launch("pack", 1, 4)]
    assert zeroed == [(sums.data_ptr() + 16 * 3, 16, 0)]  # of the one that was packed and not unpacked
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
    kernels._buckets, kernels._addresses = [SimpleNamespace(param_data=bucket)], []
    kernels.look_up(required=False)  # they may be there by the time that masters are packed
    with pytest.raises(RuntimeError, match="has no GPU memory now"):
        kernels.look_up()


def test_masters_whose_unpacking_was_interrupted_are_not_saved(monkeypatch):
    # Ctrl-C in a reader, then a checkpoint: the host has the copied form only, which would be taken for masters.
    optimizer, offloader = make(master_remainders=True)
    offloader._schedule.release_everything()

    def interrupted(slab):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Slab, "drop_packed", interrupted)
        offloader.require_readable()
    params = optimizer.optimizer.param_groups[0]["params"]
    with pytest.raises(RuntimeError, match="KeyboardInterrupt came"), offloader.saving(copies=True):
        for param in params:
            offloader.hand_out(param, lambda p=param: {"param": p})
