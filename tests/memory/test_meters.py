"""Peaks beside what graphs keep, and the blocks that PyTorch's allocator takes for slabs."""

import pytest
import torch

from bridge_fgo.memory.meters import ACTIVE, PeakMeter, block_rounding

MIB = 2**20
GPU = torch.device("cuda")


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
    counters(monkeypatch, allocated_bytes=40)
    meter = PeakMeter()
    assert meter.end_interval() == 40
    meter.count_graphs()
    assert meter.end_interval() == 90
    segments.pop(1)
    meter.count_graphs()
    assert meter.end_interval() == 40


def counters(monkeypatch, **peaks):
    """Has the allocator report these peaks."""
    stats = {name: {"all": {"peak": peak}} for name, peak in peaks.items()}
    stats |= {"oversize_segments": {"peak": 1}, "num_alloc_retries": 0}
    monkeypatch.setattr(PeakMeter, "works", True)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda: stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)


def test_memory_that_waits_for_a_copy_counts_if_asked_for_in_no_reported_peak_and_is_no_hole(monkeypatch):
    counters(monkeypatch, allocated_bytes=40, active_bytes=60, reserved_bytes=70)
    for meter, needed, holes in ((PeakMeter(), 40, 30), (PeakMeter(ACTIVE), 60, 10)):
        assert (meter.end_interval(), meter.end_phase(), meter.holes) == (needed, 40, holes)


@pytest.fixture
def settings(monkeypatch):
    """PyTorch's allocator; returns its settings, to be changed."""
    found = {}
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"allocator_settings": found})
    return found


def test_blocks_are_of_the_next_division_that_each_power_of_two_has_of_its_own(settings):
    settings["roundup_power2_divisions"] = {str(2**i): 4 for i in range(16)}
    rounded = block_rounding(GPU)
    assert [rounded(mib * MIB) for mib in (1024, 1025, 1280, 1281, 1900)] == [
        mib * MIB for mib in (1024, 1280, 1280, 1536, 2048)
    ]
    assert rounded(0) == 0 and rounded(1024) == 1024  # not what is smaller than the least blocks
    settings["roundup_power2_divisions"] = {"1": 1, "2": 2, "4": 8, "8": 0}
    rounded = block_rounding(GPU)
    sizes = {3 * MIB // 4: 3 * MIB // 4, 5 * MIB // 4: 5 * MIB // 4, 9 * MIB // 4: 3 * MIB, 9 * MIB // 2: 9 * MIB // 2}
    assert {nbytes: rounded(nbytes) for nbytes in sizes} == sizes
    assert rounded(9 * MIB) == 9 * MIB and rounded(100 * MIB) == 100 * MIB


def test_a_block_is_what_was_asked_for_but_counts_with_what_may_be_left_where_it_must_not_be_split(settings):
    assert [block_rounding(device)(5 * MIB) for device in (GPU, torch.device("cpu"))] == [5 * MIB] * 2
    settings["max_split_size"] = 64 * MIB
    assert [block_rounding(GPU)(mib * MIB) for mib in (63, 64, 100)] == [63 * MIB, 84 * MIB, 120 * MIB]
    settings["expandable_segments"] = True  # whose blocks may be split at any size
    assert block_rounding(GPU)(100 * MIB) == 100 * MIB
