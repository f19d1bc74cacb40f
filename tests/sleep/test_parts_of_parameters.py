"""A predicate chooses which parameters sleep: what shares memory moves together, and every bit is a resident run's."""

import contextlib

import pytest
import torch
from both import PACKED
from cpu_training import CpuTraining
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sleeping import KINDS, Sleeper, note, options, poison
from test_host_params import on_gpu, on_host

import bridge_fgo
from bridge_fgo.bridge import residency

pytestmark = pytest.mark.usefixtures("cpu_standins", "poisoned")


def frozen(_, param):
    return not param.requires_grad


def trained(_, param):
    return param.requires_grad


def frozen_in_a_layer(name, param):
    return "layers.0" in name and not param.requires_grad


def experts(name, _):
    return "experts" in name


WHERE = [None, frozen, trained, frozen_in_a_layer, experts]


def names_of(me, where=None):
    """Return the names of parameters for which a predicate holds."""
    return {name for name, p in me.ddp.named_parameters() if where is None or where(name, p)}


def away(me):
    """Return the names of parameters that have no memory."""
    return names_of(me, lambda _, param: not param.untyped_storage().nbytes())


KIND_SETS = st.sets(st.sampled_from(KINDS)).map(lambda kinds: sorted({"params", *kinds}))
MOVES = st.tuples(st.sampled_from(["offload", "reload", "only", "step"]), KIND_SETS, st.sampled_from(WHERE))


@settings(max_examples=16, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    moves=st.lists(MOVES, max_size=12),
    config=st.sampled_from([None, PACKED]),
    changes=st.sampled_from([{"frozen": True}, {"experts": True}]),
)
def test_any_order_of_sleeps_of_parts_moves_what_is_chosen_and_is_bitwise_a_resident_run(moves, config, changes):
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        poison(patch)
        me = Sleeper(stack.enter_context(CpuTraining(options(**changes))), changes, config)
        res, everything, expected = me.res, names_of(me), set()
        for verb, kinds, where in [move for move in moves if names_of(me, move[2])]:
            if verb == "step" and len(me.seen) < 4:
                res.reload()
                me.train()
                expected = set()
            elif verb == "offload":
                res.offload(kinds, where=where)
                expected |= names_of(me, where)
            elif verb == "reload":
                returns = "optimizer" in kinds and "optimizer" in res.away
                res.reload(kinds, where=where)
                expected -= names_of(me, where)
                if config is PACKED and returns:
                    expected -= names_of(me, trained)  # which packed masters need
            elif verb == "only":
                kinds_before, before = res.away, away(me)
                with res.only(kinds, where=where):
                    assert away(me) >= everything - names_of(me, where) - names_of(me, trained)
                    assert not away(me) & names_of(me, where)
                assert (res.away, away(me)) == (kinds_before, before)
            assert away(me) == expected and ("params" in res.away) == bool(expected)
        res.reload()
        res.close()
        if me.seen:
            me.assert_as_resident()


def test_packed_masters_move_beside_a_base_that_sleeps_and_wake_the_adapters_alone(sleeper):
    me = sleeper(config=PACKED, frozen=True)
    base, adapters = names_of(me, frozen), names_of(me, trained)
    me.res.offload("params", where=frozen)
    assert me.res.offload("optimizer").woke == () == me.res.reload("optimizer").woke
    assert away(me) == base
    me.res.offload("params")
    assert me.res.offload("optimizer").woke == ("params",)
    assert away(me) == base | adapters
    assert me.res.reload("optimizer").woke == ("params",)
    assert away(me) == base
    me.res.reload()
    me.res.offload("params")
    with me.res.only("params"):
        assert me.res.away == {"grads", "optimizer"}
    assert me.res.away == {"params"} and away(me) == base | adapters
    me.res.reload()
    me.train()
    me.assert_as_resident()


def test_adapters_are_read_and_written_as_the_base_sleeps_and_the_base_says_what_to_call(sleeper):
    me = sleeper(frozen=True)
    expected, params = on_gpu(me.res), dict(me.ddp.named_parameters())
    me.res.offload(where=frozen)
    assert me.res.away == set(KINDS) and away(me) == names_of(me, frozen)
    assert on_host(me.res) == expected
    for name, param in params.items():
        if param.requires_grad:
            param.detach().add_(0)
        else:
            with pytest.raises(RuntimeError, match=rf"{name!r}, of shape .*Residency.reload\('params'\)"):
                param.detach().add_(0)
    with pytest.raises(RuntimeError, match=r"'params' were sent off the GPU"):
        me.ddp(None)
    me.res.reload()
    me.train()
    me.assert_as_resident()


