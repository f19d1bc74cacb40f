"""What a checkpoint is given: right bytes, in memory that nothing writes, and no slab moved that need not be.

With a background worker host buffers are lent to it. Any order of steps, saves and loads: `engines/test_any_order.py`.
"""

import copy
import gc
import pickle
import resource
from multiprocessing.reduction import DupFd, ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from fake_optimizer import make_distributed_optimizer, step
from fake_training import Training, masters_of
from spies import fail, note
from stream_order import install

from bridge_fgo.bridge import patch, state_wrappers
from bridge_fgo.config import OffloadConfig
from bridge_fgo.engines import checkpoints
from bridge_fgo.engines.lease import Attachment
from bridge_fgo.engines.native import NativeEngine
from bridge_fgo.memory import host_buffer
from bridge_fgo.memory.host_buffer import LentStorage, SharedHostBuffer, shared_copy
from bridge_fgo.memory.meters import PeakMeter
from bridge_fgo.memory.slab import SlabState
from bridge_fgo.memory.transfers import CudaTransfers, Transfers
from bridge_fgo.offload import snapshot
from bridge_fgo.states.distributed import MegatronSource

SIZES = [300_000, 1000, 500_000, 64, 700_000, 128]


def made(**settings):
    """Return a training whose states are all released."""
    training = Training(**{"sizes": SIZES, "master_remainders": False, **settings})
    training.update()
    training.away()
    return training


def lending(**settings):
    training = made(**settings)
    training.engine.use_worker_memory()
    return training


def save(training):
    return training.saved(*training.sources)


def one_step(training):
    training.step()
    training.away()


def clones(tensors):
    return [tensor.clone() for tensor in tensors]


def are_equal(tensors, expected):
    return all(torch.equal(*pair) for pair in zip(tensors, expected, strict=True))


def is_lent(training, tensor):
    """Whether the tensor's memory is a host buffer's: what is written there is seen in it."""
    hosts = [(slab.host.address, slab.host.address + slab.nbytes) for slab in training.slabs()]
    return any(start <= tensor.data_ptr() < end for start, end in hosts)


def are_lent(training, tensors):
    (lent,) = {is_lent(training, tensor) for tensor in tensors}
    return lent


def goes_as_it_is(tensor):
    """Check that mcore and torch hand a tensor to another process without a copy."""
    assert tensor.untyped_storage().nbytes() == tensor.nbytes, "mcore would copy a part of a storage"
    place = tensor.data_ptr()
    ForkingPickler.dumps(tensor)
    assert tensor.data_ptr() == place, "torch would copy what is in no shared memory"


# Copies.


def in_bf16():
    """Return an Adam with states in 16 bits, which a save reads as fp32, all released; its engine, and the source."""
    optimizer = make_distributed_optimizer(SIZES)
    for param in masters_of(optimizer):  # TE keeps moments in 16 bits beside fp32 masters; torch's Adam has one dtype
        param.data = param.data.bfloat16()
    optimizer.optimizer.master_weights = True  # by which it is TE's Adam with masters of its own
    dtypes = {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16, "master_param": torch.float32}
    optimizer.optimizer.name_to_dtype_map = dtypes
    source = MegatronSource(optimizer)
    engine = NativeEngine([source], OffloadConfig(engine="native"), PeakMeter(), transfers=Transfers())
    step(optimizer, 1)
    before = {id(param): clones(moments(optimizer, param)) for param in masters_of(optimizer)}
    engine.begin_pass()
    engine.release()
    return optimizer, engine, source, before


def moments(optimizer, param):
    state = optimizer.optimizer.state[param]
    return [state["exp_avg"], state["exp_avg_sq"]]


def test_states_that_are_read_in_another_dtype_come_back_a_few_parts_at_a_time(monkeypatch):
    monkeypatch.setattr(snapshot.Snapshot, "most_borrowed", 1)
    optimizer, engine, source, before = in_bf16()
    present = []

    def read(param):
        present.append(sum(slab.gpu_bytes > 0 for slab in engine.slabs))
        return dict(zip("ab", (moment.float() for moment in moments(optimizer, param)), strict=True))

    with engine.saving(source, copies=True):
        for param in masters_of(optimizer):
            handed = engine.hand_out(source, param, lambda param=param: read(param))
            assert are_equal(handed.values(), [moment.float() for moment in before[id(param)]])
    assert 0 < max(present) < len(engine.slabs) // 2
    assert {slab.state for slab in engine.slabs} == {SlabState.RELEASED}
    engine.require_readable()
    assert all(are_equal(moments(optimizer, param), before[id(param)]) for param in masters_of(optimizer))


