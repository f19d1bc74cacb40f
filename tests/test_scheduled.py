"""Measured peaks decide what is released late and prefetched early."""

from dataclasses import replace
from functools import wraps

import fused_adam
import pytest
import torch
from both import PACKED, WHOLE, as_resident, both, resident, session_of, training
from bridge_loop import train
from fake_meter import FakeMeter, have_sessions_take_it
from lanes import in_lanes

import bridge_fgo
from bridge_fgo.bridge import session
from bridge_fgo.config import readable
from bridge_fgo.memory.meters import ACTIVE, ALLOCATED, DeviceMemory
from bridge_fgo.states import inner_step

STEPS = 8


@pytest.fixture
def meter(monkeypatch):
    """Have sessions use a fake meter; its class attributes set the sizes."""
    have_sessions_take_it(monkeypatch.setattr)
    for name in ("activation", "step", "forward_points"):
        monkeypatch.setattr(FakeMeter, name, getattr(FakeMeter, name))
    return FakeMeter


KINDS = {"plain": {}, "two chunks": {"chunks": 2}, "experts": {"experts": True}}


@pytest.mark.parametrize(
    ("name", "share"), in_lanes([(n, s) for n in KINDS for s in (0.3, 1.0, 3.0)], [("plain", 0.3), ("experts", 3.0)])
)
def test_bits_are_equal_and_no_more_is_held_than_the_plan_has_room_for(meter, name, share):
    meter.forward_points = 5  # two layers with two children, and the norm after them
    meter.activation = int(share * resident(STEPS, **KINDS[name])[0].state_bytes) // meter.forward_points
    held = []
    """What was held at each point after the plan was made."""
    with as_resident(STEPS, **KINDS[name]) as run:
        run.step()
        schedule = session_of(run).engine.schedule
        point = schedule.point

        def spy(mark):
            point(mark)
            if schedule._plan is not None:
                held.append((schedule._index, schedule.ledger.nbytes, schedule._plan))

        schedule.point = spy
        run.train(STEPS - 1)
    assert all(nbytes <= plan.leave[index] for index, nbytes, plan in held)
    first, last = held[0][0], max(index for index, _, _ in held)
    in_forward = [nbytes for index, nbytes, _ in held if index <= first + 1]
    at_the_end = [nbytes for index, nbytes, _ in held if index == last]
    assert min(in_forward) > 0, "nothing left late"
    # In the first planned step nothing does: the allocator lets go of its blocks after that one's backward.
    assert min(at_the_end[1:]) > 0, "nothing came early"


@pytest.mark.parametrize(
    ("moments", "budget_gib", "is_divided"),
    [
        pytest.param(torch.float32, 1.0, False, id="all stays"),
        pytest.param(torch.bfloat16, 1.0, True, id="with temporaries", marks=pytest.mark.slow),
        pytest.param(torch.float32, None, True, id="all leaves", marks=pytest.mark.slow),
    ],
)
def test_a_step_with_nothing_away_is_divided_only_where_it_needs_memory(
    meter, monkeypatch, moments, budget_gib, is_divided
):
    called, step = [], fused_adam.FusedAdam.step
    monkeypatch.setattr(fused_adam.FusedAdam, "step", wraps(step)(lambda self: called.append(1) or step(self)))
    monkeypatch.setattr(inner_step, "UPSTREAM", inner_step.UPSTREAM | {__name__})  # where that wrapper is
    with as_resident(STEPS, replace(PACKED, gpu_memory_budget_gib=budget_gib), adam="te") as run:
        run.optimizer.chained_optimizers[0].optimizer.name_to_dtype_map["exp_avg"] = moments
        for _ in range(STEPS):
            called.clear()
            run.step()
    assert (len(called) > 1) == is_divided


@pytest.mark.parametrize(("budget", "told"), [(2.0, 1), (3.0, 0)])
def test_a_step_above_the_budget_is_said_once_there_is_a_plan(meter, monkeypatch, capsys, budget, told):
    monkeypatch.setattr(meter, "end_phase", lambda self: 3 * 2**30)
    with training(True, replace(WHOLE, gpu_memory_budget_gib=budget)) as run:
        run.train(2)
        before = capsys.readouterr().out
        run.train(3)
    after = capsys.readouterr().out
    assert "allocated 3.00 GiB" not in before
    assert after.count(f"allocated 3.00 GiB, more than OffloadConfig.gpu_memory_budget_gib={budget:g}:") == told
    assert (before + after).count("bridge_fgo: measured ") == 1, "and what was planned"


