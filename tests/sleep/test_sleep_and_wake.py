"""Parameters, gradients and optimizer state are offloaded and reloaded apart, bitwise as if nothing had moved."""

import contextlib
import copy
import itertools
import time
import warnings
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch
from both import PACKED
from cpu_training import CpuTraining
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sleeping import (
    KINDS,
    SEVERAL_SLABS,
    WHOLE,
    Sleeper,
    configured,
    fail,
    gone,
    note,
    options,
    poison,
    precision_aware,
    resident,
    resident_now,
)  # fmt: skip

import bridge_fgo
from bridge_fgo.bridge import residency
from bridge_fgo.memory.host_buffer import HostBuffer
from bridge_fgo.memory.slab import MOST_IN_TRANSIT, StillShared
from bridge_fgo.memory.storage_slab import StorageSlab
from bridge_fgo.sleep import moved, states
from bridge_fgo.sleep.rounding import Rounding
from bridge_fgo.sleep.weights import Weights

pytestmark = pytest.mark.usefixtures("cpu_standins", "poisoned")
MASTERS = pytest.mark.parametrize("masters", [WHOLE, PACKED], ids=["whole masters", "packed masters"])

# What trains.


@configured
def fp32_gradients(cfg):
    cfg.ddp.grad_reduce_in_fp32 = False
    cfg.ddp.param_name_patterns_for_fp32_local_accumulation = ("all",)


@dataclass
class Case:
    """A training that sleeps.

    changes: its options. config: of its residency. flag: the config that is installed, with the flag set. prepare:
    changes what the options cannot.
    """

    changes: dict = field(default_factory=dict)
    config: bridge_fgo.OffloadConfig | None = None
    flag: bridge_fgo.OffloadConfig | None = None
    prepare: object = None


ADAM, MUON = {"distributed": False}, {"distributed": False, "optimizer": "muon"}
IN_FLIGHT = {"overlap_grad_reduce": True, "overlap_param_gather": True}
SLOW = {
    *("experts", "adam", "muon", "muon_of_experts", "adam_with_fp32_parameters", "adam_with_most_frozen"),
    *("adam_packed", "dist_muon_packed", "flag_with_whole_masters"),
}
CASES = {
    "dense": Case(),
    "experts": Case({"experts": True}),
    "native_fp32_parameters": Case({"precision": "fp32_params"}),
    "most_parameters_frozen": Case({"frozen": True}),
    "fp16_with_skipped_steps": Case({"precision": "fp16"}),
    "two_chunks_with_collectives_in_flight": Case({"chunks": 2, **IN_FLIGHT}),
    "packed": Case(config=PACKED),
    "flag_with_packed_masters": Case(flag=PACKED),
    "flag_with_whole_masters": Case(flag=WHOLE),
    "flag_by_default": Case(flag=bridge_fgo.OffloadConfig(engine="native", slab_bytes=2**20)),
    "adam": Case(ADAM),
    "muon": Case(MUON),
    "dist_muon": Case(MUON | {"optimizer": "dist_muon"}),
    "muon_of_experts": Case(MUON | {"experts": True}),
    "adam_with_fp32_parameters": Case(ADAM | {"precision": "fp32_params"}),
    "adam_with_most_frozen": Case(ADAM | {"frozen": True}),
    "adam_packed": Case(ADAM, PACKED),
    "muon_packed": Case(MUON, PACKED),
    "dist_muon_packed": Case(MUON | {"optimizer": "dist_muon"}, PACKED),
    "fp32_gradients_beside_16_bit_buffers": Case(prepare=fp32_gradients),
    "precision_aware": Case(prepare=precision_aware(False)),
    "precision_aware_with_remainders": Case(prepare=precision_aware(True)),
}


