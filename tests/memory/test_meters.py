"""Timing the training stream's waits, with events that tell made-up times; and peaks beside what graphs keep."""

import pytest
import torch
from made_up_gpu import Gpu

from bridge_fgo.memory.meters import LEAST_SECONDS, PeakMeter, WaitMeter


def step(meter, gpu, waits):
    meter.begin()
    for _ in range(waits):
        meter.around(gpu.wait, "stream")
    meter.end()


def test_a_steps_waits_are_summed_but_for_what_events_take_themselves():
    gpu = Gpu([0.25, LEAST_SECONDS / 2, 0.5])
    meter = WaitMeter(gpu.event)
    step(meter, gpu, 3)
    assert meter.take() == pytest.approx(0.75)
    assert meter.take() is None


def test_a_step_without_waits_took_none():
    meter = WaitMeter(Gpu([]).event)
    step(meter, Gpu([]), 0)
    assert meter.take() == 0.0


def test_figures_come_when_the_gpu_is_done_and_the_step_meanwhile_is_not_timed():
    gpu = Gpu([0.25, 1.0])
    meter = WaitMeter(gpu.event)
    step(meter, gpu, 1)
    gpu.done = False
    assert meter.take() is None
    meter.begin()
    assert not meter.is_timing
    meter.end()
    gpu.done = True
    assert meter.take() == pytest.approx(0.25)
    step(meter, gpu, 1)
    assert meter.take() == pytest.approx(1.0)


def test_a_dropped_step_says_nothing():
    gpu = Gpu([0.5])
    meter = WaitMeter(gpu.event)
    assert not meter.is_timing
    meter.begin()
    assert meter.is_timing
    meter.around(gpu.wait, "stream")
    meter.drop()
    meter.end()
    assert meter.take() is None


def test_what_graphs_keep_for_their_replays_counts_as_needed(monkeypatch):
    """Their pools are closed to all others, and count as allocated only while a graph is captured."""
    segments = [
        {"segment_pool_id": (0, 0), "total_size": 100, "active_size": 10},
        {"segment_pool_id": (0, 1), "total_size": 70, "active_size": 20},
        {"segment_pool_id": (3, 0), "total_size": 5, "active_size": 5},
    ]
    monkeypatch.setattr(PeakMeter, "works", True)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    stats = {"allocated_bytes": {"all": {"peak": 40}}, "oversize_segments": {"peak": 1}, "num_alloc_retries": 0}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda: stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    meter = PeakMeter()
    assert meter.end_interval() == 40
    meter.count_graphs()
    assert meter.end_interval() == 90
    segments.pop(1)
    meter.count_graphs()
    assert meter.end_interval() == 40
