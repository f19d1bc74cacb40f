"""Full-iteration CUDA graphs in Bridge's real train_step on the CPU, with a stand-in for the graph."""

import pytest
from both import as_resident, resident, session_of, training
from fake_meter import FakeMeter, have_sessions_take_it
from graph_standin import CapturedSchedule

import bridge_fgo
from bridge_fgo.bridge import session
from bridge_fgo.bridge.session import active_session

STEPS = 8
MODES = ["eager", "eager", "capture and replay", *["replay"] * (STEPS - 3)]


pytestmark = pytest.mark.usefixtures("cpu_standins")


def captured(monkeypatch, training):
    """Have a training's passes captured into a graph from the third on."""
    training.cfg.model.cuda_graph_impl = "full_iteration"
    schedule = CapturedSchedule(monkeypatch, training._schedule, training.cfg.model)
    training._schedule = schedule.forward_backward
    return schedule


NATIVE = bridge_fgo.OffloadConfig(engine="native")


@pytest.mark.parametrize("kind", [{}, {"experts": True}], ids=["dense", "experts"])
def test_passes_that_are_captured_and_replayed_are_bitwise_resident_ones_without_a_graph(monkeypatch, kind):
    with as_resident(STEPS, NATIVE, **kind) as run:
        schedule = captured(monkeypatch, run)
        steps = [run.step() for _ in range(STEPS)]
        held = run.live_bytes
    assert schedule.modes == MODES
    losses, expected = ([(s.loss, s.grad_norm) for s in one] for one in (steps, resident(STEPS, **kind)[0].steps))
    assert losses == expected
    assert held and not any(held), "states are away while the graph runs"


def test_states_are_on_their_way_back_when_the_schedule_returns(monkeypatch):
    """No hook in the graph would begin it: without the wrapper around the graph, the optimizer step would."""
    begun = []
    with training(True, NATIVE) as run:
        captured(monkeypatch, run)
        inner = run._schedule

        def watched(**kwargs):
            result = inner(**kwargs)
            begun.append(active_session().engine.schedule.recorder.in_step)
            return result

        run._schedule = watched
        for _ in range(STEPS):
            run.step()
    assert begun == [True] * STEPS


@pytest.fixture
def meter(monkeypatch):
    """Have sessions use a fake meter, by which nothing but slabs needs memory."""
    have_sessions_take_it(monkeypatch.setattr)
    monkeypatch.setattr(FakeMeter, "count_graphs", lambda meter: None)
    monkeypatch.setattr(FakeMeter, "step", 2**30)
    return FakeMeter


def test_only_a_replayed_pass_is_measured_and_goes_by_a_plan(monkeypatch, meter):
    """An eager pass, and the capture, need other memory than a replay."""
    measured, planned = [], []
    with training(True, NATIVE) as run:
        schedule = captured(monkeypatch, run)
        for _ in range(STEPS):
            run.step()
            engine = session_of(run).engine
            planned.append(engine.schedule.is_planned)
            measured.append(bool(engine.schedule.holding.plans_for(engine.schedule.signature)))
    assert schedule.modes == MODES
    assert measured == [False] * 3 + [True] * (STEPS - 3)
    assert planned == [False] * 4 + [True] * (STEPS - 4)


def test_what_is_run_again_eagerly_goes_by_no_plan(monkeypatch, meter):
    """mcore's retry after an overflow resets the graph, and needs the memory of an eager pass."""
    with training(True, NATIVE) as run:
        captured(monkeypatch, run)
        for _ in range(STEPS):
            run.step()
        attached = session_of(run)
        schedule = attached.engine.schedule
        assert schedule.ledger.nbytes, "the plan holds states in a replayed pass"
        with attached.training_step(run.model, schedule.signature):
            attached.begin_pass(is_replayed=True)
            attached.release()
            assert schedule.ledger.nbytes
            attached.begin_pass()
            attached.release()
            assert not schedule.ledger.nbytes
            attached.reload()


def test_a_graph_that_comes_or_goes_is_counted_anew(monkeypatch):
    counted = []
    monkeypatch.setattr(session.PeakMeter, "count_graphs", lambda meter: counted.append(len(schedule.modes)))
    with training(True, NATIVE) as run:
        schedule = captured(monkeypatch, run)
        for _ in range(STEPS):
            run.step()
    assert counted == [3]
