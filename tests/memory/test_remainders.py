"""What of a master the bf16 weight does not say: every bit comes back, or nothing is copied in part."""

from types import SimpleNamespace

import pytest
import torch
from fake_optimizer import make_distributed_optimizer, state_bytes, step, with_model
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_fgo.config import OffloadConfig
from bridge_fgo.engines.native import NativeEngine
from bridge_fgo.memory import remainder_kernels, remainders
from bridge_fgo.memory.meters import PeakMeter
from bridge_fgo.memory.remainders import Remainders
from bridge_fgo.memory.slab import Slab, SlabState
from bridge_fgo.memory.state import WeightShard
from bridge_fgo.memory.transfers import HostTransfers
from bridge_fgo.offload.debug import debugged
from bridge_fgo.offload.packing_policy import WATCHED_STEPS
from bridge_fgo.states.distributed import MegatronSource
from bridge_fgo.states.masters import MasterCopy

SIZES = [1000, 7, 70_000, 256, 33]
CHANGED = "weights of the model were changed while"


def made(count, **settings):
    """Return some optimizers with models, and the engine of which each is a source; masters are packed at once."""
    optimizers = [with_model(make_distributed_optimizer(SIZES, seed=i)) for i in range(count)]
    settings = {"master_remainders": True, **settings}
    config = OffloadConfig(engine="native", slab_bytes=2**20, piece_bytes=65536, **settings)
    sources = [MegatronSource(optimizer) for optimizer in optimizers]
    engine = NativeEngine(sources, config, PeakMeter(), transfers=debugged(HostTransfers(65536)))
    for optimizer, source in zip(optimizers, sources, strict=True):
        wrapped = optimizer._copy_main_params_to_model_params
        optimizer._copy_main_params_to_model_params = lambda s=source, w=wrapped: engine.write_back(s, w)
    return optimizers, engine


def make(**settings):
    (optimizer,), engine = made(1, **settings)
    return optimizer, engine


def update(optimizer, engine, seed):
    (source,) = [source for source in engine.sources if source.optimizer is optimizer]
    with engine.stepping(source):
        step(optimizer, seed)
        optimizer._copy_main_params_to_model_params()


def masters_of(optimizer):
    return optimizer.shard_fp32_from_float16_groups[0]


def weights_of(optimizer):
    return optimizer.model_float16_groups[0]


def master_slabs(engine):
    return [slab for slab in engine.slabs if slab.codec.family is not None]


def send_away(engine):
    engine.begin_pass()
    for slab in engine.slabs:
        slab.release()


def through(words):
    """Send masters of the given bits (int32) out and back; return their bits then, and whether they were encoded."""
    optimizer = with_model(make_distributed_optimizer([len(words)]))
    (master,), (weight,) = masters_of(optimizer), weights_of(optimizer)
    master.view(torch.int32).copy_(words)
    weight.copy_(master)
    config = OffloadConfig(engine="native", master_remainders=True)
    engine = NativeEngine([MegatronSource(optimizer)], config, PeakMeter(), transfers=HostTransfers(65536))
    send_away(engine)
    encoded = engine.slabs[0].is_encoded
    assert engine.slabs[0].gpu_bytes == 0
    engine.require_readable()
    return master.view(torch.int32).clone(), encoded


LOW_HALVES = torch.arange(2**16, dtype=torch.int32)


@pytest.mark.parametrize("high", [0, 1, 0x3F80, 0x3F81, 0x7F7F, 0x7F80 - 2, 0x8000, 0xBF81, 0xFF7F])
def test_every_low_half_comes_back_ties_and_overflows_included(high):
    words = ((high << 16) - (2**32 if high >= 0x8000 else 0)) + LOW_HALVES
    back, encoded = through(words.int())
    assert encoded
    assert torch.equal(back, words.int())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=600, max_size=700))
def test_any_bits_that_are_no_nans_come_back_from_less_than_all_of_them(words):
    words = torch.tensor(words, dtype=torch.int32).view(torch.float32).nan_to_num(0.1).view(torch.int32)
    back, encoded = through(words)
    assert encoded
    assert torch.equal(back, words)


def test_a_nan_with_a_payload_is_no_rounding_and_is_copied_whole():
    words = torch.full((1000,), 0x7F800123, dtype=torch.int32)
    back, encoded = through(words)
    assert not encoded
    assert torch.equal(back, words)


