"""The slabs that move: which one is released or prefetched next, as far as there is GPU memory."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice

import torch

from bridge_fgo.memory.meters import Ledger
from bridge_fgo.memory.slab import Slab, SlabState, decode_together
from bridge_fgo.memory.slab_file import MOST_AHEAD
from bridge_fgo.memory.transfers import Transfers

LOOKAHEAD = 2  # groups of parts that are brought back before the one in hand, if room has to be made for them first


class SlabQueue:
    """Prefetches slabs in the order in which they step; releases them in the order in which their copies out began."""

    def __init__(self, transfers: Transfers, ledger: Ledger, warn: Callable[[str], None]) -> None:
        self._transfers, self._ledger, self._warn = transfers, ledger, warn
        self.failed_fetches = 0  # passes of the whole run in which there was no GPU memory for a copy ahead of its time
        self.start([])

    def start(self, slabs: Sequence[Slab]) -> None:
        """Begin a pass with these slabs, in the order in which they step."""
        self.slabs = slabs
        self._next = 0
        self._position = {slab: i for i, slab in enumerate(slabs)}
        # slabs that may be released, in the order in which their copies out began
        self.leaving = OrderedDict.fromkeys(slab for slab in slabs if slab.state is SlabState.OFFLOADING)
        self.unsent = OrderedDict[Slab, None]()  # slabs that are to leave once the disk takes their copies out
        self._in_file = [slab for slab in slabs if slab.host.in_file]
        self.is_short = False  # whether there was no memory for a copy in this pass: nothing more is prefetched

    @property
    def to_come(self) -> Sequence[Slab]:
        """The slabs that have not been copied back in this pass."""
        return self.slabs[self._next :]

    @property
    def is_through(self) -> bool:
        """Whether all slabs have been copied back in this pass, or are on their way."""
        return self._next >= len(self.slabs)

    def mark_here(self, slab: Slab) -> None:
        """Note that a slab is on the GPU, and so are those before it."""
        self.unsent.pop(slab, None)
        self._next = max(self._next, self._position.get(slab, -1) + 1)

    # Out.

    def mark_leaving(self, slab: Slab) -> None:
        """Put a slab whose copy out has begun, perhaps anew, after those whose copies began before."""
        self.leaving[slab] = None
        self.leaving.move_to_end(slab)

    def send(self, slab: Slab, start: Callable[[], None] | None = None) -> None:
        """Start the copy out of a slab that may then be released; if the disk is behind, later (`send_unsent`)."""
        # The first time it takes states in, which hold memory that is not counted until then.
        if start is None and slab.gpu_bytes and not slab.host.has_room:
            self.unsent[slab] = None
            slab.codec.just_rounded = False  # somebody may write masters or weights until then
        else:
            slab.offload(start)
            self.mark_leaving(slab)

    def send_unsent(self, updated_only: bool) -> None:
        """Start the copies out that had to wait for the disk, as far as it takes more."""
        for slab in [s for s in self.unsent if not updated_only or self._position.get(s, -1) < self._next]:
            if not slab.host.has_room:
                return
            self._send_unsent(slab)

    def _send_unsent(self, slab: Slab) -> None:
        del self.unsent[slab]
        if slab.state in (SlabState.RESIDENT, SlabState.RELOADING) and slab.exists():
            slab.offload()
            self.mark_leaving(slab)

    def cancel_leaving(self, slab: Slab) -> None:
        """Do not release a slab in this pass, though a copy out of it may have begun."""
        self.leaving.pop(slab, None)

    def release_down_to(self, limit: int) -> None:
        """Release slabs that may be, until all slabs hold `limit` bytes at most, or none is left."""
        self._release_sent(limit)
        while self.unsent and self._ledger.nbytes > limit:  # the training thread waits for the disk
            self._send_unsent(next(iter(self.unsent)))
            self._release_sent(limit)

    def _release_sent(self, limit: int) -> None:
        going: list[Slab] = []
        held = self._ledger.nbytes
        while held > limit and self.leaving:
            slab, _ = self.leaving.popitem(last=False)
            if slab.state is SlabState.OFFLOADING:  # not given up since
                held -= slab.gpu_bytes
                going.append(slab)
        for slab in reversed(going):  # the last has left last: for those before it nothing need wait
            slab.release()

    def release_last_down_to(self, limit: int) -> None:
        """Do as `release_down_to`, with those first whose copies out began last: they are needed last."""
        while self._ledger.nbytes > limit and self.leaving:
            self.leaving.popitem()[0].release()
        self.release_down_to(limit)

    def send_back(self, limit: int) -> None:
        """Start the copies out of slabs that were copied back, the last first, until `limit` bytes stay at most."""
        here = [slab for slab in self.slabs if slab.state in (SlabState.RESIDENT, SlabState.RELOADING)]
        leaving = (slab.gpu_bytes for slab in self.slabs if slab.state is SlabState.OFFLOADING)
        held = self._ledger.nbytes - sum(leaving)
        going: list[Slab] = []
        while here and held > limit:
            slab = here.pop()
            held -= slab.gpu_bytes
            self._next = min(self._next, self._position[slab])
            if slab.exists():
                going.append(slab)
        decode_together(going[::-1])  # one check of the weights, which the host waits for, and not one for each
        for slab in going:
            slab.offload()
            self.mark_leaving(slab)

    # In.

    def bring_ahead(self, limit: int) -> None:
        """Prefetch slabs for the optimizer step, as long as all slabs hold `limit` bytes at most."""
        self.read_ahead()
        self.ahead_of_time(partial(self._bring_up_to, limit))

    def read_ahead(self) -> None:
        """Have the disk read what is needed next, as far as its buffers reach."""
        away = (s for s in self._in_file if self._position[s] >= self._next and s.state is SlabState.RELEASED)
        for slab in islice(away, MOST_AHEAD):
            slab.host.read_ahead()

    def bring_for(self, slabs: list[Slab], limit: int) -> None:
        """Prefetch slabs from those of a group on, and make room for the nearest only.

        To make room, the current stream waits for a copy out, and so do the updates that it gets next. So no room is
        made for slabs whose turn is far off.
        """
        self.bring_ahead(limit)
        until = self._position.get(slabs[-1], -1) + 1 + LOOKAHEAD * len(slabs)
        while self._next < min(until, len(self.slabs)):
            before = self._next
            self.release_down_to(limit - self.slabs[self._next].transit_bytes)
            self.bring_ahead(limit)
            if self._next == before:
                return

    def _bring_up_to(self, limit: int) -> None:
        with self._transfers.back_to_back():
            while self._next < len(self.slabs):
                slab = self.slabs[self._next]
                state = slab.state
                if state is SlabState.RELEASED or state is SlabState.OFFLOADING:
                    held = slab.gpu_bytes if state is SlabState.OFFLOADING else 0
                    if self._ledger.nbytes + slab.stepping_bytes - held > limit:
                        return
                    if state is SlabState.RELEASED and not slab.host.is_ready:
                        return  # the pass would wait for the disk
                    slab.reload()  # of a slab that was not released: it stays
                    if slab.staging is None and slab.codec.encodes:
                        with self._transfers.on_compute_stream():  # whose memory it is
                            slab.reserve()
                self.unsent.pop(slab, None)
                self._next += 1

    def ahead_of_time(self, bring: Callable[[], None]) -> None:
        """Call `bring`, which prefetches, unless memory has run out in this pass, or does so now."""
        if self.is_short:
            return
        try:
            bring()
        except torch.OutOfMemoryError as error:
            self.is_short = True
            self.failed_fetches += 1
            if self.failed_fetches == 1:
                self._warn(
                    "there was no GPU memory for a copy of optimizer state ahead of its time, so in this step the "
                    "rest comes just when it is updated; bridge_fgo.stats().failed_fetches counts such passes. Set "
                    f"OffloadConfig.gpu_memory_budget_gib to keep more room. {error}"
                )
            self.give_back()

    def fetch(self, slab: Slab, limit: int) -> None:
        """Copy back a slab that the update needs now, and make room for it; if there is no memory, twice.

        It was released; it may be one of those that stay, for which there was no memory before. All slabs keep to
        `limit` bytes, as far as it takes no more than releasing what is being copied out.
        """
        self.release_down_to(limit - slab.transit_bytes)
        self.read_ahead()
        try:
            slab.reload()
        except torch.OutOfMemoryError:
            self.give_back()
            slab.reload()

    def give_back(self) -> None:
        """Release what is being copied out, and have the allocator give back what is free in blocks of other sizes."""
        self.release_down_to(0)
        self.return_cached()

    def return_cached(self) -> None:
        """Have the allocator give back to the driver what nobody has."""
        # Race: the driver waits for no copy out of a released slab, nor for kernels that read the weights which
        # Megatron-FSDP has gathered into memory of another stream, and let go of.
        self._transfers.await_released()
        torch.cuda.empty_cache()