@pytest.mark.parametrize(
    ("name", "steps"),
    [pytest.param(name, 4, id=name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES]
    + [
        pytest.param(name, 10, id=f"{name}-10", marks=pytest.mark.slow)
        for name in itertools.islice(CASES, 6)
    ],
)  # fmt: skip
def test_training_that_sleeps_after_each_step_is_bitwise_a_resident_one(monkeypatch, name, steps):
    case = CASES[name]
    if case.prepare is not None:
        case.prepare(monkeypatch)
    installed = contextlib.nullcontext() if case.flag is None else bridge_fgo.install(case.flag)
    with installed, CpuTraining(options(**case.changes, offload=case.flag is not None)) as training:
        me = Sleeper(training, case.changes, case.config)
        assert me.res is not None  # made before the first step, which makes the moments
        for number in range(steps):
            me.train()
            moved = me.res.offload()
            assert me.gone() == set(KINDS) == me.res.away
            assert not any(p.untyped_storage().nbytes() for ddp in training.model for p in ddp.parameters())
            if "distributed" in case.changes:  # no DDP buffer has the weights, and nobody rounds them again
                assert moved.copied_by_kind["params"] > 0
            with me.res.only("params"):
                assert me.gone() == {"grads", "optimizer"} == me.res.away
            if case.flag is None or number % 2:
                me.res.reload()
                assert me.gone() == set() == me.res.away
                assert not any(slab._bytes.any() for slab in me.res._gradients.slabs)
            else:
                me.res.reload("params", "grads")  # the step brings the states itself
        me.res.reload()
        if case.config is case.flag is None:  # packed ones are copied anew
            assert me.res.offload().copied == 0
        me.res.close()
        me.assert_as_resident(resident if case.prepare is None else resident_now)


KIND_SETS = st.sets(st.sampled_from(KINDS)).map(sorted)
MOVES = st.one_of(
    st.tuples(st.just("offload"), KIND_SETS),
    st.tuples(st.just("reload"), KIND_SETS),
    st.tuples(st.just("keep"), KIND_SETS),
    st.just(("step", [])),
)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(moves=st.lists(MOVES, max_size=14), mid=KIND_SETS, debug=st.booleans())
def test_any_order_of_sleeps_wakes_and_steps_is_bitwise_a_resident_run(moves, mid, debug):
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        poison(patch)
        if debug:
            patch.setenv("BRIDGE_FGO_DEBUG", "1")
        me = Sleeper(stack.enter_context(CpuTraining(options())), {}, None)
        res, step = me.res, me.training.optimizer.step

        def sleep_first():  # between the backward and the update
            res.offload(mid, grads="keep")
            assert me.gone() == set(mid)
            res.reload()
            return step()

        patch.setattr(me.training.optimizer, "step", sleep_first)
        for verb, kinds in moves:
            before = res.away
            if verb == "step":
                res.reload()
                me.train()
            elif verb == "reload":
                res.reload(kinds)
                assert res.away == before - set(kinds)
            else:
                res.offload(kinds, grads="keep" if verb == "keep" else "drop")
                assert me.gone() >= before | set(kinds) == res.away
            if len(me.seen) == 6:
                break
        res.reload()
        res.close()
        if me.seen:
            me.assert_as_resident()


@MASTERS
def test_a_sleep_in_parts_brings_back_nothing_and_the_driver_gets_memory_last(sleeper, monkeypatch, masters):
    me, returns = sleeper(0, config=masters, early=True), []
    monkeypatch.setattr(residency, "return_to_driver", lambda device: returns.append(me.gone()))
    for order in itertools.permutations(KINDS):
        me.train()
        for kind in order:
            me.res.offload(kind)
            assert returns[-1] == me.res.away
        assert me.gone() == set(KINDS) == me.res.away
        me.res.reload()
    me.res.offload(grads="keep")
    assert returns[-1] == set(KINDS)


# Copies, and their order.


WEIGHTS_AWAY = {
    "awake": lambda res: None,
    "both away": lambda res: res.offload(),
    "masters before weights": lambda res: (res.offload("optimizer"), res.offload("params")),
    "weights before masters": lambda res: (res.offload("params"), res.offload("optimizer")),
    "masters here": lambda res: res.offload("params"),
    "masters back": lambda res: (res.offload(), res.reload("optimizer")),
    "masters back by an error": lambda res: (res.offload(), wake_no_weights(res)),
    "by a later sleep that copies nothing": lambda res: (res.offload(), res.reload(), res.offload()),
}
"""Where weights and masters are as masters are written."""


def wake_no_weights(res):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        fail(patch, StorageSlab, "fill", call=1, error=torch.OutOfMemoryError)
        res.reload("params", "optimizer")
    assert res.away == {"params", "grads"}


@pytest.mark.parametrize("by", ["a load", "a write"])
@pytest.mark.parametrize("is_flag", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["served", "flag"])
@pytest.mark.parametrize("way", WEIGHTS_AWAY)
def test_masters_that_are_replaced_while_weights_are_away_change_no_weight_before_a_step(sleeper, way, is_flag, by):
    """As awake: a step writes weights from masters, a load of the optimizer's states does not."""
    with bridge_fgo.install(WHOLE):
        me = sleeper(1, offload=is_flag)
        me.res.serve_states()
        saved = copy.deepcopy(me.leaf.get_parameter_state_dp_reshardable())
        for entry in (entry for buckets in saved[0].values() for bucket in buckets for entry in bucket):
            entry["padding"] = False  # as a checkpoint has it
        me.train()
        before = [param.detach().clone() for param in me.ddp.parameters()]
        WEIGHTS_AWAY[way](me.res)
        if by == "a load":
            me.leaf.load_parameter_state_from_dp_reshardable(saved)
        for master in (m for group in me.leaf.shard_fp32_from_float16_groups for m in group if by == "a write"):
            master.mul_(2)
        me.res.reload()
        assert all(torch.equal(one, other) for one, other in zip(me.ddp.parameters(), before, strict=True))
        me.train()
        me.res.reload()
        assert not any(torch.equal(one, other) for one, other in zip(me.ddp.parameters(), before, strict=True))


def test_gradients_cross_no_link_unchanged_memory_crosses_once_and_objects_stay_the_same(sleeper):
    me = sleeper()
    out, states = me.res.offload(), 6 * me.weights_bytes
    assert out.copied_by_kind == {"optimizer": states, "params": 0}  # rounded from the masters
    assert out.copied == states and out.freed == states * 9 // 6
    assert me.res.reload().copied_by_kind == {"optimizer": states, "params": 0, "grads": 0}
    assert me.res.offload().copied == 0
    assert me.res.offload().seconds == 0  # away already

    me = sleeper()
    (ddp,) = me.training.model

    def views():
        found = [t for p in ddp.parameters() for t in (p, p.main_grad)]
        return found + [t for b in ddp.buffers for bucket in b.buckets for t in (bucket.param_data, bucket.grad_data)]

    held = views()
    storages = [t.untyped_storage()._cdata for t in held]
    before = [t.detach().clone() for t in ddp.parameters()]
    me.res.offload()
    assert all(t.untyped_storage().nbytes() == 0 for t in held)
    me.res.reload()
    assert all(one is other for one, other in zip(held, views(), strict=True))
    assert [t.untyped_storage()._cdata for t in views()] == storages
    assert all(torch.equal(one, other) for one, other in zip(before, ddp.parameters(), strict=True))


@pytest.mark.parametrize("steps", [0, 1])
@MASTERS
def test_the_freed_bytes_of_states_are_those_of_their_storages(sleeper, masters, steps):
    """Moments are not made before the first step; a sum that counts them would tell of memory that somebody keeps."""
    me = sleeper(steps, config=masters, experts=True)
    for _ in range(2):  # the first time from tensors of their own, then from slabs
        held = me.states_bytes()
        assert 0 < held == me.res.offload("optimizer").freed and me.states_bytes() == 0
        assert me.res.reload("optimizer").freed == -held == -me.states_bytes()
    me.train()
    me.assert_as_resident()


def test_host_memory_is_taken_once_and_from_the_second_wake_of_parameters_alone_on_they_cross_in_16_bits(sleeper):
    with mock.patch.object(HostBuffer, "__init__", autospec=True, side_effect=HostBuffer.__init__) as make:
        me = sleeper()
        for _ in range(3):
            me.train()
            me.res.offload()
            me.res.reload("params")
            me.res.offload("params")
            me.res.reload()
    taken = sum(call.args[1] for call in make.call_args_list)
    assert taken == 7 * me.weights_bytes  # 12 bytes of states and 2 of weights to each weight of 2

    me, copied = sleeper(0, early=True), []
    for _ in range(3):
        me.train()
        out = me.res.offload()
        copied.append(
            (out.copied_by_kind["params"], me.res.reload("params").copied, me.res.offload("params").copied)
        )  # fmt: skip
        me.res.reload()
    nbytes = me.weights_bytes
    assert copied[0] == (0, 2 * nbytes, nbytes)  # whole masters came, one slab at a time
    assert copied[1] == copied[2] == (nbytes, nbytes, 0)


def test_gradients_and_weights_get_their_memory_while_states_are_copied(sleeper, monkeypatch):
    """The driver takes time to give it; the host waits for the copies when it has nothing else to do."""
    me, order = sleeper(), []
    me.res.offload()
    for owner, name in (
        (type(me.res._states), "reload"),
        (type(me.res._states), "finish_reload"),
        (StorageSlab, "fill"),
    ):
        note(monkeypatch, order, owner, name, name)
    me.res.reload()
    assert order[0] == "reload" and order[-1] == "finish_reload" and set(order[1:-1]) == {"fill"}


@pytest.mark.parametrize("write", [lambda words: words.mul_(2), lambda words: words[:8].bitwise_not_()])
def test_after_a_step_states_are_copied_without_a_look_else_only_those_that_have_changed(sleeper, monkeypatch, write):
    """To sum over them before the first copy begins would take time for what is known."""
    me, looked = sleeper(), []
    note(monkeypatch, looked, type(me.res._states._copies), "unchanged", "look")
    me.res.offload()
    me.res.reload()
    me.train()
    assert me.res.offload("optimizer").copied == 6 * me.weights_bytes
    assert len(looked) == 1  # of the first sleep, before anybody could say
    me.res.reload()
    words = me.moment.view(torch.int32).view(-1)
    write(words)
    written = words.clone()
    copied = me.res.offload("optimizer").copied
    assert len(looked) == 2 and 0 < copied < 6 * me.weights_bytes
    me.res.reload()
    assert torch.equal(words, written)
    assert me.res.offload("optimizer").copied == 0


@MASTERS
def test_the_driver_gets_what_has_left_while_other_slabs_are_copied(sleeper, monkeypatch, masters):
    """The driver takes a fifth of the copies' time. The host waits first until no copy reads the memory any more."""
    monkeypatch.setattr(states, "RETURNED_BYTES", 1)
    me = sleeper(experts=True, hidden=128, sequence=32, vocab=128, config=masters)
    packed, order = masters is PACKED, []
    for name in ("copy_out", "release", "await_released"):
        note(monkeypatch, order, me.transfers, name, name, with_slab=True)
    monkeypatch.setattr(states, "return_to_driver", lambda device: order.append(("driver", me.gone())))
    me.res.offload()
    first = order[:]
    me.res.reload()
    me.train()
    order.clear()
    me.res.offload()
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


def waken_alone(me):
    """Have weights be copied at the next sleep: they are reloaded without their masters."""
    me.res.offload()
    me.res.reload("params")
    me.res.reload()
    me.train()


def test_weights_begin_to_leave_before_states_and_what_decides_nothing_is_compared_meanwhile(sleeper, monkeypatch):
    me, order = sleeper(), []
    note(monkeypatch, order, StorageSlab, "copy_out", "weights")
    note(monkeypatch, order, Rounding, "agrees", "compare")
    note(monkeypatch, order, states.OptimizerStates, "start_offload", "states")
    me.res.offload()
    assert order == ["compare", "states"]  # masters tell the weights
    me.res.reload()
    waken_alone(me)
    order.clear()
    me.res.offload()
    assert order == ["weights", "compare", "states"]  # they are copied in any case: they wake alone


def test_masters_are_packed_with_weights_that_were_looked_up_after_they_had_woken(sleeper, monkeypatch):
    """A buffer that was asleep may come back to another address, and kernels keep a table of addresses."""
    from bridge_fgo.memory.remainders import Remainders

    order = []
    for owner, name in ((Remainders, "locate"), (Remainders, "encode"), (Weights, "reload")):
        note(monkeypatch, order, owner, name, name)
    me = sleeper(config=PACKED, early=True)
    me.res.offload("params")
    order.clear()
    me.res.offload("optimizer")
    assert order[:3] == ["reload", "locate", "encode"]
    me.res.close()


@pytest.mark.parametrize("flag", [False, True])
def test_packed_masters_wake_their_weights_first_and_the_call_says_so(sleeper, flag):
    with bridge_fgo.install(PACKED) if flag else contextlib.nullcontext():
        me = sleeper(config=None if flag else PACKED, offload=flag)
        bridge_fgo.reload_states()
        out, nbytes = me.res.offload(), me.weights_bytes
        assert out.copied_by_kind["params"] == nbytes  # they are what the masters come back by
        assert nbytes < out.copied_by_kind["optimizer"] - 4 * nbytes < 1.2 * nbytes  # 17 bits of 32
        back = me.res.reload("optimizer")
        assert back.woke == ("params",) and me.res.away == {"grads"}
        me.res.offload("params")
        again = me.res.offload("optimizer")
        assert again.woke == ("params",) and again.copied_by_kind["params"] == nbytes  # in alone: nothing had changed
        assert me.res.away == set(KINDS)
        me.res.reload()
        me.train()


@pytest.mark.parametrize(("left", "warns"), [(0, False), (10**9, True)])
def test_memory_of_which_another_process_has_handles_is_said(monkeypatch, left, warns):
    """As an inference engine has them: what is let go of stays on the GPU, and no count of our own tells."""
    allocated = [4 * 10**9, left]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 * 10**9, 9 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated.pop(0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * 10**9)
    tally = moved.Tally(torch.device("cuda", 0))
    tally.moved.freed = 4 * 10**9
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        tally.note_what_stays()
    assert [("1.00 GB" in str(each.message) and "weight sync" in str(each.message)) for each in said] == [True] * warns
    assert tally.moved.stays == {"allocated": left, "cached": 3 * 10**9 - left, "outside": 10**9}


# Faults.


def test_weights_that_are_loaded_after_a_sleep_failed_half_way_are_copied_at_the_next(sleeper, monkeypatch):
    """Masters that were compared in the failed one may have gone, and tell nothing of what was loaded since."""
    me = sleeper()
    me.res.offload()
    me.res.reload()
    with monkeypatch.context() as patch, pytest.raises(StillShared):
        fail(patch, Weights, "release", call=1)
        me.res.offload("params", "optimizer")
    assert me.res.away == {"optimizer"}  # unchanged, and so gone at once
    change(me.weight, 123.0)
    me.res.offload("params")
    me.res.reload()
    assert me.weight.view(-1)[3] == 123.0


def change(weight, value):
    """Change an element of a weight by hand."""
    with torch.no_grad():
        weight.view(-1)[3] = value


def test_where_states_cannot_leave_the_weights_stay_and_their_copies_are_waited_for(sleeper, monkeypatch):
    """Training may go on and write them, while a copy that is taken for theirs still reads them."""
    me, order = sleeper(), []
    waken_alone(me)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        fail(patch, states.OptimizerStates, "start_offload", call=1, error=MemoryError)
        note(patch, order, states.OptimizerStates, "start_offload", "states")
        note(patch, order, StorageSlab, "copy_out", "weights")
        patch.setattr(residency, "wait_for_gpu", lambda device: order.append("wait"))
        me.res.offload("params", "optimizer")
    assert order == ["wait", "weights", "states", "wait"]
    assert not me.res.away
    me.train()
    me.res.offload()
    me.res.reload()
    me.assert_as_resident()


NO_MEMORY = torch.OutOfMemoryError
FAULTS = {
    "copy_out": ("states", StillShared, None),
    "empty": ("storages", StillShared, None),
    "release": ("states", StillShared, None),
    "fill of weights": ("storages", NO_MEMORY, "params"),
    "fill of gradients": ("storages", NO_MEMORY, "grads"),
}
"""Second calls that fail, of slabs of states or of storages: in a sleep, or in a wake of some kind."""


@pytest.mark.parametrize("where", FAULTS)
@MASTERS
def test_after_a_move_that_failed_half_way_training_goes_on_and_the_next_copies_it(
    sleeper, monkeypatch, where, masters
):
    """Else a slab whose copy was started before the update would be offloaded with the old values."""
    of, error, wakes = FAULTS[where]
    me = sleeper(config=masters, experts=True, **SEVERAL_SLABS)  # several buffers
    assert len(me.res._states.engine.slabs) > MOST_IN_TRANSIT
    if wakes is not None:
        me.res.offload(grads="keep")
    with monkeypatch.context() as patch, pytest.raises(error):
        fail(patch, StorageSlab if of == "storages" else me.transfers, where.partition(" ")[0], error=error)
        me.res.offload("params", "optimizer") if wakes is None else me.res.reload(wakes)
    assert wakes is None or me.gone() == set(KINDS) == me.res.away
    me.res.reload()
    for _ in range(2):
        me.train()
        me.res.offload()
        me.res.reload()
    me.assert_as_resident()


@MASTERS
@pytest.mark.parametrize("away", [(), ("grads",), ("params", "optimizer"), KINDS])
def test_after_an_error_in_a_block_what_was_away_is_again_and_what_has_left_waits_for_a_reload(sleeper, away, masters):
    me = sleeper(config=masters)
    for kinds in (("grads",), ("params",), ("params", "grads")):
        if away:
            me.res.offload(*away)
        with pytest.raises(ZeroDivisionError) as caught, me.res.only(*kinds):
            if len(kinds) == 2:
                sum(weight.float().sum() for weight in me.ddp.parameters()).backward()
                assert me.res._backwards.pending
            _ = 1 / 0
        stays = sorted({*KINDS} - {*kinds, *away})
        assert me.res.away == {*away, *stays}
        words = ", ".join(map(repr, stays))
        notes = [f"bridge_fgo: {words} stay off the GPU after this error: call reload() on every rank"]
        assert getattr(caught.value, "__notes__", []) == (notes if stays else [])
        me.res.reload()
        assert not me.res.away
        me.ddp.zero_grad_buffer()
    me.train()
    me.assert_as_resident()


def test_what_cannot_be_offloaded_again_after_an_error_is_told_beside_it(sleeper, monkeypatch):
    me = sleeper(0)
    me.res.offload()
    with monkeypatch.context() as patch:
        patch.setattr("bridge_fgo.bridge.residency.wait_for_gpu", lambda device: time.sleep(0.5))
        patch.setattr("bridge_fgo.sleep.moved.PATIENCE", 0.1)
        with pytest.raises(ZeroDivisionError) as caught, me.res.only("params"):
            _ = 1 / 0
        assert me.res.away == {"grads", "optimizer"}
        assert caught.value.__notes__ == [
            "bridge_fgo: what the block has reloaded may still be on the GPU: work on the GPU, a collective perhaps, "
            "has not ended in 0.1 seconds"
        ]
    me.res.close()


# What masters do not round to, and gradients.


def test_weights_that_were_changed_by_hand_are_copied_and_not_rounded_from_masters(sleeper):
    me = sleeper()
    change(me.weight, 123.0)
    assert me.res.offload().copied_by_kind["params"] == me.weights_bytes
    me.res.reload()
    assert me.weight.view(-1)[3] == 123.0


@pytest.mark.parametrize("slept_before", [True, False])
def test_weights_that_are_changed_while_their_masters_are_away_come_back_changed(sleeper, slept_before):
    me = sleeper()
    res, weight = me.res, me.weight
    res.offload("optimizer")
    if slept_before:
        assert res.offload("params").copied == 0  # as they were when the masters left
        res.reload("params")
    for value in (123.0, 45.0):
        change(weight, value)
        res.offload("params")
        res.reload("params")
        assert weight.view(-1)[3] == value
    res.offload("params")
    res.reload("optimizer")
    res.reload("params")
    assert weight.view(-1)[3] == 45.0


def test_gradients_may_go_once_ddp_has_zeroed_them_and_not_after_a_backward_by_a_refusal_that_says_so(sleeper):
    me, refused = sleeper(0), []
    res, step = me.res, me.training.optimizer.step

    def sleep_first():
        with pytest.raises(RuntimeError, match=r"zero_grad_buffer\(\).*grads='keep'") as error:
            res.offload()
        assert me.gone() == set() == res.away
        refused.append(error)
        return step()

    me.training.optimizer.step = sleep_first
    me.train()
    assert refused and not res._backwards.pending
    res.offload("grads")  # the update is over
    res.reload()
    me.train()
    me.assert_as_resident()

    me = sleeper()
    me.res._backwards.pending.add(id(me.ddp))
    me.training.optimizer.zero_grad()  # those of shards; mcore leaves DDP's buffers
    assert me.res._backwards.pending
    me.ddp.zero_grad_buffer()
    param = me.leaf.optimizer.param_groups[0]["params"][0]
    param.grad = torch.ones_like(param)
    assert me.res.offload("grads").freed == sum(s.nbytes for s in me.res._gradients.slabs) + param.nbytes
    assert param.grad is None and me.gone() == {"grads"} == me.res.away


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


def test_collectives_in_flight_are_waited_for_and_their_handles_stay(sleeper):
    me, waited = sleeper(**IN_FLIGHT), []
    group = me.ddp.bucket_groups[0]

    class Handle:
        def wait(self):
            waited.append(gone(me.res))

    before, group.param_gather_handle = group.param_gather_handle, Handle()
    me.res.offload("params")
    assert waited == [set()] and isinstance(group.param_gather_handle, Handle)
    group.param_gather_handle = before
    me.res.close()
