"""Parameters, gradients and optimizer state leave and return apart, and training is bitwise that of a resident run."""

from __future__ import annotations

import contextlib
import copy
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sleeping import KINDS, fail_once, numbers, options, poison, residency, resident, states_bytes, weights_bytes

import bridge_fgo
from bridge_fgo.memory.slab import MOST_IN_TRANSIT, StillShared
from bridge_fgo.memory.storage_slab import StorageSlab
from bridge_fgo.sleep import residency as phases_residency
from bridge_fgo.sleep import states
from bridge_fgo.sleep.rounding import Rounding
from bridge_fgo.tools.arms.cpu_model import CpuOptions
from bridge_fgo.tools.arms.cpu_training import CpuTraining

pytestmark = [pytest.mark.usefixtures("cpu_standins"), pytest.mark.usefixtures("poisoned")]

SCENARIOS = {
    "dense": {},
    "experts": {"experts": True},
    "native_fp32_parameters": {"precision": "fp32_params"},
    "most_parameters_frozen": {"frozen": True},
    "fp16_with_skipped_steps": {"precision": "fp16"},
    "two_chunks_with_collectives_in_flight": {"chunks": 2, "overlap_grad_reduce": True, "overlap_param_gather": True},
}
KIND_SETS = st.sets(st.sampled_from(KINDS)).map(sorted)
MOVES = st.one_of(
    st.tuples(st.just("offload"), KIND_SETS),
    st.tuples(st.just("reload"), KIND_SETS),
    st.tuples(st.just("keep"), KIND_SETS),
    st.just(("step", [])),
)


def assert_as_resident(training, seen, changes, steps=6):
    expected = resident(steps, **changes)
    assert seen == [each for each, _ in expected[: len(seen)]]
    if seen:
        assert training.digests() == expected[len(seen) - 1][1]


def gone(res):
    """Return the kinds whose memory is empty, by the storages themselves."""
    found = set()
    if all(not slab.storage.nbytes() for slab in res._model.weight_slabs):
        found.add("params")
    if all(not slab.storage.nbytes() for slab in res._model.gradient_slabs):
        found.add("grads")
    if res._states is not None and states_bytes(res) == 0:
        found.add("optimizer")
    return found


