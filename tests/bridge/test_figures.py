"""Figures of a step are those of the step: not of what came between steps."""

from types import SimpleNamespace

import pytest
import torch
from fake_meter import have_clocks_rest

import bridge_fgo
from bridge_fgo import OffloadConfig, figures
from bridge_fgo.bridge import train_step
from bridge_fgo.bridge.reporting import measured_peaks, say
from bridge_fgo.engines.native import NativeEngine
from bridge_fgo.memory.meters import ALLOCATED, RESERVED, PeakMeter, Traffic


class Allocator:
    """Counts as PyTorch's does."""

    def __init__(self, patch):
        self.peaks = dict.fromkeys((ALLOCATED, RESERVED), 0)
        patch.setattr(PeakMeter, "works", property(lambda meter: True))
        patch.setattr(torch.cuda, "memory_stats_as_nested_dict", self.stats)
        patch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)

    def stats(self):
        return {key.split(".")[0]: {"all": {"peak": peak}} for key, peak in self.peaks.items()}

    def reset(self):
        self.peaks = dict.fromkeys(self.peaks, 0)

    def take(self, nbytes):
        """Take memory and give it back."""
        self.peaks = {key: max(nbytes, peak) for key, peak in self.peaks.items()}


@pytest.fixture
def allocator(monkeypatch):
    have_clocks_rest(monkeypatch.setattr)
    return Allocator(monkeypatch)


def test_memory_of_what_runs_between_steps_is_in_no_step(allocator):
    meter = PeakMeter()
    of_run = figures.Figures(NativeEngine([], OffloadConfig(engine="native"), meter), "0.19.2", meter)
    for between in (200, 0, 100):  # the model is built, nothing, an evaluation
        allocator.take(between)
        of_run.begin_step()
        of_run.released()
        allocator.take(30)
        of_run.reloading()
        allocator.take(10)
        of_run.end_step()
        now = of_run.snapshot()
        assert (now.peak_forward_backward_bytes, now.peak_step_bytes) == (30, 10)
        assert now.peak_reserved_bytes == of_run.peak_allocated_bytes == 30
    assert meter.run_peaks[ALLOCATED] == 200, "Bridge's own report has the peak of the run"


def test_gradients_are_in_the_figures_of_the_step_and_of_host_memory(allocator):
    meter = PeakMeter()
    engine = NativeEngine([], OffloadConfig(engine="native"), meter)
    gradients = SimpleNamespace(traffic=Traffic(), nbytes=100, pinned_bytes=40)
    of_run = figures.Figures(engine, "0.19.2", meter, gradients)
    names = [f"bridge_fgo/{name}" for name in figures.GRADIENT_FIGURES]
    for out in (60, 0):
        of_run.begin_step()
        gradients.traffic.out += out
        gradients.traffic.back += out // 2
        gradients.traffic.seconds += out / 100
        of_run.end_step()
        now = of_run.snapshot()
        assert [now.scalars()[name] for name in names] == [100, out, out // 2]
        assert now.enqueue_seconds == pytest.approx(out / 100)
        assert (now.bytes_offloaded, now.bytes_reloaded) == (0, 0), "of states"
        assert now.pinned_bytes == 40
    without = figures.Figures(engine, "0.19.2", meter).snapshot()
    assert without.pinned_bytes == 0 and not set(names) & without.scalars().keys()


def test_an_allocator_without_snapshots_has_no_segments_that_expand(allocator, monkeypatch):
    def snapshot():
        raise RuntimeError("not meaningful")

    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert not PeakMeter().expands
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"is_expandable": True}])
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    assert PeakMeter().expands


@pytest.fixture
def logged(cpu_standins, allocator, monkeypatch):
    """Return what trains on a CPU, resident, with 50 bytes in forward and backward and 20 in the update of a step.

    That returns losses and what was logged.
    """
    import cpu_training

    def train(steps):
        written, losses = [], []
        monkeypatch.setattr(train_step, "log_scalars", lambda scalars, state: written.append(scalars))
        with cpu_training.CpuTraining(cpu_training.CpuOptions()) as training:
            step = training.optimizer.step
            monkeypatch.setattr(training.optimizer, "step", lambda: (allocator.take(20), step())[1])
            hook = training.model[0].register_forward_hook(lambda *_: allocator.take(50))
            for _ in range(steps):
                allocator.take(700)  # an evaluation, between steps
                losses.append(training.step().loss)
            hook.remove()
        return losses, written

    return train


def test_a_resident_run_that_is_measured_logs_its_peaks_and_trains_the_same_else_resets_no_counter(logged, allocator):
    with bridge_fgo.install():
        assert logged(1)[1] == []
    assert allocator.peaks[ALLOCATED] == 700

    losses, written = logged(2)
    assert written == []
    with bridge_fgo.install(OffloadConfig(measure=True)):
        assert logged(2) == (losses, 2 * [
            {
                "bridge_fgo/released_bytes": 0,
                "bridge_fgo/peak_forward_backward_bytes": 50,
                "bridge_fgo/peak_step_bytes": 20,
                "bridge_fgo/peak_reserved_bytes": 50,
            }
        ])  # fmt: skip
        # Bridge's report of memory keeps the peak of the run.
        assert 700 in [peaks[ALLOCATED] for peaks in measured_peaks() if peaks]


@pytest.mark.parametrize(("rank", "line"), [("0", "bridge_fgo: on\n"), ("", "bridge_fgo: on\n"), ("1", "")])
def test_a_line_is_printed_on_the_first_rank_or_where_no_launcher_says_which_this_is(monkeypatch, capsys, rank, line):
    monkeypatch.setenv("RANK", rank)
    say("on")
    assert capsys.readouterr().out == line
