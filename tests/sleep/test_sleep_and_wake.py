"""Parameters, gradients and states sleep apart, bitwise as if nothing moved."""

import copy
import itertools
import time
import warnings

import pytest
import torch
from both import PACKED, poison
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from lanes import in_lanes
from sleeping import (
    GIB,
    KINDS,
    SEVERAL_SLABS,
    WHOLE,
    counted,
    double_masters,
    experts,
    frozen,
    frozen_in_a_layer,
    gone,
    sleeping,
    tally_of_a_gpu,
    trained,
)  # fmt: skip
from spies import fail, note

import bridge_fgo
from bridge_fgo.memory.slab import MOST_IN_TRANSIT, StillShared
from bridge_fgo.memory.storage_slab import StorageSlab
from bridge_fgo.sleep import moves, state_offloader
from bridge_fgo.sleep.rounding import Rounding
from bridge_fgo.sleep.weight_offloader import WeightOffloader

pytestmark = pytest.mark.usefixtures("cpu_standins", "poisoned")
MASTERS = pytest.mark.parametrize("masters", [WHOLE, PACKED], ids=["whole masters", "packed masters"])

# What trains.


ADAM, MUON = {"distributed": False}, {"distributed": False, "optimizer": "muon"}
IN_FLIGHT = {"overlap_grad_reduce": True, "overlap_param_gather": True}
SLOW = {
    *("experts", "adam", "muon", "muon_of_experts", "adam_with_fp32_parameters", "adam_with_most_frozen"),
    *("adam_packed", "dist_muon_packed", "flag_with_whole_masters"),
}
TRAININGS = {
    "dense": {},
    "experts": {"experts": True},
    "native_fp32_parameters": {"precision": "fp32_params"},
    "most_parameters_frozen": {"frozen": True},
    "fp16_with_skipped_steps": {"precision": "fp16"},
    "two_chunks_with_collectives_in_flight": {"chunks": 2, **IN_FLIGHT},
    "packed": {"config": PACKED},
    "flag_with_packed_masters": {"flag": PACKED},
    "flag_with_whole_masters": {"flag": WHOLE},
    "flag_by_default": {"flag": bridge_fgo.OffloadConfig(engine="native", slab_bytes=2**20)},
    "adam": ADAM,
    "muon": MUON,
    "dist_muon": MUON | {"optimizer": "dist_muon"},
    "muon_of_experts": MUON | {"experts": True},
    "adam_with_fp32_parameters": ADAM | {"precision": "fp32_params"},
    "adam_with_most_frozen": ADAM | {"frozen": True},
    "adam_packed": ADAM | {"config": PACKED},
    "muon_packed": MUON | {"config": PACKED},
    "dist_muon_packed": MUON | {"optimizer": "dist_muon", "config": PACKED},
    "fp32_gradients_beside_16_bit_buffers": {
        "configured": {
            "ddp.grad_reduce_in_fp32": False,
            "ddp.param_name_patterns_for_fp32_local_accumulation": ("all",),
        },
    },
    "precision_aware": {"adam": {"store_param_remainders": False}},
    "precision_aware_with_remainders": {"adam": {"store_param_remainders": True}},
}


@pytest.mark.parametrize("name", in_lanes(TRAININGS, TRAININGS.keys() - SLOW))
def test_training_that_sleeps_is_read_and_swaps_after_each_step_is_bitwise_a_resident_one(sleeper, name):
    of = TRAININGS[name]
    me = sleeper(0, early=True, **of)
    by_flag, copies_anew = "flag" in of, "flag" in of or "config" in of  # packed ones
    if "adam" not in of:
        me.offload()  # moments are not made before the first step
        me.reload()
    me.train()
    me.keep("first")
    for number in range(3):
        moved = me.offload()
        assert me.gone() == set(KINDS) == me.res.away and not me.weights_here()
        if "distributed" in of:  # no DDP buffer has the weights, and nobody rounds them again
            assert moved.copied_by_kind["params"] > 0
        me.read_asleep()
        with me.only("params"):
            assert me.gone() == {"grads", "optimizer"} == me.res.away
        if by_flag and number % 2 == 0:
            me.reload("params", "grads")  # the step brings the states itself
        else:
            me.reload()
            assert me.gone() == set() == me.res.away
            assert not any(slab._bytes.any() for slab in me.res._memory.gradients.slabs)
        me.train()
        if by_flag:  # which leaves states on the host
            me.offload("params")
            me.read_asleep()
            me.reload("params")
    me.keep("newest")
    for away in ((), ("params",), ("params", "optimizer"), KINDS, ("optimizer",)):
        me.offload(away)
        for kept in ("first", "newest", "first"):
            with me.swap(kept):
                pass
        if "params" in away:
            me.read_asleep()
        me.reload()
    assert copies_anew or me.offload().copied + me.offload().copied == 0
    me.end()