@pytest.mark.parametrize("steps", [4, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("changes", SCENARIOS.values(), ids=SCENARIOS)
def test_training_that_sleeps_after_each_step_is_bitwise_a_resident_one(changes, steps):
    with CpuTraining(options(**changes)) as training:
        res, seen = residency(training), []
        for number in range(steps):
            seen.append(numbers(training.step()))
            res.offload()
            assert gone(res) == set(KINDS) == res.away
            if number % 2:
                res.reload("params")
                res.offload("params")
            res.reload()
            assert gone(res) == set() == res.away
    assert_as_resident(training, seen, changes, max(steps, 6))


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(moves=st.lists(MOVES, max_size=14), mid=KIND_SETS, debug=st.booleans())
def test_any_order_of_sleeps_wakes_and_steps_is_bitwise_a_resident_run(moves, mid, debug):
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        poison(patch)
        if debug:
            patch.setenv("BRIDGE_FGO_DEBUG", "1")
        training = stack.enter_context(CpuTraining(options()))
        res, seen = residency(training), []
        step = training.optimizer.step

        def sleep_first():  # between the backward and the update
            res.offload(mid, grads="keep")
            assert gone(res) == set(mid)
            res.reload()
            return step()

        patch.setattr(training.optimizer, "step", sleep_first)
        for verb, kinds in moves:
            if verb == "step":
                res.reload()
                seen.append(numbers(training.step()))
            elif verb == "reload":
                before = res.away
                res.reload(kinds)
                assert res.away == before - set(kinds)
            else:
                before = res.away
                res.offload(kinds, grads="keep" if verb == "keep" else "drop")
                assert gone(res) >= before | set(kinds) == res.away
            if len(seen) == 6:
                break
        res.reload()
        res.close()
    assert_as_resident(training, seen, {})


def test_parameters_and_buffers_are_the_same_objects_after_a_wake():
    with CpuTraining(options()) as training:
        training.step()
        res = residency(training)
        (ddp,) = training.model
        views = [t for p in ddp.parameters() for t in (p, p.main_grad)]
        views += [t for b in ddp.buffers for bucket in b.buckets for t in (bucket.param_data, bucket.grad_data)]
        storages = [t.untyped_storage()._cdata for t in views]
        before = [t.detach().clone() for t in ddp.parameters()]
        res.offload()
        assert all(t.untyped_storage().nbytes() == 0 for t in views)
        res.reload()
        again = [t for p in ddp.parameters() for t in (p, p.main_grad)]
        again += [t for b in ddp.buffers for bucket in b.buckets for t in (bucket.param_data, bucket.grad_data)]
        assert all(one is other for one, other in zip(views, again, strict=True))
        assert [t.untyped_storage()._cdata for t in again] == storages
        assert all(torch.equal(one, other) for one, other in zip(before, ddp.parameters(), strict=True))
        assert not any(p.main_grad.any() for p in ddp.parameters())


def test_gradients_cross_no_link_and_unchanged_memory_crosses_once():
    with CpuTraining(options()) as training:
        training.step()
        res = residency(training)
        out = res.offload()
        states = 6 * weights_bytes(training)
        assert out.copied_by_kind == {"optimizer": states, "params": 0}  # rounded from the masters
        assert out.copied == states and out.freed == states * 9 // 6
        assert res.reload().copied_by_kind == {"optimizer": states, "params": 0, "grads": 0}
        assert res.offload().copied == 0
        assert res.offload().seconds == 0  # away already
        res.reload()
        training.step()
        assert res.offload("optimizer").copied_by_kind == {"optimizer": states}


def test_the_freed_bytes_of_states_are_those_of_their_storages():
    with CpuTraining(options(experts=True)) as training:
        training.step()
        res = residency(training)
        for _ in range(2):  # the first time from tensors of their own, then from slabs
            held = states_bytes(res)
            assert held == res.offload("optimizer").freed and states_bytes(res) == 0
            assert res.reload("optimizer").freed == -held == -states_bytes(res)


def test_gradients_and_weights_get_their_memory_while_states_are_copied(monkeypatch):
    """The driver takes time to give it; the host waits for the copies when it has nothing else to do."""
    with CpuTraining(options()) as training:
        training.step()
        res = residency(training)
        res.offload()
        order = []
        for name, owner in (("reload", res._states), ("came_back", res._states), ("fill", StorageSlab)):
            act = getattr(owner, name)
            monkeypatch.setattr(owner, name, lambda *a, name=name, act=act: order.append(name) or act(*a))
        res.reload()
        assert order[0] == "reload" and order[-1] == "came_back" and set(order[1:-1]) == {"fill"}


def test_after_a_step_states_are_copied_without_a_look_and_else_only_those_that_have_changed(monkeypatch):
    """To sum over them before the first copy begins would take time for what is known."""
    with CpuTraining(options()) as training:
        training.step()
        res = residency(training)
        looked = []
        unchanged = res._states._copies.unchanged
        monkeypatch.setattr(res._states._copies, "unchanged", lambda: looked.append(unchanged()) or looked[-1])
        res.offload()
        res.reload()
        training.step()
        assert res.offload("optimizer").copied == 6 * weights_bytes(training)
        assert len(looked) == 1  # of the first sleep, before anybody could say
        res.reload()
        moment = next(iter(training.optimizer.chained_optimizers[0].optimizer.state.values()))["exp_avg"]
        moment.mul_(2)
        copied = res.offload("optimizer").copied
        assert len(looked) == 2 and 0 < copied < 6 * weights_bytes(training)
        res.reload()
        assert res.offload("optimizer").copied == 0


def test_states_whose_words_were_complemented_since_the_last_wake_are_copied():
    with CpuTraining(options()) as training:
        res = residency(training)
        training.step()
        res.offload()
        res.reload()
        moment = next(iter(training.optimizer.chained_optimizers[0].optimizer.state.values()))["exp_avg"]
        moment.view(torch.int32).view(-1)[:8].bitwise_not_()
        written = moment.clone()
        assert res.offload().copied > 0
        res.reload()
        assert torch.equal(moment.view(torch.int32), written.view(torch.int32))
        res.close()


@pytest.mark.parametrize("packed", [False, True])
def test_the_driver_gets_what_has_left_while_other_slabs_are_copied(monkeypatch, packed):
    """The driver takes a fifth of the copies' time. The host waits first until no copy reads the memory any more."""
    monkeypatch.setattr(states, "RETURNED_BYTES", 1)
    with CpuTraining(CpuOptions(experts=True)) as training:
        training.step()
        small = bridge_fgo.OffloadConfig(engine="native", master_remainders=packed, slab_bytes=2**20)
        res = bridge_fgo.Residency(training.model, training.optimizer, small)
        transfers = type(res._states.engine.schedule.transfers)
        order = []
        for name in ("copy_out", "release", "await_released"):
            act = getattr(transfers, name)
            monkeypatch.setattr(
                transfers, name, lambda of, *slab, n=name, act=act: (order.append((n, *slab[:1])), act(of, *slab))
            )
        monkeypatch.setattr(states, "return_to_driver", lambda device: order.append(("driver", gone(res))))
        res.offload()
        first = order[:]
        res.reload()
        training.step()
        order.clear()
        res.offload()
    for one in (first, order):
        names = [name for name, *_ in one]
        copies, returns = names.count("copy_out"), [i for i, name in enumerate(names) if name == "driver"]
        assert len(returns) == names.count("release") == names.count("await_released") == copies > MOST_IN_TRANSIT
        assert all(names[i - 2 : i] == ["release", "await_released"] for i in returns)
    # Few slabs are under way where tensors are moved into them, or packed. Masters are packed by weights, which stay.
    assert most_in_transit(first) == MOST_IN_TRANSIT
    if packed:
        assert 1 < most_in_transit(order, packed) <= MOST_IN_TRANSIT
    else:
        assert most_in_transit(order) == copies
    assert all(("params" in kinds) != packed for _, kinds in (one for one in order if one[0] == "driver"))


def most_in_transit(order, packed=False):
    """Return how many slabs, or of those whose masters are packed, were on their way together."""
    leaving, most = set(), 0
    for name, *slab in order:
        if name == "copy_out":
            leaving.update(one for one in slab if not packed or one.codec.family is not None)
        elif name == "release":
            leaving.difference_update(slab)
        most = max(most, len(leaving))
    return most


@pytest.mark.parametrize("packed", [False, True])
def test_before_the_first_step_a_sleep_frees_what_is_there(packed):
    """Moments are not made yet; a sum that counts them would tell of memory that somebody keeps."""
    with CpuTraining(options()) as training:
        config = bridge_fgo.OffloadConfig(engine="native", master_remainders=packed)
        res = residency(training, config=config)
        held = states_bytes(res)
        assert 0 < held == res.offload("optimizer").freed and states_bytes(res) == 0
        res.reload()
        seen = [numbers(training.step())]
    assert seen == [each for each, _ in resident(1)]


def test_weights_that_are_loaded_after_a_sleep_failed_half_way_are_copied_at_the_next(monkeypatch):
    """Masters that were compared in the failed one may have gone, and tell nothing of what was loaded since."""
    with CpuTraining(options()) as training:
        training.step()
        res = residency(training)
        res.offload()
        res.reload()

        def fails(*of):
            raise StillShared("another process has it")

        with monkeypatch.context() as patch:
            patch.setattr(type(res._weights), "empty", fails)
            with pytest.raises(StillShared):
                res.offload("params", "optimizer")
        assert res.away == {"optimizer"}  # unchanged, and so gone at once
        weight = next(training.model[0].parameters())
        with torch.no_grad():
            weight.view(-1)[3] = 123.0
        before = weight.detach().clone()
        res.offload("params")
        res.reload()
        assert torch.equal(weight, before)


def test_from_the_second_wake_of_parameters_alone_on_they_cross_in_16_bits():
    with CpuTraining(options()) as training:
        res, nbytes = residency(training), weights_bytes(training)
        copied = []
        for _ in range(3):
            training.step()
            out = res.offload()
            copied.append((out.copied_by_kind["params"], res.reload("params").copied, res.offload("params").copied))
            res.reload()
        assert copied[0] == (0, 2 * nbytes, nbytes)  # whole masters came, one slab at a time
        assert copied[1] == copied[2] == (nbytes, nbytes, 0)


def test_weights_begin_to_leave_before_states_and_what_decides_nothing_is_compared_meanwhile(monkeypatch):
    with CpuTraining(options()) as training:
        training.step()
        res = residency(training)
        order = []
        note(monkeypatch, order, StorageSlab, "copy_out", "weights")
        note(monkeypatch, order, Rounding, "agrees", "compare")
        note(monkeypatch, order, states.OptimizerStates, "start_offload", "states")
        res.offload()
        assert order == ["compare", "states"]  # masters tell the weights
        res.reload("params")
        res.reload()
        training.step()
        order.clear()
        res.offload()
        assert order == ["weights", "compare", "states"]  # they are copied in any case: they wake alone


def note(monkeypatch, order, owner, name, word):
    """Append a word whenever a method is called."""
    method = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *of: (order.append(word), method(*of))[1])


def test_where_states_cannot_leave_the_weights_stay_and_their_copies_are_waited_for(monkeypatch):
    """Training may go on and write them, while a copy that is taken for theirs still reads them."""
    with CpuTraining(options()) as training:
        training.step()
        res = residency(training)
        res.offload()
        res.reload("params")
        res.reload()
        training.step()
        order = []

        def fail(self):
            order.append("states")
            raise MemoryError("states")

        with monkeypatch.context() as patch:
            note(patch, order, StorageSlab, "copy_out", "weights")
            patch.setattr(states.OptimizerStates, "start_offload", fail)
            patch.setattr(phases_residency, "wait_for_gpu", lambda device: order.append("wait"))
            with pytest.raises(MemoryError):
                res.offload("params", "optimizer")
        assert order == ["wait", "weights", "states", "wait"]
        assert not res.away
        training.step()
        res.offload()
        res.reload()
        found = training.digests()
    assert found == resident(3)[-1][1]


@pytest.mark.parametrize("where", ["copy out", "weights", "release"])
@pytest.mark.parametrize("packed", [False, True])
def test_after_a_sleep_that_failed_half_way_training_goes_on_and_the_next_copies_what_it_wrote(
    monkeypatch, where, packed
):
    """A slab whose copy was started before the update would else leave with what it was then."""
    changes = {"experts": True, "hidden": 128, "sequence": 32, "vocab": 128}  # several slabs
    with CpuTraining(options(**changes)) as training:
        training.step()
        small = bridge_fgo.OffloadConfig(engine="native", master_remainders=packed, slab_bytes=2**20)
        res = residency(training, config=small)
        assert len(res._states.engine.slabs) > MOST_IN_TRANSIT
        transfers = type(res._states.engine.schedule.transfers)
        owner, name = {
            "copy out": (transfers, "copy_out"), "weights": (StorageSlab, "empty"), "release": (transfers, "release"),
        }[where]  # fmt: skip
        with monkeypatch.context() as patch:
            fail_once(patch, owner, name)
            with pytest.raises(StillShared):
                res.offload("params", "optimizer")
        res.reload()
        for _ in range(2):
            training.step()
            res.offload()
            res.reload()
        found = training.digests()
    assert found == resident(3, **changes)[-1][1]


def test_weights_that_were_changed_by_hand_are_copied_and_not_rounded_from_masters():
    with CpuTraining(options()) as training:
        training.step()
        res = residency(training)
        weight = next(training.model[0].parameters())
        with torch.no_grad():
            weight.view(-1)[3] = 123.0
        before = weight.detach().clone()
        assert res.offload().copied_by_kind["params"] == weights_bytes(training)
        res.reload()
        assert torch.equal(weight, before)


def test_weights_that_are_changed_while_their_masters_are_away_come_back_changed():
    with CpuTraining(options()) as training:
        training.step()
        res = residency(training)
        weight = next(training.model[0].parameters())
        res.offload("optimizer")
        assert res.offload("params").copied == 0  # as they were when the masters left
        res.reload("params")
        for value in (123.0, 45.0):
            with torch.no_grad():
                weight.view(-1)[3] = value
            res.offload("params")
            res.reload("params")
            assert weight.view(-1)[3] == value
        res.offload("params")
        res.reload("optimizer")
        res.reload("params")
        assert weight.view(-1)[3] == 45.0


def test_gradients_of_a_backward_are_not_dropped_and_nothing_moves():
    with CpuTraining(options()) as training:
        res, refused = residency(training), []
        step = training.optimizer.step

        def sleep_first():
            with pytest.raises(RuntimeError, match="grads='keep'") as error:
                res.offload()
            assert gone(res) == set() == res.away
            refused.append(error)
            return step()

        training.optimizer.step = sleep_first
        seen = [numbers(training.step())]
        assert refused and not res._model.has_backward
        res.offload("grads")  # the update is over
        res.reload()
        seen.append(numbers(training.step()))
    assert_as_resident(training, seen, {})


def test_zeroed_gradients_may_be_dropped():
    with CpuTraining(options()) as training:
        res = residency(training)
        res._model.backwards[0].is_pending = True
        training.model[0].zero_grad_buffer()
        res.offload("grads")
        assert gone(res) >= {"grads"}


def test_fp32_gradients_of_shards_go_with_their_buffer():
    with CpuTraining(options()) as training:
        training.step()
        res = residency(training)
        (group, *_) = training.optimizer.chained_optimizers[0].optimizer.param_groups
        param = group["params"][0]
        param.grad = torch.ones_like(param)
        res.reload()
        assert res.offload("grads").freed == sum(s.nbytes for s in res._model.gradient_slabs) + param.nbytes
        assert param.grad is None


def test_memory_that_is_gone_is_not_read_but_raises():
    with CpuTraining(options()) as training:
        training.step()
        res = residency(training)
        (ddp,) = training.model
        (leaf,) = training.optimizer.chained_optimizers
        res.offload()
        for use, kind in (
            (lambda: ddp(None), "params"),
            (lambda: ddp.module(None), "params"),
            (lambda: ddp.state_dict(), "params"),
            (lambda: ddp.zero_grad_buffer(), "grads"),
            (lambda: training.optimizer.step(), "params"),
            (lambda: leaf.state_dict(), "optimizer"),
            (lambda: leaf.load_state_dict({}), "optimizer"),
        ):
            with pytest.raises(RuntimeError, match=rf"call reload\('{kind}'\) first"):
                use()
        res.reload("params")
        with pytest.raises(RuntimeError, match=r"reload\('grads'\)"):
            ddp(None)
        res.close()
        assert "step" not in vars(training.optimizer) and "state_dict" not in vars(ddp)
        training.step()


def test_a_copy_of_a_guarded_model_is_not_guarded_and_is_its_own():
    with CpuTraining(options()) as training:
        model = torch.nn.Linear(3, 2)
        res = bridge_fgo.Residency([training.model[0], model])
        twin = copy.deepcopy(model)
        twin.weight.data.zero_()
        assert not twin.state_dict()["weight"].any()
        assert model.state_dict()["weight"].any()
        res.close()


def test_contexts_put_everything_back():
    with CpuTraining(options()) as training:
        seen = [numbers(training.step())]
        res = residency(training)
        res.offload("grads")
        with res.only("params") as moved:
            assert res.away == {"grads", "optimizer"} and moved.copied_by_kind["optimizer"]
            with res.asleep():
                assert res.away == set(KINDS)
            assert res.away == {"grads", "optimizer"}
        assert res.away == {"grads"}
        res.reload()
        seen.append(numbers(training.step()))
    assert_as_resident(training, seen, {})


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("away", [(), ("grads",), ("params", "optimizer"), KINDS])
def test_after_an_error_in_a_block_what_was_away_is_away_again_and_what_has_left_waits_for_a_reload(away, packs):
    with CpuTraining(options()) as training:
        seen = [numbers(training.step())]
        res = residency(training, config=bridge_fgo.OffloadConfig(engine="native", master_remainders=packs))
        for kinds in (("grads",), ("params",), ("params", "grads")):
            if away:
                res.offload(*away)
            with pytest.raises(ZeroDivisionError) as caught, res.only(*kinds):
                if len(kinds) == 2:
                    sum(weight.float().sum() for weight in training.model[0].parameters()).backward()
                    assert res._model.has_backward
                _ = 1 / 0
            stays = sorted({*KINDS} - {*kinds, *away})
            assert res.away == {*away, *stays}
            words = ", ".join(map(repr, stays))
            notes = [f"bridge_fgo: {words} stay off the GPU after this error: call reload() on every rank"]
            assert getattr(caught.value, "__notes__", []) == (notes if stays else [])
            res.reload()
            assert not res.away
            training.model[0].zero_grad_buffer()
        seen.append(numbers(training.step()))
    assert_as_resident(training, seen, {})


def test_what_cannot_leave_again_after_an_error_is_told_beside_it(monkeypatch):
    with CpuTraining(options()) as training:
        res = residency(training)
        res.offload()
        monkeypatch.setattr("bridge_fgo.sleep.residency.wait_for_gpu", lambda device: time.sleep(2))
        monkeypatch.setattr("bridge_fgo.sleep.moved.PATIENCE", 0.1)
        with pytest.raises(ZeroDivisionError) as caught, res.only("params"):
            _ = 1 / 0
        assert res.away == {"grads", "optimizer"}
        assert caught.value.__notes__ == [
            "bridge_fgo: what has come in the block may be on the GPU still: work on the GPU, a collective perhaps, "
            "has not ended in 0.1 seconds"
        ]
        monkeypatch.undo()
        res.close()


def test_a_model_without_ddp_leaves_and_returns_and_is_copied_once():
    model = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50, bias=False))
    model[1].weight = model[0].weight  # tied
    model.append(torch.nn.Linear(50, 3).requires_grad_(False))
    before = [p.detach().clone() for p in model.parameters()]
    res = bridge_fgo.Residency(model)
    nbytes = sum(p.nbytes for p in before)
    assert res.offload("params").copied == nbytes
    assert [p.untyped_storage().nbytes() for p in model.parameters()] == [0, 0, 0]
    with pytest.raises(RuntimeError, match=r"reload\('params'\)"):
        model(torch.zeros(1, dtype=torch.long))
    assert res.reload().copied == nbytes
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))
    assert res.offload().copied == 0
    with pytest.raises(ValueError, match="optimizer=None"):
        res.offload("optimizer")
    res.close()
    model(torch.zeros(1, dtype=torch.long))


