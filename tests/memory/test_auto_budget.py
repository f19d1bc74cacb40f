"""A budget that is found out: what the device has, less what others have and a margin that grows where it is needed."""

import pytest
import torch
from fake_training import WHOLE, Meter, Training, use_small_parts

from bridge_fgo.memory.auto_budget import GROWTH, LEAST_MARGIN, MOST_HOLES, AutoBudget
from bridge_fgo.memory.meters import DeviceMemory, PeakMeter
from bridge_fgo.memory.slab import SlabState

GIB = 2**30


class Device(PeakMeter):
    """A meter of a GPU of 140 GiB, of which others have two."""

    works = True
    allowed = 140 * GIB

    def __init__(self, allocated=50 * GIB, reserved=51 * GIB):
        super().__init__()
        self.run_peaks = {"allocated_bytes.all.peak": allocated, "reserved_bytes.all.peak": reserved}

    def device_memory(self):
        return DeviceMemory(140 * GIB, 140 * GIB - 2 * GIB - 51 * GIB, 51 * GIB, self.allowed)


def test_the_budget_is_all_but_what_others_have_and_the_margin_and_no_more_than_pytorch_may_take():
    assert AutoBudget(Device()).budget_bytes() == 138 * GIB - 140 * GIB // LEAST_MARGIN
    assert AutoBudget(Device(reserved=56 * GIB)).budget_bytes() == 138 * GIB - 6 * GIB
    assert AutoBudget(Device(reserved=90 * GIB)).budget_bytes() == 138 * GIB - 140 * GIB // MOST_HOLES
    meter = Device()
    meter.allowed = 42 * GIB
    assert AutoBudget(meter).budget_bytes() == 42 * GIB - 140 * GIB // LEAST_MARGIN


@pytest.mark.parametrize(
    ("backend", "fraction", "allowed"),
    [("native", lambda: 0.3, 42 * GIB), ("native", None, 140 * GIB), ("cudaMallocAsync", lambda: 0.3, 140 * GIB)],
    ids=["a fraction", "PyTorch before 2.8", "an allocator that does not tell"],
)
def test_what_pytorch_may_take_is_asked_for_where_it_tells(monkeypatch, backend, fraction, allowed):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (100 * GIB, 140 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 30 * GIB)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", fraction, raising=False)
    if fraction is None:
        monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction")
    assert PeakMeter().device_memory() == (140 * GIB, 100 * GIB, 30 * GIB, allowed)


def test_the_margin_grows_where_the_allocator_had_to_give_back_what_it_caches():
    meter = Device()
    meter.retries = 3  # of the checkpoint's load
    room = AutoBudget(meter)
    first = room.budget_bytes()
    assert not room.runs_short()
    meter.retries = 4
    assert room.runs_short() and not room.runs_short()
    margin = 140 * GIB // LEAST_MARGIN
    assert room.budget_bytes() == first - (int(GROWTH * margin) - margin)
    meter.retries, meter.run_peaks["reserved_bytes.all.peak"] = 5, 70 * GIB
    assert room.runs_short()
    assert room.budget_bytes() == 138 * GIB - 20 * GIB


class MeterOfADevice(Meter):
    """Made-up peaks on a GPU that has `whole` bytes; others have a tenth."""

    retries = holes = allowed = 0

    def __init__(self, whole, layer, step=0):
        super().__init__(layer, step)
        self.whole = whole

    def device_memory(self):
        return DeviceMemory(self.whole, self.whole - self.whole // 10, 0, self.allowed or self.whole)


def automatic(monkeypatch, whole, **how):
    use_small_parts(monkeypatch)
    return Training(WHOLE // 4, budget="auto", meter=MeterOfADevice(whole, WHOLE // 4), **how)


def run(training, steps):
    """Run steps; return the bytes that were copied back in each."""
    came = []
    for _ in range(steps):
        before = training.engine.traffic.back
        training.step()
        came.append(training.engine.traffic.back - before)
    return came


def test_just_what_is_needed_leaves_and_nothing_if_all_fits(monkeypatch):
    training = automatic(monkeypatch, whole=4 * WHOLE)
    assert run(training, 6)[3:] == [0, 0, 0]
    assert training.residencies == {SlabState.RESIDENT}
    # A tenth is not to be had, nor the margin; activations take as much as the states.
    training = automatic(monkeypatch, whole=2 * WHOLE, sizes=[340] * 20)
    run(training, 4)
    room = 2 * WHOLE - 2 * WHOLE // 10 - 2 * WHOLE // LEAST_MARGIN - WHOLE
    part = max(part.nbytes for part in training.parts())
    assert room - part < training.staying <= room
    training = automatic(monkeypatch, whole=4 * WHOLE, sizes=[340] * 20)
    training.meter.allowed = 2 * WHOLE
    run(training, 4)
    assert 0 < training.staying <= 2 * WHOLE - 4 * WHOLE // LEAST_MARGIN - WHOLE
    training = automatic(monkeypatch, whole=WHOLE)
    run(training, 4)
    assert not any(part.stays for part in training.parts())


def test_more_leaves_where_the_allocator_ran_short(monkeypatch):
    training = automatic(monkeypatch, whole=2 * WHOLE, sizes=[340] * 20)
    run(training, 4)
    before = training.staying
    training.meter.retries, training.meter.holes = 1, WHOLE // 2
    training.step()
    after = training.staying
    assert after < before and len(training.said) == 1 and "give back memory that it caches" in training.said[0]
    training.step()
    assert len(training.said) == 1


def test_what_is_found_out_is_no_budget_of_the_users_and_without_a_gpu_it_is_refused_as_a_number_is(monkeypatch):
    training = automatic(monkeypatch, whole=2 * WHOLE)
    run(training, 3)
    assert training.schedule.is_planned
    with pytest.raises(ValueError, match=r"gpu_memory_budget_gib='auto' needs a GPU"):
        Training(0, budget="auto", meter=PeakMeter())
