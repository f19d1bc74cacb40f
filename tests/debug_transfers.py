"""A debug mode that makes races visible: late copies, and poison wherever nobody may read.

    BRIDGE_FGO_DEBUG=1 python -m debug_transfers MODULE|SCRIPT.py [ARGUMENTS]

Set BRIDGE_FGO_DEBUG to a seed (an integer) in the environment of every rank. Training is slower and, where the
patches and the schedule are right, bitwise the same; a read before its copy has ended, or after a release, gets NaNs.
Whoever imports this has the engines made from then on ask for it.
"""

from __future__ import annotations

import os
import random
import runpy
import sys
import weakref
from typing import override

import torch

from bridge_fgo.bridge import session
from bridge_fgo.engines import native
from bridge_fgo.memory.gradient_bucket import GradientBucket
from bridge_fgo.memory.slab import Slab
from bridge_fgo.memory.transfers import CudaTransfers, Lane, Transfers

Movable = Slab | GradientBucket
VARIABLE = "BRIDGE_FGO_DEBUG"
POISON = 0xFF
"""Every byte of it: a NaN in fp32, bf16 and fp16, -1 in int16."""
MOST_CYCLES = 2_000_000
"""The longest delay of a copy on a GPU, in cycles of its clock: about a millisecond."""


def debugged(transfers: Transfers) -> Transfers:
    """Return the transfers, in debug mode where the environment asks for it; ValueError if that has no seed."""
    seed = os.environ.get(VARIABLE, "")
    if not seed:
        return transfers
    if not seed.removeprefix("-").isdecimal():
        raise ValueError(f"{VARIABLE}={seed!r}: set it to an integer, the seed of the delays, or leave it unset")
    return DebugTransfers(transfers, int(seed))


class DebugTransfers(Transfers):
    """Transfers that make races visible.

    - Copies are late by a random time. On a GPU a kernel that only waits goes before them; in host memory, where copies
      are done at once, they are put off until something asks for their end, which is as late as a GPU could be.
    - GPU memory is poisoned before it is given back, and after it is taken, before the copy in. With CUDA a random half
      of the copies in go without: what was poisoned just now cannot take the shortcut of `back_to_back`.
    - The host buffer is poisoned when its slab is readable again: the only valid bytes are on the GPU from then on.
      With CUDA not before the next pass, or the next save: the host would have to wait for the copy in, which would
      hide a wait that is missing.
    """

    keeps_host_copies = False

    def __init__(self, transfers: Transfers, seed: int) -> None:
        self._transfers = transfers
        self._cuda = transfers if isinstance(transfers, CudaTransfers) else None
        self.capturing = transfers.capturing
        self.computing, self.on_compute_stream = transfers.computing, transfers.on_compute_stream
        self.back_to_back, self.shares_link = transfers.back_to_back, transfers.shares_link
        self.join, self.wait_for = transfers.join, transfers.wait_for
        self.mark_out, self.seconds_out = transfers.mark_out, transfers.seconds_out
        self.begin_update, self.landed_in_update = transfers.begin_update, transfers.landed_in_update
        self.finish_in, self.finish_all = transfers.finish_in, transfers.finish_all
        self.limit_pieces, self.forget = transfers.limit_pieces, transfers.forget
        self.await_released = transfers.await_released
        self._random = random.Random(seed)
        # slabs whose copy out, or in, is put off; and whose host buffer nobody may read and is not poisoned yet
        self._late_out, self._late_in, self._stale = (weakref.WeakSet[Movable]() for _ in range(3))

    @override
    def begin_pass(self) -> None:
        self._poison_stale()
        self._transfers.begin_pass()

    @override
    def copy_out(self, slab: Movable, written: bool = True) -> None:
        self._late_out.discard(slab)  # of an offload that was given up
        self._stale.discard(slab)
        if self._is_put_off(out=True):
            self._late_out.add(slab)
        else:
            self._transfers.copy_out(slab, written)

    @override
    def release(self, slab: Movable) -> None:
        self.wait_out(slab)
        with self.on_compute_stream():  # whose memory it is
            _poison(slab)
        self._transfers.release(slab)

    @override
    def copy_in(self, slab: Movable) -> None:
        self._catch_up_out(slab)
        if self._cuda is None or self._random.random() < 0.5:
            with self.on_compute_stream():  # as in `CudaTransfers.copy_in`
                slab.allocate()
                _poison(slab)
            if self._cuda is not None:
                # Race: the poison would overwrite what was copied in, where the lane waits for nothing newer than what
                # the copy before it needed.
                order_anew(self._cuda)
        if self._is_put_off(out=False):
            self._late_in.add(slab)
        else:
            self._transfers.copy_in(slab)

    @override
    def wait_in(self, slab: Movable) -> None:
        if slab in self._late_in:
            self._transfers.copy_in(slab)
            self._late_in.discard(slab)  # last, as in `_catch_up_out`
        self._transfers.wait_in(slab)
        self._stale.add(slab)
        if self._cuda is None:
            self._poison_stale()

    def _poison_stale(self) -> None:
        if self._cuda is not None and self._stale:
            self.finish_in()
        for slab in self._stale:
            if not getattr(slab, "is_lent", False):
                slab.host.tensor.fill_(POISON)
        self._stale.clear()

    @override
    def wait_out(self, slab: Movable) -> None:
        self._catch_up_out(slab)
        self._transfers.wait_out(slab)

    @override
    def finish_out(self) -> None:
        for slab in list(self._late_out):
            self._catch_up_out(slab)
        self._transfers.finish_out()
        self._poison_stale()

    @override
    def has_landed(self, slab: Movable) -> bool:
        return slab not in self._late_in and self._transfers.has_landed(slab)

    @override
    def has_left(self, slab: Movable) -> bool:
        return slab not in self._late_out and self._transfers.has_left(slab)

    def _catch_up_out(self, slab: Movable) -> None:
        if slab in self._late_out:
            self._transfers.copy_out(slab)
            self._late_out.discard(slab)  # last: an interruption leaves it to be done

    def _is_put_off(self, out: bool) -> bool:
        """Return whether to do a copy later; on a GPU it is enqueued now, behind a delay."""
        if self._cuda is None:
            return self._random.random() < 0.5
        delay(self._cuda._out if out else self._cuda._in, self._random.randrange(MOST_CYCLES))
        return False


def order_anew(transfers: CudaTransfers) -> None:
    """Have the next copy wait for what the training stream holds by then."""
    transfers._is_ordered = False


def delay(lane: Lane, cycles: int) -> None:
    """Have the next copy, and so every later one, begin that many GPU cycles later."""
    with torch.cuda.stream(lane._streams[lane._turn]):
        torch.cuda._sleep(cycles)
    lane._is_open = True


def _poison(slab: Movable) -> None:
    """Fill the GPU memory of a slab or a bucket, and that of what is copied in its place, on the current stream."""
    for memory in (slab.gpu, getattr(slab, "staging", None)):
        if memory is not None:
            memory.fill_(POISON)


def put_in_place() -> None:
    """Have engines ask the environment for the debug mode."""
    make = native.make_transfers

    def make_debugged(*of: object) -> Transfers:
        return debugged(make(*of))  # type: ignore[reportArgumentType]

    native.make_transfers = session.make_transfers = make_debugged


put_in_place()


def main() -> None:
    """Run a module, or a script, with the mode in place."""
    sys.argv = sys.argv[1:]
    if sys.argv[0].endswith(".py"):
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
