"""Each call of `Residency` does what it says, or says what to do."""

import copy
import dataclasses
import gc
import io
import re
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cpu_training import CpuTraining
from sleeping import KINDS, gone, options, residency
from spies import before, fail

import bridge_fgo
from bridge_fgo.memory.host_buffer import HostBuffer
from bridge_fgo.memory.storage_slab import StorageSlab
from bridge_fgo.sleep.checks import Checks
from bridge_fgo.sleep.gradient_offloader import Backwards
from bridge_fgo.sleep.weight_offloader import PLAIN, WeightSlab

pytestmark = pytest.mark.usefixtures("cpu_standins", "poisoned")


@pytest.fixture(scope="module")
def trained(cpu_standins):
    with CpuTraining(options()) as training:
        training.step()
        yield training


@pytest.fixture
def training(trained):
    yield trained
    if (res := bridge_fgo.Residency.of(trained.model)) is not None:
        res.close()


@pytest.fixture
def model():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def are_equal(model, before):
    return all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))


def enter(context):
    with context:
        pass


VERBS = {
    "offload": lambda res: res.offload(),
    "reload": lambda res: res.reload(),
    "only": lambda res: enter(res.only("params")),
    "asleep": lambda res: enter(res.asleep()),
    "checkpointing": lambda res: enter(res.checkpointing()),
    "training_step": lambda res: enter(res.training_step()),
    "host_params": lambda res: res.host_params(),
}


def test_after_close_every_verb_raises_and_moves_nothing(training):
    res = residency(training)
    before = weights(training.model[0])
    res.offload()
    res.close()
    res.close()
    for verb in VERBS.values():
        with pytest.raises(RuntimeError, match=r"after close\(\)"):
            verb(res)
    assert all(p.untyped_storage().nbytes() for p in training.model[0].parameters())
    assert are_equal(training.model[0], before)


@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_close_in_a_context_is_told_at_its_end_and_nothing_moves_after_it(training, sleeps, fails):
    res, before = residency(training), weights(training.model[0])
    if sleeps:
        res.offload()
    with pytest.raises(ZeroDivisionError if fails else RuntimeError) as caught, res.only("params"):
        res.close()
        _ = fails and 1 / 0
    assert "after close()" in (caught.value.__notes__[0] if fails else str(caught.value))
    assert all(buffer.grad_data.untyped_storage().nbytes() for buffer in training.model[0].buffers)
    assert are_equal(training.model[0], before)


# One for a model.


def test_of_finds_the_one_residency_of_a_model_until_it_is_closed_and_a_second_is_refused(training, model):
    (ddp,) = training.model
    reference = torch.nn.Linear(3, 2)
    res, other = residency(training), bridge_fgo.Residency(reference)
    assert all(bridge_fgo.Residency.of(each) is res for each in (training.model, ddp, ddp.module))
    assert bridge_fgo.Residency.of(reference) is other
    assert bridge_fgo.Residency.of(copy.deepcopy(reference)) is None
    for each in (res, other):
        each.close()
    assert bridge_fgo.Residency.of(ddp) is None is bridge_fgo.Residency.of(reference)

    for first, others in ((model[0], (model[0], model, torch.nn.Sequential(model[0]))), (model, (model[1],))):
        res = bridge_fgo.Residency(first)
        for second in others:
            with pytest.raises(ValueError, match=r"has a Residency already.*Residency\.of"):
                bridge_fgo.Residency(second)
        res.close()
    bridge_fgo.Residency(model[1]).close()


def test_a_residency_that_nobody_holds_while_asleep_is_found_and_wakes_and_goes_with_its_model():
    model = torch.nn.Linear(3, 2)
    before, res = weights(model), weakref.ref(bridge_fgo.Residency(model))
    res().offload()
    gc.collect()
    assert res() is bridge_fgo.Residency.of(model)
    res().reload()
    assert are_equal(model, before) and not res().away
    del model
    gc.collect()
    assert res() is None