# Any order of calls.

KIND_SETS = st.sets(st.sampled_from(KINDS)).map(sorted)
WHERE = st.sampled_from([None, frozen, trained, frozen_in_a_layer, experts])
CALLS = st.one_of(
    st.tuples(st.sampled_from(["offload", "reload", "only", "error"]), KIND_SETS, WHERE),
    st.tuples(st.sampled_from(["offload", "keep gradients"]), KIND_SETS, st.none()),
    st.tuples(st.sampled_from(["step", "keep", "swap", "write", "read", "make", "swap and error", "checkpointing"])),
)
"""Verbs, the kinds that they move, and which parameters of these."""


def call(me, verb, kinds=(), where=None):
    """Make a call, if it can be made; what was asked for moves, and nothing else, and the `Sleeper` checks it."""
    if where is not None and not ("params" in kinds and me.names(where)):
        return
    chosen, others = me.names(where) if "params" in kinds else set(), set(kinds) - {"params"}
    names, away = me.names_away(), me.res.away - {"params"}
    if verb == "step" and len(me.seen) < 5:
        me.reload()
        me.train()
    elif verb in ("offload", "keep gradients"):
        me.offload(kinds, where=where, grads="drop" if verb == "offload" else "keep")
        assert me.names_away() == names | chosen & me.movable_names
        assert me.res.away - {"params"} == away | others & me.movable
    elif verb == "reload":
        needed = me.names(trained) if me.lacks_masters and "optimizer" in kinds else set()
        moved = me.reload(kinds, where=where)
        woke = names - chosen - me.names_away()
        assert bool(moved.woke) == bool(woke) and woke <= needed
        # Masters for which the host has no room are on the GPU, and need no weights.
        assert woke == needed & names - chosen or me.res._memory.unhosted
        assert me.res.away - {"params"} == away - others
    elif verb == "only":
        with me.only(kinds, where=where):
            assert me.names_away().isdisjoint(chosen) and me.res.away.isdisjoint(others)
            assert me.names_away() >= me.movable_names - chosen - me.names(trained)  # those may be needed
            assert me.res.away >= me.movable - others - {"params"}
    elif verb == "error":
        error_in_a_block(me, *kinds, where=where)
    elif verb == "keep" and "params" not in me.res.away:
        me.keep("a set")
    elif verb == "swap" and me.kept:
        with me.swap("a set"):
            pass
    elif verb == "swap and error" and me.kept:
        error_in_a_swap(me, "a set")
    elif verb == "write" and me.weight.untyped_storage().nbytes() and not me.lacks_masters:
        me.write(len(me.writes))
    elif verb == "read" and me.names_away() == me.names():
        me.read_asleep()
    elif verb == "checkpointing":
        with me.as_before(), me.res.checkpointing():
            me.check()
            assert "params" not in me.res.away
    elif verb == "make":
        me.make(**me.how)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@example([("reload", ["optimizer"], None)], PACKED, {"distributed": False}, 0.2, [], False)
