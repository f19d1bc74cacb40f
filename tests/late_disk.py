"""Copies that end late, in a thread, so that a slab file that does not wait for them gets or gives wrong bytes."""

import random
import threading
import time
from typing import override

import pytest

from bridge_fgo.memory.slab_file import direct_file
from bridge_fgo.memory.transfers import Transfers

POISON = 0xFF


def require_direct_files(folder):
    """Skip a test where a folder is on no disk that takes O_DIRECT."""
    if not has_direct_files(folder):
        pytest.skip("O_DIRECT is refused here")


def has_direct_files(folder):
    try:
        direct_file(str(folder), 4096)
    except ValueError:
        return False
    return True


class LateTransfers(Transfers):
    """Does each copy in a thread, up to two milliseconds after it was asked for, as a GPU may."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.under_way = {}  # by the address of a host buffer: threads of its copies out and in

    def later(self, slab, place, copy):
        delay, over = self.random.uniform(0, 2e-3), threading.Event()

        def run():
            time.sleep(delay)
            copy()
            over.set()

        thread = threading.Thread(target=run)
        self.under_way.setdefault(slab.host.address, [None, None])[place] = thread
        thread.start()
        return over.is_set

    @override
    def copy_out(self, slab, written=True):
        memory, moving = slab.host.to_fill(), slab.moving
        memory.fill_(POISON)
        slab.host.filled(moving.numel(), self.later(slab, 0, lambda: memory[: moving.numel()].copy_(moving)))

    @override
    def copy_in(self, slab):
        memory = slab.host.to_empty()
        slab.allocate()
        moving = slab.moving
        moving.fill_(POISON)
        slab.host.emptied(self.later(slab, 1, lambda: moving.copy_(memory[: moving.numel()])))

    def wait(self, place, slab=None):
        every = list(self.under_way.values()) if slab is None else [self.under_way.get(slab.host.address, (None, None))]
        for threads in every:
            if threads[place] is not None:
                threads[place].join()

    @override
    def wait_in(self, slab):
        self.wait(1, slab)

    @override
    def wait_out(self, slab):
        self.wait(0, slab)

    @override
    def finish_out(self):
        self.wait(0)

    @override
    def finish_in(self):
        self.wait(1)