def test_what_has_not_changed_is_copied_once_whatever_part_of_it_sleeps(sleeper):
    me = sleeper(frozen=True)
    nbytes = {name: param.nbytes for name, param in me.ddp.named_parameters()}
    assert 0 < len(names_of(me, frozen_in_a_layer)) < len(names_of(me, frozen)) < len(nbytes)
    parts = sum(nbytes[name] for name in names_of(me, frozen_in_a_layer)), sum(map(nbytes.get, names_of(me, frozen)))
    assert me.res.offload("params", where=frozen_in_a_layer).copied == parts[0]
    assert me.res.offload("params", where=frozen).copied == parts[1] - parts[0]
    assert me.res.reload("params", where=frozen).copied == parts[1]
    assert me.res.offload("params", where=frozen).copied == 0


def test_a_part_of_what_shares_memory_is_refused_by_name_and_nothing_moves(sleeper):
    me = sleeper()
    first, weight = min(names_of(me)), torch.zeros(6)
    model = torch.nn.ParameterList([torch.nn.Parameter(weight[:2]), torch.nn.Parameter(weight[2:])])
    cases = [(me.res, first, "DDP buffer 0's parameter buffer"), (bridge_fgo.Residency(model), "1", "parameter '0'")]
    for res, one, shared in cases:
        for verb in (res.offload, res.reload, lambda kinds, where, res=res: res.only(kinds, where=where).__enter__()):
            with pytest.raises(ValueError, match=rf"holds for parameter {one!r} and not for .*, which share {shared}"):
                verb("params", where=lambda name, _, one=one: name == one)
        assert not res.away
    with pytest.raises(ValueError, match=r"where= chooses among 'params', and only \['grads', 'optimizer'\]"):
        me.res.offload("optimizer", "grads", where=frozen)
    assert not me.res.away


def test_a_choice_of_no_parameter_is_an_error_and_nothing_moves(sleeper):
    me = sleeper(frozen=True)
    for before in ((), KINDS):
        me.res.offload(before)
        for verb in (me.res.offload, me.res.reload, me.res.only):
            with pytest.raises(ValueError, match="where= holds for no parameter on any rank: it is called with"):
                verb("params", where=lambda name, _: name == "none").__enter__()
            assert me.res.away == set(before)
    me.res.reload()
    with pytest.raises(ValueError, match="where= holds for no parameter"):
        me.res.keep("none", where=lambda name, _: name == "none")
    with pytest.raises(ValueError, match=r"where='layers\.0': give a function of a parameter's name"):
        me.res.offload("params", where="layers.0")
    me.train()
    me.assert_as_resident()


def test_an_error_in_a_block_leaves_the_parts_that_slept_asleep_and_names_what_has_left(sleeper):
    me = sleeper(frozen=True)
    me.res.offload("params", where=frozen)
    with pytest.raises(ZeroDivisionError) as caught, me.res.only("params", where=frozen):
        assert away(me) == names_of(me, trained)
        _ = 1 / 0
    assert away(me) == names_of(me)
    (note,) = caught.value.__notes__
    assert "'grads', 'optimizer', 'params' stay off the GPU" in note
    me.res.reload()
    me.train()
    me.assert_as_resident()


def test_a_predicate_that_reads_a_parameter_that_is_away_is_told_what_to_call(sleeper):
    me = sleeper(frozen=True)
    me.res.offload("params")
    with pytest.raises(RuntimeError, match=r"of shape .* was used, .*: call Residency.reload\('params'\)"):
        me.res.reload("params", where=lambda _, param: bool(param.detach().sum() > 0))
    assert away(me) == names_of(me)
    me.res.reload()


def test_ranks_that_choose_different_buffers_gather_them_in_one_order(sleeper, monkeypatch):
    me, order = sleeper(experts=True), []
    dense, of_experts = (slab for slab in me.res._weights.slabs if slab.ranges)
    told = residency.told_by_ranks

    def with_another(act):
        own, votes = told(act)
        if isinstance(votes[0], residency.Wake):
            votes = [*votes, votes[0]._replace(places={dense.place})]  # a rank that asks for the other one
        return own, votes

    for slab in (dense, of_experts):
        slab.place = (me.res._weights.slabs.index(slab), 0)
        note(monkeypatch, order, slab, "gather", slab)
    me.res.offload("params")
    monkeypatch.setattr(residency, "told_by_ranks", with_another)
    me.res.reload("params", where=experts)
    assert order == [dense, of_experts] and not away(me)
