"""Copies for a checkpoint worker: in shared memory, complete when handed out, and not used again too early."""

import time
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from test_snapshot import made, params, read_as_it_is

from bridge_fgo.memory import shared_copies
from bridge_fgo.memory.shared_copies import SharedCopies


@pytest.fixture
def copies(monkeypatch):
    monkeypatch.setattr(shared_copies, "PIECE_BYTES", 1000)  # so that a tensor is copied by several threads
    copies = SharedCopies(page_locks=False)
    yield copies
    copies.close()


def numbers(count, dtype=torch.float32):
    return torch.arange(count, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", [(7,), (250, 3), (40, 25)])
def test_a_copy_has_the_bits_and_a_whole_shared_storage(copies, dtype, shape):
    tensor = numbers(shape[0] * (shape[1] if len(shape) > 1 else 1), dtype).reshape(shape)
    copy = copies.copy(tensor)
    copies.finish()
    assert torch.equal(copy, tensor) and copy.dtype == dtype and copy.is_contiguous()
    # mcore clones a tensor that is a part of its storage, by one thread and into ordinary memory.
    assert copy.untyped_storage().nbytes() == copy.nbytes
    assert copy.is_shared()


def test_torch_hands_a_copy_to_another_process_without_copying_it_again(copies):
    copy, ordinary = copies.copy(numbers(5000)), numbers(5000)
    copies.finish()
    places = [copy.data_ptr(), ordinary.data_ptr()]
    for tensor in (copy, ordinary):
        ForkingPickler.dumps(tensor)
    assert copy.data_ptr() == places[0] and ordinary.data_ptr() != places[1]


def test_what_is_not_contiguous_is_copied_as_it_reads(copies):
    tensor = numbers(600).reshape(20, 30).t()
    copy = copies.copy(tensor)
    copies.finish()
    assert torch.equal(copy, tensor)


def test_memory_is_used_again_when_nobody_refers_to_it_and_not_before(copies):
    first = copies.copy(numbers(1000))
    view, place = first.detach().view(10, 100), first.data_ptr()
    del first
    second = copies.copy(torch.zeros(1000))
    copies.finish()
    assert second.data_ptr() != place and torch.equal(view.flatten(), numbers(1000)), "a writer still reads it"
    del view
    third = copies.copy(torch.ones(1000))
    copies.finish()
    assert third.data_ptr() == place and copies.nbytes == 8000


def test_states_are_handed_out_when_every_thread_has_copied_its_part(monkeypatch):
    fill = shared_copies._fill

    def slowly(to, of):
        time.sleep(0.02)
        fill(to, of)

    monkeypatch.setattr(shared_copies, "_fill", slowly)
    optimizer, engine, source, before = made()
    engine.share_copies()
    monkeypatch.setattr(engine.checkpoints, "lends", False)  # as where there is no memory for second host buffers
    with engine.saving(source, copies=True):
        for param in params(optimizer):
            handed = engine.hand_out(source, param, read_as_it_is(optimizer, param))
            for slab in engine.slabs:
                slab.host.tensor.zero_()  # as a later step would overwrite it
            assert all(torch.equal(handed[name], value) for name, value in before[id(param)].items())
            break
    del handed
    engine.require_writable()
    engine.close()


def test_a_copy_that_fails_is_an_error_of_the_save(copies, monkeypatch):
    def fails(to, of):
        raise OSError("bus error")

    monkeypatch.setattr(shared_copies, "_fill", fails)
    copies.copy(numbers(10))
    with pytest.raises(OSError, match="bus error"):
        copies.finish()
    copies._under_way.clear()


def test_pages_that_cuda_does_not_lock_are_said_and_copied_to_all_the_same(monkeypatch):
    def refuses(address, nbytes):
        raise RuntimeError("the CUDA driver refused to page-lock")

    monkeypatch.setattr(shared_copies, "PageLock", refuses)
    copies = SharedCopies(page_locks=True)
    memory = copies.copy(numbers(100)).view(torch.uint8)
    with pytest.warns(UserWarning, match="refused to page-lock"):
        copies._lock(memory)
    copies._lock(memory)  # is not tried again
    copies.close()
