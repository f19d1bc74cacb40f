"""Weights that were kept under a name are swapped into the model for a block; its own are bitwise there afterwards."""

import contextlib

import pytest
import torch
from both import PACKED
from sleeping import KINDS, WHOLE, fail, residency
from test_quantized import Float8Tensor, in_ddp, mcore_knows_them  # noqa: F401 - a fixture

import bridge_fgo
from bridge_fgo.bridge import residency as residency_module
from bridge_fgo.memory.storage_slab import StorageSlab

pytestmark = pytest.mark.usefixtures("cpu_standins", "poisoned")


def weights_of(me):
    return [param.detach().clone() for ddp in me.training.model for param in ddp.parameters()]


def assert_weights(me, expected):
    assert all(torch.equal(one, other) for one, other in zip(weights_of(me), expected, strict=True))


IN_FLIGHT = {"overlap_grad_reduce": True, "overlap_param_gather": True}
CASES = {
    "dense": ({}, None, False),
    "experts": ({"experts": True}, None, False),
    "frozen base": ({"frozen": True}, None, False),
    "chunks, collectives in flight": (
        {"chunks": 2, "overlap_grad_reduce": True, "overlap_param_gather": True},
        None,
        0,
    ),
    "fp32": ({"precision": "fp32_params"}, None, False),
    "no DistributedOptimizer": ({"distributed": False}, None, False),
    "packed": ({}, PACKED, False),
    "flag, packed": ({}, PACKED, True),
    "flag, whole": ({}, WHOLE, True),
}
SLOW = {"experts", "fp32", "no DistributedOptimizer", "flag, whole"}
CASES = [pytest.param(*case, id=name, marks=pytest.mark.slow if name in SLOW else ()) for name, case in CASES.items()]


@pytest.mark.parametrize(("changes", "config", "flag"), CASES)
def test_a_training_that_swaps_awake_and_asleep_is_bitwise_one_that_does_not(sleeper, changes, config, flag):
    with bridge_fgo.install(config) if flag else contextlib.nullcontext():
        me = sleeper(1, config=None if flag else config, offload=bool(flag), **changes)
        me.res.keep("first")
        first = weights_of(me)
        for away in ((), ("params",), ("params", "optimizer"), KINDS, ("optimizer",)):
            me.train()
            own = weights_of(me)
            me.res.keep("newest")
            me.res.offload(away)
            before = me.res.away
            for name, expected in (("first", first), ("newest", own), ("first", first)):
                with me.res.weights(name):
                    assert_weights(me, expected)
                assert me.res.away == before and set(me.gone()) == set(away) - (set() if away else before)
            me.res.reload()
            assert_weights(me, own)
        me.train()
        me.res.close()
        me.changes = changes
        me.assert_as_resident()


def test_a_swap_copies_what_has_changed_and_what_a_sleep_has_copied_not_again(sleeper):
    me = sleeper()
    nbytes = me.weights_bytes
    assert me.res.keep("ref").copied == nbytes and me.res.keep("ref").copied == 0
    with me.res.weights("ref") as moved:
        assert moved.copied == 0, "they are the model's own"
    me.train()
    for copied in (2 * nbytes, nbytes):  # the model's own out, once, and the others in
        with me.res.weights("ref") as moved:
            assert moved.copied == copied
    assert me.res.offload("params").copied == 0
    with me.res.weights("ref") as moved:
        assert moved.copied == nbytes and me.gone() == set()
    assert me.gone() == {"params"}
    me.res.offload()
    me.res.reload()
    me.train()
    me.assert_as_resident()


def test_masters_keep_weights_that_have_never_crossed_while_others_are_in_their_place(sleeper):
    me = sleeper()
    me.res.keep("ref")
    me.train()
    own = weights_of(me)
    assert me.res.offload().copied_by_kind["params"] == 0
    with me.res.weights("ref") as moved:
        assert moved.copied == me.weights_bytes
    assert me.res.away == set(KINDS)
    me.res.reload()
    assert_weights(me, own)


def test_masters_that_are_written_in_the_block_change_no_weight_of_the_models_own(sleeper):
    with bridge_fgo.install(WHOLE):
        me = sleeper()
        me.res.serve_states()
        me.res.keep("ref")
        me.train()
        own = weights_of(me)
        me.res.offload()
        with me.res.weights("ref"):
            for master in (m for group in me.leaf.shard_fp32_from_float16_groups for m in group):
                master.mul_(2)
        me.res.reload()
        assert_weights(me, own)


