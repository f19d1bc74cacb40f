"""What is away brings itself back when it is touched, or says what to call: states, storages, and views of them."""

import copy
import gc
import io
import weakref

import pytest
import safetensors.torch
import torch
import torch.utils.dlpack
from accesses import ACCESSES, assert_same
from debug_transfers import DebugTransfers
from fake_training import Training, use_small_parts

from bridge_fgo.memory import guard
from bridge_fgo.memory.guard import is_guarded
from bridge_fgo.memory.slab import SlabState
from bridge_fgo.memory.storage_slab import StorageSlab, find_aliases
from bridge_fgo.memory.transfers import Transfers

REFUSES_ADDRESSES = hasattr(torch._C, "_clear_storage_data_ptr_access_error_msg")  # PyTorch 2.12


@pytest.fixture
def small(monkeypatch):
    use_small_parts(monkeypatch)


def trained(**settings):
    training = Training(layer=500, master_remainders=False, **settings)
    training.steps(2)
    return training


WAYS = ["offloading", "released", "reloading"]


@pytest.mark.parametrize("where", WAYS)
@pytest.mark.parametrize("name", ACCESSES)
def test_whatever_touches_offloaded_states_finds_them_and_training_goes_on_with_what_it_wrote(name, where, small):
    training = trained()
    training.engine.begin_pass()
    for slab in training.slabs():
        slab.require_writable()
        for verb in ("offload", "release", "reload")[: WAYS.index(where) + 1]:
            getattr(slab, verb)()
    assert {slab.state.value for slab in training.slabs()} == {where}
    for pair in training.states()[::4]:
        assert is_guarded(pair[0])
        assert_same(ACCESSES[name], pair)
        assert not is_guarded(pair[0]) and type(pair[0]) is torch.Tensor
    training.engine.release()
    training.engine.reload()
    training.finish()
    training.check()


def test_metadata_and_gradients_are_given_without_bringing_anything_back(small):
    training = trained()
    training.away()
    tensor, of_twin = training.states()[0]
    assert (tensor.shape, tensor.dtype, tensor.device, tensor.numel(), len(tensor)) == (
        of_twin.shape, of_twin.dtype, of_twin.device, of_twin.numel(), len(of_twin),
    )  # fmt: skip
    assert isinstance(tensor, torch.Tensor) and {tensor: 1}[tensor] == 1 and tensor.is_contiguous()
    tensor.grad = torch.ones_like(tensor)
    assert tensor.grad.sum() == tensor.numel() and torch.zeros_like(tensor).sum() == 0
    assert is_guarded(tensor) and all(slab.state is SlabState.RELEASED for slab in training.slabs())


def test_a_touch_brings_back_what_was_touched_and_is_counted_and_said_once_by_its_line(small):
    training = trained()
    touches = training.engine.traffic.touches
    for step in range(2):
        training.away()
        before = touches.nbytes
        tensor = training.states()[0][0]
        tensor.sum()
        back = [slab for slab in training.slabs() if slab.state is SlabState.RESIDENT]
        assert len(back) == 1 and back[0].holds(tensor)
        assert touches.nbytes - before == back[0].state_bytes
        news = touches.news()
        assert ("test_guard.py:" in news) == (step == 0), "each place is said once"
        training.engine.reload()
        training.finish()
    training.check()


def test_nothing_comes_back_inside_a_capture(small, monkeypatch):
    training = trained()
    training.away()
    with pytest.MonkeyPatch.context() as captured:
        captured.setattr(type(training.schedule.transfers), "capturing", lambda self: True)
        touches = training.engine.traffic.touches
        touches.refusals[:] = [lambda: training.schedule.transfers.capturing() and "reload_states() before"]
        with pytest.raises(RuntimeError, match=r"'exp_avg' of shape.*reload_states"):
            training.states()[1][0].sum()
    assert all(slab.state is SlabState.RELEASED for slab in training.slabs())


def test_states_that_are_dropped_while_they_are_away_go_at_once(small):
    training = trained()
    training.away()
    gone = [weakref.ref(one) for one in (*training.slabs(), *(mine for mine, _ in training.states()))]
    gc.disable()
    try:
        training.engine.schedule.forget_parts()
        training.engine._offloaded.clear()
        training.optimizers.clear()
        training.sources.clear()
        training.engine.sources.clear()
        del training
        gc.collect()
        assert not any(ref() for ref in gone)
    finally:
        gc.enable()


BY_STORAGE = {
    "address": lambda t: t.untyped_storage().data_ptr(),
    "copy": lambda t: copy.deepcopy(t.untyped_storage()),
    "clone": lambda t: t.untyped_storage().clone(),
    "saved": lambda t: torch.save(t.untyped_storage(), io.BytesIO()),
    "set": lambda t: torch.empty(0).set_(t.untyped_storage(), 0, t.shape, t.stride()).sum(),  # pyright: ignore
    "dlpack": torch.utils.dlpack.to_dlpack,
    "safetensors": lambda t: safetensors.torch.save({"a": t}),
}


@pytest.mark.skipif(not REFUSES_ADDRESSES, reason="needs PyTorch 2.12")
@pytest.mark.parametrize("name", BY_STORAGE)
def test_code_that_reads_states_through_their_storage_gets_the_error_or_finds_them_after_a_reload(name, small):
    training = trained()
    training.away()
    tensor, of_twin = training.states()[0]
    assert tensor.untyped_storage().nbytes() == 0
    with pytest.raises(RuntimeError, match=r"call bridge_fgo\.reload_states\(\) first"):
        BY_STORAGE[name](tensor)
    training.engine.require_writable()
    BY_STORAGE[name](tensor)
    assert tensor.equal(of_twin)


