"""What moves when: all slabs of a rank, through one training step.

Slabs leave after the update of their part, during what follows: the rest of the optimizer step and the first
microbatch's forward, each no later than its place is needed. They come back in the last microbatch's backward
as activations go, and in the optimizer step. How much the GPU may hold at each point of the step comes from
peaks that were measured in an earlier step, one in which everything was released throughout.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, takewhile

import torch

from bridge_fgo.engine.holding import HoldPlan, MemoryProfile
from bridge_fgo.engine.part import StepPart, TrackedSlab, pack_together, unpack_together
from bridge_fgo.engine.peaks import PeakMeter
from bridge_fgo.engine.planner import HoldPlanner, staying_bytes
from bridge_fgo.engine.residency import Residency
from bridge_fgo.engine.slab import Ledger
from bridge_fgo.engine.transfers import Transfers
from bridge_fgo.engine.waits import PackingChoice

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
        budget_bytes: peak of allocated bytes to stay under while offloading as little as possible; None
            to offload everything.
    """

    def __init__(self, transfers: Transfers, meter: PeakMeter, budget_bytes: int | None = None) -> None:
        self.ledger = Ledger()
        self.transfers = transfers
        self.parts: list[StepPart] = []
        """Of all optimizers of the rank, in the order in which they step."""
        self.planner = planner = HoldPlanner(budget_bytes)
        self.signature: object = None
        """What a pass must have in common with the measured one: set before a pass; the number of microbatches."""
        self.torn = False
        """Whether an optimizer step began and did not end: some parameters are updated, others are not."""
        self.packing = PackingChoice(transfers.waits, lambda text: planner.announce(text))
        self._meter = meter
        self._fresh = False
        self._warm = False
        self._record: MemoryProfile | None = None
        self._in_step_phase = False
        self._plan: HoldPlan | None = None
        self._index = 0
        self._leaving: OrderedDict[TrackedSlab, None] = OrderedDict()
        """Slabs that may be released, in the order in which they began to leave."""
        self._coming: list[TrackedSlab] = []
        self._position: dict[TrackedSlab, int] = {}
        self._next = 0

    @property
    def is_planned(self) -> bool:
        """Whether the newest pass went by measured peaks."""
        return self._plan is not None

    def remove(self, parts: list[StepPart]) -> None:
        """Forget parts that are no more offloaded."""
        self.parts = [part for part in self.parts if part not in parts]
        self.count_packable()
        self._coming, self._position, self._next = [], {}, 0
        self._leaving.clear()

    def count_packable(self) -> None:
        """Which parts there are, or stay, has changed."""
        self.packing.packable_bytes = sum(part.packable_bytes for part in self.parts if not part.stays)

    def require_whole(self, what: str) -> None:
        """See `Offloader.require_whole`.

        Raises:
            RuntimeError: an error ended an optimizer step half-way.
        """
        if self.torn:
            raise RuntimeError(
                f"the optimizer state cannot be {what}: an error ended an optimizer step after some parameters were "
                "updated and before others were; build the optimizer anew and resume from the last checkpoint"
            )

    # The pass.

    def begin_pass(self) -> None:
        """A forward-backward pass begins; every slab that is to leave is on its way, or gone."""
        self.transfers.begin_pass()
        self._record_in(None)  # a pass may be run again
        self._plan = self.planner.plans.get(self.signature)
        self.packing.begin_pass(self.signature, by_plan=self._plan is not None and not self._fresh)
        self._index = 0
        self._coming = [slab for part in self.parts for slab in part.slabs if not part.stays]
        self._position = {slab: i for i, slab in enumerate(self._coming)}
        self._leaving = OrderedDict.fromkeys(s for s in self._coming if s.tracker.state is Residency.OFFLOADING)
        self._next = 0
        self._in_step_phase = False

    def release(self) -> None:
        """Point 0: nothing reads the states any more until the optimizer steps."""
        # Those before were kept by an earlier call of this pass: there is one for each optimizer, and the session's.
        for slab in islice(self._coming, self._next, None):
            # A reader since the pass began (MXFP8's copy of the masters) has had it brought back.
            if slab.tracker.state is Residency.RESIDENT and slab.slab.exists():
                slab.tracker.offload()
                self._line_up(slab)
        if self._plan is None:
            self._release_down_to(0)
            if self._warm and self._meter.works and self.signature not in self.planner.plans:
                self._meter.end_interval()  # what came before belongs to no interval
                self._record_in(MemoryProfile([0]))
        else:
            self._hold_to(self._plan)

    def point(self) -> None:
        """The model passed a point of the pass: a layer begins its forward or ends its backward."""
        self._measure()
        self._index += 1
        if self._record is not None:
            self._record.intervals.append(0)
            return
        plan = self._plan
        if plan is None:
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
        """The last backward is done: bring back what the optimizer step has room for."""
        if self._in_step_phase:
            return
        if self._plan is not None and self._index + 1 != len(self._plan.leave):
            # Another number of points than in the measured pass: measure this kind of pass anew.
            self.planner.forget(self.signature)
            self._plan = None
        self._measure()
        self._in_step_phase = True
        if self._fresh and self._plan is not None:
            # Blocks that the allocator cut to the sizes of activations do not fit slabs, and what it has reserved it
            # does not give back by itself. From here on activations take their memory from slabs that went.
            torch.cuda.empty_cache()
            self._fresh = False
        for part in self.parts:
            if part.stays:  # from now on; it was away when that was decided
                for slab in part.slabs:
                    slab.tracker.require_writable()  # one at a time: what is copied for it needs memory beside it
                    slab.slab.drop_packed()  # where it came whole, and memory to pack it was reserved
        limit = self.step_limit - self._room_to_make()
        while self.ledger.nbytes > limit and self._leaving:
            self._leaving.popitem()[0].tracker.release()  # the last, which are needed last
        self._bring_up_to(limit)

    @property
    def step_limit(self) -> int:
        """Bytes of state that the GPU may hold while the optimizer steps; two parts where that is not known."""
        if self._plan is not None:
            return self._plan.step
        moving = max((part.transit_bytes for part in self.parts if not part.stays), default=0)
        return 2 * moving + staying_bytes(self.parts) + self.planner.masters_held_bytes

    def _room_to_make(self) -> int:
        """Return the bytes to keep free in the first step, for the states that the update of a part makes.

        They ask for no room themselves, and are there twice while their slab takes them in. A group has fewer than the
        largest part: as nothing is planned yet, it is a quarter of that at most.
        """
        if self._warm:
            return 0

        def to_make(part: StepPart) -> int:
            return sum(slab.nbytes for slab in part.slabs if slab.slab.gpu is None and not slab.slab.exists())

        return 2 * max((to_make(part) for part in self.parts), default=0)

    # The optimizer step.

    def step(
        self, parts: list[StepPart], update: Callable[[StepPart], None], hold_masters: bool, together_bytes: int
    ) -> None:
        """Bring back, update and send off the parts of one optimizer, as a pipeline in both directions.

        Parts that are small go through it in groups: a call of the driver's takes the host twice as long after an
        update as after another such call.

        Args:
            parts: in order.
            update: called once for each of them.
            hold_masters: masters that mcore copies to the model stay on the GPU until the next pass; their copy out
                starts all the same.
            together_bytes: size of a group at most, but for one of a single part; see `pipeline_bytes`.
        """
        # What has landed goes first, so that copies out begin. What stays needs no copy, and fills the time while
        # the others come.
        moving = [part for part in parts if not part.stays]
        landed = list(takewhile(self._has_landed, moving))
        staying = [part for part in parts if part.stays]
        limit = self.step_limit
        free = limit - staying_bytes(self.parts) - self.planner.masters_held_bytes
        together_bytes = min(together_bytes, free // GROUPS_HELD)
        room_to_make = self._room_to_make()
        limit -= room_to_make
        for run in (landed, staying, moving[len(landed) :]):
            for group in _groups(run, together_bytes):
                slabs = [slab for part in group for slab in part.slabs]
                if room_to_make:
                    self._release_down_to(limit)
                self._bring_for(slabs, limit)
                unpack_together(slabs)
                for slab in reversed(slabs):  # the last lands last: for those before it nothing need wait
                    slab.tracker.require_writable()
                    self._next = max(self._next, self._position.get(slab, -1) + 1)
                for part in group:
                    update(part)
                if run is not staying:
                    self._send_off(slabs, hold_masters)

    def _has_landed(self, part: StepPart) -> bool:
        here = (Residency.RESIDENT, Residency.OFFLOADING)
        return all(
            slab.tracker.state in here
            or (slab.tracker.state is Residency.RELOADING and self.transfers.has_landed(slab.slab))
            for slab in part.slabs
        )

    def _send_off(self, slabs: list[TrackedSlab], hold_masters: bool) -> None:
        packed = pack_together(slabs)
        with self.transfers.back_to_back():
            for slab in slabs:
                if slab.slab.exists():
                    slab.tracker.offload(slab.mover.start_packed if slab in packed else None)
                    if hold_masters and slab.is_copied_to_model:
                        self._leaving.pop(slab, None)  # from the offload that the update gave up
                    else:
                        self._line_up(slab)

    def _bring_for(self, slabs: list[TrackedSlab], limit: int) -> None:
        """Bring back slabs from those of a group on, making room for the nearest only.

        To make room is to have the current stream wait for a copy out, and the updates that it gets next with
        it: so it is not done for slabs whose turn is far off.
        """
        self._bring_up_to(limit)
        if not slabs:
            return
        until = self._position.get(slabs[-1], -1) + 1 + LOOKAHEAD * len(slabs)
        while self._next < min(until, len(self._coming)):
            before = self._next
            self._release_down_to(limit - self._coming[self._next].transit_bytes)
            self._bring_up_to(limit)
            if self._next == before:
                return

    # Moves.

    def _line_up(self, slab: TrackedSlab) -> None:
        """A slab has begun to leave, perhaps anew: then it goes after those that began since."""
        self._leaving[slab] = None
        self._leaving.move_to_end(slab)

    def _release_down_to(self, limit: int) -> None:
        going: list[TrackedSlab] = []
        held = self.ledger.nbytes
        while held > limit and self._leaving:
            slab, _ = self._leaving.popitem(last=False)
            if slab.tracker.state is Residency.OFFLOADING:  # not given up since
                held -= slab.slab.gpu_bytes
                going.append(slab)
        for slab in reversed(going):  # the last has left last: for those before it nothing need wait
            slab.tracker.release()

    def _bring_up_to(self, limit: int) -> None:
        """Have slabs here for the optimizer step, in its order, as long as no more than `limit` bytes are held."""
        with self.transfers.back_to_back():
            while self._next < len(self._coming):
                slab = self._coming[self._next]
                state = slab.tracker.state
                if state is Residency.RELEASED or state is Residency.OFFLOADING:
                    held = slab.slab.gpu_bytes if state is Residency.OFFLOADING else 0
                    if self.ledger.nbytes + slab.slab.stepping_bytes - held > limit:
                        return
                    slab.tracker.reload()  # of a slab that has not left: it need not leave any more
                    if slab.slab.packed is None and slab.slab.packs:
                        with self.transfers.on_compute_stream():  # whose memory it is
                            slab.slab.reserve()
                self._next += 1

    def release_everything(self) -> None:
        """Free every slab that may leave; for work between steps that needs the memory."""
        leaving = [
            slab
            for part in self.parts
            for slab in part.slabs
            if not part.stays and slab.tracker.state is not Residency.RELEASED
        ]
        for remainders in {slab.slab.remainders.owner for slab in leaving if slab.slab.remainders is not None}:
            remainders.look_up()  # weights may have been let go of and taken again since the pass
        with self.transfers.computing():
            for slab in leaving:
                if slab.slab.exists():
                    slab.tracker.offload()  # where a reader between steps has had it brought back
                    slab.tracker.release()

    # Measuring, and what follows from it.

    def _record_in(self, profile: MemoryProfile | None) -> None:
        self._record = profile
        self.ledger.observer = None if profile is None else weakref.WeakMethod(self._memory_changes)

    def _memory_changes(self, before: bool) -> None:
        """Slabs take or give back memory: what was there until now has been measured with them, or without."""
        if before:
            self._measure()
        elif self._record is not None:
            self._meter.end_interval()  # of the change itself

    def _measure(self) -> None:
        if self._record is None:
            return
        others = self._meter.end_interval() - self.ledger.nbytes
        if self._in_step_phase:
            self._record.step = max(others, self._record.step)
        else:
            self._record.intervals[-1] = max(others, self._record.intervals[-1])

    def end_step(self, updated: bool) -> None:
        """The training step is over: make the plan, if this was the measured step.

        updated: whether the optimizer stepped, on this rank and on the others.

        Raises:
            ValueError: the budget cannot be met; gives the least one that can.
        """
        if self._record is not None and self._in_step_phase and updated:
            self._measure()
            self.planner.add(self.signature, self._record, self.parts, self._meter.expands)
            self.count_packable()
            self._fresh = True
        self._record_in(None)
        self.packing.end_step(updated, by_plan=self.is_planned)
        self._warm = self._warm or updated
        self._in_step_phase = False


def _groups(parts: Sequence[StepPart], together_bytes: int) -> Iterator[list[StepPart]]:
    """Yield the parts in order, as many at once as hold no more bytes on their way, but one at least."""
    group: list[StepPart] = []
    held = 0
    for part in parts:
        if group and held + part.transit_bytes > together_bytes:
            yield group
            group, held = [], 0
        group.append(part)
        held += part.transit_bytes
    if group:
        yield group
