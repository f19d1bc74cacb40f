"""The optimizer step as a pipeline: parts are updated and copied out, while the next ones are copied in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import groupby, takewhile
from operator import attrgetter

from bridge_fgo.memory.slab import Slab, SlabState, decode_together, encode_together
from bridge_fgo.memory.transfers import Transfers
from bridge_fgo.offload.part import Part
from bridge_fgo.offload.slab_queue import SlabQueue

GROUPS_HELD = 8
"""Groups of more than one part that the optimizer step has room for, at least: the one in hand, those that are copied
in, and so many that are copied out that the step does not wait for the copy of what was updated just before."""


class StepPipeline:
    """Copies parts in, updates them and copies them out, in both directions of the link at once.

    Parts that are small go through it in groups: a call of the driver's takes the host twice as long after an update as
    after another such call.

    Args:
        queue: of the slabs that move.
        transfers: the copies.
    """

    def __init__(self, queue: SlabQueue, transfers: Transfers) -> None:
        self._queue = queue
        self._transfers = transfers

    def run(
        self,
        parts: list[Part],
        update: Callable[[Part], None],
        limit: int,
        group_bytes: int,
        keep_masters: bool,
        makes_states: bool,
        in_order: bool,
        h2d_first: bool,
    ) -> None:
        """Update the parts of one source.

        Args:
            parts: in order.
            update: called once for each of them.
            limit: bytes of state that the GPU may hold meanwhile.
            group_bytes: size of a group at most, but for one of a single part.
            keep_masters: whether states that are written back to the model stay on the GPU until the next pass; their
                copy out starts all the same.
            makes_states: whether updates may make states, for which other slabs make room.
            in_order: whether parts are updated in their order, whatever has landed (`Source.keeps_order`).
            h2d_first: whether copies out wait for copies in, once none of those waits for the room that they make.
        """
        queue = self._queue
        for run in self._runs(parts, in_order):
            for group in _groups(run, group_bytes):
                slabs = [slab for part in group for slab in part.slabs]
                if makes_states:
                    queue.release_down_to(limit)
                queue.bring_for(slabs, limit)
                for slab in slabs:
                    if slab.state is SlabState.RELEASED:  # there was no room for it ahead of its turn
                        queue.fetch(slab, limit)
                decode_together(slabs)
                for slab in reversed(slabs):  # the last lands last: for those before it nothing need wait
                    slab.require_writable()
                    queue.mark_here(slab)
                for part in group:
                    update(part)
                if not group[0].stays:
                    self._send_off(slabs, keep_masters, h2d_first and queue.is_through)

    def _runs(self, parts: list[Part], in_order: bool) -> list[list[Part]]:
        """Return the parts as they are updated, those that stay apart from those that move."""
        if in_order:
            return [list(run) for _, run in groupby(parts, key=attrgetter("stays"))]
        # Parts that have landed are updated first, so that their copies out begin. Parts that stay need no copy: they
        # are updated while the others come.
        moving = [part for part in parts if not part.stays]
        landed = list(takewhile(self._has_landed, moving))
        return [landed, [part for part in parts if part.stays], moving[len(landed) :]]

    def _has_landed(self, part: Part) -> bool:
        if any(slab.state is SlabState.RELEASED for slab in part.slabs):
            return False
        return all(slab.state is not SlabState.RELOADING or self._transfers.has_landed(slab) for slab in part.slabs)

    def _send_off(self, slabs: list[Slab], keep_masters: bool, yields: bool) -> None:
        encoded = encode_together(slabs)
        with self._transfers.yielding() if yields else nullcontext(), self._transfers.back_to_back():
            for slab in slabs:
                if slab.exists():
                    slab.offload(slab.start_encoded if slab in encoded else None)
                    if keep_masters and slab.written_back:
                        self._queue.cancel_leaving(slab)  # from the offload that the update gave up
                    else:
                        self._queue.mark_leaving(slab)


def _groups(parts: Sequence[Part], group_bytes: int) -> Iterator[list[Part]]:
    """Yield the parts in order, as many at once as hold no more bytes on their way, but one at least."""
    group: list[Part] = []
    held = 0
    for part in parts:
        if group and held + part.transit_bytes > group_bytes:
            yield group
            group, held = [], 0
        group.append(part)
        held += part.transit_bytes
    if group:
        yield group