@given(
    calls=st.lists(CALLS, max_size=12),
    config=st.sampled_from([WHOLE, PACKED]),
    changes=st.sampled_from([{}, {"frozen": True}, {"experts": True}, {"distributed": False}]),
    share=st.sampled_from([None, None, None, 1e-9, 0.03, 0.2, 0.5, 0.9, 1.0, 2.0]),
    mid=KIND_SETS,
    debug=st.booleans(),
)
def test_any_order_of_calls_moves_what_is_asked_for_within_any_limit_and_is_bitwise_a_resident_run(
    calls, config, changes, share, mid, debug
):
    """Any order of sleeps and wakes of parts, swaps, errors, writes and steps; also between backward and update."""
    with pytest.MonkeyPatch.context() as patch:
        poison(patch)
        if debug:
            patch.setenv("BRIDGE_FGO_DEBUG", "1")
        with sleeping(**changes) as me:
            me.how = {"config": config}
            me.train()
            update = me.training.optimizer.step

            def sleep_first():
                me.res.offload(mid, grads="keep")
                assert me.gone() == set(mid)
                me.res.reload()
                return update()

            if share is None:
                patch.setattr(me.training.optimizer, "step", sleep_first)
                me.movable_names, me.movable = me.names(), set(KINDS)
                for each in calls:
                    call(me, *each)
            else:
                with counted() as everything:
                    me.make(**me.how).close()
                me._res, limit = None, share * sum(everything)
                me.how["host_memory_limit_gib"] = limit / GIB
                with counted() as taken:
                    held = me.weights_here() + me.states_bytes()
                    unhosted = me.res._memory.unhosted
                    assert (unhosted == 0) == (share >= 1) and (unhosted < held or share < 0.2)
                    me.offload()
                    assert me.weights_here() + me.states_bytes() == unhosted
                    me.movable_names, me.movable = me.names_away(), me.res.away
                    for each in [each for each in calls if each[0] not in ("keep gradients", "keep", "make")]:
                        call(me, *each)
                assert sum(taken) <= limit
            me.end()


def error_in_a_block(me, *kinds, has_backward=False, **how):
    """End a block by an error: what was away is again; what has left stays, and a note says so."""
    before, names = me.res.away, me.names_away()
    with pytest.raises(ZeroDivisionError) as caught, me.res.only(*kinds, **how):
        if has_backward:
            sum(weight.float().sum() for weight in me.ddp.parameters()).backward()
            assert me.res.has_gradients
        _ = 1 / 0
    me.check()
    assert before <= me.res.away and names <= me.names_away()
    gone = me.res.away - before | ({"params"} if me.names_away() - names else set())
    words = ", ".join(map(repr, sorted(gone)))
    notes = [f"bridge_fgo: {words} stay off the GPU after this error: call reload() on every rank"]
    assert getattr(caught.value, "__notes__", []) == (notes if gone else [])


def error_in_a_swap(me, name):
    """End the block of a swap by an error: the model's own weights are away, and a note says so if they were not."""
    before = me.res.away
    with pytest.raises(ZeroDivisionError) as caught, me.res.weights(name):
        _ = 1 / 0
    me.check()
    notes = ["bridge_fgo: 'params' stay off the GPU after this error: call reload() on every rank"]
    assert getattr(caught.value, "__notes__", []) == (notes if me.res.away != before else [])


# Orders of calls in which something went wrong once, or that no other test has for sure.


def swap(me):
    with me.swap("a set") as moved:
        return moved


def errors_in_blocks(me):
    for away, kinds in itertools.product(AWAY, (("grads",), ("params",), ("params", "grads"))):
        me.offload(*away or ([],))
        error_in_a_block(me, *kinds, has_backward=len(kinds) == 2)
        assert me.res.away == {*away, *set(KINDS) - set(kinds)}
        me.reload()
        me.ddp.zero_grad_buffer()


def errors_in_blocks_whose_weights_went(me):
    """Packed masters stay, as they cannot be packed anew without their weights."""
    me.offload("optimizer")
    with pytest.raises(ZeroDivisionError) as caught, me.res.only("optimizer"):
        me.res.offload("params")
        _ = 1 / 0
    assert me.res.away == {"params", "grads"} | (set() if me.how["config"] is PACKED else {"optimizer"})
    assert len(caught.value.__notes__) == 1


def written_and_read(me):
    """Weights that were rounded on the host are not taken for those that it had before."""
    first = float(me.weight.view(-1)[3])
    for value in (2.0, first, 2.0):  # masters round to the weights as they are, once
        me.write(value)
        me.offload()
        me.read_asleep()
        me.reload()


def written_after_a_fault(me):
    """Masters that were compared in a sleep that failed may have gone; they tell nothing of what was loaded since."""
    me.offload()
    me.reload()
    with me.failing(WeightOffloader, "release", call=1):
        me.res.offload("params", "optimizer")
    assert me.res.away == {"optimizer"}  # unchanged, and so gone at once
    me.write()
    me.offload("params")


def swapped_after_masters_left(me):
    """Masters keep weights that have never crossed while others are in their place."""
    me.keep("a set")
    me.train()
    assert me.offload().copied_by_kind["params"] == 0 and swap(me).copied == me.weights_bytes