def test_what_is_saved_from_and_loaded_into_is_host_memory_whatever_the_default_device():
    optimizer, engine, source, before = in_bf16()
    param = masters_of(optimizer)[0]
    with torch.device("meta"), engine.loading(source):
        handed = engine.hand_out(source, param, lambda: dict(optimizer.optimizer.state[param]))
        copies = [copied(before[id(param)][0]) for copied in (shared_copy, snapshot.host_copy)]
    assert {value.device.type for value in handed.values()} == {"cpu"}
    assert are_equal(copies, 2 * before[id(param)][:1])


def test_parts_that_take_turns_in_a_save_come_back_once():
    optimizer, engine, source, _ = in_bf16()
    turns = [masters_of(optimizer)[number] for number in (0, 2, 4)]
    parts = {id(part): part for part in map(engine._offloaded[source].owners.get, map(id, turns))}
    with engine.saving(source, copies=True):
        for param in 3 * turns:
            engine.hand_out(source, param, lambda: {})
    assert len(parts) == 3
    assert engine.traffic.back == sum(slab.codec.link_bytes for part in parts.values() for slab in part.slabs)


def test_what_interrupts_a_save_comes_out_and_the_rest_of_what_was_borrowed_goes_back(monkeypatch):
    optimizer, engine, source, _ = in_bf16()
    borrowed = []
    fail(monkeypatch, Transfers, "copy_in", KeyboardInterrupt, call=3)
    note(monkeypatch, borrowed, Transfers, "copy_in", lambda transfers, slab: slab)
    with pytest.raises(KeyboardInterrupt), engine.saving(source, copies=True):
        for param in masters_of(optimizer):
            engine.hand_out(source, param, lambda: {})
    assert [slab.interrupted for slab in engine.slabs if slab in borrowed] == ["", "", "KeyboardInterrupt"]
    assert all(slab.state is SlabState.RELEASED for slab in engine.slabs if slab is not borrowed[2])


def test_what_is_not_offloaded_is_saved_as_it_is_and_what_a_load_does_not_write_is_kept():
    training = made(fraction=0.2)
    (source,) = training.sources
    offloaded = {i for part in training.parts() for i in part.ids}
    left = next(pair for pair in training.pairs(source) if id(pair[0]) not in offloaded)
    with training.engine.saving(source, copies=True):
        assert training.hand_out(source, *left)[0]["param"] is left[0]

    training = made()
    (source,) = training.sources
    param, twin = training.pairs(source)[0]
    new = torch.full_like(param, 3.0)
    for one, of in ((source.optimizer, param), (training.twins[0], twin)):
        one.optimizer.state[of]["exp_avg"] = new.clone()
    mine = source.optimizer.optimizer.state[param]["exp_avg"]
    assert not any(tensor.data_ptr() == mine.data_ptr() for tensor in save(training))

    training = lending()
    handed = save(training)
    expected = clones(handed)
    with training.engine.loading(*training.sources):
        pass
    training.check()
    assert are_equal(handed, expected)


def test_each_of_two_optimizers_that_are_saved_at_once_hands_out_its_own_states_and_moves_none():
    training = made(optimizers=2)
    one, other = training.sources
    with training.engine.saving(one, copies=True), training.engine.saving(other, copies=False):
        for source in training.sources:
            training.handed(source)
    assert training.residencies == {SlabState.RELEASED}


def test_a_checkpoints_state_dict_does_not_have_te_read_states_that_mcore_drops(monkeypatch):
    training = made()
    (source,), (param, *_) = training.sources, masters_of(training.optimizers[0])

    class Adam:
        state = source.optimizer.optimizer.state

        def get_unscaled_state(self, param, name):
            return self.state[param][name].float() + 1  # reads: of released memory

    for module in (state_wrappers, patch):
        monkeypatch.setattr(module, "attachment_of", lambda _: Attachment(training.engine, source))
    distributed = SimpleNamespace(optimizer=Adam())

    def state_dict():
        return distributed.optimizer.get_unscaled_state(param, "exp_avg")

    with training.engine.saving(source, copies=True):
        found = state_wrappers.reads_no_states(state_dict, distributed, (), {})
        assert found is Adam.state[param]["exp_avg"]
    assert "get_unscaled_state" not in vars(distributed.optimizer)
    assert training.residencies == {SlabState.RELEASED}
    state_wrappers.reads_no_states(state_dict, distributed, (), {})
    assert training.residencies == {SlabState.RESIDENT}