def test_verbs_of_two_threads_take_turns(monkeypatch, training):
    res, ended = residency(training), []
    inside, woken = threading.Event(), threading.Event()
    before(monkeypatch, StorageSlab, "empty", lambda slab: (inside.set(), woken.wait(0.5)))

    def wakes():
        inside.wait(10)
        res.reload()
        ended.append("reload")
        woken.set()

    other = threading.Thread(target=wakes)
    other.start()
    res.offload("params", "grads")
    ended.append("offload")
    other.join(10)
    assert ended == ["offload", "reload"] and gone(res) == set() == res.away


# What is asked for.

ASKED = [
    ([], set(KINDS)),
    (["all"], set(KINDS)),
    ([["all"]], set(KINDS)),
    (["params"], {"params"}),
    (["params", "grads"], {"params", "grads"}),
    ([["params", "grads"]], {"params", "grads"}),
    ([{"optimizer"}], {"optimizer"}),
    ([[]], set()),
]
"""Arguments of a verb, and what it moves."""


@pytest.mark.parametrize("has_iterators", [False, True], ids=["lists", "iterators"])
def test_what_is_named_moves_an_empty_list_moves_nothing_and_contexts_put_everything_back(training, has_iterators):
    def given(arguments):
        return [iter(each) if has_iterators and isinstance(each, list) else each for each in arguments]

    res = residency(training)
    for what, kinds in ASKED:
        res.offload(*given(what))
        assert res.away == gone(res) == kinds
        res.offload("all")
        res.reload(*given(what))
        assert res.away == set(KINDS) - kinds
        res.reload()
    res.offload("grads")
    with res.only([]):
        assert res.away == set(KINDS)
        with res.only("all"):
            assert res.away == set()
            with res.only(["params", "grads"]) as moved:
                assert res.away == {"optimizer"} and moved.copied_by_kind["optimizer"] == 0
                with res.asleep():
                    assert res.away == set(KINDS)
                assert res.away == {"optimizer"}
            assert res.away == set()
    assert res.away == gone(res) == {"grads"}


def test_what_names_no_kind_is_refused_and_nothing_moves(training):
    res = residency(training)
    for wrong in (True, None, {"params": False}, ["params", "gradients"], "weights", [["params"]]):
        for verb in (res.offload, res.reload, lambda kinds: enter(res.only(kinds))):
            with pytest.raises(ValueError, match=r"use 'all' or any of 'params', 'grads', 'optimizer'"):
                verb(wrong)
    with pytest.raises(ValueError, match="grads='copy'"):
        res.offload(grads="copy")
    assert gone(res) == set()


# What cannot be offloaded.


def adds_an_adapter(model):
    model.append(torch.nn.Linear(2, 2))
    return "2.weight"


def assigns(model):
    model.load_state_dict({name: p.clone() for name, p in model.state_dict().items()}, assign=True)
    return "0.weight"


def rebinds(model):
    model[1].bias.data = model[1].bias.data.clone()
    return "1.bias"


@pytest.mark.parametrize("change", [adds_an_adapter, assigns, rebinds])
def test_parameters_that_are_not_those_it_was_made_of_are_named_and_nothing_moves(model, change):
    res = bridge_fgo.Residency(model)
    name = change(model)
    with pytest.raises(RuntimeError, match=rf"{name!r}.*close\(\)"):
        res.offload("params")
    assert all(p.untyped_storage().nbytes() for p in model.parameters()) and not res.away
    res.close()
    before = weights(model)
    res = bridge_fgo.Residency(model)
    assert res.offload("params").freed == sum(p.nbytes for p in before)
    assert not any(p.untyped_storage().nbytes() for p in model.parameters())
    res.reload()
    assert are_equal(model, before)


def test_a_parameter_that_lies_in_ddps_buffer_no_more_is_refused(training):
    res = residency(training)
    name, parameter = next(iter(training.model[0].named_parameters()))
    before, parameter.data = parameter.data, parameter.data.clone()
    with pytest.raises(ValueError, match=rf"{name!r}.*copy_"):
        res.offload()
    assert gone(res) == set()
    res.close()
    with pytest.raises(ValueError, match=rf"{name!r}.*copy_"):
        residency(training)
    parameter.data = before
    residency(training).close()