def calls(*several):
    """Return a function that makes calls, each as the arguments of `call` after the first."""

    def make(me):
        me.movable_names, me.movable = me.names(), set(KINDS)
        for each in several:
            call(me, *each)

    return make


WRITTEN = [
    *2 * [("write",), ("offload", ["params"]), ("reload", ["params"])],
    ("offload", ["params"]),
    ("reload", ["optimizer"]),
]
AWAY = ((), ("grads",), ("params",), ("params", "optimizer"), KINDS)
ORDERS = {
    "errors in blocks": errors_in_blocks,
    "errors in blocks whose weights went": errors_in_blocks_whose_weights_went,
    "errors in swaps": calls(
        ("keep",), *(each for away in AWAY for each in (("step",), ("offload", away), ("swap and error",)))
    ),
    "weights written and read": written_and_read,
}
OF_WHOLE_MASTERS = {
    "written while masters are away": calls(("offload", ["optimizer"]), *WRITTEN),
    "written while masters are away, having slept": calls(
        ("offload", ["optimizer"]), ("offload", ["params"]), ("reload", ["params"]), *WRITTEN
    ),
    "written after a fault": written_after_a_fault,
    "swapped after masters left": swapped_after_masters_left,
    "written before an error in a swap": calls(("keep",), ("offload", ["optimizer"]), ("write",), ("swap and error",)),
}


@pytest.mark.parametrize("masters", [WHOLE, PACKED], ids=["whole masters", "packed masters"])
@pytest.mark.parametrize("order", ORDERS)
def test_after_an_order_of_calls_training_goes_on_bitwise(sleeper, order, masters):
    me = sleeper(1, config=masters, early=True)
    ORDERS[order](me)
    me.end()


@pytest.mark.parametrize("order", OF_WHOLE_MASTERS)
def test_after_an_order_of_calls_in_which_masters_tell_weights_these_are_not_taken_for_others(sleeper, order):
    me = sleeper()
    OF_WHOLE_MASTERS[order](me)
    me.end()


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
        fail(patch, StorageSlab, "fill", torch.OutOfMemoryError, call=1)
        res.reload("params", "optimizer")
    assert res.away == {"params", "grads"}


@pytest.mark.parametrize("by", ["a load", "a write"])
@pytest.mark.parametrize("is_flag", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["served", "flag"])
@pytest.mark.parametrize("way", WEIGHTS_AWAY)
def test_masters_that_are_replaced_while_weights_are_away_change_no_weight_before_a_step(sleeper, way, is_flag, by):
    """As awake: a step writes weights from masters, a load of the optimizer's states does not."""
    with bridge_fgo.install(WHOLE):
        me = sleeper(1, flag=WHOLE if is_flag else None)
        me.res.serve_states()
        saved = copy.deepcopy(me.leaf.get_parameter_state_dp_reshardable())
        for entry in (entry for buckets in saved[0].values() for bucket in buckets for entry in bucket):
            entry["padding"] = False  # as a checkpoint has it

        def load(training):
            (leaf,) = training.optimizer.chained_optimizers
            leaf.load_parameter_state_from_dp_reshardable(saved)

        me.train()
        WEIGHTS_AWAY[way](me.res)
        me.write_by(load if by == "a load" else double_masters)
        me.reload()
        me.end()


def test_gradients_cross_no_link_and_unchanged_memory_crosses_once(sleeper):
    me = sleeper()
    out, states = me.res.offload(), 6 * me.weights_bytes
    assert out.copied_by_kind == {"optimizer": states, "params": 0}  # rounded from the masters
    assert out.copied == states and out.freed == states * 9 // 6
    assert me.res.reload().copied_by_kind == {"optimizer": states, "params": 0, "grads": 0}
    assert me.res.offload().copied == 0
    assert me.res.offload().seconds == 0  # away already


def test_host_memory_is_taken_once_and_parameters_that_wake_alone_cross_in_16_bits_from_then_on(sleeper):
    with counted() as taken:
        me = sleeper()
        for _ in range(3):
            me.train()
            me.res.offload()
            me.res.reload("params")
            me.res.offload("params")
            me.res.reload()
    assert sum(taken) == 7 * me.weights_bytes  # 12 bytes of states and 2 of weights to each weight of 2

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


