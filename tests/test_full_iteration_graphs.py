"""Full-iteration CUDA graphs (a stand-in) train bitwise as resident."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from both import as_resident, resident, session_of, training
from fake_meter import FakeMeter, have_sessions_take_it

import bridge_fgo
from bridge_fgo.bridge.points import PointHook
from bridge_fgo.bridge.session import active_session

WARM_UP = 2
STEPS = 8
MODES = ["eager", "eager", "capture and replay", *["replay"] * (STEPS - 3)]


pytestmark = pytest.mark.usefixtures("cpu_standins")


class Graph:
    """Stands for `torch.cuda.CUDAGraph`."""

    def __init__(self):
        self.run = None

    def register_generator_state(self, state):
        pass

    def replay(self):
        self.run()


class CapturedSchedule:
    """A schedule of mcore's as FullCudaGraphWrapper captures it. `modes` says how each pass ran.

    A replay runs the schedule that was captured, with the data in the static buffers. On a GPU no Python runs then, so
    nothing of this package may be there at the capture.
    """

    def __init__(self, monkeypatch, schedule, model_config):
        from megatron.core import full_cuda_graph

        self.modes = []
        self._schedule, self._model_config, self._graph = schedule, model_config, None
        self._wrapper = full_cuda_graph.FullCudaGraphWrapper
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", self._capture)
        monkeypatch.setattr(full_cuda_graph, "get_all_rng_states", dict)
        monkeypatch.setattr(full_cuda_graph, "get_graph_pool", lambda single: None)
        for name, value in (("curr_iteration", 0), ("cuda_graph", None), ("result", None)):
            monkeypatch.setattr(self._wrapper, name, dict.fromkeys(("training", "validation"), value))
        monkeypatch.setattr(full_cuda_graph.StaticBufferLoader, "static_buffers", {"training": [], "validation": []})
        self._buffers = full_cuda_graph.StaticBufferLoader.static_buffers["training"]
        self.forward_backward = self._wrapper(self._run, cuda_graph_warmup_steps=WARM_UP)

    @contextmanager
    def _capture(self, graph, **how):
        self._graph = graph
        try:
            yield
        finally:
            self._graph = None

    def _run(self, **kwargs):
        if self._graph is None:
            self.modes.append("eager")
        else:
            self.modes.append("capture")
            self._check(kwargs["model"])
            self._graph.run = lambda: self._replay(kwargs)
        return self._schedule(**kwargs)

    def _check(self, model):
        assert not hasattr(self._model_config.finalize_model_grads_func, "__wrapped__"), "the hook of a reload"
        chunks = model if isinstance(model, list) else [model]
        hooks = [hook for chunk in chunks for one in chunk.modules() for hook in one._forward_pre_hooks.values()]
        own = [hook for hook in hooks if isinstance(getattr(getattr(hook, "func", None), "__self__", None), PointHook)]
        assert not own

    def _replay(self, kwargs):
        if self.modes[-1] != "capture":  # mcore replays what it has just captured, which on a GPU has computed nothing
            self.modes.append("replay")
            self._wrapper.result["training"] = self._schedule(**kwargs | {"data_iterator": [iter(self._buffers)]})
        else:
            self.modes[-1] = "capture and replay"


def captured(monkeypatch, training):
    """Have a training's passes captured into a graph from the third on."""
    training.cfg.model.cuda_graph_impl = "full_iteration"
    schedule = CapturedSchedule(monkeypatch, training._schedule, training.cfg.model)
    training._schedule = schedule.forward_backward
    return schedule


NATIVE = bridge_fgo.OffloadConfig(engine="native")


@pytest.mark.parametrize("kind", [{}, {"experts": True}], ids=["dense", "experts"])
def test_passes_that_are_captured_and_replayed_are_bitwise_resident_ones_without_a_graph(monkeypatch, kind):
    begun = []
    with as_resident(STEPS, NATIVE, **kind) as run:
        schedule = captured(monkeypatch, run)
        inner = run._schedule

        def watched(**kwargs):
            result = inner(**kwargs)
            begun.append(active_session().engine.schedule.recorder.in_step)
            return result

        run._schedule = watched
        steps = run.train(STEPS)
        held = run.live_bytes
    assert schedule.modes == MODES
    # No hook in the graph would begin it: without the wrapper around the graph, the optimizer step would.
    assert begun == [True] * STEPS, "states are on their way back when the schedule returns"
    losses, expected = ([(s.loss, s.grad_norm) for s in one] for one in (steps, resident(STEPS, **kind)[0].steps))
    assert losses == expected
    assert held and not any(held), "states are away while the graph runs"


@pytest.fixture
def meter(monkeypatch):
    """Have sessions use a fake meter, by which nothing but slabs needs memory."""
    have_sessions_take_it(monkeypatch.setattr)
    monkeypatch.setattr(FakeMeter, "count_graphs", mock.Mock())
    monkeypatch.setattr(FakeMeter, "step", 2**30)
    return FakeMeter


def test_only_a_replayed_pass_is_measured_and_goes_by_a_plan_and_a_graph_that_comes_is_counted_anew(monkeypatch, meter):
    """An eager pass, and the capture, need other memory than a replay."""
    measured, planned, counted = [], [], []
    with training(True, NATIVE) as run:
        schedule = captured(monkeypatch, run)
        for _ in range(STEPS):
            run.step()
            engine = session_of(run).engine
            planned.append(engine.schedule.is_planned)
            counted.append(meter.count_graphs.call_count)
            measured.append(bool(engine.schedule.holding.plans_for(engine.schedule.kind)))
    assert schedule.modes == MODES
    assert measured == [False] * 3 + [True] * (STEPS - 3)
    assert planned == [False] * 4 + [True] * (STEPS - 4)
    assert counted == [0] * 2 + [1] * (STEPS - 2)


def test_what_is_run_again_eagerly_goes_by_no_plan(monkeypatch, meter):
    """mcore's retry after an overflow resets the graph, and needs the memory of an eager pass."""
    with training(True, NATIVE) as run:
        captured(monkeypatch, run)
        run.train(STEPS)
        attached = session_of(run)
        schedule = attached.engine.schedule
        assert schedule.ledger.nbytes, "the plan holds states in a replayed pass"
        with attached.training_step(run.model, schedule.kind):
            attached.begin_pass(is_replayed=True)
            attached.release()
            assert schedule.ledger.nbytes
            attached.begin_pass()
            attached.release()
            assert not schedule.ledger.nbytes
            attached.reload()
