"""An optimizer's own step runs once, with all states, bitwise as resident."""

import contextlib
import copy
import functools
import pkgutil
from types import MethodType
from unittest import mock

import cpu_training
import fused_adam
import pytest
import torch
from both import OPTIMIZERS, bits, both, steps
from lanes import in_lanes
from saving import load, save

import bridge_fgo
from bridge_fgo.config import MIB

pytestmark = pytest.mark.usefixtures("cpu_standins")

STEPS = 4


class WarmUp:
    """Counts its own steps for a warm-up of the step size."""

    calls = 0

    def step(self, closure=None):
        self.calls += 1
        before = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] *= min(1.0, self.calls / 10)
        super().step(closure)
        for group, lr in zip(self.param_groups, before, strict=True):
            group["lr"] = lr


class TrustRatio:
    """Scales gradients by their norm over everything that it steps."""

    @torch.no_grad()
    def step(self, closure=None):
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        grads = [getattr(grad, "_local_tensor", grad) for grad in grads]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        for grad in grads:
            grad.mul_(0.1 / norm.clamp(min=1e-6))
        return super().step(closure)


MUON = OPTIMIZERS["muon"]
FSDP = {"fsdp": "optim_grads_params"}
CASES = {
    "a_fused_adam_that_counts_its_calls": (WarmUp, "FusedAdam", {}),
    "a_fused_adam_that_looks_at_all_gradients": (TrustRatio, "FusedAdam", {}),
    "torchs_adamw_that_counts_its_calls": (WarmUp, "AdamW", {"experts": True}),
    "torchs_adamw_that_is_not_distributed": (TrustRatio, "AdamW", {"distributed": False}),
    "torchs_adamw_under_megatron_fsdp": (TrustRatio, "AdamW", FSDP),
    "muon_that_counts_its_calls": (WarmUp, "Muon", MUON),
}


@contextlib.contextmanager
def provided(name, monkeypatch):
    """Context in which trainings get an optimizer of somebody's own, by `OptimizerConfig.provide`; gives the class."""
    from megatron.core.optimizer import emerging_optimizers, get_megatron_optimizer
    from megatron.core.optimizer import muon as mcores_muon

    def subclass(base):
        return type(f"{mixin.__name__}Of{base.__name__}", (mixin, base), {"__module__": __name__})

    (mixin, kind, options), make_config = CASES[name], cpu_training.make_config
    build = get_megatron_optimizer
    if kind == "Muon":
        cls, build = subclass(emerging_optimizers.TensorParallelMuon), mcores_muon.get_megatron_muon_optimizer
        taken = mock.patch.object(emerging_optimizers._EMERGING_OPTIMIZERS["muon"], "optimizer_cls", cls)
    elif kind == "FusedAdam":
        fused_adam.have_mcore_take_it(monkeypatch.setattr)
        taken = mock.patch("megatron.core.optimizer.Adam", cls := subclass(fused_adam.FusedAdam))
    else:
        taken = mock.patch("torch.optim.AdamW", cls := subclass(torch.optim.AdamW))

    def make(options):
        cfg = make_config(options)

        def provide(**given):
            with taken:
                return build(config=cfg.optimizer, **given)

        cfg.optimizer.provide = provide
        return cfg

    with monkeypatch.context() as patch:
        patch.setattr(cpu_training, "make_config", make)
        yield cls, options


IN_THE_FAST_LANE = (
    "a_fused_adam_that_looks_at_all_gradients",
    "torchs_adamw_that_counts_its_calls",
    "muon_that_counts_its_calls",
)


@pytest.mark.parametrize("name", in_lanes(CASES, IN_THE_FAST_LANE))
def test_it_steps_once_a_step_bitwise_as_resident_and_is_named_with_the_memory_that_it_holds(name, monkeypatch, capsys):
    figures = []

    def trained(run):
        seen = steps(run, STEPS)
        figures.append(bridge_fgo.stats())
        return seen

    with provided(name, monkeypatch) as (cls, options):
        both(trained, **options)
    said = [line for line in capsys.readouterr().out.splitlines() if "is not divided" in line]
    assert len(said) == 1 and f"{__name__}.{cls.__qualname__} has of its own" in said[0], said
    held = float(said[0].split("that all ")[1].split(" MiB that are offloaded")[0])
    assert 0 < held <= figures[1].offloaded_bytes / MIB + 0.01  # an optimizer beside it divides its step


@pytest.mark.parametrize("where", ["before", "after", "around"])
def test_hooks_on_the_step_and_a_wrapper_run_once_a_step_with_every_parameter_bitwise_as_resident(where):
    def hooked(run):
        adam, seen = run.optimizer.chained_optimizers[0].optimizer, []
        step = adam.step

        def hook(*how):
            seen.append([param.sum().item() for group in adam.param_groups for param in group["params"]])
            for group in adam.param_groups:
                group["lr"] *= 0.9

        def wrapper(*args, **kwargs):
            hook()
            return step(*args, **kwargs)

        if where == "around":
            adam.step = wrapper
        else:
            {"before": adam.register_step_pre_hook, "after": adam.register_step_post_hook}[where](hook)
        return steps(run, 3), seen

    (_, seen), _ = both(hooked)
    assert len(seen) == 3


def leaf_of(run):
    return getattr(run.optimizer, "chained_optimizers", [run.optimizer])[0]


def put_on_the_object(leaf, name, own, patch):
    setattr(leaf, name, MethodType(own, leaf))


def put_on_the_class(leaf, name, own, patch):
    patch.setattr(type(leaf), name, own)


def put_on_a_subclass(leaf, name, own, patch):
    leaf.__class__ = type("Subclass", (type(leaf),), {name: own, "__module__": __name__})