# Lent buffers.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", [(7,), (250, 3), (40, 25)])
def test_a_shared_copy_has_the_bits_and_goes_to_another_process_as_it_is(dtype, shape):
    tensor = torch.arange(torch.Size(shape).numel()).to(dtype).reshape(shape)
    for each in (tensor, tensor.t() if len(shape) > 1 else tensor):
        copied = shared_copy(each)
        assert torch.equal(copied, each) and copied.dtype == dtype and copied.is_contiguous()
        goes_as_it_is(copied)


def test_a_lent_state_is_the_whole_of_a_shared_storage_and_a_copy_of_it_is_ordinary_memory():
    training = lending()
    for tensor in save(training):
        assert is_lent(training, tensor)
        goes_as_it_is(tensor)
    state = save(training := lending())[0]
    assert is_lent(training, state)
    for other in (copy.deepcopy(state), state.clone(), state.to(torch.bfloat16)):
        assert not isinstance(other.untyped_storage(), LentStorage)
        assert torch.equal(pickle.loads(ForkingPickler.dumps(other)), state.to(other.dtype))


def test_steps_write_no_byte_that_a_writer_reads_and_saves_get_copies_until_it_is_done():
    training = lending()
    first = save(training)
    of_first, lenders = clones(first), [slab for slab in training.slabs() if slab.is_lent]
    read = [slab.host for slab in lenders]
    assert [t.data_ptr() for t in save(training)] == [t.data_ptr() for t in first], "no step was between"
    for _ in range(3):
        one_step(training)
    assert lenders and not any(slab.host in read for slab in lenders)
    second = save(training)
    of_second = clones(second)
    assert not are_lent(training, second)
    one_step(training)
    assert are_equal(first, of_first) and are_equal(second, of_second)
    del first
    third = save(training)
    of_third = clones(third)
    assert are_lent(training, third)
    one_step(training)
    assert [slab.host for slab in lenders] == read
    assert are_equal(third, of_third)


@pytest.mark.parametrize("packs", [False, True])
def test_states_on_the_gpu_are_lent_whole_and_stay_there(packs):
    training = lending(master_remainders=packs)
    training.engine.require_writable()
    handed = save(training)
    expected = clones(handed)
    assert training.residencies == {SlabState.OFFLOADING} and are_lent(training, handed)
    assert not any(slab.is_encoded for slab in training.slabs())
    training.update()
    assert are_equal(handed, expected)


@pytest.mark.parametrize("on_their_way", [False, True])
def test_masters_that_were_copied_in_part_come_back_once_and_are_lent_whole(on_their_way):
    training = lending(master_remainders=True)
    if on_their_way:
        training.engine.require_writable()
        training.engine.begin_pass()
    packed = [slab for slab in training.slabs() if slab.is_encoded]
    assert any(slab.state is SlabState.OFFLOADING for slab in packed) is on_their_way
    moved = training.engine.traffic.back
    handed = save(training)
    if not on_their_way:
        assert training.engine.traffic.back - moved == sum(slab.codec.link_bytes for slab in packed)
        assert training.residencies == {SlabState.RELEASED}
    assert packed and not any(slab.is_encoded for slab in packed) and are_lent(training, handed)