VIEWS = {
    "view": lambda tensor: tensor.view(-1),
    "detached": lambda tensor: tensor.detach(),
    "data": lambda tensor: tensor.data,
    "view_of_a_view": lambda tensor: tensor.view(-1)[2:].view(-1)[1:9:2],
    "bytes": lambda tensor: tensor.view(torch.uint8),
}


@pytest.mark.parametrize("where", WAYS)
@pytest.mark.parametrize("name", VIEWS)
def test_views_that_others_made_before_find_the_states_and_training_goes_on_with_what_they_wrote(name, where, small):
    training = trained(transfers=DebugTransfers(Transfers(), 1))
    training.engine.begin_pass()
    training.engine.require_writable()
    pairs = [[VIEWS[name](tensor) for tensor in pair] for pair in training.states()]
    for slab in training.slabs():
        for verb in ("offload", "release", "reload")[: WAYS.index(where) + 1]:
            getattr(slab, verb)()
    for mine, of_twin in pairs:
        if where == "released" and REFUSES_ADDRESSES and is_guarded(mine):  # the first of its slab
            with guard.own(), pytest.raises(RuntimeError, match="reload_states"):
                mine.data_ptr()
        assert mine.equal(of_twin)
        for view in (mine, of_twin):
            view.zero_()
    training.engine.release()
    training.engine.reload()
    training.finish()
    training.check()


def test_a_view_that_others_held_before_the_owner_took_it_is_listed_once_when_it_is_given_up():
    memory = torch.zeros(8)
    view, views = memory[2:4], guard.Views(memory)
    views.add((), [view])
    views.add([view])
    views.keep([])
    assert len(views.found) == 1


def test_code_that_makes_new_views_in_each_step_is_told_once(small, monkeypatch):
    training, said, before = trained(), [], guard._looks
    for _ in range(guard.MANY_LOOKS + 2):
        training.engine.require_writable()
        views = [tensor.detach() for tensor, _ in training.states()]
        training.away()
        said.append(training.engine.traffic.touches.news())
        training.engine.reload()
        training.finish()
        del views
    assert guard._looks - before == guard.MANY_LOOKS + 2
    (line,) = [each for each in said if "views" in each]
    assert "make and keep such views once" in line and said.index(line) == guard.MANY_LOOKS - 1


# Storages that a sleep empties.


def storage(named=()):
    tensor = torch.arange(12.0).view(3, 4)
    slab = StorageSlab(tensor, "the buffer", "wake()", named=named)
    slab.map_host()
    return tensor, slab


def asleep(slab):
    find_aliases([slab])
    slab.copy_out()
    slab.empty()


def test_views_of_an_emptied_storage_are_valid_again_and_ranges_come_back():
    buffer = torch.arange(100, dtype=torch.int16)
    view = buffer[10:20].view(2, 5)
    slab = StorageSlab(view, "it", "reload()", [(0, 40), (60, 80)])
    slab.map_host()
    assert slab.copy_out() == 60
    assert slab.empty() == 200 and slab.empty() == 0 and view.untyped_storage().nbytes() == 0
    assert slab.fill(zeroed=True) == 200 and slab.fill() == 0
    assert not buffer.any()
    assert slab.copy_in() == 60
    expected = torch.arange(100, dtype=torch.int16)
    expected[20:30] = expected[40:] = 0
    assert torch.equal(buffer, expected) and torch.equal(view, expected[10:20].view(2, 5))


def test_a_tensor_has_its_own_name_in_the_error_also_where_it_is_frozen(monkeypatch):
    monkeypatch.setattr(gc, "get_objects", list)  # which lists nothing that `gc.freeze` has frozen
    tensor = torch.zeros(4)
    other = tensor[:2]
    slab = StorageSlab(tensor, "the buffer", "wake()", named=[("parameter 'w'", other)])
    slab.map_host()
    asleep(slab)
    with pytest.raises(RuntimeError, match=r"parameter 'w', of shape \(2,\), was used.*call wake\(\)"):
        other.sum()


def test_objects_are_looked_through_once_a_tensor_was_made_on_the_storage_also_in_anothers_place(monkeypatch):
    looks = []
    objects = gc.get_objects
    monkeypatch.setattr(gc, "get_objects", lambda: looks.append(1) or objects())
    tensor, slab = storage()
    for _ in range(3):
        asleep(slab)
        slab.fill()
    assert len(looks) == 1
    view = tensor[1:]
    asleep(slab)
    assert len(looks) == 2 and is_guarded(view)

    tensor, slab = storage()
    kept = tensor[:2]
    find_aliases([slab])
    assert slab.views.are_known()
    kept = tensor[2:]
    assert not slab.views.are_known(), "as many as before, and another one"
    asleep(slab)
    assert is_guarded(kept)


@pytest.mark.skipif(not REFUSES_ADDRESSES, reason="needs PyTorch 2.12")
def test_code_in_cpp_that_asks_for_an_address_is_refused_until_the_memory_is_back():
    tensor, slab = storage()
    asleep(slab)
    with guard.own(), pytest.raises(RuntimeError, match=r"call wake\(\) first"):
        tensor.data_ptr()
    slab.fill()
    assert tensor.data_ptr()