def test_a_block_offloads_before_it_reloads_as_it_begins_and_as_it_ends(sleeper, monkeypatch):
    """There may be no memory for both."""
    me, order = sleeper(), []
    me.res.offload("params")
    for owner, names in ((StorageSlab, ("empty", "fill")), (state_offloader.StateOffloader, ("end_offload", "reload"))):
        for name in names:
            note(monkeypatch, order, owner, name, name)
    with me.only("params"):
        pass
    assert order == ["empty", "end_offload", "fill", "empty", "reload", "fill"]


def test_the_seconds_of_a_part_are_of_all_that_is_done_for_it(sleeper, monkeypatch):
    me = sleeper()
    for name in ("start_offload", "end_offload"):
        act = getattr(state_offloader.StateOffloader, name)
        monkeypatch.setattr(state_offloader.StateOffloader, name, lambda of, act=act: (time.sleep(0.1), act(of))[1])
    assert me.res.offload().seconds_by_part["optimizer"] >= 0.2


def test_gradients_and_weights_get_their_memory_while_states_are_copied(sleeper, monkeypatch):
    """The driver takes time to give it; the host waits for the copies when it has nothing else to do."""
    me, order = sleeper(), []
    me.res.offload()
    for owner, name in (
        (type(me.res._memory.states), "reload"),
        (type(me.res._memory.states), "finish_reload"),
        (StorageSlab, "fill"),
    ):
        note(monkeypatch, order, owner, name, name)
    me.res.reload()
    assert order[0] == "reload" and order[-1] == "finish_reload" and set(order[1:-1]) == {"fill"}


@pytest.mark.parametrize("write", [lambda words: words.mul_(2), lambda words: words[:8].bitwise_not_()])
def test_after_a_step_states_are_copied_without_a_look_else_only_those_that_have_changed(sleeper, monkeypatch, write):
    """To sum over them before the first copy begins would take time for what is known."""
    me, looked = sleeper(), []
    note(monkeypatch, looked, state_offloader, "byte_sums", "look")
    me.res.offload()
    me.res.reload()
    me.train()
    looked.clear()
    assert me.res.offload("optimizer").copied == 6 * me.weights_bytes
    assert not looked
    me.res.reload()
    words = me.moment.view(torch.int32).view(-1)
    write(words)
    written = words.clone()
    looked.clear()
    copied = me.res.offload("optimizer").copied
    assert len(looked) == 1 and 0 < copied < 6 * me.weights_bytes
    me.res.reload()
    assert torch.equal(words, written)
    assert me.res.offload("optimizer").copied == 0


@MASTERS
def test_the_driver_gets_what_has_left_while_other_slabs_are_copied(sleeper, monkeypatch, masters):
    """The driver takes a fifth of the copies' time. The host waits first until no copy reads the memory any more."""
    monkeypatch.setattr(state_offloader, "RETURNED_BYTES", 1)
    me = sleeper(experts=True, hidden=128, sequence=32, vocab=128, config=masters)
    packed, order = masters is PACKED, []
    for name in ("copy_out", "release", "await_released"):
        note(monkeypatch, order, me.transfers, name, lambda _, *slab, name=name: (name, *slab[:1]))
    monkeypatch.setattr(state_offloader, "return_to_driver", lambda device: order.append(("driver", me.gone())))
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
    note(monkeypatch, order, state_offloader.StateOffloader, "start_offload", "states")
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
    for owner, name in ((Remainders, "locate"), (Remainders, "encode"), (WeightOffloader, "reload")):
        note(monkeypatch, order, owner, name, name)
    me = sleeper(config=PACKED, early=True)
    me.res.offload("params")
    order.clear()
    me.res.offload("optimizer")
    assert order[:3] == ["reload", "locate", "encode"]
    me.res.close()


@pytest.mark.parametrize("flag", [False, True])
def test_packed_masters_wake_their_weights_first_and_the_call_says_so(sleeper, flag):
    me = sleeper(flag=PACKED) if flag else sleeper(config=PACKED)
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
    tally = tally_of_a_gpu(monkeypatch, 5 * 10**9, [4 * 10**9, left], 3 * 10**9)
    tally.moved.freed = 4 * 10**9
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        tally.note_what_stays()
    assert [("1.00 GB" in str(each.message) and "weight sync" in str(each.message)) for each in said] == [True] * warns
    assert tally.moved.stays == {"allocated": left, "cached": 3 * 10**9 - left, "outside": 10**9}


# Faults.