def test_what_interrupts_a_save_that_lends_comes_out(monkeypatch):
    training = lending()
    training.engine.require_writable()
    monkeypatch.setattr(Transfers, "copy_out", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save(training)


def no_memory(training, patch):
    training.engine.use_worker_memory()
    patch.setattr(checkpoints, "free_for_each_rank", lambda: 1000)
    return "gets copies of the states, which takes longer"


def no_pages(training, patch):
    patch.setattr(training.engine, "_pins", True)
    patch.setattr(checkpoints, "page_lock", mock.Mock(side_effect=RuntimeError("could not page-lock")))
    training.engine.use_worker_memory()
    return "could not page-lock"


def no_files(training, patch):
    limit = host_buffer.OTHER_FILES + 3 * len(training.slabs()) - 1
    patch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    training.engine.use_worker_memory()
    assert not any(isinstance(slab.host, SharedHostBuffer) for slab in training.slabs())
    return None


@pytest.mark.parametrize("lack", [no_memory, no_pages, no_files])
def test_without_what_lending_takes_a_checkpoint_gets_copies_in_shared_memory_and_that_is_said_once(monkeypatch, lack):
    training = made()
    said = lack(training, monkeypatch)
    for _ in range(2):
        handed = save(training)
        assert not are_lent(training, handed)
        assert all(tensor.is_shared() for tensor in handed), "and torch copies none of them again"
    assert len(training.said) == bool(said) and all(said in line for line in training.said)


def mappings():
    return Path("/proc/self/maps").read_text().count("memfd:bridge_fgo")


def test_however_torch_hands_memory_over_a_buffer_goes_as_one_file_with_its_bytes(monkeypatch):
    sent = []
    monkeypatch.setattr(torch.multiprocessing, "get_sharing_strategy", lambda: "file_system")
    monkeypatch.setattr(host_buffer, "DupFd", lambda file: sent.append(file) or DupFd(file))
    training = lending()
    handed = save(training)
    received = pickle.loads(ForkingPickler.dumps(handed))
    lenders = [slab for slab in training.slabs() if slab.is_lent]
    assert len(sent) == len(set(sent)) == len(lenders) < len(handed)
    for mine, theirs in zip(handed, received, strict=True):
        assert torch.equal(mine, theirs) and theirs.data_ptr() != mine.data_ptr()
        assert theirs.untyped_storage().nbytes() == theirs.nbytes
        mine.view(-1)[0] += 1  # it is the same memory
        assert torch.equal(mine, theirs)
        mine.view(-1)[0] -= 1
    mapped = mappings()
    del received, theirs
    assert mappings() == mapped - len(lenders)
    training.made.clear()  # bits may be others: x + 1 - 1


# How much host memory buffers take that may be lent, by what the kernel says that is resident.

SLACK = 1.05


def resident_bytes():
    """Return the bytes of shared memory of this process; every host buffer is such."""
    gc.collect()
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssShmem"))
    return int(line.split()[1]) * 1024


class Measured:
    """A training of two optimizers whose states are away, on made-up streams, and the bytes of its host buffers."""

    def __init__(self):
        transfers = CudaTransfers(torch.device("cpu"), 2**24)
        self._before = resident_bytes()
        self.training = made(optimizers=2, transfers=transfers, sizes=[200_000] * 5)
        self.engine, self.own = self.training.engine, self.taken()
        assert self.own >= sum(slab.nbytes for slab in self.training.slabs())

    def taken(self):
        return resident_bytes() - self._before

    def save(self, source):
        handed = self.training.saved(source)
        for slab in self.training.slabs(source):
            for spare in slab.spares:
                spare.tensor.zero_()  # as page-locking it does
        return handed


@pytest.fixture
def measured(monkeypatch):
    install(monkeypatch)
    return Measured()


def test_a_background_save_takes_second_buffers_and_no_third(measured):
    measured.engine.use_worker_memory()
    assert measured.taken() <= SLACK * measured.own
    for _ in range(3):
        for source in measured.training.sources:
            measured.save(source)
        assert measured.taken() <= SLACK * 2 * measured.own
        one_step(measured.training)


@pytest.mark.parametrize("steps_before", [0, 1])
def test_second_buffers_that_can_be_lent_no_more_are_let_go_of(measured, monkeypatch, steps_before):
    training = measured.training
    measured.engine.use_worker_memory()
    first, second = training.sources
    handed = measured.save(first)
    expected = clones(handed)
    for _ in range(steps_before):  # the copies out go to the others
        one_step(training)
    monkeypatch.setattr(checkpoints, "free_for_each_rank", lambda: 0)
    measured.save(second)
    assert len(training.said) == 1 and "gets copies of the states" in training.said[0]
    assert not any(slab.spares for slab in training.slabs())
    one_step(training)
    assert are_equal(handed, expected)
    del handed
    copies = sum(slab.nbytes for slab in training.slabs(second))
    assert measured.taken() <= SLACK * (measured.own + copies)
