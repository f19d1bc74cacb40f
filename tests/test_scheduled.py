"""The schedule with measured peaks, in Bridge's real train_step on the CPU: what leaves late and comes early."""

from contextlib import nullcontext

import pytest
from fake_meter import FakeClock, FakeMeter
from test_parity import SMALL_SLABS

import bridge_fgo
from bridge_fgo import figures
from bridge_fgo.cli.arms.cpu_model import CpuOptions
from bridge_fgo.cli.arms.cpu_training import CpuTraining, run
from bridge_fgo.engine import native, schedule
from bridge_fgo.wiring import session, wrappers
from bridge_fgo.wiring.session import SESSION

STEPS = 8


@pytest.fixture
def meter(monkeypatch):
    """Have sessions use a fake meter; its class attributes set the sizes."""
    monkeypatch.setattr(FakeClock, "measure", nullcontext, raising=False)
    monkeypatch.setattr(session, "PeakMeter", FakeMeter)
    monkeypatch.setattr(figures, "StepClock", FakeClock)
    monkeypatch.setattr(native, "MARGIN_PARTS", 0)  # four parts of the least size are more than all states here
    monkeypatch.setattr(schedule, "MARGIN_SHARE", 0)
    for name in ("activation", "step", "forward_points"):
        monkeypatch.setattr(FakeMeter, name, getattr(FakeMeter, name))
    return FakeMeter


def watched(options, config, held):
    """Run a training with offload; append what was held at each point after the plan was made."""
    with bridge_fgo.install(config), CpuTraining(options) as training:
        for _ in range(STEPS):
            training.step()
            schedule = vars(training.optimizer)[SESSION].schedule
            if not hasattr(schedule, "watched"):
                schedule.watched = True
                point = schedule.point

                def spy(schedule=schedule, point=point):
                    point()
                    if schedule._plan is not None:
                        held.append((schedule._index, schedule.ledger.nbytes, schedule._plan))

                schedule.point = spy
        return training.digests()


@pytest.mark.parametrize("share", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("name", ["plain", "two chunks", "experts"])
def test_bits_are_equal_and_no_more_is_held_than_the_plan_has_room_for(meter, share, name):
    kinds = {"plain": {}, "two chunks": {"chunks": 2}, "experts": {"experts": True}}
    options = CpuOptions(offload=True, **kinds[name])
    resident = run(CpuOptions(**kinds[name]), STEPS)
    meter.forward_points = 5  # two layers with two children, and the norm after them
    meter.activation = int(share * resident.state_bytes) // meter.forward_points
    held = []
    assert watched(options, SMALL_SLABS, held) == resident.digests
    assert all(nbytes <= plan.leave[index] for index, nbytes, plan in held)
    first, last = held[0][0], max(index for index, _, _ in held)
    in_forward = [nbytes for index, nbytes, _ in held if index <= first + 1]
    at_the_end = [nbytes for index, nbytes, _ in held if index == last]
    assert min(in_forward) > 0, "nothing left late"
    # In the first planned step nothing does: the allocator lets go of its blocks after that one's backward.
    assert min(at_the_end[1:]) > 0, "nothing came early"


def test_readers_between_steps_find_masters_that_are_on_the_host(bridge_train):
    # Bridge's calc_params_l2_norm (log_params_norm) reads `param.main_param`; without the gate it reads freed memory.
    with bridge_fgo.install(SMALL_SLABS), CpuTraining(CpuOptions(offload=True)) as training:
        for _ in range(2):
            training.step()
        everything = bridge_fgo.stats().state_bytes
        assert training.live_state_bytes() < everything
        parameters = [p for p in training.model[0].parameters() if hasattr(p, "main_param")]

        def norm(model, *args, **kwargs):
            return sum(float(p.main_param.norm()) for p in parameters)

        assert hasattr(bridge_train.calc_params_l2_norm, "__wrapped__")
        read = wrappers.reads_all_masters(norm, None, (training.model,), {})
    assert read > 0


def test_an_evaluation_needs_no_more_memory_than_training():
    with bridge_fgo.install(SMALL_SLABS), CpuTraining(CpuOptions(offload=True)) as training:
        training.step()
        assert training.live_state_bytes() > 0  # the last parts have not left yet
        wrappers.evaluate(lambda: None, None, (), {})
        assert training.live_state_bytes() == 0
        training.step()


def test_a_budget_without_a_gpu_is_refused():
    config = bridge_fgo.OffloadConfig(engine="native", gpu_memory_budget_gib=40.0)
    with bridge_fgo.install(config), pytest.raises(ValueError, match=r"gpu_memory_budget_gib=40\.0 needs a GPU"):
        run(CpuOptions(offload=True), 1)


def test_a_step_above_the_budget_is_said_once(meter, monkeypatch, capsys):
    monkeypatch.setattr(meter, "end_phase", lambda self: 3 * 2**30)
    config = bridge_fgo.OffloadConfig(engine="native", slab_bytes=2**20, gpu_memory_budget_gib=2.0)
    with bridge_fgo.install(config):
        run(CpuOptions(offload=True), 5)
    said = [line for line in capsys.readouterr().out.splitlines() if "allocated 3.00 GiB" in line]
    assert len(said) == 1