@pytest.mark.parametrize("kind", ["params", "grads"])
def test_a_wake_that_finds_no_memory_leaves_it_away_and_may_be_tried_again(monkeypatch, kind):
    changes = {"experts": True}  # several buffers
    with CpuTraining(options(**changes)) as training:
        seen = [numbers(training.step())]
        res = residency(training)
        res.offload(grads="keep")
        fill, calls = StorageSlab.fill, []

        def full(slab, zeroed=False):
            calls.append(slab)
            if len(calls) == 2:
                raise torch.OutOfMemoryError("none left")
            return fill(slab, zeroed)

        with monkeypatch.context() as patch:
            patch.setattr(StorageSlab, "fill", full)
            with pytest.raises(torch.OutOfMemoryError):
                res.reload(kind)
        assert gone(res) == set(KINDS) == res.away
        res.reload()
        seen.append(numbers(training.step()))
    assert_as_resident(training, seen, changes)


def test_collectives_in_flight_are_waited_for_and_their_handles_stay():
    with CpuTraining(options(overlap_grad_reduce=True, overlap_param_gather=True)) as training:
        training.step()
        res = residency(training)
        group = training.model[0].bucket_groups[0]
        waited = []

        class Handle:
            def wait(self):
                waited.append(gone(res))

        before, group.param_gather_handle = group.param_gather_handle, Handle()
        res.offload("params")
        assert waited == [set()] and isinstance(group.param_gather_handle, Handle)
        group.param_gather_handle = before
        res.close()


def test_words_that_are_none_are_refused_before_anything_moves():
    with CpuTraining(options()) as training:
        res = residency(training)
        for call, match in (
            (lambda: res.offload("params", "gradients"), "gradients"),
            (lambda: res.reload("weights"), "weights"),
            (lambda: res.offload(grads="copy"), "grads='copy'"),
        ):
            with pytest.raises(ValueError, match=match):
                call()
        assert gone(res) == set()
        res.close()