def test_chunks_do_not_change_what_is_encoded(monkeypatch):
    words = torch.randint(-(2**31), 2**31 - 1, (5000,), dtype=torch.int64).int()
    words = words.view(torch.float32).nan_to_num(1.0).view(torch.int32)
    monkeypatch.setattr(remainders, "CHUNK", 64)
    back, encoded = through(words)
    assert encoded
    assert torch.equal(back, words)


def test_twenty_steps_have_the_bits_of_a_resident_run_and_a_sixth_less_is_copied():
    resident = with_model(make_distributed_optimizer(SIZES))
    optimizer, engine = make()
    update(optimizer, engine, 0)
    step(resident, 0)
    resident._copy_main_params_to_model_params()
    for seed in range(1, 20):
        send_away(engine)
        engine.reload()
        before = engine.traffic.out
        update(optimizer, engine, seed)
        assert 0.83 < (engine.traffic.out - before) / (12 * sum(SIZES)) < 0.86  # 10 + 1/8 bytes of 12, and gaps
        step(resident, seed)
        resident._copy_main_params_to_model_params()
    assert state_bytes(optimizer) == state_bytes(resident)


@pytest.mark.parametrize(
    ("asked", "packs", "encoded"), [(True, False, True), (None, False, False), (False, True, False)]
)
def test_masters_are_copied_whole_or_in_part_as_asked_for_and_else_as_the_schedule_says(asked, packs, encoded):
    _, engine = make(master_remainders=asked)
    engine.schedule.packing.packs = packs
    send_away(engine)
    assert any(slab.is_encoded for slab in engine.slabs) is encoded
    assert (engine.traffic.out >= 4 * sum(SIZES)) is not encoded


def test_masters_that_left_whole_and_weights_that_change_need_no_check():
    optimizer, engine = make(master_remainders=None)
    engine.schedule.packing.packs = False
    before = [master.clone() for master in masters_of(optimizer)]
    send_away(engine)
    weights_of(optimizer)[2][0] += 1
    engine.require_readable()
    assert all(torch.equal(a, b) for a, b in zip(before, masters_of(optimizer), strict=True))


def test_masters_that_are_not_what_the_weights_were_rounded_from_are_copied_whole():
    optimizer, engine = make()
    weights_of(optimizer)[0].mul_(1.5)
    before = state_bytes(optimizer)
    send_away(engine)
    assert master_slabs(engine) and not any(slab.is_encoded for slab in engine.slabs)
    engine.require_readable()
    assert state_bytes(optimizer) == before


@pytest.mark.parametrize("ask", ["read", "step", "save", "settle"])
def test_weights_changed_meanwhile_are_an_error_and_nothing_is_lost_when_they_are_put_back(ask):
    optimizer, engine = make()
    update(optimizer, engine, 1)
    before = state_bytes(optimizer)
    send_away(engine)
    kept = weights_of(optimizer)[2].clone()
    weights_of(optimizer)[2][123] += 1
    if ask == "settle":
        for slab in engine.slabs:
            slab.reload()
    with pytest.raises(RuntimeError, match=CHANGED):
        if ask == "read":
            engine.require_readable()
        elif ask == "settle":
            engine.settle()
        elif ask == "save":
            with engine.saving(*engine.sources, copies=True):
                pass
        else:
            update(optimizer, engine, 2)
    weights_of(optimizer)[2].copy_(kept)
    engine.require_readable()
    assert state_bytes(optimizer) == before


def test_weights_that_change_places_are_noticed():
    optimizer, engine = make()
    send_away(engine)
    weight = weights_of(optimizer)[2]
    weight[:2] = weight[:2].flip(0).clone()
    with pytest.raises(RuntimeError, match=CHANGED):
        engine.require_readable()


def test_weights_in_another_place_than_before_are_found():
    optimizer, engine = make()
    before = state_bytes(optimizer)
    send_away(engine)
    bucket = optimizer.buffers[-1].buckets[0]
    bucket.param_data = bucket.param_data.clone()
    weights_of(optimizer)[0].zero_()  # the old place
    engine.require_readable()
    assert state_bytes(optimizer) == before