@pytest.mark.parametrize(
    ("put", "optimizer"),
    in_lanes(
        [
            (put, kind)
            for put in (put_on_the_object, put_on_the_class, put_on_a_subclass)
            for kind in (None, "adam", "fsdp")
        ],
        [(put_on_the_object, None), (put_on_a_subclass, "adam"), (put_on_the_object, "fsdp")],
    ),
)
def test_a_copy_to_the_weights_that_is_somebodys_own_runs_once_a_step_bitwise_as_resident(put, optimizer, capsys):
    def copied(run):
        leaf, masters = leaf_of(run), []
        owner, name = leaf, "_copy_main_params_to_model_params"
        if optimizer == "fsdp":
            owner, name = leaf.model_chunks[0].param_and_grad_buffer, "copy_main_weights_to_model_weights"
        upstreams = getattr(type(owner), name)

        def average_and_copy(owner):
            params = [param for group in leaf.optimizer.param_groups for param in group["params"]]
            masters.append([getattr(param, "_local_tensor", param).sum() + torch.rand(()) for param in params])
            upstreams(owner)

        with pytest.MonkeyPatch.context() as patch:
            put(owner, name, average_and_copy, patch)
            return steps(run, 4), masters

    (_, masters), _ = both(copied, **OPTIMIZERS.get(optimizer, FSDP if optimizer == "fsdp" else {}))
    assert len(masters) == 4
    said = [line for line in capsys.readouterr().out.splitlines() if "is not divided" in line]
    assert len(said) == 1 and "copy to the weights" in said[0] and "average_and_copy" in said[0]


OPTIMIZER = "megatron.core.optimizer."
FSDPS = "megatron.core.distributed.fsdp.src.megatron_fsdp."
REPLACED = {
    f"{OPTIMIZER}distrib_optimizer.DistributedOptimizer._build_model_and_main_param_groups": {},
    f"{OPTIMIZER}distrib_optimizer.DistributedOptimizer._copy_model_params_to_main_params": {},
    f"{OPTIMIZER}optimizer.Float16OptimizerWithFloat16Params._copy_model_params_to_main_params": OPTIMIZERS["adam"],
    f"{OPTIMIZER}distrib_optimizer.DistributedOptimizer._init_optimizer_states_with_dummy_values": FSDP,
    f"{FSDPS}megatron_fsdp.MegatronFSDP.install_optimized_model_weights": FSDP,
    f"{FSDPS}param_and_grad_buffer.ParamAndGradBuffer.copy_main_weights_to_model_weights": FSDP,
}
"""Methods that the package calls part by part where they are upstream's, by training."""


@pytest.mark.parametrize("path", REPLACED)
def test_what_stood_in_upstreams_place_before_the_package_came_runs_as_often_as_resident(path, monkeypatch, tmp_path):
    owner, _, name = path.rpartition(".")
    cls, calls = pkgutil.resolve_name(owner), []
    before = vars(cls)[name]
    upstreams = getattr(before, "__func__", before)

    @functools.wraps(upstreams)
    def own(*args, **kwargs):
        calls.append(torch.rand(()))
        return upstreams(*args, **kwargs)

    monkeypatch.setattr(cls, name, classmethod(own) if isinstance(before, classmethod) else own)

    def trained(run):
        seen, folder = steps(run, 2), tmp_path / str(run.options.offload)
        if run.options.fsdp is None:
            run.optimizer.reload_model_params()
        else:
            save(run, folder)
            load(run, folder)
        seen += steps(run, 2)
        called, calls[:] = list(calls), []
        assert called
        return seen, called

    both(trained, **REPLACED[path])


def halved(adam, state_dict):
    halves = {
        number: {name: value * 0.5 if value.dim() else value for name, value in values.items()}
        for number, values in state_dict["state"].items()
    }
    return {**state_dict, "state": halves}


def halve_the_first(adam):
    for values in adam.state.values():
        values["exp_avg"].mul_(0.5)


HOOKS = {
    "state_dict": lambda adam: adam.register_state_dict_post_hook(halved),
    "before_a_load": lambda adam: adam.register_load_state_dict_pre_hook(halved),
    "after_a_load": lambda adam: adam.register_load_state_dict_post_hook(halve_the_first),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_on_the_state_dictionary_see_and_change_the_states_bitwise_as_resident(name):
    def hooked(run):
        seen = steps(run, 2)
        HOOKS[name](run.optimizer.chained_optimizers[0].optimizer)
        kept = copy.deepcopy(run.optimizer.state_dict())
        seen += steps(run)
        run.optimizer.load_state_dict(copy.deepcopy(kept))
        return seen, kept, bits(run), steps(run, 2)

    both(hooked, **OPTIMIZERS["adam"])


class Remembers(WarmUp):
    """Has the count of its steps saved, in its param groups, and loaded."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["calls"] = self.calls

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.calls = self.param_groups[0]["calls"]


@pytest.mark.parametrize(("adam", "options"), [("te", {}), ("te", FSDP), (None, OPTIMIZERS["adam"])])
def test_an_override_of_the_load_runs_bitwise_as_resident(adam, options, tmp_path):
    def resumed(run):
        leaf = leaf_of(run)
        leaf.optimizer.__class__ = type("Subclass", (Remembers, type(leaf.optimizer)), {"__module__": __name__})
        seen, folder = steps(run, 2), tmp_path / str(run.options.offload)
        save(run, folder)
        seen += steps(run, 2)
        load(run, folder)
        assert leaf.optimizer.calls == 2
        return seen, bits(run), steps(run, 2)

    both(resumed, adam=adam, **options)