def test_where_states_cannot_leave_the_weights_stay_and_their_copies_are_waited_for(sleeper, monkeypatch):
    """Training may go on and write them, while a copy that is taken for theirs still reads them."""
    me, order = sleeper(), []
    waken_alone(me)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        fail(patch, state_offloader.StateOffloader, "start_offload", MemoryError, call=1)
        note(patch, order, state_offloader.StateOffloader, "start_offload", "states")
        note(patch, order, StorageSlab, "copy_out", "weights")
        patch.setattr(moves, "wait_for_gpu", lambda device: order.append("wait"))
        me.res.offload("params", "optimizer")
    assert order == ["wait", "weights", "states", "wait"]
    assert not me.res.away
    me.train()
    me.res.offload()
    me.res.reload()
    me.assert_as_resident()


def begin_swap(me):
    me.res.weights("a set").__enter__()


def fall_asleep(me):
    me.res.offload("params", "optimizer")


NO_MEMORY = torch.OutOfMemoryError
FAULTS = {
    "a copy out": (None, "copy_out", StillShared, (), fall_asleep),
    "a release": (None, "release", StillShared, (), fall_asleep),
    "a storage": (StorageSlab, "empty", StillShared, (), fall_asleep),
    "weights' memory": (StorageSlab, "fill", NO_MEMORY, KINDS, lambda me: me.res.reload("params")),
    "gradients' memory": (StorageSlab, "fill", NO_MEMORY, KINDS, lambda me: me.res.reload("grads")),
    "a swap's memory": (StorageSlab, "fill", NO_MEMORY, ("params",), begin_swap),
    "weights' zeros": (torch.Tensor, "zero_", NO_MEMORY, KINDS, lambda me: me.res.reload("params")),
    "a swap's zeros": (torch.Tensor, "zero_", NO_MEMORY, ("params",), begin_swap),
    "a swap's copy in": (StorageSlab, "copy_in", NO_MEMORY, (), begin_swap),
    "a swap's copy out": (StorageSlab, "copy_out", NO_MEMORY, (), begin_swap),
}
"""Second calls that fail: of what (None: what copies states), the error, what is away before, and the verb."""


@pytest.mark.parametrize("where", FAULTS)
@MASTERS
def test_after_a_move_that_failed_half_way_training_goes_on_and_the_next_copies_it(sleeper, where, masters):
    """Else a slab whose copy was started before the update would be offloaded with the old values."""
    owner, name, error, away, act = FAULTS[where]
    me = sleeper(config=masters, experts=True, **SEVERAL_SLABS)  # several buffers
    assert len(me.res._memory.states.engine.slabs) > MOST_IN_TRANSIT
    me.keep("a set")
    me.train()
    me.offload(away, grads="keep")
    with me.failing(owner or me.transfers, name, error=error):
        act(me)
    assert not away or me.gone() == me.res.away == set(away)
    me.reload()
    for _ in range(2):
        me.train()
        me.offload()
        me.reload()
    me.end()


def test_what_cannot_be_offloaded_again_after_an_error_is_told_beside_it(sleeper, monkeypatch):
    me = sleeper(0)
    me.res.offload()
    with monkeypatch.context() as patch:
        patch.setattr("bridge_fgo.sleep.moves.wait_for_gpu", lambda device: time.sleep(0.5))
        patch.setattr("bridge_fgo.memory.transfers.PATIENCE", 0.1)
        with pytest.raises(ZeroDivisionError) as caught, me.res.only("params"):
            _ = 1 / 0
        assert me.res.away == {"grads", "optimizer"}
        assert caught.value.__notes__ == [
            "bridge_fgo: what the block has reloaded may still be on the GPU: work on the GPU, a collective perhaps, "
            "has not ended in 0.1 seconds"
        ]
    me.res.close()


def test_gradients_may_go_once_ddp_has_zeroed_them_and_are_refused_after_a_backward(sleeper):
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
    assert refused and not res._memory.backwards.pending
    res.offload("grads")  # the update is over
    res.reload()
    me.end()

    me = sleeper()
    me.res._memory.backwards.pending.add(id(me.ddp))
    me.training.optimizer.zero_grad()  # those of shards; mcore leaves DDP's buffers
    assert me.res._memory.backwards.pending
    me.ddp.zero_grad_buffer()
    param = me.leaf.optimizer.param_groups[0]["params"][0]
    param.grad = torch.ones_like(param)
    assert me.res.offload("grads").freed == sum(s.nbytes for s in me.res._memory.gradients.slabs) + param.nbytes
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
