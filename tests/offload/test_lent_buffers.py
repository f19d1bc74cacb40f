"""Host buffers that are lent to a checkpoint's writer: whole, right, and written by nothing until it is done."""

import copy
import pickle
import resource
from multiprocessing.reduction import DupFd, ForkingPickler
from pathlib import Path

import pytest
import torch
from fake_optimizer import make_distributed_optimizer, step, with_model
from test_snapshot import SIZES, made, params, read_as_it_is, residencies, states

from bridge_fgo.config import OffloadConfig
from bridge_fgo.engines import checkpoints
from bridge_fgo.engines.native import NativeEngine
from bridge_fgo.memory import host_buffer
from bridge_fgo.memory.host_buffer import LentStorage, SharedHostBuffer, shared_copy
from bridge_fgo.memory.meters import PeakMeter
from bridge_fgo.memory.slab import SlabState
from bridge_fgo.memory.transfers import HostTransfers
from bridge_fgo.offload.debug import DebugTransfers
from bridge_fgo.states.distributed import MegatronSource


def lending(**options):
    optimizer, engine, source, before = made(**options)
    engine.use_worker_memory()
    return optimizer, engine, source, before


def save(optimizer, engine, source):
    """Return what a writer gets: the states of each parameter by name."""
    with engine.saving(source, copies=True):
        return [engine.hand_out(source, param, read_as_it_is(optimizer, param)) for param in params(optimizer)]


def load(optimizer, engine, source, value, everything=False):
    """Load `value` into every element of every state."""
    with engine.loading(source, everything=everything):
        for param in params(optimizer):
            for target in engine.hand_out(source, param, read_as_it_is(optimizer, param)).values():
                target.fill_(value)


def now(optimizer, engine):
    engine.require_readable()
    return [states(optimizer, param) for param in params(optimizer)]


def away(engine):
    engine.begin_pass()
    engine.release()


def one_step(optimizer, engine, seed):
    engine.require_writable()
    step(optimizer, seed)
    away(engine)


def tensors(saved):
    """The states; torch's count of steps, which is in nobody's slab, is the optimizer's own."""
    values = [value for of_param in saved for value in of_param.values() if isinstance(value, torch.Tensor)]
    return [value for value in values if value.dim()]


def are_equal(saved, expected):
    return all(torch.equal(*pair) for pair in zip(tensors(saved), tensors(expected), strict=True))


def is_lent(engine, tensor):
    """Whether the tensor's memory is a host buffer's: what is written there is seen in it."""
    hosts = [(slab.host.address, slab.host.address + slab.nbytes) for slab in engine.slabs]
    return any(start <= tensor.data_ptr() < end for start, end in hosts)


def test_a_lent_state_is_the_whole_of_a_shared_storage_and_goes_to_another_process_as_it_is():
    optimizer, engine, source, before = lending()
    handed = save(optimizer, engine, source)
    assert are_equal(handed, [before[id(param)] for param in params(optimizer)])
    for tensor in tensors(handed):
        assert is_lent(engine, tensor)
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, "mcore would copy a part of a storage"
        place = tensor.data_ptr()
        ForkingPickler.dumps(tensor)
        assert tensor.data_ptr() == place, "torch would copy what is in no shared memory"


def test_steps_write_no_byte_of_what_a_writer_reads_and_its_buffers_are_used_again_when_it_is_done():
    optimizer, engine, source, _ = lending()
    handed, expected = save(optimizer, engine, source), now(optimizer, engine)
    lenders = [slab for slab in engine.slabs if slab.is_lent]
    read = [slab.host for slab in lenders]
    for seed in range(3):
        one_step(optimizer, engine, seed)
    assert are_equal(handed, expected)
    assert lenders and not any(slab.host in read for slab in lenders)
    del handed
    later, expected = save(optimizer, engine, source), now(optimizer, engine)
    one_step(optimizer, engine, 4)
    assert [slab.host for slab in lenders] == read
    assert are_equal(later, expected)


def test_a_save_while_the_writer_before_is_busy_gets_copies():
    optimizer, engine, source, _ = lending()
    first, of_first = save(optimizer, engine, source), now(optimizer, engine)
    one_step(optimizer, engine, 1)
    second, of_second = save(optimizer, engine, source), now(optimizer, engine)
    assert not any(is_lent(engine, tensor) for tensor in tensors(second))
    one_step(optimizer, engine, 2)
    assert are_equal(first, of_first) and are_equal(second, of_second)
    del first
    third = save(optimizer, engine, source)
    assert all(is_lent(engine, tensor) for tensor in tensors(third))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", [(7,), (250, 3), (40, 25)])
