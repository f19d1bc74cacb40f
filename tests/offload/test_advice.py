"""What more GPU memory would save is said once, of a step that waited for copies."""

from contextlib import contextmanager

import pytest
from fake_training import WHOLE, Training

from bridge_fgo.memory.meters import DeviceMemory
from bridge_fgo.memory.transfers import Transfers

GIB = 2**30


class Timed(Transfers):
    """Copies out at a GiB a second; the training stream waits a second for each copy that it waits for."""

    seconds = None

    def mark_out(self, is_end):
        if is_end:
            self.seconds = (self.training.engine.traffic.out - self.begun) / GIB
        self.begun = self.training.engine.traffic.out

    def seconds_out(self):
        return self.seconds

    def wait_out(self, slab):
        with self.timing():
            pass


class Clock:
    def __init__(self, transfers, late):
        self.waited, self.late, self.transfers = None, late, transfers

    def begin_step(self):
        self.waited = 0.0

    @contextmanager
    def measure(self):
        yield
        self.waited += 1.0

    def seconds(self):
        self.late -= 1
        return None if self.late >= 0 else self.waited


@pytest.mark.parametrize("late", [0, 2], ids=["", "the GPU is two steps late"])
@pytest.mark.parametrize(
    ("settings", "whole_gib", "says"),
    [
        ({}, 141, True),
        ({}, 8, True),
        ({}, 3, False),
        ({"fraction": 0.9}, 141, False),
        ({"budget": "auto"}, 141, False),
    ],
)
def test_what_more_memory_saves_is_said_once_unless_it_cannot_be_had(monkeypatch, settings, whole_gib, says, late):
    moves = Timed()
    training = Training(layer=WHOLE // 3, transfers=moves, master_remainders=False, **settings)
    monkeypatch.setattr(
        type(training.meter),
        "device_memory",
        lambda meter: DeviceMemory(whole_gib * GIB, whole_gib * GIB, 0, whole_gib * GIB),
        raising=False,
    )
    for name in ("holes", "retries"):
        monkeypatch.setattr(type(training.meter), name, 0, raising=False)
    training.engine._advice._clock = clock = Clock(moves, late)
    said = []
    training.schedule.holding.announce = said.append
    moves.training = training
    training.steps(9)
    lines = [line for line in said if "training waits" in line]
    assert len(lines) == says
    if says:
        assert clock.waited > 1 and f"training waits {clock.waited:.2f} s a step" in lines[0]
        budgets = "3: 3.00 s, 5: 5.00 s, 9: 9.00 s" if whole_gib > 8 else "3: 3.00 s, 5: 5.00 s"
        assert lines[0].endswith(f"shorter, with {budgets}")
