"""Optimizers with a step of their own: it runs once a step, with every state there, bitwise as resident."""

from __future__ import annotations

import contextlib
from functools import partial
from unittest import mock

import fused_adam
import pytest
import torch
from both import numbers
from saving import load, save
from test_checkpoints import session_of
from test_parity import DEFAULTS, SMALL_SLABS

import bridge_fgo
from bridge_fgo.states.inner_step import InnerStep
from bridge_fgo.tools.arms import cpu_training
from bridge_fgo.tools.arms.cpu_training import CpuOptions, CpuTraining, run

pytestmark = pytest.mark.usefixtures("cpu_standins")

STEPS = 5
MUON = {"distributed": False, "optimizer": "muon"}


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


class CountsGroups:
    """Steps a group by its number among all that a step has begun: in a method that the known step calls."""

    begun = 0

    def _init_group(self, group, *args, **kwargs):
        self.begun += 1
        group["weight_decay"] = 0.01 * (self.begun % 7)
        return super()._init_group(group, *args, **kwargs)


class CountsUpdates:
    """Weighs a parameter by its number among all updates: by what FusedAdam's step asks for each parameter."""

    asked = 0

    def update(self, group, param):
        self.asked += 1
        param.grad.mul_(1 + self.asked % 5)
        super().update(group, param)


def subclass(mixin, base):
    return type(f"{mixin.__name__}Of{base.__name__}", (mixin, base), {"__module__": __name__})


def fused(mixin):
    return "megatron.core.optimizer.Adam", subclass(mixin, fused_adam.FusedAdam), {}


def torchs(mixin, **options):
    return "torch.optim.AdamW", subclass(mixin, torch.optim.AdamW), options


def muon(mixin):
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

    return "optimizer_cls", subclass(mixin, TensorParallelMuon), MUON


CASES = {
    "a_fused_adam_that_counts_its_calls": lambda: fused(WarmUp),
    "a_fused_adam_that_looks_at_all_gradients": lambda: fused(TrustRatio),
    "a_fused_adam_with_an_update_of_its_own": lambda: fused(CountsUpdates),
    "torchs_adamw_that_counts_its_calls": lambda: torchs(WarmUp, experts=True),
    "torchs_adamw_with_an_init_group_of_its_own": lambda: torchs(CountsGroups),
    "torchs_adamw_that_is_not_distributed": lambda: torchs(TrustRatio, distributed=False),
    "torchs_adamw_under_megatron_fsdp": lambda: torchs(TrustRatio, fsdp="optim_grads_params"),
    "muon_that_counts_its_calls": lambda: muon(WarmUp),
    "muon_with_an_init_group_of_its_own": lambda: muon(CountsGroups),
}


@contextlib.contextmanager
def provided(name, monkeypatch):
    """Context in which trainings get an optimizer of somebody's own, by `OptimizerConfig.provide`; gives the class."""
    from megatron.core.optimizer import emerging_optimizers, get_megatron_optimizer
    from megatron.core.optimizer import muon as mcores_muon

    place, cls, options = CASES[name]()
    make_config = cpu_training.make_config
    if "Fused" in cls.__name__:
        fused_adam.have_mcore_take_it(monkeypatch.setattr)
    entry = emerging_optimizers._EMERGING_OPTIMIZERS["muon"]
    taken = mock.patch.object(entry, place, cls) if place == "optimizer_cls" else mock.patch(place, cls)
    build = mcores_muon.get_megatron_muon_optimizer if place == "optimizer_cls" else get_megatron_optimizer

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


LONG = ("a_fused_adam_with_an_update_of_its_own", "torchs_adamw_that_is_not_distributed", "muon_that_counts_its_calls")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in CASES])
def test_it_steps_once_a_step_bitwise_as_resident_and_is_named_with_the_memory_that_it_holds(name, monkeypatch, capsys):
    with provided(name, monkeypatch) as (cls, options):
        resident, figures = run(CpuOptions(**options), STEPS), []
        with bridge_fgo.install(DEFAULTS if "fsdp" in options else SMALL_SLABS):
            record = run(CpuOptions(offload=True, **options), STEPS, lambda _: figures.append(bridge_fgo.stats()))
    assert numbers(record) == numbers(resident)
    assert record.digests == resident.digests
    assert record.peak_forward_backward_bytes == 0 < resident.peak_forward_backward_bytes
    said = [line for line in capsys.readouterr().out.splitlines() if "is not divided" in line]
    gib = f" {figures[0].offloaded_bytes / 2**30:.2f} GiB"
    assert len(said) == 1 and f"{__name__}.{cls.__qualname__} has of its own" in said[0] and gib in said[0], said