@pytest.mark.parametrize("pins", [False, True], ids=["", "mcore pins for activations"])
def test_what_the_plan_predicted_is_said_once_beside_what_was_measured(meter, capsys, monkeypatch, pins):
    planned, beside = [], "; for activations 5.00 GiB are pinned on the host" * pins
    monkeypatch.setattr(session.Session, "_offloads_activations", pins)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    counts = {"allocated_bytes": {"current": 5 * 2**30}}
    monkeypatch.setattr(torch.cuda, "host_memory_stats_as_nested_dict", lambda: counts)
    with training(True, WHOLE) as run:
        for _ in range(6):
            run.step()
            planned.append(bridge_fgo.stats().planned_peak_bytes)
        peak = session_of(run).figures.peak_allocated_bytes
    assert planned[:2] == [None, None] and peak is not None and peak <= planned[-1]
    said = [line for line in capsys.readouterr().out.splitlines() if " measured, " in line]
    assert said == [f"bridge_fgo: peak of step 4: {readable(peak)} measured, {readable(planned[3])} planned{beside}"]


@pytest.mark.parametrize(("budget", "offloads", "counter"), [
    ("auto", True, ACTIVE), ("auto", False, ALLOCATED), (40.0, True, ALLOCATED), (None, True, ALLOCATED)
])  # fmt: skip
def test_auto_finds_out_the_room_beside_activations_whose_copies_out_still_run(
    meter, monkeypatch, budget, offloads, counter
):
    """A budget in GiB is one of allocated bytes."""
    monkeypatch.setattr(session.Session, "_offloads_activations", offloads)
    memory = DeviceMemory(whole=2**40, free=2**40, reserved=0, allowed=2**40)
    monkeypatch.setattr(meter, "device_memory", lambda self: memory)
    with training(True, replace(WHOLE, gpu_memory_budget_gib=budget)) as run:
        for _ in range(3):
            run.step()
        assert session_of(run).meter.of_intervals == counter


class StandInGraphs:
    """Stands for mcore's helper that captures layers into graphs: a replayed layer is one that is called."""

    def __init__(self, model, **others):
        from megatron.core.transformer.module import GraphableMegatronModule
        from megatron.core.transformer.transformer_layer import TransformerLayer

        self.modules = list(model[0].modules())
        self.layers = [module for module in self.modules if isinstance(module, TransformerLayer)]
        for module in self.modules:
            if isinstance(module, GraphableMegatronModule):  # made before the config asked for graphs
                module.cuda_graphs, module.cuda_graph_manual_hooks = [], []
        self._graphs_created = False

    def create_cudagraphs(self):
        """Note what there is now, and have the layers called past their hooks from now on."""
        hooks = sum(len(module._forward_pre_hooks) for module in self.modules)
        held = sum(s.engine.schedule.ledger.nbytes for s in session.all_sessions())
        StandInGraphs.found = hooks, session.active_session(), held
        self._graphs_created = True
        for layer in self.layers:

            def replay(*args, layer=layer, is_first_microbatch=None, **kwargs):
                return layer.forward(*args, **kwargs)[:1]

            layer.cuda_graphs = [replay]

    def delete_cuda_graphs(self):
        """Nothing to delete."""


def test_layers_are_captured_with_no_state_on_the_gpu_and_what_they_need_is_measured_again(meter, monkeypatch):
    # Replayed layers run no hooks, so no point tells that their activations grow.
    from megatron.core.transformer import transformer_layer
    from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

    monkeypatch.setattr(transformer_layer, "is_te_min_version", lambda version: True)  # it stands in here
    for name in ("__init__", "create_cudagraphs", "delete_cuda_graphs"):
        monkeypatch.setattr(TECudaGraphHelper, name, vars(StandInGraphs)[name])
    meter.forward_points = 5
    meter.activation = 10 * resident(2)[0].state_bytes // meter.forward_points
    held, plans = [], []

    def captured(run):
        run.cfg.model.cuda_graph_impl, run.cfg.model.cuda_graph_warmup_steps = "transformer_engine", 5
        seen = train(run, 8)
        if run.options.offload:
            held.extend(seen.held)
            plans.extend(session_of(run).engine.schedule.holding.plans)
        return seen.numbers

    both(captured)
    assert StandInGraphs.found == (0, None, 0)
    assert min(held[3:5]) > 0, "by the plan some stay into the forward"
    assert held[5] == 0, "released before the capture; then other points, which are measured"
    before, after = sorted((plan.leave for plan in plans), key=len, reverse=True)
    assert len(after) < len(before), "layers that are captured report no points"
