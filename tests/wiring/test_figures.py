"""Figures of a step are those of the step: not of what came between steps."""

import pytest
import torch

from bridge_fgo import OffloadConfig, figures
from bridge_fgo.core.meters import ALLOCATED, RESERVED, PeakMeter
from bridge_fgo.engines.native import NativeEngine


class Allocator:
    """Counts as PyTorch's does."""

    def __init__(self, patch):
        self.peaks = dict.fromkeys((ALLOCATED, RESERVED), 0)
        patch.setattr(PeakMeter, "works", property(lambda meter: True))
        patch.setattr(torch.cuda, "memory_stats", lambda: dict(self.peaks))
        patch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)

    def reset(self):
        self.peaks = dict.fromkeys(self.peaks, 0)

    def take(self, nbytes):
        """Take memory and give it back."""
        self.peaks = {key: max(nbytes, peak) for key, peak in self.peaks.items()}


@pytest.fixture
def allocator(monkeypatch):
    from fake_meter import FakeClock

    monkeypatch.setattr(figures, "StepClock", FakeClock)
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
    assert of_run.run_peaks[ALLOCATED] == 200, "Bridge's own report has the peak of the run"


def test_an_allocator_without_snapshots_has_no_segments_that_expand(allocator, monkeypatch):
    def snapshot():
        raise RuntimeError("not meaningful")

    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert not PeakMeter().expands
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"is_expandable": True}])
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    assert PeakMeter().expands
