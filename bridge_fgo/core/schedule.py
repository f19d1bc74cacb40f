"""What moves when: all slabs of a rank, through one training step.

The time line of a step. How much the GPU may hold at each moment comes from peaks that were measured in an earlier
step, one in which everything was released throughout (`HoldPolicy`).

    begin_pass   every slab that is to leave is on its way out, or gone
    release      point 0: nothing reads the states any more; slabs go as far as activations need their place
    point        a layer begins its forward: activations grow, and slabs go, those first that began to leave first
    point        a layer's backward has ended: activations shrink, and in the last microbatch slabs come back, those
                 first that step first
    reload       the last backward is done: slabs come as far as the optimizer step has room for them
    step         part by part, small ones in groups: wait for it, update it, send it off; meanwhile the next come
    end_step     a step that was measured gives the plan for those that follow
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, takewhile

import torch

from bridge_fgo.core.meters import Ledger, PeakMeter
from bridge_fgo.core.packing_policy import PackingPolicy
from bridge_fgo.core.part import Part
from bridge_fgo.core.policy import HoldPlan, HoldPolicy, MemoryProfile
from bridge_fgo.core.residency import Residency
from bridge_fgo.core.slab import Slab, decode_together, encode_together
from bridge_fgo.core.transfers import Transfers

LOOKAHEAD = 2
"""Groups of parts that are brought back before the one in hand, where room has to be made for them first."""

GROUPS_HELD = 8
"""Groups of more than one part that the optimizer step has room for, at least: the one in hand, those that come, and
enough that leave for the step not to wait for the copy out of what was updated just before."""


class Schedule:
    """The order of all moves on one rank. Without measured peaks everything is released throughout.

    Args:
        transfers: the copies.
        meter: the allocator's peaks; where it does not work (no GPU), nothing is ever measured.
        budget_bytes: see `HoldPolicy`.
    """

    def __init__(self, transfers: Transfers, meter: PeakMeter, budget_bytes: int | None = None) -> None:
        self.ledger = Ledger()
        self.transfers = transfers
        self.parts: list[Part] = []
        """Parts of all sources of the rank, in the order in which they step."""
        self.holding = holding = HoldPolicy(budget_bytes)
        self.signature: object = None
        """What a pass must have in common with the measured one: set before a pass; the number of microbatches."""
        self.packing = PackingPolicy(
            transfers.waits, lambda text: holding.announce(text), lambda text: holding.warn(text)
        )
        self._meter = meter
        self._fresh = self._warm = False
        self._record: MemoryProfile | None = None
        self._plan: HoldPlan | None = None
        self._start()

    @property
    def is_planned(self) -> bool:
        """Whether the newest pass went by measured peaks."""
        return self._plan is not None

    def forget_parts(self) -> None:
        """Forget all parts: they are no more offloaded."""
        self.parts.clear()
        self.count_packable()
        self._start()

    def _start(self) -> None:
        """Go to point 0, with the parts that there are now."""
        self._index = self._next = 0
        self._in_step_phase = False
        self._coming = self._slabs(stay=False)
        self._position = {slab: i for i, slab in enumerate(self._coming)}
        self._leaving = OrderedDict.fromkeys(s for s in self._coming if s.state is Residency.OFFLOADING)
        """Slabs that may be released, in the order in which they began to leave."""

    def _slabs(self, stay: bool) -> list[Slab]:
        return [slab for part in self.parts if part.stays == stay for slab in part.slabs]

    def count_packable(self) -> None:
        """Tell the packing policy of the parts that move, as those that there are, or that stay, have changed."""
        self.packing.packable_bytes = sum(part.packable_bytes for part in self.parts if not part.stays)

    # The pass.

    def begin_pass(self) -> None:
        """Begin a forward-backward pass; every slab that is to leave is on its way, or gone."""
        self.transfers.begin_pass()
        self._record_in(None)  # a pass may be run again
        self._plan = self.holding.plans.get(self.signature)
        self.packing.begin_pass(self.signature, by_plan=self._plan is not None and not self._fresh)
        self._start()

    def release(self) -> None:
        """Pass point 0: nothing reads the states any more until the optimizer steps."""
        # Those before were kept by an earlier call of this pass.
        for slab in islice(self._coming, self._next, None):
            # A reader since the pass began (MXFP8's copy of the masters) has had it brought back.
            if slab.state is Residency.RESIDENT and slab.exists():
                slab.offload()
                self._line_up(slab)
        if self._plan is None:
            self._release_down_to(0)
            if self._warm and self._meter.works and self.signature not in self.holding.plans:
                self._meter.end_interval()  # what came before belongs to no interval
                self._record_in(MemoryProfile([0]))
        else:
            self._hold_to(self._plan)

    def point(self) -> None:
        """Pass a point: a layer begins its forward or has ended its backward."""
        self._measure()
        self._index += 1
        plan = self._plan
        if plan is None:
            if self._record is not None:
                self._record.intervals.append(0)
            return
        index = min(self._index, len(plan.leave) - 1)
        held = self.ledger.nbytes
        if held > plan.leave[index] or (held < plan.come[index] and self._next < len(self._coming)):
            with self.transfers.on_compute_stream():
                self._hold_to(plan)

    def _hold_to(self, plan: HoldPlan) -> None:
        known = self._index < len(plan.leave)
        self._release_down_to(plan.leave[self._index] if known else 0)
        if known and not self._fresh:
            self._bring_up_to(plan.come[self._index])

    def reload(self) -> None:
        """End the pass: bring back what the optimizer step has room for."""
        if self._in_step_phase:
            return
        if self._plan is not None and self._index + 1 != len(self._plan.leave):
            # Another number of points than in the measured pass: measure this kind of pass anew.
            self.holding.forget(self.signature)
            self._plan = None
        self._measure()
        self._in_step_phase = True
        if self._fresh and self._plan is not None:
            # Blocks that the allocator cut to the sizes of activations do not fit slabs, and what it has reserved it
            # does not give back by itself. From here on activations take their memory from slabs that went.
            torch.cuda.empty_cache()
            self._fresh = False
        for slab in self._slabs(stay=True):  # from now on; they were away when that was decided
            slab.require_writable()  # one at a time: what is copied for it needs memory beside it
            slab.drop_staging()  # where it came whole, and memory to encode it was reserved
        limit = self.step_limit - self._room_to_make()
        while self.ledger.nbytes > limit and self._leaving:
            self._leaving.popitem()[0].release()  # the last, which are needed last
        self._bring_up_to(limit)

    @property
    def step_limit(self) -> int:
        """Bytes of state that the GPU may hold while the optimizer steps; two parts where that is not known."""
        if self._plan is not None:
            return self._plan.step
        moving = max((part.transit_bytes for part in self.parts if not part.stays), default=0)
        return 2 * moving + self._bytes_in_any_case

    @property
    def _bytes_in_any_case(self) -> int:
        """Bytes that stay for good, or are held to the end of the optimizer step."""
        return sum(part.nbytes for part in self.parts if part.stays) + self.holding.masters_held_bytes

    def _room_to_make(self) -> int:
        """Return the bytes to keep free in the first step, for the states that the update of a part makes.

        They ask for no room themselves, and are there twice while their slab takes them in. A group has fewer than the
        largest part: as nothing is planned yet, it is a quarter of that at most.
        """
        to_make = (sum(s.nbytes for s in part.slabs if s.gpu is None and not s.exists()) for part in self.parts)
        return 0 if self._warm else 2 * max(to_make, default=0)

    # The optimizer step.

    def step(self, parts: list[Part], update: Callable[[Part], None], keep_masters: bool, together_bytes: int) -> None:
        """Bring back, update and send off the parts of one source, as a pipeline in both directions.

        Parts that are small go through it in groups: a call of the driver's takes the host twice as long after an
        update as after another such call.

        Args:
            parts: in order.
            update: called once for each of them.
            keep_masters: whether states that are written back to the model stay on the GPU until the next pass; their
                copy out starts all the same.
            together_bytes: size of a group at most, but for one of a single part (`pipeline_bytes`).
        """
        # What has landed goes first, so that copies out begin. What stays needs no copy, and fills the time while
        # the others come.
        moving = [part for part in parts if not part.stays]
        landed = list(takewhile(self._has_landed, moving))
        staying = [part for part in parts if part.stays]
        limit = self.step_limit
        together_bytes = min(together_bytes, (limit - self._bytes_in_any_case) // GROUPS_HELD)
        room_to_make = self._room_to_make()
        limit -= room_to_make
        for run in (landed, staying, moving[len(landed) :]):
            for group in _groups(run, together_bytes):
                slabs = [slab for part in group for slab in part.slabs]
                if room_to_make:
                    self._release_down_to(limit)
                self._bring_for(slabs, limit)
                for slab in slabs:
                    if slab.state is Residency.RELEASED:  # there was no room for it ahead of its turn
                        slab.reload()
                decode_together(slabs)
                for slab in reversed(slabs):  # the last lands last: for those before it nothing need wait
                    slab.require_writable()
                    self._next = max(self._next, self._position.get(slab, -1) + 1)
                for part in group:
                    update(part)
                if run is not staying:
                    self._send_off(slabs, keep_masters)

    def _has_landed(self, part: Part) -> bool:
        if any(slab.state is Residency.RELEASED for slab in part.slabs):
            return False
        return all(slab.state is not Residency.RELOADING or self.transfers.has_landed(slab) for slab in part.slabs)

    def _send_off(self, slabs: list[Slab], keep_masters: bool) -> None:
        encoded = encode_together(slabs)
        with self.transfers.back_to_back():
            for slab in slabs:
                if slab.exists():
                    slab.offload(slab.start_encoded if slab in encoded else None)
                    if keep_masters and slab.written_back:
                        self._leaving.pop(slab, None)  # from the offload that the update gave up
                    else:
                        self._line_up(slab)

    def _bring_for(self, slabs: list[Slab], limit: int) -> None:
        """Bring back slabs from those of a group on, making room for the nearest only.

        To make room is to have the current stream wait for a copy out, and the updates that it gets next with
        it: so it is not done for slabs whose turn is far off.
        """
        self._bring_up_to(limit)
        until = self._position.get(slabs[-1], -1) + 1 + LOOKAHEAD * len(slabs)
        while self._next < min(until, len(self._coming)):
            before = self._next
            self._release_down_to(limit - self._coming[self._next].transit_bytes)
            self._bring_up_to(limit)
            if self._next == before:
                return

    # Moves.

    def _line_up(self, slab: Slab) -> None:
        """Put a slab that has begun to leave, perhaps anew, after those that began before."""
        self._leaving[slab] = None
        self._leaving.move_to_end(slab)

    def _release_down_to(self, limit: int) -> None:
        going: list[Slab] = []
        held = self.ledger.nbytes
        while held > limit and self._leaving:
            slab, _ = self._leaving.popitem(last=False)
            if slab.state is Residency.OFFLOADING:  # not given up since
                held -= slab.gpu_bytes
                going.append(slab)
        for slab in reversed(going):  # the last has left last: for those before it nothing need wait
            slab.release()

    def _bring_up_to(self, limit: int) -> None:
        """Have slabs here for the optimizer step, in its order, as long as no more than `limit` bytes are held."""
        with self.transfers.back_to_back():
            while self._next < len(self._coming):
                slab = self._coming[self._next]
                state = slab.state
                if state is Residency.RELEASED or state is Residency.OFFLOADING:
                    held = slab.gpu_bytes if state is Residency.OFFLOADING else 0
                    if self.ledger.nbytes + slab.stepping_bytes - held > limit:
                        return
                    slab.reload()  # of a slab that has not left: it need not leave any more
                    if slab.staging is None and slab.codec.encodes:
                        with self.transfers.on_compute_stream():  # whose memory it is
                            slab.reserve()
                self._next += 1

    def release_everything(self) -> None:
        """Free every slab that may leave; for work between steps that needs the memory."""
        leaving = [slab for slab in self._slabs(stay=False) if slab.state is not Residency.RELEASED]
        for family in {slab.codec.family for slab in leaving}:
            if family is not None:
                family.locate()  # weights may have been let go of and taken again since the pass
        with self.transfers.computing():
            for slab in leaving:
                if slab.exists():
                    slab.offload()  # where a reader between steps has had it brought back
                    slab.release()

    # Measuring, and what follows from it.

    def _record_in(self, profile: MemoryProfile | None) -> None:
        self._record = profile
        self.ledger.observer = None if profile is None else weakref.WeakMethod(self._memory_changes)

    def _memory_changes(self, before: bool) -> None:
        """Measure what was there until slabs take or give back memory, and leave out the change itself."""
        if before:
            self._measure()
        elif self._record is not None:
            self._meter.end_interval()

    def _measure(self) -> None:
        if self._record is None:
            return
        others = self._meter.end_interval() - self.ledger.nbytes
        if self._in_step_phase:
            self._record.step = max(others, self._record.step)
        else:
            self._record.intervals[-1] = max(others, self._record.intervals[-1])

    def end_step(self, updated: bool) -> None:
        """Make the plan, or raise as `HoldPolicy.add`, if the training step that is over was the measured one.

        Args:
            updated: whether the optimizer stepped, on this rank and on the others.
        """
        if self._record is not None and self._in_step_phase and updated:
            self._measure()
            staying = self.holding.add(self.signature, self._record, self.parts, self._meter.expands)
            for position, part in enumerate(self.parts):
                part.stays = position in staying
            self.count_packable()
            self._fresh = True
        self._record_in(None)
        self.packing.end_step(updated, by_plan=self.is_planned)
        self._warm = self._warm or updated
        self._in_step_phase = False


def _groups(parts: Sequence[Part], together_bytes: int) -> Iterator[list[Part]]:
    """Yield the parts in order, as many at once as hold no more bytes on their way, but one at least."""
    group: list[Part] = []
    held = 0
    for part in parts:
        if group and held + part.transit_bytes > together_bytes:
            yield group
            group, held = [], 0
        group.append(part)
        held += part.transit_bytes
    if group:
        yield group
