"""The debug mode: it changes no bits where all waits are there, and shows a wait that is missing."""

import pytest
import torch
from fake_optimizer import make_distributed_optimizer, state_bytes, step
from fake_training import use_small_parts
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from test_schedule import AnyOrder

from bridge_fgo.config import OffloadConfig
from bridge_fgo.engines.native import NativeEngine
from bridge_fgo.memory.meters import PeakMeter
from bridge_fgo.memory.slab import Slab, SlabState, SlabStateMachine
from bridge_fgo.memory.transfers import HostTransfers
from bridge_fgo.offload.debug import POISON, VARIABLE, DebugTransfers, debugged
from bridge_fgo.states.distributed import MegatronSource

SIZES = [300_000, 1000, 500_000]


@pytest.fixture(params=range(3))
def debugging(request, monkeypatch, unset):
    monkeypatch.setenv(VARIABLE, str(request.param))


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    """These tests say themselves when the mode is on; the whole lane may run under it."""
    monkeypatch.delenv(VARIABLE, raising=False)


def make():
    optimizer = make_distributed_optimizer(SIZES)
    config = OffloadConfig(engine="native", slab_bytes=2**20, piece_bytes=2**16)
    return optimizer, NativeEngine([MegatronSource(optimizer)], config, PeakMeter())


def trained(steps=6):
    """Train with offload; return the bytes of all states."""
    optimizer, engine = make()
    for seed in range(steps):
        engine.begin_pass()
        engine.release()
        engine.reload()
        engine.require_writable()
        step(optimizer, seed)
    engine.close()
    return state_bytes(optimizer)


def resident(steps=6):
    optimizer = make_distributed_optimizer(SIZES)
    for seed in range(steps):
        step(optimizer, seed)
    return state_bytes(optimizer)


@pytest.mark.usefixtures("debugging")
def test_bits_are_those_of_a_resident_run():
    assert trained() == resident()


def test_any_order_of_steps_and_readers_leaves_bits_right_with_late_copies_and_poison(monkeypatch):
    monkeypatch.setenv(VARIABLE, "7")
    use_small_parts(monkeypatch)
    run_state_machine_as_test(AnyOrder, settings=settings(max_examples=40, stateful_step_count=20, deadline=None))


def no_wait_before_the_step(monkeypatch):
    monkeypatch.setattr(Slab, "_wait_reload", lambda self: None)


def no_wait_before_memory_goes(monkeypatch):
    def release(self, slab):
        slab.free()

    monkeypatch.setattr(DebugTransfers, "release", release)
    monkeypatch.setattr(HostTransfers, "release", release)


def a_reload_that_does_not_come_back(monkeypatch):
    reload = SlabStateMachine.reload

    def forgets(self):
        reload(self)
        self._state = SlabState.RESIDENT

    monkeypatch.setattr(SlabStateMachine, "reload", forgets)


@pytest.mark.parametrize("fault", [no_wait_before_the_step, a_reload_that_does_not_come_back])
def test_a_missing_wait_shows_in_the_bits_and_without_debug_does_not(monkeypatch, fault):
    expected = resident()
    fault(monkeypatch)
    assert trained() == expected
    monkeypatch.setenv(VARIABLE, "1")
    assert trained() != expected


def test_memory_that_is_given_back_before_its_copy_out_is_an_error(monkeypatch):
    no_wait_before_memory_goes(monkeypatch)
    assert trained() == resident()
    monkeypatch.setenv(VARIABLE, "1")
    with pytest.raises((AssertionError, RuntimeError)):
        trained()


@pytest.mark.usefixtures("debugging")
def test_what_may_not_be_read_is_poison():
    optimizer, engine = make()
    step(optimizer, 0)
    engine.begin_pass()
    engine.release()
    host = [slab.host.tensor.clone() for slab in engine.slabs]
    engine.require_readable()
    for slab, before in zip(engine.slabs, host, strict=True):
        assert slab.gpu is not None
        assert torch.equal(slab.gpu, before)
        assert bool((slab.host.tensor == POISON).all())


def test_a_seed_that_is_none_is_an_error(monkeypatch):
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(ValueError, match="BRIDGE_FGO_DEBUG='yes'"):
        debugged(HostTransfers(1))