def test_whoever_overwrites_all_masters_need_not_keep_the_weights():
    optimizer, engine = make()
    send_away(engine)
    for weight in weights_of(optimizer):
        weight.fill_(3)
    with engine.overwriting_masters(*engine.sources):
        for master in masters_of(optimizer):
            master.fill_(3)
    send_away(engine)
    engine.require_readable()
    assert all((master == 3).all() for master in masters_of(optimizer))


def test_an_offload_given_up_leaves_no_memory_behind():
    optimizer, engine = make()
    before = state_bytes(optimizer)
    engine.begin_pass()
    assert any(slab.staging is not None for slab in engine.slabs)
    engine.require_writable()
    assert all(slab.staging is None and not slab.is_encoded for slab in engine.slabs)
    assert sum(slab.gpu_bytes for slab in engine.slabs) == engine.schedule.ledger.nbytes
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
        engine = NativeEngine([MegatronSource(optimizer)], OffloadConfig(engine="native"), PeakMeter())
        assert engine.slabs and master_slabs(engine) == []


def test_changes_that_would_cancel_in_a_sum_are_noticed():
    # Four neighbours whose signs are + - - +: negated, their bits change by amounts that a linear sum does not see.
    optimizer, engine = make()
    weight = weights_of(optimizer)[2]
    weight[:4] = torch.tensor([1.0, -1.0, -1.0, 1.0])
    masters_of(optimizer)[2][:4] = weight[:4].float()
    send_away(engine)
    weight[:4].neg_()
    with pytest.raises(RuntimeError, match=CHANGED):
        engine.require_readable()


def test_who_reads_one_parameter_or_copies_masters_is_told_of_changed_weights_too():
    for read in ("hand_out", "write_back"):
        optimizer, engine = make()
        send_away(engine)
        weights_of(optimizer)[2][0] += 1
        with pytest.raises(RuntimeError, match=CHANGED):
            if read == "hand_out":
                engine.hand_out(*engine.sources, masters_of(optimizer)[2], dict)
            else:
                engine.write_back(*engine.sources, lambda: None)


def test_masters_that_turn_out_to_be_no_rounding_after_the_step_are_an_error_of_their_own(monkeypatch):
    optimizer, engine = make()
    round_masters = MasterCopy.copy_part

    def wrong(self, ids):
        round_masters(self, ids)
        weights_of(optimizer)[2][0] += 1

    monkeypatch.setattr(MasterCopy, "copy_part", wrong)
    update(optimizer, engine, 1)
    with pytest.raises(RuntimeError, match="is not what its bf16 weight was rounded from"):
        engine.require_readable()


def test_masters_are_lost_where_their_writer_fails_after_the_weights_changed_until_they_are_written():
    optimizer, engine = make()
    send_away(engine)
    weights_of(optimizer)[2][0] += 1
    with pytest.raises(OSError, match="no such file"), engine.overwriting_masters(*engine.sources):
        raise OSError("no such file")
    (source,) = engine.sources
    for attempt in (
        lambda: update(optimizer, engine, 1),
        lambda: engine.require_whole(source, "saved"),
        engine.updating,
        engine.close,
    ):
        with pytest.raises(RuntimeError, match="failed; load a checkpoint"):
            attempt()
    with engine.overwriting_masters(*engine.sources):
        for master, weight in zip(masters_of(optimizer), weights_of(optimizer), strict=True):
            master.copy_(weight)
    update(optimizer, engine, 1)


def test_nothing_is_lost_where_a_writer_fails_and_the_weights_are_as_they_were():
    optimizer, engine = make()
    before = state_bytes(optimizer)
    send_away(engine)
    with pytest.raises(OSError, match="no such file"), engine.overwriting_masters(*engine.sources):
        raise OSError("no such file")
    assert state_bytes(optimizer) == before
    engine.require_whole(*engine.sources, "saved")


@pytest.mark.parametrize("failing", ["encode", "copy_out"])
def test_a_copy_out_that_fails_can_be_tried_again(monkeypatch, failing):
    optimizer, engine = make()
    before = state_bytes(optimizer)
    of = Remainders if failing == "encode" else HostTransfers

    def fails(*_):
        raise RuntimeError("no")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no"):
        patch.setattr(of, failing, fails)
        engine.begin_pass()
    weights_of(optimizer)[2][0] += 1  # nothing has left: this is nobody's business
    engine.require_readable()
    weights_of(optimizer)[2][0] -= 1
    send_away(engine)
    engine.require_readable()
    assert state_bytes(optimizer) == before
    assert sum(slab.gpu_bytes for slab in engine.slabs) == engine.schedule.ledger.nbytes


