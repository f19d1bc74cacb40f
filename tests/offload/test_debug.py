"""The debug mode shows a wait that is missing; that it changes no bits is tested in `engines/test_any_order.py`."""

import pytest
from debug_transfers import VARIABLE, DebugTransfers, debugged
from fake_optimizer import state_bytes
from fake_training import Meter, Training

from bridge_fgo.memory.slab import Slab, SlabState, SlabStateMachine
from bridge_fgo.memory.transfers import Transfers


@pytest.fixture(autouse=True)
def measures_nothing(monkeypatch):
    """Everything is released in every pass; and these tests say themselves when the mode is on."""
    monkeypatch.setattr(Meter, "works", False)
    monkeypatch.delenv(VARIABLE, raising=False)


def bits_are_right():
    """Train with offload; return whether the states have the bits of the twin's."""
    training = Training(sizes=[300_000, 1000, 500_000], master_remainders=False)
    training.made.clear()
    training.steps(6)
    training.engine.close()
    return state_bytes(training.optimizers[0]) == state_bytes(training.twins[0])


def no_wait_before_the_step(patch):
    patch.setattr(Slab, "_wait_reload", lambda self: None)


def a_reload_that_does_not_come_back(patch):
    reload = SlabStateMachine.reload

    def forgets(self):
        reload(self)
        self._state = SlabState.RESIDENT

    patch.setattr(SlabStateMachine, "reload", forgets)


@pytest.mark.parametrize("fault", [no_wait_before_the_step, a_reload_that_does_not_come_back])
def test_a_missing_wait_shows_in_the_bits_and_without_debug_does_not(monkeypatch, fault):
    fault(monkeypatch)
    assert bits_are_right()
    monkeypatch.setenv(VARIABLE, "1")
    assert not bits_are_right()


def test_each_verb_is_its_own_or_is_handed_on():
    own = {"timing"} | vars(DebugTransfers).keys() | vars(DebugTransfers(Transfers(), 1)).keys()
    assert not {name for name in vars(Transfers) if not name.startswith("_")} - own


def test_a_seed_that_is_none_is_an_error(monkeypatch):
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(ValueError, match="BRIDGE_FGO_DEBUG='yes'"):
        debugged(Transfers())