def test_a_shared_copy_has_the_bits_and_goes_to_another_process_as_it_is(dtype, shape):
    tensor = torch.arange(shape[0] * (shape[1] if len(shape) > 1 else 1)).to(dtype).reshape(shape)
    for each in (tensor, tensor.t() if len(shape) > 1 else tensor):
        copied = shared_copy(each)
        assert torch.equal(copied, each) and copied.dtype == dtype and copied.is_contiguous()
        # mcore clones a tensor that is a part of its storage, by one thread and into ordinary memory.
        assert copied.untyped_storage().nbytes() == copied.nbytes
        place = copied.data_ptr()
        ForkingPickler.dumps(copied)
        assert copied.data_ptr() == place, "torch would copy what is in no shared memory"


def test_two_saves_without_a_step_between_lend_the_same_buffers():
    optimizer, engine, source, _ = lending()
    first = save(optimizer, engine, source)
    second = save(optimizer, engine, source)
    assert [t.data_ptr() for t in tensors(first)] == [t.data_ptr() for t in tensors(second)]


def test_states_on_the_gpu_are_lent_whole_and_stay_there():
    optimizer, engine, source, before = lending()
    engine.require_writable()
    handed = save(optimizer, engine, source)
    assert residencies(engine) == {SlabState.RESIDENT}
    step(optimizer, 2)
    assert are_equal(handed, [before[id(param)] for param in params(optimizer)])
    assert all(is_lent(engine, tensor) for tensor in tensors(handed))


def test_a_load_writes_no_byte_of_what_a_writer_reads():
    optimizer, engine, source, _ = lending()
    handed, expected = save(optimizer, engine, source), now(optimizer, engine)
    away(engine)
    load(optimizer, engine, source, 7.0)
    assert are_equal(handed, expected)
    assert all(bool((value == 7).all()) for value in tensors(now(optimizer, engine)))


def test_what_a_load_does_not_write_is_kept():
    optimizer, engine, source, _ = lending()
    handed, expected = save(optimizer, engine, source), now(optimizer, engine)
    away(engine)
    with engine.loading(source):
        pass
    assert are_equal(now(optimizer, engine), expected) and are_equal(handed, expected)


def with_remainders():
    optimizer = with_model(make_distributed_optimizer(SIZES))
    source = MegatronSource(optimizer)
    config = OffloadConfig(engine="native", slab_bytes=2**20, master_remainders=True)
    engine = NativeEngine([source], config, PeakMeter(), transfers=HostTransfers(2**16))
    step(optimizer, 1)
    optimizer._copy_main_params_to_model_params()
    engine.use_worker_memory()
    engine.begin_pass()
    engine.release()
    assert any(slab.is_encoded for slab in engine.slabs)
    return optimizer, engine, source


def test_masters_that_were_copied_in_part_come_back_once_and_are_lent_whole():
    optimizer, engine, source = with_remainders()
    packed = sum(slab.codec.link_bytes for slab in engine.slabs if slab.is_encoded)
    moved = engine.traffic.back
    handed = save(optimizer, engine, source)
    assert engine.traffic.back - moved == packed
    assert residencies(engine) == {SlabState.RELEASED} and not any(slab.is_encoded for slab in engine.slabs)
    assert all(is_lent(engine, tensor) for tensor in tensors(handed))
    assert are_equal(handed, now(optimizer, engine))


def test_masters_on_their_way_out_in_part_are_lent_whole():
    optimizer, engine, source = with_remainders()
    engine.require_writable()
    engine.begin_pass()  # they leave, and are not released
    assert any(slab.is_encoded and slab.state is SlabState.OFFLOADING for slab in engine.slabs)
    handed = save(optimizer, engine, source)
    assert all(is_lent(engine, tensor) for tensor in tensors(handed))
    assert are_equal(handed, now(optimizer, engine))


