"""A chosen part of the parameters sleeps, and changes no bit."""

import pytest
import torch
from both import PACKED
from sleeping import KINDS, another_rank, experts, frozen, frozen_in_a_layer, trained
from spies import note

import bridge_fgo
from bridge_fgo.sleep.moves import Wake

pytestmark = pytest.mark.usefixtures("cpu_standins", "poisoned")


def test_packed_masters_move_beside_a_base_that_sleeps_and_wake_the_adapters_alone(sleeper):
    me = sleeper(config=PACKED, frozen=True)
    base, adapters = me.names(frozen), me.names(trained)
    me.res.offload("params", where=frozen)
    assert me.res.offload("optimizer").woke == () == me.res.reload("optimizer").woke
    assert me.names_away() == base
    me.res.offload("params")
    assert me.res.offload("optimizer").woke == ("params",)
    assert me.names_away() == base | adapters
    assert me.res.reload("optimizer").woke == ("params",)
    assert me.names_away() == base
    me.res.reload()
    me.res.offload("params")
    with me.res.only("params"):
        assert me.res.away == {"grads", "optimizer"}
    assert me.res.away == {"params"} and me.names_away() == base | adapters
    me.end()


def test_adapters_are_read_and_written_as_the_base_sleeps_and_the_base_says_what_to_call(sleeper):
    me = sleeper(frozen=True)
    me.offload(where=frozen)
    assert me.res.away == set(KINDS) and me.names_away() == me.names(frozen)
    me.read_asleep()
    for name, param in me.ddp.named_parameters():
        if param.requires_grad:
            param.detach().add_(0)
        else:
            with pytest.raises(RuntimeError, match=rf"{name!r}, of shape .*Residency.reload\('params'\)"):
                param.detach().add_(0)
    with pytest.raises(RuntimeError, match=r"'params' were sent off the GPU"):
        me.ddp(None)
    me.end()


def test_what_has_not_changed_is_copied_once_whatever_part_of_it_sleeps(sleeper):
    me = sleeper(frozen=True)
    nbytes = {name: param.nbytes for name, param in me.ddp.named_parameters()}
    assert 0 < len(me.names(frozen_in_a_layer)) < len(me.names(frozen)) < len(nbytes)
    parts = sum(nbytes[name] for name in me.names(frozen_in_a_layer)), sum(map(nbytes.get, me.names(frozen)))
    assert me.res.offload("params", where=frozen_in_a_layer).copied == parts[0]
    assert me.res.offload("params", where=frozen).copied == parts[1] - parts[0]
    assert me.res.reload("params", where=frozen).copied == parts[1]
    assert me.res.offload("params", where=frozen).copied == 0


def test_a_part_of_what_shares_memory_is_refused_by_name_and_nothing_moves(sleeper):
    me = sleeper()
    first, weight = min(me.names()), torch.zeros(6)
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
    me.end()


def test_a_predicate_that_reads_a_parameter_that_is_away_is_told_what_to_call(sleeper):
    me = sleeper(frozen=True)
    me.res.offload("params")
    with pytest.raises(RuntimeError, match=r"of shape .* was used, .*: call Residency.reload\('params'\)"):
        me.res.reload("params", where=lambda _, param: bool(param.detach().sum() > 0))
    assert me.names_away() == me.names()
    me.res.reload()


def test_ranks_that_choose_different_buffers_gather_them_in_one_order(sleeper, monkeypatch):
    me, order = sleeper(experts=True), []
    dense, of_experts = (slab for slab in me.res._memory.weights.slabs if slab.ranges)

    def asks_for_the_other(mine):
        return mine._replace(places={dense.place}) if isinstance(mine, Wake) else mine

    for slab in (dense, of_experts):
        slab.place = (me.res._memory.weights.slabs.index(slab), 0)
        note(monkeypatch, order, slab, "gather", slab)
    me.res.offload("params")
    another_rank(monkeypatch, asks_for_the_other)
    me.res.reload("params", where=experts)
    assert order == [dense, of_experts] and not me.names_away()
