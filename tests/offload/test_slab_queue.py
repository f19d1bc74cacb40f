"""Which slabs a queue releases, and which it prefetches after some were sent back."""

from unittest import mock

import pytest

from bridge_fgo.memory.meters import Ledger
from bridge_fgo.memory.slab import SlabState
from bridge_fgo.offload import slab_queue
from bridge_fgo.offload.slab_queue import SlabQueue

NBYTES = 100


class FakeSlab:
    """A slab of 100 bytes that is on the GPU until it is released."""

    gpu_bytes = stepping_bytes = transit_bytes = NBYTES

    def __init__(self, ledger, state):
        self.ledger, self.state = ledger, state
        ledger.nbytes += NBYTES

    def exists(self):
        return True

    def offload(self):
        self.state = SlabState.OFFLOADING

    def release(self):
        assert self.state is SlabState.OFFLOADING
        self.state = SlabState.RELEASED
        self.ledger.nbytes -= NBYTES


@pytest.fixture
def made(monkeypatch):
    """Return a function that makes a queue of slabs in the given states."""
    monkeypatch.setattr(slab_queue, "decode_together", lambda slabs: None)

    def make(*states):
        ledger = Ledger()
        queue = SlabQueue(mock.Mock(), ledger, pytest.fail)
        queue.start([FakeSlab(ledger, state) for state in states])
        return queue

    return make


def test_a_slab_whose_copy_out_was_given_up_frees_nothing_and_others_are_released_for_it(made):
    queue = made(*[SlabState.OFFLOADING] * 3)
    queue.slabs[0].state = SlabState.RESIDENT  # the update has written it since
    queue.release_down_to(NBYTES)
    assert queue._ledger.nbytes == NBYTES
    assert [slab.state for slab in queue.slabs] == [SlabState.RESIDENT, SlabState.RELEASED, SlabState.RELEASED]


def test_slabs_that_are_sent_back_are_to_be_prefetched_again(made):
    queue = made(*[SlabState.RESIDENT] * 3)
    queue.mark_here(queue.slabs[-1])
    assert queue.is_through
    queue.send_back(NBYTES, [])
    assert [slab.state for slab in queue.slabs] == [SlabState.RESIDENT, *[SlabState.OFFLOADING] * 2]
    assert list(queue.to_come) == queue.slabs[1:] and not queue.is_through