def test_what_interrupts_a_save_that_lends_comes_out(monkeypatch):
    optimizer, engine, source, _ = lending()
    engine.require_writable()

    def interrupted(transfers, slab, written=True):
        raise KeyboardInterrupt

    monkeypatch.setattr(HostTransfers, "copy_out", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(optimizer, engine, source)
    assert [bool(slab.interrupted) for slab in engine.slabs].count(True) == 1


def test_debug_mode_poisons_no_buffer_that_is_lent():
    optimizer = make_distributed_optimizer(SIZES)
    source = MegatronSource(optimizer)
    transfers = DebugTransfers(HostTransfers(2**16), 1)
    engine = NativeEngine([source], OffloadConfig(engine="native"), PeakMeter(), transfers=transfers)
    step(optimizer, 1)
    engine.use_worker_memory()
    engine.begin_pass()
    engine.release()
    handed = save(optimizer, engine, source)
    expected = now(optimizer, engine)  # the host's copy is of no use from here on
    one_step(optimizer, engine, 2)
    assert are_equal(handed, expected)


def test_without_host_memory_for_a_second_buffer_a_checkpoint_gets_copies_and_it_is_said(monkeypatch, capsys):
    optimizer, engine, source, before = lending()
    said = []
    monkeypatch.setattr(engine.schedule.holding, "warn", said.append)
    monkeypatch.setattr(checkpoints, "free_for_each_rank", lambda: 1000)
    handed = save(optimizer, engine, source)
    assert not any(is_lent(engine, tensor) for tensor in tensors(handed))
    assert are_equal(handed, [before[id(param)] for param in params(optimizer)])
    save(optimizer, engine, source)
    assert len(said) == 1 and "gets copies of the states, which takes longer" in said[0]


def test_where_a_buffer_cannot_be_page_locked_training_goes_on_with_those_that_it_has(monkeypatch):
    def refuses(buffers, device):
        raise RuntimeError("could not page-lock")

    optimizer, engine, source, before = made()
    said = []
    monkeypatch.setattr(engine.schedule.holding, "warn", said.append)
    monkeypatch.setattr(engine.checkpoints, "_pin_near", torch.device("cuda"))
    monkeypatch.setattr(checkpoints, "pin", refuses)
    engine.use_worker_memory()
    handed = save(optimizer, engine, source)
    assert len(said) == 1 and "could not page-lock" in said[0]
    assert are_equal(handed, [before[id(param)] for param in params(optimizer)])


def test_with_too_few_open_files_a_checkpoint_gets_copies(monkeypatch):
    optimizer, engine, source, before = made()
    limit = host_buffer.OTHER_FILES + 3 * len(engine.slabs) - 1
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    engine.use_worker_memory()
    assert not any(isinstance(slab.host, SharedHostBuffer) for slab in engine.slabs)
    handed = save(optimizer, engine, source)
    assert are_equal(handed, [before[id(param)] for param in params(optimizer)])
    assert all(tensor.is_shared() for tensor in tensors(handed)), "and torch copies none of them again"


def mappings():
    return Path("/proc/self/maps").read_text().count("memfd:bridge_fgo")


def test_however_torch_hands_memory_over_a_buffer_goes_as_one_file_and_the_other_process_has_its_bytes(monkeypatch):
    sent = []
    monkeypatch.setattr(torch.multiprocessing, "get_sharing_strategy", lambda: "file_system")
    monkeypatch.setattr(host_buffer, "DupFd", lambda file: sent.append(file) or DupFd(file))
    optimizer, engine, source, _ = lending()
    handed = tensors(save(optimizer, engine, source))
    received = pickle.loads(ForkingPickler.dumps(handed))
    lenders = [slab for slab in engine.slabs if slab.is_lent]
    assert len(sent) == len(set(sent)) == len(lenders) < len(handed)
    for mine, theirs in zip(handed, received, strict=True):
        assert torch.equal(mine, theirs) and theirs.data_ptr() != mine.data_ptr()
        assert theirs.untyped_storage().nbytes() == theirs.nbytes
        mine.view(-1)[0] += 1  # it is the same memory
        assert torch.equal(mine, theirs)
    mapped = mappings()
    del received, theirs
    assert mappings() == mapped - len(lenders)


def test_a_copy_of_a_lent_state_is_ordinary_memory():
    optimizer, engine, source, _ = lending()
    state = tensors(save(optimizer, engine, source))[0]
    for other in (copy.deepcopy(state), state.clone(), state.to(torch.bfloat16)):
        assert not isinstance(other.untyped_storage(), LentStorage)
        assert torch.equal(pickle.loads(ForkingPickler.dumps(other)), state.to(other.dtype))


def test_in_the_step_before_a_save_masters_leave_whole():
    optimizer, engine, source = with_remainders()
    for saved_next, encoded in ((False, True), (True, False)):
        with engine.training_step(kind=1, is_saved_next=saved_next):
            engine.begin_pass()
            engine.release()
            engine.reload()
            engine.updating()
            with engine.stepping(source):
                step(optimizer, 3)  # part by part, and so are weights rounded
            engine.settle()
        masters = [slab for slab in engine.slabs if slab.written_back and slab.state is SlabState.RELEASED]
        assert masters and all(slab.is_encoded is encoded for slab in masters)
