"""Peaks beside what graphs keep."""

import torch

from bridge_fgo.memory.meters import PeakMeter


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
