"""What is away brings itself back when it is touched, or says what to call: states, storages, and views of them."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from fake_training import Training, use_small_parts
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_fgo.memory import guard
from bridge_fgo.memory.guard import Aliases, class_of, is_guarded
from bridge_fgo.memory.slab import SlabState
from bridge_fgo.memory.storage_slab import StorageSlab, find_aliases

REFUSES_ADDRESSES = hasattr(torch._C, "_clear_storage_data_ptr_access_error_msg")  # PyTorch 2.12


def saved(value):
    torch.save(value, file := io.BytesIO())
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def with_data(t):
    t.data = t.data.clone()
    return t.clone()


READS = {
    "sum": lambda t: t.sum(),
    "clone": lambda t: t.clone(),
    "isnan": lambda t: torch.isnan(t).any(),
    "item": lambda t: t.view(-1)[3].item(),
    "matmul": lambda t: t.view(1, -1) @ t.view(-1, 1),
    "view": lambda t: t.view(-1)[1:3].clone(),
    "detach": lambda t: t.detach() * 2,
    "data": lambda t: t.data + 1,
    "double": lambda t: t.double(),
    "to_numpy": lambda t: torch.from_numpy(t.detach().numpy().copy()),
    "copied_from": lambda t: torch.empty_like(t).copy_(t),
    "cat": lambda t: torch.cat([t.view(-1), t.view(-1)]),
    "foreach_norm": lambda t: torch.stack(torch._foreach_norm([t])),
    "keyword": lambda t: torch.add(input=t, other=1),
    "deepcopy": copy.deepcopy,
    "shallow_copy": lambda t: copy.copy(t).clone(),
    "saved": saved,
    "saved_in_a_dictionary": lambda t: saved({"a": [t]})["a"][0],
    "pickled": lambda t: pickle.loads(pickle.dumps(t)),
    "list": lambda t: torch.tensor(t.tolist()),
    "repr": lambda t: torch.tensor(list(repr(t).encode())),
    "equal": lambda t: torch.tensor(torch.equal(t, t)),
    "inference_mode": lambda t: torch.inference_mode()(lambda: t.sum())().clone(),
}
WRITES = {
    "zero": lambda t: t.zero_(),
    "add": lambda t: t.add_(0.5),
    "lerp": lambda t: t.lerp_(torch.ones_like(t), 0.25),
    "copy_to": lambda t: t.copy_(torch.full_like(t, 3.0)),
    "fill": lambda t: t.fill_(2.0),
    "set_item": lambda t: t.__setitem__(0, 7.0),
    "through_data": lambda t: t.data.mul_(0.5),
    "through_a_view": lambda t: t.view(-1)[:2].mul_(3.0),
    "foreach_add": lambda t: [torch._foreach_add_([t], 1.0)] and t,
    "out": lambda t: torch.add(torch.ones_like(t), 1.0, out=t),
    "other_memory": with_data,
}
ACCESSES = {**READS, **WRITES}


@pytest.fixture
def small(monkeypatch):
    use_small_parts(monkeypatch)


def trained(master_remainders=False, **settings):
    training = Training(layer=500, master_remainders=master_remainders, **settings)
    for seed in range(2):
        training.step(seed)
    return training


def away(training):
    """Have all states of a training be away, in the midst of a pass."""
    training.engine.begin_pass()
    training.engine.release()
    training.engine.offload_now()


def states(training):
    """Return (state of the engine's, the twin's) for each state of all parameters."""
    (source,) = training.sources
    of_twin = training.twins[0].optimizer.state
    pairs = []
    for param, twin in training.pairs(source):
        mine = source.optimizer.optimizer.state[param]
        pairs += [(param, twin), *((mine[name], of_twin[twin][name]) for name in ("exp_avg", "exp_avg_sq"))]
    return pairs


def act(access, tensor):
    with torch.no_grad():
        result = access(tensor)
    return result.clone() if isinstance(result, torch.Tensor) else result


def assert_same(training, access, pair):
    mine, of_twin = (act(access, tensor) for tensor in pair)
    if isinstance(of_twin, torch.Tensor):
        assert mine.equal(of_twin) and class_of(mine) is class_of(of_twin)
    else:
        assert mine == of_twin


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
    for pair in states(training)[::4]:
        assert is_guarded(pair[0])
        assert_same(training, ACCESSES[name], pair)
        assert not is_guarded(pair[0]) and type(pair[0]) is torch.Tensor
    training.engine.release()
    training.engine.reload()
    training.update(7)
    training.end_step(updated=True)
    training.check()


SOME = [*READS, *WRITES]
STEPS = st.tuples(st.just("step"), st.integers(1, 2), st.booleans())
TOUCHES = st.tuples(st.just("touch"), st.sampled_from(SOME), st.integers(0, 20))
IN_PASS = st.tuples(st.just("in pass"), st.sampled_from(list(READS)), st.integers(0, 20), st.integers(1, 7))
SAVES = st.tuples(st.just("save"))


@given(st.lists(st.one_of(STEPS, TOUCHES, IN_PASS, SAVES), max_size=12), st.booleans(), st.sampled_from([None, 70_000]))
@settings(max_examples=40, deadline=None)
def test_any_order_of_accesses_steps_and_saves_gives_the_bits_of_a_resident_optimizer(actions, packs, budget):
    with pytest.MonkeyPatch.context() as patch:
        use_small_parts(patch)
        training = trained(master_remainders=packs, budget=budget)
        (source,) = training.sources
        for seed, (kind, *how) in enumerate(actions, start=10):
            if kind == "step":
                training.step(seed, passes=how[0], skip=how[1])
            elif kind == "touch":
                assert_same(training, ACCESSES[how[0]], states(training)[how[1]])
            elif kind == "save":
                with training.engine.saving(source, copies=True):
                    for pair in training.pairs(source):
                        handed, expected = training.hand_out(source, *pair)
                        assert all(handed[name].equal(expected[name]) for name in ("param", "exp_avg", "exp_avg_sq"))
            else:
                training.run_pass(points=how[2])
                assert_same(training, ACCESSES[how[0]], states(training)[how[1]])
                training.update(seed)
                training.end_step(updated=True)
        training.check()


def test_metadata_and_gradients_are_given_without_bringing_anything_back(small):
    training = trained()
    away(training)
    tensor, of_twin = states(training)[0]
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
        away(training)
        before = touches.nbytes
        tensor = states(training)[0][0]
        tensor.sum()
        back = [slab for slab in training.slabs() if slab.state is SlabState.RESIDENT]
        assert len(back) == 1 and back[0].holds(tensor)
        assert touches.nbytes - before == back[0].state_bytes
        news = touches.news()
        assert ("test_guard.py:" in news) == (step == 0), "each place is said once"
        training.engine.reload()
        training.update(step)
        training.end_step(updated=True)
    training.check()


def test_nothing_comes_back_inside_a_capture(small, monkeypatch):
    training = trained()
    away(training)
    with pytest.MonkeyPatch.context() as captured:
        captured.setattr(type(training.schedule.transfers), "capturing", lambda self: True)
        touches = training.engine.traffic.touches
        touches.refusals[:] = [lambda: training.schedule.transfers.capturing() and "reload_states() before"]
        with pytest.raises(RuntimeError, match=r"'exp_avg' of shape.*reload_states"):
            states(training)[1][0].sum()
    assert all(slab.state is SlabState.RELEASED for slab in training.slabs())


def test_states_that_are_dropped_while_they_are_away_go_at_once(small):
    training = trained()
    away(training)
    slabs = [weakref.ref(slab) for slab in training.slabs()]
    tensors = [weakref.ref(mine) for mine, _ in states(training)]
    gc.disable()
    try:
        training.engine.schedule.forget_parts()
        training.engine._offloaded.clear()
        training.optimizers.clear()
        training.sources.clear()
        training.engine.sources.clear()
        del training
        gc.collect()
        assert not any(ref() for ref in (*slabs, *tensors))
    finally:
        gc.enable()


@pytest.mark.skipif(not REFUSES_ADDRESSES, reason="needs PyTorch 2.12")
def test_a_view_that_was_made_before_is_refused_by_name_in_place_of_a_crash(small):
    training = trained()
    training.engine.require_writable()
    views = [tensor.view(-1) for tensor, _ in states(training)]
    away(training)
    for view in views:
        with pytest.raises(RuntimeError, match="reload_states"):
            view.sum()
    training.engine.require_readable()
    for view, (_, of_twin) in zip(views, states(training), strict=True):
        assert view.equal(of_twin.view(-1))


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


NOT_OF_A_MATRIX = {"repr", "other_memory"}


@pytest.mark.parametrize("name", sorted(ACCESSES.keys() - NOT_OF_A_MATRIX))
def test_whatever_touches_a_storage_that_is_away_is_told_what_to_call(name):
    tensor, slab = storage()
    parameter = torch.nn.Parameter(tensor)  # as models have them
    asleep(slab)
    for each in (tensor, parameter):
        with pytest.raises(RuntimeError, match=r"the buffer.*call wake\(\) first"), torch.no_grad():
            ACCESSES[name](each)
    assert isinstance(parameter, torch.nn.Parameter) and parameter.shape == (3, 4)
    slab.fill()
    slab.copy_in()
    assert type(parameter) is torch.nn.Parameter and type(tensor) is torch.Tensor
    assert parameter.equal(torch.arange(12.0).view(3, 4)) and tensor.sum() == 66


def test_a_tensor_has_its_own_name_in_the_error():
    tensor = torch.zeros(4)
    other = tensor[:2]
    slab = StorageSlab(tensor, "the buffer", "wake()", named=[("parameter 'w'", other)])
    slab.map_host()
    asleep(slab)
    with pytest.raises(RuntimeError, match=r"parameter 'w', of shape \(2,\), was used.*call wake\(\)"):
        other.sum()


@pytest.mark.parametrize("how", ["state_dict", "data", "slice_of_a_slice"])
def test_tensors_that_somebody_made_while_it_was_awake_are_found(how, monkeypatch):
    monkeypatch.setattr(guard, "_CAN_REFUSE", False)  # as before PyTorch 2.12: no storage refuses its address
    layer = torch.nn.Linear(4, 4, bias=False)
    slab = StorageSlab(layer.weight, "the buffer", "wake()")
    slab.map_host()
    find_aliases([slab])
    kept = {
        "state_dict": lambda: layer.state_dict()["weight"],
        "data": lambda: layer.weight.data,
        "slice_of_a_slice": lambda: layer.weight.detach()[1:][1:],
    }[how]()
    expected = kept.clone()
    for _ in range(2):
        asleep(slab)
        for touch in (torch.sum, saved, copy.deepcopy):
            with pytest.raises(RuntimeError, match=r"call wake\(\) first"):
                touch(kept)
        slab.fill()
        slab.copy_in()
        assert kept.equal(expected)
        kept = kept.detach()  # another one in its place


def test_objects_are_looked_through_only_where_somebody_has_made_a_tensor_on_the_storage(monkeypatch):
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


def test_two_tensors_that_take_turns_are_told_from_one():
    tensor = torch.zeros(8)
    kept = tensor[:4]
    aliases = Aliases()
    Aliases.find([(tensor.untyped_storage(), aliases)])
    assert aliases.is_current(tensor.untyped_storage())
    assert any(each is kept for each in aliases.tensors())
    kept = tensor[4:]
    assert not aliases.is_current(tensor.untyped_storage()), "as many as before, and another one"
    Aliases.find([(tensor.untyped_storage(), aliases)])
    assert any(each is kept for each in aliases.tensors())


@pytest.mark.skipif(not REFUSES_ADDRESSES, reason="needs PyTorch 2.12")
def test_code_in_cpp_that_asks_for_an_address_is_refused_until_the_memory_is_back():
    tensor, slab = storage()
    asleep(slab)
    with guard.own(), pytest.raises(RuntimeError, match=r"call wake\(\) first"):
        tensor.data_ptr()
    slab.fill()
    assert tensor.data_ptr()
