"""Stepping an Adam in parts: bits, group counters, and what forbids it."""

import functools
from functools import partial
from types import FunctionType, MethodType, SimpleNamespace

import pytest
import torch
import torch.optim.optimizer as every_optimizer
import wrapt
from fused_adam import FusedAdam

from bridge_fgo.states import inner_step
from bridge_fgo.states.inner_step import InnerStep, in_place_of


class SkipsEmptyGroups(FusedAdam):
    counts_empty_groups = False


@pytest.fixture(autouse=True)
def fused_adam_is_known(monkeypatch):
    monkeypatch.setattr(inner_step, "KNOWN", inner_step.KNOWN | {"fused_adam.FusedAdam.step"})
    monkeypatch.setattr(inner_step, "UPSTREAM", inner_step.UPSTREAM | {"fused_adam"})


def make(cls=FusedAdam):
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(size, generator=generator) for size in (3, 5, 7, 2, 4)]
    return params, cls([{"params": params[:3]}, {"params": []}, {"params": params[3:]}])


def give_grads(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)


def in_parts(adam, params, parts):
    """Step as DistributedOptimizer does, by `adam.step()`, in the given parts (positions); the rest is None's."""
    inner = InnerStep(adam)
    owners = {id(params[i]): number for number, part in enumerate(parts) for i in part}

    def step():
        for owner in (*range(len(parts)), None):
            inner.update(owner)

    with inner.replaced(step, owners):
        adam.step()


@pytest.mark.parametrize("cls", [SkipsEmptyGroups, FusedAdam, torch.optim.AdamW])
@pytest.mark.parametrize("parts", [[[0], [1], [2], [3], [4]], [[0, 3], [1, 2, 4]], [[2, 4]], []])
def test_parts_have_the_bits_of_the_whole(cls, parts):
    whole_params, whole = make(cls)
    params, adam = make(cls)
    for seed in range(4):
        give_grads(whole_params, seed)
        whole.step()
        give_grads(params, seed)
        in_parts(adam, params, parts)
    assert all(torch.equal(a, b) for a, b in zip(whole_params, params, strict=True))
    assert [g.get("step") for g in adam.param_groups] == [g.get("step") for g in whole.param_groups]
    assert [len(g["params"]) for g in adam.param_groups] == [3, 0, 2]


def somebodys_hook(*args):
    pass


@pytest.mark.parametrize("whose", ["its own", "every optimizer's"])
@pytest.mark.parametrize("when", ["pre", "post"])
@pytest.mark.parametrize("hook", [somebodys_hook, partial(somebodys_hook)])
def test_hooks_on_the_step_forbid_its_division_and_are_named(whose, when, hook):
    _, adam = make()
    inner = InnerStep(adam)
    assert inner.kept_whole_by() == ""
    if whose == "its own":
        handle = getattr(adam, f"register_step_{when}_hook")(hook)
    else:
        handle = getattr(every_optimizer, f"register_optimizer_step_{when}_hook")(hook)
    try:
        assert inner.kept_whole_by() == f"a hook on it, {__name__}.somebodys_hook"
    finally:
        handle.remove()
    assert inner.kept_whole_by() == ""


@pytest.fixture
def kinetos_hook(monkeypatch):
    """Registered for every optimizer, as torch does where KINETO_USE_DAEMON is set; what it was called with."""
    calls = []

    def counts_steps(optimizer, args, kwargs):
        calls.append(
            (optimizer, args, kwargs, [param.clone() for g in optimizer.param_groups for param in g["params"]])
        )

    assert callable(torch.profiler._optimizer_post_hook)
    monkeypatch.setattr(torch.profiler, "_optimizer_post_hook", counts_steps)
    handle = every_optimizer.register_optimizer_step_post_hook(counts_steps)
    yield calls
    handle.remove()


@pytest.mark.parametrize("cls", [FusedAdam, torch.optim.AdamW])
def test_kinetos_hook_is_called_once_after_a_divided_step_as_after_a_whole_one(cls, kinetos_hook):
    ends = []
    for divided in (False, True):
        params, adam = make(cls)
        assert InnerStep(adam).kept_whole_by() == ""
        give_grads(params, 0)
        if divided:
            in_parts(adam, params, [[0, 3], [1, 2], [4]])
        else:
            adam.step()
        ((optimizer, args, kwargs, seen),) = kinetos_hook
        kinetos_hook.clear()
        assert optimizer is adam and args == (adam,) and kwargs == {}
        ends.append(seen)
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    adam.step()
    assert len(kinetos_hook) == 1, "it hangs where it did"


def test_a_failing_step_leaves_the_groups_whole_and_kinetos_hook_uncalled_where_it_was(kinetos_hook):
    params, adam = make()
    give_grads(params, 0)
    adam.param_groups[0]["betas"] = None  # the update raises
    with pytest.raises(TypeError):
        in_parts(adam, params, [[0], [1, 2], [3, 4]])
    assert [len(group["params"]) for group in adam.param_groups] == [3, 0, 2]
    assert "step" not in vars(adam) and kinetos_hook == []
    adam.param_groups[0]["betas"] = adam.defaults["betas"]
    adam.step()
    assert len(kinetos_hook) == 1


def elsewhere(code, **names):
    """Return what a module that is not upstream's defines as `it`."""
    names = {"__name__": "somebodys", "torch": torch, "functools": functools, **names}
    exec(code, names)
    return names["it"]