def test_a_slab_is_copied_whole_where_there_is_no_memory_for_more(monkeypatch):
    optimizer, engine = make()
    before = state_bytes(optimizer)

    def full(self):
        raise torch.cuda.OutOfMemoryError("full")

    monkeypatch.setattr(Slab, "_take_staging", full)
    send_away(engine)
    assert not any(slab.is_encoded for slab in engine.slabs)
    engine.require_readable()
    assert state_bytes(optimizer) == before


def test_the_ledger_stays_right_where_memory_runs_out_on_the_way_back(monkeypatch):
    optimizer, engine = make()
    before = state_bytes(optimizer)
    send_away(engine)

    def full(self):
        raise torch.cuda.OutOfMemoryError("full")

    with monkeypatch.context() as patch, pytest.raises(torch.cuda.OutOfMemoryError):
        patch.setattr(Slab, "_take_staging", full)  # the slab's own memory is there by then
        engine.require_readable()
    assert sum(slab.gpu_bytes for slab in engine.slabs) == engine.schedule.ledger.nbytes
    released = [slab for slab in engine.slabs if slab.state is SlabState.RELEASED]
    assert released and not any(slab.gpu_bytes for slab in released)  # nobody would give it back
    engine.require_readable()
    assert sum(slab.gpu_bytes for slab in engine.slabs) == engine.schedule.ledger.nbytes
    assert state_bytes(optimizer) == before


def test_before_masters_leave_between_steps_the_weights_are_looked_up(monkeypatch):
    # A parameter buffer may have been let go of and taken again: a kernel would read where it was.
    _, engine = make(master_remainders=True)
    calls = []
    for name in ("locate", "encode"):
        real = getattr(Remainders, name)
        monkeypatch.setattr(Remainders, name, lambda *a, n=name, r=real: (calls.append(n), r(*a))[1])
    engine.offload_now()
    assert calls == ["locate", "encode"]
    engine.offload_now()  # nothing is here
    assert calls == ["locate", "encode"]


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
    weights = torch.zeros(10_000, dtype=torch.bfloat16)
    shards = [[WeightShard(weights.detach, 100 * row, 100)] * (1 + row % 2) for row in range(count)]
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
    kernels._buffers, kernels._addresses = [lambda: bucket], []
    assert not kernels.look_up(required=False)  # they may be there by the time that masters are packed
    with pytest.raises(RuntimeError, match="has no GPU memory now"):
        kernels.look_up()


def test_masters_stay_whole_where_weights_had_no_memory_when_packed_ones_would_have_needed_it(monkeypatch):
    optimizer, engine = make(master_remainders=None)
    warned = []
    engine.schedule.holding.warn = warned.append
    (family,) = {slab.codec.family for slab in master_slabs(engine)}
    for seed in range(WATCHED_STEPS + 2):
        if seed == 2:
            with monkeypatch.context() as patch:
                patch.setattr(family, "_kernels", SimpleNamespace(look_up=lambda required: required))
                engine.offload_now()  # an evaluation, with the weights elsewhere
                engine.begin_pass()
        send_away(engine)
        update(optimizer, engine, seed)
        engine.end_step(updated=True)
    send_away(engine)
    assert not any(slab.is_encoded for slab in engine.slabs)
    assert len(warned) == 1


def test_masters_whose_decoding_was_interrupted_are_not_saved(monkeypatch):
    # Ctrl-C in a reader, then a checkpoint: the host has the copied form only, which would be taken for masters.
    optimizer, engine = make(master_remainders=True)
    engine.offload_now()

    def interrupted(slab):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Slab, "drop_staging", interrupted)
        engine.require_readable()
    params = optimizer.optimizer.param_groups[0]["params"]
    (source,) = engine.sources
    with pytest.raises(RuntimeError, match="KeyboardInterrupt came"), engine.saving(source, copies=True):
        for param in params:
            engine.hand_out(source, param, lambda p=param: {"param": p})