def test_of_a_frozen_base_nothing_crosses_and_a_choice_keeps_no_host_memory_for_it(sleeper):
    me = sleeper(frozen=True)
    me.res.keep("all")
    me.res.keep("adapters", where=lambda name, param: param.requires_grad)
    hosts = {name: sum(h.tensor.numel() for h in kept.hosts.values()) for name, kept in me.res._sets.by_name.items()}
    assert hosts["adapters"] == me.weights_bytes < hosts["all"]
    own = weights_of(me)
    me.train()
    for name in hosts:
        with me.res.weights(name) as moved:
            assert 0 < moved.copied <= 2 * me.weights_bytes
            assert_weights(me, own)
    me.assert_as_resident()


def test_kept_weights_may_be_kept_under_another_name_and_dropped(sleeper):
    me = sleeper()
    me.res.keep("rollout")
    old = weights_of(me)
    me.train()
    with me.res.weights("rollout"):
        me.res.keep("old")
    me.res.keep("rollout")
    me.res.drop("nothing")
    new = weights_of(me)
    me.train()
    for name, expected in (("old", old), ("rollout", new)):
        with me.res.weights(name):
            assert_weights(me, expected)
    me.res.drop("old")
    with pytest.raises(ValueError, match=r"weights\('old'\): kept are \['rollout'\]; call keep\('old'\) first"):
        me.res.weights("old").__enter__()


def test_persistent_buffers_go_with_the_weights():
    model = torch.nn.BatchNorm1d(3)
    model.register_buffer("scratch", torch.zeros(1), persistent=False)
    res = bridge_fgo.Residency(model)
    model.running_mean.fill_(1)
    res.keep("ref")
    model.running_mean.fill_(2)
    with res.weights("ref"):
        assert model.running_mean.tolist() == [1, 1, 1]
        model(torch.randn(4, 3))
        model.scratch.fill_(7)
    assert model.running_mean.tolist() == [2, 2, 2] and model.num_batches_tracked == 0 and model.scratch == 7
    res.close()


def test_the_block_has_no_gradients_and_training_and_other_verbs_in_it_are_refused_by_name(sleeper):
    me = sleeper()
    me.res.keep("ref")
    me.train()
    with me.res.weights("ref"):
        assert not torch.is_grad_enabled()
        for act in (me.res.offload, me.res.reload, me.res.close, me.res.host_params):
            with pytest.raises(RuntimeError, match=r"only keep\(\) and drop\(\) may be called: end the block first"):
                act()
        for context in (me.res.only("params"), me.res.checkpointing(), me.res.weights("ref")):
            with pytest.raises(RuntimeError, match=r"block of its weights\('ref'\)"), context:
                pass
        for act in (me.training.optimizer.step, me.training.optimizer.reload_model_params):
            with pytest.raises(RuntimeError, match=r"training in the block of .*'ref'"):
                act()
        with torch.enable_grad(), pytest.raises(RuntimeError, match=r"training in the block of .*'ref'.* gradients"):
            me.ddp(None)
    me.train()
    me.assert_as_resident()


def test_a_backward_of_an_earlier_forward_is_refused_in_the_block_and_right_afterwards():
    model = torch.nn.Linear(3, 3, bias=False)
    res, x = bridge_fgo.Residency(model), torch.ones(2, 3, requires_grad=True)
    res.keep("ref")
    model.weight.detach().add_(1)
    loss = model(x).sum()
    with res.weights("ref"), pytest.raises(RuntimeError, match="training in the block of"):
        loss.backward(retain_graph=True)
    x.grad = None
    loss.backward()
    assert torch.equal(x.grad, model.weight.detach().sum(0).expand(2, 3))
    res.close()


def test_a_swap_between_a_backward_and_its_update_is_refused(sleeper):
    me = sleeper()
    me.res.keep("ref")
    sum(param.float().sum() for param in me.ddp.parameters()).backward()
    with pytest.raises(RuntimeError, match="between a backward and its update"):
        me.res.weights("ref").__enter__()
    me.ddp.zero_grad_buffer()
    with me.res.weights("ref"):
        pass
    me.train()
    me.assert_as_resident()


