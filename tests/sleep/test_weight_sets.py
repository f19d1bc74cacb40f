"""Weights that were kept are swapped in for a block, bitwise."""

import re

import pytest
import torch
from sleeping import GIB, WHOLE, another_rank, double_masters, trained
from test_quantized import Float8Tensor, in_ddp, mcore_knows_them  # noqa: F401 - a fixture

import bridge_fgo

pytestmark = pytest.mark.usefixtures("cpu_standins", "poisoned")


def test_a_swap_copies_what_has_changed_and_what_a_sleep_has_copied_not_again(sleeper):
    me = sleeper()
    nbytes = me.weights_bytes
    assert me.keep("ref").copied == nbytes and me.keep("ref").copied == 0
    with me.swap("ref") as moved:
        assert moved.copied == 0, "they are the model's own"
    me.train()
    for copied in (2 * nbytes, nbytes):  # the model's own out, once, and the others in
        with me.swap("ref") as moved:
            assert moved.copied == copied
    assert me.offload("params").copied == 0
    with me.swap("ref") as moved:
        assert moved.copied == nbytes
    assert me.gone() == {"params"}
    me.offload()
    me.end()


def test_masters_that_are_written_in_the_block_change_no_weight_of_the_models_own(sleeper):
    with bridge_fgo.install(WHOLE):
        me = sleeper()
        me.res.serve_states()
        me.keep("ref")
        me.train()
        me.offload()
        with me.swap("ref"):
            me.write_by(double_masters)
        me.reload()
        me.end()


def test_of_a_frozen_base_nothing_crosses_and_a_choice_keeps_no_host_memory_for_it(sleeper):
    me = sleeper(frozen=True)
    me.keep("all")
    me.keep("adapters", where=trained)
    sets = me.res._sets.by_name
    hosts = {name: sum(h.tensor.numel() for h in kept.hosts.values()) for name, kept in sets.items()}
    assert hosts["adapters"] == me.weights_bytes < hosts["all"]
    me.train()
    for name in hosts:
        with me.swap(name) as moved:
            assert 0 < moved.copied <= 2 * me.weights_bytes
    me.end()


def test_kept_weights_may_be_kept_under_another_name_and_dropped(sleeper):
    me = sleeper()
    me.keep("rollout")
    me.train()
    with me.swap("rollout"):
        me.keep("old")
    me.keep("rollout")
    me.res.drop("nothing")
    me.train()
    for name in ("old", "rollout"):
        with me.swap(name):
            pass
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


def test_a_swap_within_a_step_and_training_and_other_verbs_in_its_block_are_refused_by_name(sleeper):
    me = sleeper()
    me.res.keep("ref")
    sum(param.float().sum() for param in me.ddp.parameters()).backward()
    with pytest.raises(RuntimeError, match="between a backward and its update"):
        me.res.weights("ref").__enter__()
    me.ddp.zero_grad_buffer()
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
    me.end()


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
    me.make(host_memory_limit_gib=8.5 * nbytes / GIB)  # 6 of states, 1 of the model's own
    me.res.keep("ref")
    with pytest.raises(ValueError, match=r"keep\('old'\) takes .*host_memory_limit_gib leaves .*higher limit"):
        me.res.keep("old")
    me.res.drop("ref")
    me.res.keep("old")
    me.make(host_memory_limit_gib=5000 / GIB)
    with pytest.raises(ValueError, match="beside that of all parameters"):
        me.res.keep("ref")


def test_ranks_of_a_buffer_that_differ_in_what_is_away_or_kept_are_refused_before_any_gathers(sleeper, monkeypatch):
    me = sleeper()
    me.res.keep("ref")
    slab = me.res._memory.weights.slabs[0]
    slab.place = (0, 0)
    for other in ((True, True), (False, False)):
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="some ranks alone have parameters"):
            another_rank(patch, lambda _, other=other: (set(), {(slab.place, *other)}))
            me.res.weights("ref").__enter__()
    with me.res.weights("ref"):
        pass


@pytest.mark.parametrize("name", ["", None, 3, ["ref"]], ids=repr)
def test_what_is_no_name_is_refused(name):
    res = bridge_fgo.Residency(torch.nn.Linear(3, 2))
    verbs = {"keep": res.keep, "drop": res.drop, "weights": lambda name: res.weights(name).__enter__()}
    for verb, call in verbs.items():
        with pytest.raises(ValueError, match=rf"{verb}\({re.escape(repr(name))}\): give a name"):
            call(name)


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