def test_arguments_that_are_something_else_are_refused_with_what_to_pass(training):
    from megatron.core.optimizer.optimizer import FP32Optimizer

    config = bridge_fgo.OffloadConfig
    inner, (ddp,) = leaf_of(training).optimizer, training.model
    fp32 = object.__new__(FP32Optimizer)
    for wrong, match in (
        ((training.optimizer, training.model), r"Residency\(model=ChainedOptimizer\).*Residency\(model, optimizer\)"),
        (([],), r"Residency\(model=\[\]\)"),
        ((iter(training.model),), r"Residency\(model=list_iterator\).*list of model chunks"),
        ((training.model, inner), rf"Residency\(optimizer={type(inner).__name__}\).*get_megatron_optimizer"),
        ((training.model, [training.optimizer]), r"Residency\(optimizer=list\)"),
        ((training.model, config()), r"Residency\(optimizer=OffloadConfig\)"),
        ((training.model, training.optimizer, 64), r"config=64\): give the settings as bridge_fgo\.OffloadConfig"),
        ((training.model, training.optimizer, config(engine="mcore")), r"engine='mcore'.*engine='native'"),
        ((training.model, fp32), r"use_distributed_optimizer=True.*, or pass optimizer=None"),
        ((ddp.module,), "in a DDP that was not passed"),
        ((ddp.module, training.optimizer), "in a DDP that was not passed"),
    ):
        with pytest.raises(ValueError, match=match):
            bridge_fgo.Residency(*wrong)
    for wrong in (None, training.optimizer, ["model"]):
        with pytest.raises(ValueError, match=r"Residency\(model=.*\): pass a module"):
            bridge_fgo.Residency.of(wrong)
    for wrong in (3, True, b"folder", ["folder"], np.array(["one", "other"]), ""):  # which Path takes for "."
        with pytest.raises(ValueError, match=rf"frozen_folder={re.escape(repr(wrong))}\): name a folder"):
            bridge_fgo.Residency(training.model, frozen_folder=wrong)
    res = bridge_fgo.Residency(training.model)  # parameters and gradients move without it
    res.offload()
    assert res.away == {"params", "grads"}


def test_a_budget_of_training_steps_needs_the_package_to_be_installed(training):
    with pytest.raises(ValueError, match=r"gpu_memory_budget_gib='auto'\)\): call bridge_fgo\.install\(\) first"):
        residency(training, config=bridge_fgo.OffloadConfig(gpu_memory_budget_gib="auto"))


def buffer_of(training):
    return training.model[0].buffers[0]


def leaf_of(training):
    return training.optimizer.chained_optimizers[0]