def resumed(folder, offload, options):
    """Save after two steps, and load that into another training; return its digests then, and two steps later."""
    with CpuTraining(CpuOptions(offload=offload, **options)) as training:
        training.step()
        training.step()
        save(training, folder)
    with CpuTraining(CpuOptions(offload=offload, **options)) as training:
        load(training, folder)
        found = [training.digests()]
        training.step()
        training.step()
        return [*found, training.digests()]


def stepped(context_of=lambda training: contextlib.nullcontext, steps=STEPS, **options):
    """Train each step in a context; return what was seen, the digests, and the most bytes of state in a forward."""
    with CpuTraining(CpuOptions(**options)) as training:
        seen, held, context = [], [], context_of(training)
        for _ in range(steps):
            with context():
                record = training.step()
            seen.append((record.loss, record.grad_norm))
            held.append(max(training.live_bytes))
        return seen, training.digests(), max(held)


def in_training_step(training):
    res = bridge_fgo.Residency(training.model, training.optimizer, SMALL_SLABS)
    return partial(res.training_step, training.options.microbatches)


@pytest.mark.parametrize("name", ["torchs_adamw_that_counts_its_calls", "muon_with_an_init_group_of_its_own"])
def test_in_a_residencys_training_step_it_steps_once_bitwise_as_resident(name, monkeypatch, capsys):
    with provided(name, monkeypatch) as (_, options):
        *resident, held = stepped(**options)
        with bridge_fgo.install(DEFAULTS):
            *mine, mine_held = stepped(in_training_step, **options)
    assert mine == resident and mine_held == 0 < held
    assert "is not divided" in capsys.readouterr().out


@pytest.mark.parametrize("when", ["pre", "post"])
def test_hooks_on_the_step_run_once_a_step_bitwise_as_resident(when):
    calls = []

    def hook(adam, args, kwargs):
        calls.append(len(adam.param_groups[0]["params"]))
        for group in adam.param_groups:
            group["lr"] *= 0.9

    def hooked(training):
        (leaf,) = training.optimizer.chained_optimizers
        getattr(leaf.optimizer, f"register_step_{when}_hook")(hook)
        return contextlib.nullcontext

    *resident, held = stepped(hooked)
    with bridge_fgo.install(SMALL_SLABS):
        *mine, mine_held = stepped(hooked, offload=True)
    assert mine == resident and mine_held == 0 < held
    assert calls[:STEPS] == calls[STEPS:]


def test_plans_count_all_that_such_a_step_holds(monkeypatch):
    with (
        provided("torchs_adamw_that_counts_its_calls", monkeypatch) as (_, options),
        bridge_fgo.install(SMALL_SLABS),
        CpuTraining(CpuOptions(offload=True, **options)) as training,
    ):
        training.step()
        training.step()
        engine = session_of(training).engine
        assert engine.schedule.holding.held_through_step == sum(slab.nbytes for slab in engine.slabs) > 0


class OfTheSameStep(torch.optim.AdamW):
    """A subclass that a step knows nothing of."""

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)


def test_a_subclass_with_the_known_step_is_divided_also_where_a_scheduler_of_torchs_counts_its_calls(monkeypatch):
    def scheduled(training):
        for leaf in training.optimizer.chained_optimizers:
            torch.optim.lr_scheduler.ConstantLR(leaf.optimizer)
        return contextlib.nullcontext

    updates, update = [], InnerStep.update
    monkeypatch.setattr(InnerStep, "update", lambda inner, part: (updates.append(part), update(inner, part))[1])
    monkeypatch.setattr(torch.optim, "AdamW", OfTheSameStep)
    *resident, _ = stepped(scheduled, steps=2)
    assert updates == []
    with bridge_fgo.install(SMALL_SLABS):
        assert list(stepped(scheduled, steps=2, offload=True)) == [*resident, 0]
    assert len(updates) > 2 * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a_fused_adam_that_counts_its_calls", "muon_with_an_init_group_of_its_own"])
def test_it_resumes_bitwise_as_resident(name, monkeypatch, tmp_path):
    with provided(name, monkeypatch) as (_, options):
        resident = resumed(tmp_path / "resident", False, options)
        with bridge_fgo.install(SMALL_SLABS):
            assert resumed(tmp_path / "offloaded", True, options) == resident