def test_masters_that_came_for_an_update_which_never_began_are_saved_as_they_are(monkeypatch):
    # Outside of a training step nothing calls the step torn; the host still has the encoded form of what has come.
    (optimizer,), engine = made(1)
    update(optimizer, engine, seed=0)
    engine.require_readable()
    (source,), params = engine.sources, optimizer.optimizer.param_groups[0]["params"]
    before = [param.detach().clone() for param in params]
    send_away(engine)

    def fails(slab):
        raise RuntimeError("no moments")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no moments"):
        patch.setattr(Slab, "require_writable", fails)
        with engine.stepping(source):
            optimizer.optimizer.step()
    assert not any(slab.state is SlabState.RELOADING and not slab.is_encoded for slab in master_slabs(engine))
    with engine.saving(source, copies=True):
        for param, expected in zip(params, before, strict=True):
            assert torch.equal(engine.hand_out(source, param, lambda p=param: {"param": p})["param"], expected)


def two_away():
    """Return two optimizers, both updated and away, the engine, and the states' bytes before."""
    optimizers, engine = made(2)
    for seed, optimizer in enumerate(optimizers):
        update(optimizer, engine, seed)
    engine.require_readable()
    before = [state_bytes(optimizer) for optimizer in optimizers]
    send_away(engine)
    return optimizers, engine, before


def test_the_slabs_of_all_sources_are_rows_of_one_table():
    _, engine, _ = two_away()
    families = {slab.codec.family for slab in master_slabs(engine)}
    rows = [slab.codec.row for slab in master_slabs(engine)]
    assert len(families) == 1 and rows == list(range(len(families.pop().sums))) == [0, 1]
    assert all(slab.is_encoded for slab in master_slabs(engine))


def test_changed_weights_of_one_source_are_no_trouble_to_the_masters_of_another():
    (first, second), engine, before = two_away()
    kept = weights_of(second)[2].clone()
    weights_of(second)[2][0] += 1
    source, changed = engine.sources
    engine.require_readable(source)
    assert state_bytes(first) == before[0]
    with engine.saving(source, copies=True):
        pass
    for ask in (lambda: engine.require_readable(changed), engine.require_readable, engine.updating, engine.close):
        with pytest.raises(RuntimeError, match=CHANGED):
            ask()
    weights_of(second)[2].copy_(kept)
    engine.require_readable()
    assert [state_bytes(optimizer) for optimizer in (first, second)] == before


@pytest.mark.parametrize("inside", ["a step", "a save", "a trusted read"])
def test_trust_in_one_sources_weights_is_none_in_anothers(inside):
    (_, second), engine, before = two_away()
    source, changed = engine.sources
    kept = weights_of(second)[2].clone()
    weights_of(second)[2][0] += 1
    contexts = {
        "a step": lambda: engine.stepping(source),
        "a save": lambda: engine.saving(source, copies=True),
        "a trusted read": lambda: engine.masters.verified(source),
    }
    with contexts[inside](), pytest.raises(RuntimeError, match=CHANGED):
        engine.require_readable(changed)
    weights_of(second)[2].copy_(kept)
    engine.require_readable(changed)
    assert state_bytes(second) == before[1]


def test_before_the_first_of_a_chain_is_updated_the_weights_of_all_are_checked():
    (first, second), engine, before = two_away()
    weights_of(second)[2][0] += 1
    with engine.training_step(kind=1), pytest.raises(RuntimeError, match=CHANGED):
        engine.updating()
    assert not engine.is_torn
    engine.require_readable(engine.sources[0])
    assert state_bytes(first) == before[0]


def test_masters_that_one_source_has_lost_forbid_the_steps_of_all_and_the_saves_of_it_alone():
    (_, second), engine, _ = two_away()
    source, lost = engine.sources
    weights_of(second)[2][0] += 1
    with pytest.raises(OSError, match="no such file"), engine.overwriting_masters(lost):
        raise OSError("no such file")
    for attempt in (engine.updating, lambda: engine.require_whole(lost, "saved"), engine.close):
        with pytest.raises(RuntimeError, match="failed; load a checkpoint"):
            attempt()
    engine.require_whole(source, "saved")
    with engine.overwriting_masters(source):
        pass
    with pytest.raises(RuntimeError, match="failed; load a checkpoint"):
        engine.updating()  # another's masters were written
    with engine.overwriting_masters(lost):
        for master, weight in zip(masters_of(second), weights_of(second), strict=True):
            master.copy_(weight)
    engine.updating()
