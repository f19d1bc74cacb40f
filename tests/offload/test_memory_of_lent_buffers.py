"""How much host memory buffers take that may be lent, by what the kernel says that is resident."""

from __future__ import annotations

import gc
from pathlib import Path
from unittest import mock

import pytest
import torch
from fake_training import Training
from stream_order import install

from bridge_fgo.engines import checkpoints
from bridge_fgo.memory.transfers import CudaTransfers

SLACK = 1.05


class Trained:
    """A training of two optimizers whose states are away, on made-up streams."""

    def __init__(self):
        transfers = CudaTransfers(torch.device("cpu"), 2**24)
        transfers.waits._make_event = lambda: mock.Mock(**{"elapsed_time.return_value": 0.0})
        gc.collect()
        self._before = resident_bytes()
        self.training = Training(0, optimizers=2, transfers=transfers, sizes=[500_000] * 5, master_remainders=False)
        self.engine = self.training.engine
        self.step(0)
        self.own = self.taken()
        assert self.own >= sum(slab.nbytes for slab in self.engine.slabs)

    def step(self, seed):
        """Train, and send the states away again."""
        self.training.step(seed)
        self.engine.begin_pass()
        self.engine.release()

    def taken(self):
        """Return the bytes of host buffers that are resident."""
        gc.collect()
        return resident_bytes() - self._before

    def save(self, source):
        """Return what a writer gets, and the same as copies."""
        with self.engine.saving(source, copies=True):
            handed = [self.training.hand_out(source, *pair)[0] for pair in self.training.pairs(source)]
        for slab in self.training.slabs(source):
            if slab.spare is not None:
                slab.spare.tensor.zero_()  # as page-locking it does
        tensors = [tensor for each in handed for tensor in each.values() if tensor.dim()]  # no count of steps
        return tensors, [tensor.clone() for tensor in tensors]


def resident_bytes():
    """Return the bytes of shared memory of this process; every host buffer is such."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssShmem"))
    return int(line.split()[1]) * 1024


@pytest.fixture
def trained(monkeypatch):
    install(monkeypatch)
    return Trained()


def test_a_background_save_takes_second_buffers_and_no_third(trained):
    trained.engine.use_worker_memory()
    assert trained.taken() <= SLACK * trained.own
    for source in trained.training.sources:
        trained.save(source)
    assert trained.taken() <= SLACK * 2 * trained.own
    for seed in range(3):
        trained.step(seed)
        for source in trained.training.sources:
            trained.save(source)
    assert trained.taken() <= SLACK * 2 * trained.own
    trained.training.check()


@pytest.mark.parametrize("steps_before", [0, 1])
def test_second_buffers_that_can_be_lent_no_more_are_let_go_of(trained, monkeypatch, steps_before):
    said = []
    monkeypatch.setattr(trained.engine.schedule.holding, "warn", said.append)
    trained.engine.use_worker_memory()
    first, second = trained.training.sources
    handed, expected = trained.save(first)
    for seed in range(steps_before):  # the copies out go to the others
        trained.step(seed)
    monkeypatch.setattr(checkpoints, "free_for_each_rank", lambda: 0)
    trained.save(second)
    assert len(said) == 1 and "gets copies of the states" in said[0]
    assert not any(slab.spare for slab in trained.engine.slabs)
    trained.step(7)
    assert all(torch.equal(*pair) for pair in zip(handed, expected, strict=True))
    del handed
    copies = sum(slab.nbytes for slab in trained.training.slabs(second))
    assert trained.taken() <= SLACK * (trained.own + copies)
    trained.training.check()
