"""What moves when: all slabs of a rank, through one training step.

The time line of a step, with the functions that run it. How much the GPU may hold at each moment follows from peaks
that were measured in an earlier step, one in which everything was released throughout (`HoldPolicy`).

1.  Bridge calls `train_step`: `bridge.train_step.train_step` > `session_for_step` > `Session.training_step`, which
    hooks the layers (`ModelPoints.hooked`).
2.  Bridge's rerun machine grants a pass: `PassBeginningMachine.should_run_forward_backward` > `Session.begin_pass` >
    `NativeEngine.begin_pass`. If it runs a pass again, the time line goes on from here.
    a.  Copies out start: `slab.send_off` > `Slab.offload` > `Slab._copy_out` > `CudaTransfers.copy_out` > `Lane.copy` >
        `Copier.copy`, one call of the driver for each piece.
    b.  A plan is chosen: `Schedule.begin_pass` gives `PassMatcher` the plans of this kind of pass.
3.  Gradients are zeroed: `Session.release` > `Schedule.release`. This is point 0: nothing reads the states any more.
    `SlabQueue.release_down_to` releases slabs as far as activations need the room, in the order of their copies.
4.  A layer's forward begins: a hook of `bridge.points` > `NativeEngine.point` > `Schedule.point`. Activations grow, and
    further slabs are released.
5.  A layer's backward has ended: the same way. Activations shrink, and in the last microbatch `SlabQueue.bring_ahead`
    prefetches slabs, in the order in which they step.
6.  The last backward is done: `Session.reload` > `Schedule.reload` prefetches what the optimizer step has room for.
7.  The optimizers step, unless the update is skipped. `Session.updating` checks that all states can be updated;
    `Session.stepping` > `NativeEngine.stepping` puts `Schedule.step` in the place of the inner `step`
    (`InnerStep.replaced`). For one part after another, small ones in groups, it waits for the slabs, updates them and
    starts their copies out, while the next slabs are copied in. Copies out that have no copies in to run beside are
    left to the next pass (2a), which hides them: whatever waits for the whole device between steps (mcore's timers, in
    each step that is logged) would wait for them. `NativeEngine.write_back` then copies the masters to weights that
    `McoreSource.copy_part` has not written.
8.  The step ends: `NativeEngine.settle` waits for copies in that nothing used. In `NativeEngine.end_step` >
    `Schedule.end_step` peaks that were measured give a plan for the steps that follow; otherwise the peak of the step
    is compared with what its plan keeps under.

Slabs in a file (`memory.slab_file`) move alike, but no pass waits for the disk, unless memory is needed at once: a copy
out begins when a buffer is free (`SlabQueue.send`), a copy in when its bytes were read ahead (`SlabQueue.read_ahead`).

If no measured pass covers a point (longer sequences, say), everything is released until the pass ends, and the pass is
measured from that point on.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, takewhile
from operator import attrgetter

from bridge_fgo.memory.auto_budget import AutoBudget
from bridge_fgo.memory.meters import Ledger, PeakMeter
from bridge_fgo.memory.slab import Part, Slab, SlabState, decode_together, encode_together
from bridge_fgo.memory.transfers import Transfers
from bridge_fgo.offload.policy import HoldPlan, HoldPolicy
from bridge_fgo.offload.profile import Mark, MemoryProfile, PassMatcher, PeakRecorder
from bridge_fgo.offload.slab_queue import SlabQueue

GROUPS_HELD = 8
"""Groups of more than one part that the optimizer step has room for, at least: the one in hand, those that are copied
in, and so many that are copied out that the step does not wait for the copy of what was updated just before."""


class Schedule:
    """The order of all moves on one rank. Without measured peaks everything is released throughout.

    Without a GPU `meter` measures nothing. `budget_bytes` and `room` are `HoldPolicy`'s.
    """

    def __init__(
        self, transfers: Transfers, meter: PeakMeter, budget_bytes: int | None = None, room: AutoBudget | None = None
    ) -> None:
        self.ledger = Ledger()
        self.transfers = transfers
        self.parts: list[Part] = []  # of all sources of the rank, in the order in which they step
        self.holding = holding = HoldPolicy(budget_bytes, room)
        self.kind: object = None  # of the passes to come (`MemoryProfile.kind`)
        self.recorder = PeakRecorder(meter, self.ledger)
        self._fresh = self._warm = False
        self._is_like_others = True
        self.queue = SlabQueue(transfers, self.ledger, lambda text: holding.warn(text))
        self._overlap: int | None = None  # bytes whose copies in ended in the newest optimizer step; None: not known
        self._to_overlap = 0  # bytes of copies out to start in this optimizer step
        self._is_updating = False  # whether the optimizer step of the newest pass has begun
        self._newest = 0  # `PeakRecorder.newest_others` at the end of a pass that went by a plan
        self._start(PassMatcher())

    @property
    def is_planned(self) -> bool:
        """Whether the newest pass went by measured peaks."""
        return self._plan is not None

    @property
    def _plan(self) -> HoldPlan | None:
        return self._matcher.plan

    @property
    def _index(self) -> int:
        """Number of the newest point."""
        return len(self._matcher.marks)

    def forget_parts(self) -> None:
        """Forget all parts: they are no more offloaded."""
        self.parts.clear()
        self._start(PassMatcher())

    def _start(self, matcher: PassMatcher) -> None:
        """Go to point 0, with the parts that there are now."""
        self._matcher = matcher
        self.queue.start(self._slabs(stay=False))

    def _slabs(self, stay: bool) -> list[Slab]:
        return [slab for part in self.parts if part.stays == stay for slab in part.slabs]

    # The pass.

    def begin_pass(self, is_like_others: bool = True) -> None:
        """Begin a forward-backward pass; every slab that is to leave is on its way, or gone.

        One that is not like others of its kind is not measured, and goes by no plan.
        """
        self._is_like_others = is_like_others
        self._learn_overlap()
        self.transfers.begin_pass()
        self.recorder.begin_pass()
        plans = self.holding.plans_for(self.kind) if is_like_others else []
        self._start(PassMatcher(plans))

    def release(self) -> None:
        """Pass point 0: nothing reads the states any more until the optimizer steps."""
        for slab in self.queue.to_come:  # what is back was kept by an earlier call of this pass
            # A reader since the pass began (MXFP8's copy of the masters) has had it brought back.
            is_coming = slab.state is SlabState.RELOADING and slab.host.in_file  # the pass before was broken off
            if (slab.state is SlabState.RESIDENT or is_coming) and slab.exists():
                self.queue.send(slab)
        if self._plan is None:
            self._send_all()
        else:
            self._hold_to(self._plan)
        self.queue.read_ahead()
        self.recorder.release()  # only now: what a skipped step or a reader between steps left here is not the pass's
        if self._plan is None and self._is_like_others and self._warm:  # else states are made in the step
            self.recorder.record(MemoryProfile([0], kind=self.kind))

    def point(self, mark: Mark) -> None:
        """Pass a point: a layer begins its forward or has ended its backward."""
        recorder = self.recorder
        if recorder.in_step:
            return  # what comes for the update stays, whatever passes late
        recorder.point(mark)
        if self.queue.unsent:
            with self.transfers.on_compute_stream():
                self.queue.send_unsent(updated_only=False)
        before = self._matcher.point(mark)
        plan = self._plan
        if before is not None:
            is_lost = plan is None and recorder.profile is None
            newest = recorder.newest_others() if is_lost else 0
            with self.transfers.on_compute_stream():
                self._change_plan(plan)
            if is_lost and self.holding.is_worth_measuring():
                known = self._matcher.known(before, self._index, newest)
                known.intervals.append(0)
                recorder.record(known)
        elif plan is not None:
            held, may_bring = self.ledger.nbytes, not (self.queue.is_through or self.queue.is_short)
            if held > plan.leave[self._index] or (may_bring and held < plan.come[self._index]):
                with self.transfers.on_compute_stream():
                    self._hold_to(plan)

    def _hold_to(self, plan: HoldPlan) -> None:
        self.queue.release_down_to(plan.leave[self._index])
        if not self._fresh:
            self.queue.bring_ahead(plan.come[self._index])

    def _change_plan(self, plan: HoldPlan | None) -> None:
        """Keep to another plan from this point on, or to none: then everything leaves."""
        self.queue.send_back(0 if plan is None else plan.come[self._index])
        if plan is None:
            self._send_all()
        else:
            self.queue.release_down_to(plan.leave[self._index])

    def _send_all(self) -> None:
        """Release what has begun to leave, and what stays for good with it: nothing says that there is room."""
        self.queue.release_down_to(0)
        for slab in self._slabs(stay=True):
            if slab.state is not SlabState.RELEASED and slab.exists():
                slab.offload()
                slab.release()

    def reload(self) -> None:
        """End the pass: bring back what the optimizer step has room for."""
        if self.recorder.in_step:
            return
        is_told = self._plan is not None and self.recorder.profile is None
        self._newest = self.recorder.newest_others() if is_told else 0
        self.recorder.end_pass()
        if self._fresh and self._plan is not None:
            # Blocks that the allocator cut to the sizes of activations do not fit slabs, and what it has reserved it
            # does not give back by itself. From here on activations take their memory from slabs that went.
            self.queue.return_cached()
            self._fresh = False
        self.queue.ahead_of_time(self._bring_what_stays)
        limit = self.step_limit - self._room_to_make()
        self.queue.release_last_down_to(limit)
        self.queue.bring_ahead(limit)

    def _bring_what_stays(self) -> None:
        for slab in self._slabs(stay=True):  # from now on; they were away when that was decided
            slab.require_writable()  # one at a time: what is copied for it needs memory beside it
            slab.drop_staging()  # if it came whole, and memory to encode it was reserved

    @property
    def step_limit(self) -> int:
        """Bytes of state that the GPU may hold while the optimizer steps; two parts if that is not known."""
        if self._plan is not None:
            return self._plan.step
        return 2 * max((part.transit_bytes for part in self.parts), default=0) + self._bytes_in_any_case

    @property
    def _bytes_in_any_case(self) -> int:
        """Bytes that stay for good, or are held to the end of the optimizer step."""
        return sum(part.nbytes for part in self.parts if part.stays) + self.holding.held_through_step

    def _room_to_make(self) -> int:
        """Return the bytes to keep free in the first step, for the states that the update of a part makes.

        They ask for no room themselves, and are there twice while their slab takes them in. A group has fewer than the
        largest part: as nothing is planned yet, it is a quarter of that at most.
        """
        to_make = (sum(s.nbytes for s in part.slabs if s.gpu is None and not s.exists()) for part in self.parts)
        return 0 if self._warm else 2 * max(to_make, default=0)

    # The optimizer step.

    def step(
        self,
        parts: list[Part],
        update: Callable[[Part], None],
        keep_masters: bool,
        group_bytes: int,
        in_order: bool = False,
    ) -> None:
        """Prefetch, update and offload the parts of one source, in order, in both directions of the link at once.

        Parts that are small go in groups: a call of the driver's takes the host twice as long after an update as after
        another such call. A group has `group_bytes` at most (`pipeline_bytes`), if the step has room for
        `GROUPS_HELD` of them. With `keep_masters` masters stay on the GPU until the next pass, also if their copy out
        starts. With `in_order` parts are updated in their order, whatever has landed (`Source.keeps_order`).
        """
        queue, limit = self.queue, self.step_limit
        self._begin_update()
        group_bytes = min(group_bytes, (limit - self._bytes_in_any_case) // GROUPS_HELD)
        room_to_make = self._room_to_make()
        limit -= room_to_make
        for run in self._runs(parts, in_order):
            for group in _groups(run, group_bytes):
                slabs = [slab for part in group for slab in part.slabs]
                queue.send_unsent(updated_only=True)
                if room_to_make:
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
                # The first step holds each state twice while a slab takes it in, and cannot wait for the next pass. A
                # step outside of training may be followed by another one, which needs the memory.
                may_defer = self._warm and self.recorder.in_step
                is_deferred = may_defer and queue.is_through and self._to_overlap <= 0
                if is_deferred:
                    for slab in slabs:
                        slab.codec.just_rounded = False  # somebody may write masters or weights until then
                    # The disk, which takes the longest, goes on at once.
                    in_file = [slab for part in group if part.in_file and not part.stays for slab in part.slabs]
                    if in_file:
                        self._send_off(in_file, keep_masters)
                elif not group[0].stays:
                    self._to_overlap -= sum(slab.nbytes for slab in slabs)
                    self._send_off(slabs, keep_masters)

    def _begin_update(self) -> None:
        """Begin the optimizer step of a pass, with its first source, and choose how much it copies out.

        In the time that copies in take, as many bytes can be copied out. The host runs ahead of the GPU, so it sees
        only what has not landed yet; what will not have landed when the GPU begins to update is known of earlier steps.

        Nothing is copied out beside copies in if ranks of a node share the link: each direction is slower while the
        other is busy. The update waits for copies in, and only the next forward for copies out. On two H100 of a node
        (54.7 GB/s one way, 34.7 each with both busy) a step of 0.645 s became longer by 0.11 s with copies out after
        copies in, and by 0.15 s with both at once; on a busy node by 0.07 s and 0.19 s. On one GPU both at once are
        faster.
        """
        if self._is_updating:
            return
        self._is_updating = True
        self.transfers.begin_update()
        coming = sum(slab.nbytes for slab in self.queue.slabs if not self._has_landed(slab))
        self._to_overlap = coming if self._overlap is None else min(coming, self._overlap)
        if self.transfers.shares_link:
            self._to_overlap = 0

    def _learn_overlap(self) -> None:
        """Note which copies in ended in the newest optimizer step, before they begin anew; if the GPU is past them."""
        if not self._is_updating:
            return
        self._is_updating = False
        late = [(slab.nbytes, self.transfers.landed_in_update(slab)) for slab in self.queue.slabs]
        if all(is_late is not None for _, is_late in late):
            self._overlap = sum(nbytes for nbytes, is_late in late if is_late)

    def _runs(self, parts: list[Part], in_order: bool) -> list[list[Part]]:
        """Return the parts as they are updated, those that stay apart from those that move."""
        if in_order:
            return [list(run) for _, run in groupby(parts, key=attrgetter("stays"))]
        # Parts that have landed are updated first, so that their copies out begin. Parts that stay need no copy: they
        # are updated while the others come.
        moving = [part for part in parts if not part.stays]
        landed = list(takewhile(lambda part: all(map(self._has_landed, part.slabs)), moving))
        return [landed, [part for part in parts if part.stays], moving[len(landed) :]]

    def _has_landed(self, slab: Slab) -> bool:
        state = slab.state
        return state is not SlabState.RELEASED and (state is not SlabState.RELOADING or self.transfers.has_landed(slab))

    def _send_off(self, slabs: list[Slab], keep_masters: bool) -> None:
        """Start the copies out of a group that was updated."""
        encoded = encode_together(slabs)
        with self.transfers.back_to_back():
            for slab in slabs:
                if slab.exists():
                    start = slab.start_encoded if slab in encoded else None
                    if keep_masters and slab.written_back:
                        slab.offload(start)
                        self.queue.cancel_leaving(slab)  # from the offload that the update gave up
                    else:
                        self.queue.send(slab, start)

    def release_everything(self) -> None:
        """Free every slab that may leave; for work between steps that needs the memory."""
        leaving = [slab for slab in self._slabs(stay=False) if slab.state is not SlabState.RELEASED]
        for family in {slab.codec.family for slab in leaving}:
            if family is not None:
                family.locate()  # weights may have been let go of and taken again since the pass
        with self.transfers.computing():
            for slab in leaving:
                if slab.exists():
                    slab.offload()  # if a reader between steps has had it brought back
                    slab.release()

    # What follows from a step.

    def end_step(self, updated: bool) -> None:
        """Make the plan, or raise as `HoldPolicy.plan`, if the training step that is over was the measured one.

        `updated` says whether the optimizer stepped. On a rank that has no parts it may say that it has not.
        """
        updated = updated or not self.parts
        learns = self.recorder.in_step and updated
        if self.holding.awaits_ranks:  # a rank that reached `agree` alone would wait for the others
            assert self.holding.all_can is not None
            learns = self.holding.all_can(learns and self.recorder.profile is not None)
        if learns and self._learn():
            staying = self.holding.plan(self.parts, self.recorder.meter.expands)
            for position, part in enumerate(self.parts):
                part.stays = position in staying
            self._fresh = True
        self.recorder.begin_pass()
        self._warm = self._warm or updated

    def _learn(self) -> bool:
        """Return whether something was learned from the step, so that it is to be planned anew."""
        plan, recorder = self._plan, self.recorder
        if recorder.profile is not None:
            recorder.measure()
            self.holding.add(recorder.profile)
        elif plan is None:
            return False
        elif self._matcher.is_shorter:  # else states would come as late in every such pass as before what it lacks
            self.holding.add(self._matcher.known(plan, self._index + 1, self._newest))
        else:
            is_exceeded = self.holding.is_exceeded(plan, recorder.peak(), self.parts)
            return self.holding.runs_short() or is_exceeded
        return True


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
