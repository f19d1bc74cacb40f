"""A CPU training whose memory is poisoned before it goes, so that what was not brought back cannot be what it was."""

from __future__ import annotations

from functools import cache

import pytest

import bridge_fgo
from bridge_fgo.memory.slab import StillShared
from bridge_fgo.memory.storage_slab import StorageSlab
from bridge_fgo.states.megatron import live_bytes
from bridge_fgo.tools.arms.cpu_training import CpuOptions, CpuTraining

SMALL = {"hidden": 64, "sequence": 16, "vocab": 64}
KINDS = ("params", "grads", "optimizer")


def options(**changes):
    """Return the options of a small training."""
    return CpuOptions(**{**SMALL, **changes})


def numbers(record):
    """Return what a step reported, as exact values."""
    return record.loss, record.grad_norm, record.skipped


@cache
def _resident(steps, items):
    seen = []
    with CpuTraining(options(**dict(items))) as training:
        for _ in range(steps):
            seen.append((numbers(training.step()), training.digests()))
    return seen


def resident(steps, **changes):
    """Return (numbers, digests) after each step of a training that never sleeps; made once for each kind."""
    return _resident(steps, tuple(sorted(changes.items())))


def poison(patch):
    """Have storages be overwritten before they go. patch: a monkeypatch."""
    empty = StorageSlab.empty

    def poisoned(slab):
        if not slab.is_away:
            slab._bytes.fill_(0xFF)
        return empty(slab)

    patch.setattr(StorageSlab, "empty", poisoned)


@pytest.fixture
def poisoned(monkeypatch):
    """Storages are overwritten before they go."""
    poison(monkeypatch)


def residency(training, **how):
    """Return the residency of a training."""
    return bridge_fgo.Residency(training.model, training.optimizer, **how)


def fail_once(patch, owner, name):
    """Have the second call of a method fail. patch: a monkeypatch."""
    act, calls = getattr(owner, name), []

    def fails(*of, **how):
        calls.append(of)
        if len(calls) == 2:
            raise StillShared("another process has it")
        return act(*of, **how)

    patch.setattr(owner, name, fails)


def states_bytes(res):
    """Return the bytes of memory that masters and moments take now, by the storages themselves."""
    return sum(live_bytes(source.states(), source.device) for source in res._states.sources)


def weights_bytes(training):
    """Return the bytes of all parameters in DDP's buffers."""
    buffers = [b for ddp in training.model for b in ddp.buffers + ddp.expert_parallel_buffers]
    return sum(buffer.param_data.nbytes for buffer in buffers)