REFUSED = {
    "ddp.nccl_ub=True": lambda t: (buffer_of(t), "nccl_ub", True),
    "ddp.fp8_param_gather=True": lambda t: (buffer_of(t), "shared_buffer", torch.zeros(1)),
    "model.cuda_graph_impl='local'": lambda t: (t.model[0].config, "cuda_graph_impl", "local"),
    "TransformerLayer with model.cuda_graph_impl='local' .*model.vision_cuda_graph_impl": lambda t: (
        t.model[0].module.module.decoder.layers[0], "config", SimpleNamespace(cuda_graph_impl="local"),
    ),
    "set ddp.overlap_param_gather=False": lambda t: (
        t.model[0], "ddp_config",
        dataclasses.replace(t.model[0].ddp_config, overlap_param_gather=True, use_distributed_optimizer=False),
    ),
    "model.expert_gtp_weight_remat_size=2": lambda t: (
        t.model[0].module.module.decoder.layers[0], "config", SimpleNamespace(expert_gtp_weight_remat_size=2),
    ),
    "ddp.use_megatron_fsdp=False": lambda t: (leaf_of(t).ddp_config, "use_megatron_fsdp", True),
    **{
        f"over a {name}: it manages parameters itself; set ddp.use_megatron_fsdp=False": lambda t, name=name: (
            t.model[0].module, "sharded", type(name, (torch.nn.Module,), {})(),
        )
        for name in ("TorchFullyShardedDataParallel", "FullyShardedDataParallelV1", "MegatronFSDP")
    },
    "set optimizer.optimizer='adam'": lambda t: (leaf_of(t), "optimizer", torch.optim.SGD([torch.zeros(1)])),
    r"no engine is attached.*unset the flag and use `res\.training_step\(\)`": lambda t: (
        leaf_of(t).config, "offload_optimizer_states", True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("named", REFUSED)
def test_what_cannot_be_offloaded_is_refused_by_name_and_nothing_is_hooked(training, monkeypatch, named):
    before = dict(vars(training.model[0])), dict(vars(training.optimizer))
    with monkeypatch.context() as patch:
        owner, name, value = REFUSED[named](training)
        patch.setattr(owner, name, value, raising=False)
        with pytest.raises(ValueError, match=named):
            residency(training)
    assert (dict(vars(training.model[0])), dict(vars(training.optimizer))) == before
    assert all(t.untyped_storage().nbytes() for t in training.model[0].parameters())


def hooks(training):
    """Return the hooks of a training's model and gradients, and the methods that are wrapped on its objects."""
    (ddp,) = training.model
    of_modules = [(*module._forward_pre_hooks, *module._forward_hooks) for module in ddp.modules()]
    wrapped = [
        {name for name in vars(each) if callable(getattr(type(each), name, None))} for each in (ddp, training.optimizer)
    ]
    return of_modules, wrapped


def test_weights_that_cannot_be_read_on_the_host_are_refused_by_name(training, monkeypatch):
    res = residency(training)
    with pytest.raises(RuntimeError, match=r"on the GPU: read them there, or offload\('params'\)"):
        res.host_params()
    res.offload()
    monkeypatch.setattr("bridge_fgo.sleep.weight_offloader.PLAIN", PLAIN[:1])
    with pytest.raises(ValueError, match=r"'module.module.*': only weights in 16 or 32 bits"):
        res.host_params()


def test_after_a_constructor_that_failed_there_are_no_hooks_and_as_after_a_close_no_host_memory(training, monkeypatch):
    before = hooks(training)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="there was a fault"):
        fail(patch, Checks, "on_optimizer", OSError, call=1)
        residency(training)
    assert hooks(training) == before
    gc.collect()
    kept = (HostBuffer, Backwards, WeightSlab)
    assert not [each for each in gc.get_objects() if type(each) in kept]
    res = residency(training)
    res.offload(grads="keep")
    res.reload()
    res.close()
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is HostBuffer], "though it is there itself"


def test_memory_that_cannot_be_emptied_or_moved_is_refused_before_anything_moves(training, model):
    res = residency(training)
    shared = buffer_of(training).grad_data.numpy()
    with pytest.raises(RuntimeError, match="gradient buffer cannot be emptied"):
        res.offload()
    assert res.away == set() and shared.size

    class Quantized(torch.nn.Parameter):
        pass

    model[0].weight = Quantized(model[0].weight.data)
    with pytest.raises(ValueError, match=r"parameter '0\.weight' outside of DDP's buffers is a"):
        bridge_fgo.Residency(model)


# Copies of a model.


def test_a_model_is_pickled_and_copied_without_what_a_residency_has_hung_on_it(model):
    inputs = torch.ones(1, 3)
    expected, state = model(inputs), str(model.state_dict())
    res = bridge_fgo.Residency(model)
    twins = [copy.deepcopy(model), loaded(model)]
    twins += [copy.deepcopy(twins[0]), loaded(twins[1])]
    res.offload()
    for twin in twins:
        assert torch.equal(twin(inputs), expected) and str(twin.state_dict()) == state
        twin[0].weight.data.zero_()
    res.reload()
    assert torch.equal(model(inputs), expected)
    res.close()


def loaded(model):
    held = io.BytesIO()
    torch.save(model, held)
    held.seek(0)
    return torch.load(held, weights_only=False)


def test_a_checked_method_is_bound_as_in_a_call_without_the_check():
    """A wrapper of wrapt's that is called through its class has, before wrapt 2.5, a signature with `self` in it."""
    instances = []

    class Load:
        def __get__(self, instance, owner):
            instances.append(instance)
            return lambda: "loaded"

    class Optimizer:
        load = Load()

    optimizer, checks = Optimizer(), Checks(frozenset, None)
    checks.before(optimizer, "load", lambda: None)
    assert optimizer.load() == "loaded"
    assert all(instance is optimizer for instance in instances)