WRAPPED = """
def it(step):
    @functools.wraps(step)
    def wrapper(*args, **kwargs):
        return step(*args, **kwargs)
    return wrapper
"""
SUBCLASS = """
class it(torch.optim.AdamW):
    def {}(self, *args, **kwargs):
        return super().{}(*args, **kwargs)
"""


@pytest.mark.parametrize("cls", [FusedAdam, torch.optim.AdamW])
def test_a_users_function_in_the_place_of_step_forbids_its_division_and_torchs_counter_does_not(cls):
    _, adam = make(cls)
    inner, step = InnerStep(adam), adam.step
    torch.optim.lr_scheduler.ConstantLR(adam)  # counts calls by a function of its own
    assert "step" in vars(adam) and not inner.kept_whole_by()
    for function in (elsewhere("it = lambda *args: 0"), elsewhere(WRAPPED)(step), torch.compile(step), partial(step)):
        adam.step = function
        assert inner.kept_whole_by().startswith("a function in its place, ")
    adam.step = MethodType(elsewhere("it = lambda *args: 0"), adam)
    torch.optim.lr_scheduler.ConstantLR(adam)  # counts the calls of that
    assert inner.kept_whole_by() == "a function in its place, somebodys.<lambda>"


@pytest.mark.parametrize(
    ("name", "is_called"),
    [
        ("step", True),
        ("_init_group", True),
        ("state_dict", False),
        ("load_state_dict", False),
        ("zero_grad", False),
        ("another", False),
    ],
)
def test_a_method_that_a_subclass_overrides_forbids_the_steps_division_only_where_the_step_calls_it(name, is_called):
    _, adam = make(elsewhere(SUBCLASS.format(name, name)))
    why = f"a method that somebodys.it has of its own, somebodys.it.{name}" if is_called else ""
    assert InnerStep(adam).kept_whole_by() == why


def test_a_method_that_somebody_replaces_forbids_the_steps_division(monkeypatch):
    _, adam = make(torch.optim.AdamW)
    inner = InnerStep(adam)
    assert inner.kept_whole_by() == ""
    adam._init_group = elsewhere("it = lambda *args: 0")
    assert inner.kept_whole_by() == "a function in its place, somebodys.<lambda>"
    del adam._init_group
    assert inner.kept_whole_by() == ""
    monkeypatch.setattr(torch.optim.AdamW, "step", elsewhere(WRAPPED)(torch.optim.AdamW.step))
    assert inner.kept_whole_by() == "a method that torch.optim.adamw.AdamW has of its own, torch.optim.adam.Adam.step"


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.NAdam])
def test_a_step_of_torchs_that_is_not_known_is_not_divided(cls):
    params = make()[0]
    assert InnerStep(cls(params, lr=0.1)).kept_whole_by()


def test_torchs_counter_is_there_after_a_divided_step():
    _, adam = make()
    torch.optim.lr_scheduler.ConstantLR(adam)
    counter = vars(adam)["step"]
    with InnerStep(adam).replaced(lambda: None, {}):
        adam.step()
    assert vars(adam)["step"] is counter


@pytest.mark.parametrize("named", [False, True])
def test_arguments_that_parts_cannot_honour_are_refused(named):
    _params, adam = make()
    inner = InnerStep(adam)
    with inner.replaced(lambda: None, {}), pytest.raises(RuntimeError, match="arguments"):
        adam.step(closure=lambda: 1.0) if named else adam.step(lambda: 1.0)


@pytest.mark.parametrize("is_function", [True, False])
def test_a_wrapper_that_is_put_on_by_wrapt_is_somebody_elses_but_for_the_packages(is_function):
    def counts(wrapped, instance, args, kwargs):
        return wrapped(*args, **kwargs)

    wrapper = counts if is_function else partial(counts)
    _, adam = make(torch.optim.AdamW)
    adam.load_state_dict = MethodType(wrapt.FunctionWrapper(torch.optim.AdamW.load_state_dict, wrapper), adam)
    assert in_place_of("load_state_dict", adam)
    ours = FunctionType(counts.__code__, {"__name__": "bridge_fgo.bridge.state_wrappers"})
    adam.load_state_dict = MethodType(wrapt.FunctionWrapper(torch.optim.AdamW.load_state_dict, ours), adam)
    assert in_place_of("load_state_dict", adam) == ""


@pytest.mark.parametrize("module", ["megatron.bridge.training.optim", "megatron.training.optim", __name__])
def test_what_is_in_the_place_of_a_method_is_somebody_elses_but_for_what_upstream_puts_there(module):
    def load(adam, state_dict):
        raise AssertionError

    function = FunctionType(load.__code__, {"__name__": module})
    _, adam = make(torch.optim.AdamW)
    assert in_place_of("load_state_dict", adam) == ""
    adam.load_state_dict = MethodType(function, adam)  # as Bridge does for the time of a load
    assert bool(in_place_of("load_state_dict", adam)) == (module == __name__)
    del adam.load_state_dict
    adam.__class__ = type("Subclass", (torch.optim.AdamW,), {"load_state_dict": function})
    assert bool(in_place_of("load_state_dict", adam)) == (module == __name__)
    assert in_place_of("load_state_dict", SimpleNamespace(load_state_dict=function)) == "", "no class of upstream's"