@pytest.mark.parametrize("away", [(), ("params",), KINDS])
def test_after_an_error_in_the_block_a_reload_brings_the_models_own_and_training_goes_on(sleeper, away):
    me = sleeper(experts=True)
    me.res.keep("ref")
    me.train()
    own = weights_of(me)
    me.res.offload(away)
    with pytest.raises(ZeroDivisionError) as caught, me.res.weights("ref"):
        _ = 1 / 0
    assert me.res.away == {"params", *away}
    notes = ["bridge_fgo: 'params' stay off the GPU after this error: call reload() on every rank"]
    assert getattr(caught.value, "__notes__", []) == ([] if away else notes)
    me.res.reload()
    assert_weights(me, own)
    me.train()
    me.assert_as_resident()


def test_after_an_error_weights_that_were_written_while_masters_were_away_are_not_rounded_from_these(sleeper):
    me = sleeper()
    me.res.keep("ref")
    me.res.offload("optimizer")
    me.weight.data.add_(1)
    own = weights_of(me)
    with pytest.raises(ZeroDivisionError), me.res.weights("ref"):
        _ = 1 / 0
    me.res.reload()
    assert_weights(me, own)


@pytest.mark.parametrize("where", ["fill", "copy_in", "copy_out"])
def test_after_a_swap_that_failed_half_way_a_reload_brings_the_models_own(sleeper, monkeypatch, where):
    me = sleeper(experts=True)  # several buffers
    me.res.keep("ref")
    me.train()
    own = weights_of(me)
    me.res.offload("params" if where == "fill" else ())
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        fail(patch, StorageSlab, where, error=torch.OutOfMemoryError)
        me.res.weights("ref").__enter__()
    me.res.reload()
    assert_weights(me, own)
    me.train()
    me.assert_as_resident()


@pytest.mark.usefixtures("mcore_knows_them")
def test_fp8_parameters_and_a_history_of_amax_are_refused_by_name(sleeper):
    me = sleeper()
    me.ddp.config.fp8, me.ddp.config.fp8_recipe = "e4m3", "delayed"
    with pytest.raises(ValueError, match=r"model.fp8_recipe='delayed'.*'tensorwise'"):
        me.res.keep("ref")
    me.ddp.config.fp8 = None
    res = bridge_fgo.Residency(in_ddp(Float8Tensor))
    with pytest.raises(ValueError, match=r"parameter '.*weight', which is in FP8.*fp8_param_gather=False"):
        res.keep("ref")


def test_a_limit_of_host_memory_counts_what_is_kept_and_what_is_dropped_makes_room(sleeper):
    me = sleeper()
    nbytes = me.weights_bytes
    me._res = residency(me.training, host_memory_limit_gib=8.5 * nbytes / 2**30)  # 6 of states, 1 of the model's own
    me.res.keep("ref")
    with pytest.raises(ValueError, match=r"keep\('old'\) takes .*host_memory_limit_gib leaves .*higher limit"):
        me.res.keep("old")
    me.res.drop("ref")
    me.res.keep("old")
    me._res.close()
    me._res = residency(me.training, host_memory_limit_gib=5000 / 2**30)
    with pytest.raises(ValueError, match="beside that of all parameters"):
        me.res.keep("ref")


def test_ranks_of_a_buffer_that_differ_in_what_is_away_or_kept_are_refused_before_any_gathers(sleeper, monkeypatch):
    me = sleeper()
    me.res.keep("ref")
    slab, told = me.res._weights.slabs[0], residency_module.told_by_ranks
    slab.place = (0, 0)
    for other in ((True, True), (False, False)):

        def with_another(act, other=other):
            own, (mine,) = told(act)
            return own, [mine, (set(), {(slab.place, *other)})]

        with (
            monkeypatch.context() as patch,
            pytest.raises(RuntimeError, match="some ranks alone have parameters"),
        ):
            patch.setattr(residency_module, "told_by_ranks", with_another)
            me.res.weights("ref").__enter__()
    with me.res.weights("ref"):
        pass


@pytest.mark.parametrize("name", ["", None, 3])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(ValueError, match=rf"keep\({name!r}\): give a name"):
        bridge_fgo.Residency(torch.nn.Linear(3, 2)).keep(name)


def test_keep_of_parameters_that_are_away_says_what_to_call_and_its_host_memory_ends_with_close(sleeper):
    me = sleeper()
    me.res.offload("params")
    with pytest.raises(RuntimeError, match=r"keep\('ref'\) while parameters are away: call reload\('params'\)"):
        me.res.keep("ref")
    me.res.reload()
    me.res.keep("ref")
    sets = me.res._sets
    me.res.close()
    assert not sets.by_name
