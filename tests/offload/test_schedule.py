"""The schedule on real AdamW optimizers in host memory, with made-up peaks: order, and what is chosen when."""

from types import SimpleNamespace

import pytest
from fake_training import MANY_SIZES, WHOLE, Training, mark, most_held_in, trained
from hypothesis import given
from hypothesis import strategies as st
from spies import note

from bridge_fgo.engines.native import NativeEngine
from bridge_fgo.memory.remainders import Remainders
from bridge_fgo.memory.slab import Slab, SlabState
from bridge_fgo.memory.transfers import Transfers
from bridge_fgo.offload import schedule

TOGETHER = {"layer": WHOLE // 2, "together": WHOLE, "sizes": MANY_SIZES}


def test_what_the_next_update_needs_comes_by_one_copy_each_if_there_is_room_before_it():
    training = trained(4, layer=WHOLE)
    before = training.engine.traffic.back
    training.step()
    assert training.engine.traffic.back - before == sum(slab.codec.link_bytes for slab in training.slabs())
    assert training.held[-1] > 0


@pytest.mark.parametrize(
    ("optimizers", "calls", "remainders"), [(1, 1, True), (1, 2, False), (2, 1, False), (2, 2, True)]
)
def test_after_a_skipped_step_what_the_optimizer_needs_first_stays_and_no_more_is_held(optimizers, calls, remainders):
    # The step has more room than the pass: some of what is here when the pass begins need not leave.
    training = Training(WHOLE // 16, WHOLE // 2, optimizers, master_remainders=remainders)
    training.calls = calls
    training.steps(5)
    training.step(skip=True)
    training.run_pass()
    assert training.slabs()[0].state is SlabState.RESIDENT
    assert most_held_in(training, training.update) <= training.schedule.step_limit
    training.end_step()


class Behind(Transfers):
    """Copies in that have not landed when the host enqueues an update; some land only once the GPU updates."""

    late = None  # slabs that do, or None while the GPU is not past it

    def has_landed(self, slab):
        return False

    def landed_in_update(self, slab):
        return None if self.late is None else slab in self.late


def copied_out_in_the_update(training):
    training.run_pass()
    before = training.engine.traffic.out
    training.update()
    copied = training.engine.traffic.out - before
    training.end_step()
    return copied


@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("late_parts", [0, 2, 3])
def test_the_update_copies_out_as_many_bytes_as_landed_in_the_update_before_it(optimizers, late_parts):
    moves = Behind()
    training = trained(5, layer=WHOLE, optimizers=optimizers, transfers=moves, master_remainders=False)
    assert copied_out_in_the_update(training) == training.whole  # as far as the host knows, all of it may land in it
    late = training.parts()[-late_parts:] if late_parts else []
    moves.late = {slab for part in late for slab in part.slabs}
    landed, largest = sum(part.nbytes for part in late), max(part.nbytes for part in training.parts())
    assert landed <= copied_out_in_the_update(training) < landed + largest
    before = training.engine.traffic.out
    training.engine.begin_pass()
    left = training.whole - (training.engine.traffic.out - before)
    assert landed <= left < landed + largest, "the next pass copies out the rest"
    moves.shares_link = True
    training.engine.release()
    assert copied_out_in_the_update(training) == 0


@pytest.mark.parametrize("optimizers", [1, 2])
def test_masters_of_small_parts_are_packed_and_made_together(monkeypatch, optimizers):
    training = trained(optimizers=optimizers, **TOGETHER)
    moves = {"encode": [], "decode": []}
    for name, seen in moves.items():
        note(monkeypatch, seen, Remainders, name, lambda family, of: len(of))
    assert most_held_in(training, training.step) <= training.schedule.step_limit
    assert sum(moves["encode"]) == len(training.parts()) > 2 * len(moves["encode"])
    assert max(moves["decode"]) > 1


@pytest.mark.parametrize("together", [None, WHOLE])
def test_masters_that_leave_again_keep_the_memory_that_they_came_in(monkeypatch, together):
    training = trained(layer=WHOLE // 2, together=together, sizes=MANY_SIZES)
    taken = []
    note(monkeypatch, taken, Slab, "_take_staging", lambda slab: slab)
    training.run_pass()
    training.update()
    assert taken and len(set(taken)) == len(taken)
    training.end_step()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("together", [True, False])
def test_masters_whose_making_failed_are_lost_if_interrupted_or_made_with_others(monkeypatch, error, together):
    # The launch for several zeroes the weights' sums, with which the masters would be checked.
    training = trained(**TOGETHER if together else {"layer": WHOLE // 2})
    real = Remainders.decode

    def fails(family, moves):
        if together:
            real(family, moves)
        if len(moves) > together:
            raise error

    training.run_pass()
    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(Remainders, "decode", fails)
        training.update()
    assert training.engine.is_lost is (together or error is KeyboardInterrupt)
    if training.engine.is_lost:
        with pytest.raises(RuntimeError, match=f"{error.__name__} came while a part of it"):
            training.engine.require_readable()


@given(st.lists(st.integers(1, 100), max_size=30), st.integers(0, 300))
def test_groups_are_whole_in_order_and_no_larger_than_they_may_be(sizes, together):
    parts = [SimpleNamespace(transit_bytes=size) for size in sizes]
    groups = list(schedule._groups(parts, together))
    assert [part for group in groups for part in group] == parts
    held = [sum(part.transit_bytes for part in group) for group in groups]
    assert all(size <= together or len(group) == 1 for size, group in zip(held, groups, strict=True))
    assert all(size + group[0].transit_bytes > together for size, group in zip(held, groups[1:], strict=False))


@pytest.mark.parametrize(("optimizers", "step"), [(1, 0), (2, WHOLE // 2)])
def test_masters_that_are_copied_in_one_go_do_not_leave_before(monkeypatch, optimizers, step):
    sizes = [300, 700, 300, 700, 700, 300, 64, 300, 300, 40, 100, 3000]
    gone = []

    def released(engine, source, copy):
        return [slab for slab in engine._slabs_of(source) if slab.state is SlabState.RELEASED]

    note(monkeypatch, gone, NativeEngine, "write_back", released)
    training = trained(6, step=step, optimizers=optimizers, sizes=sizes, quantized=True)
    assert len(gone) == 6 * optimizers
    assert not any(slab.written_back for slabs in gone for slab in slabs)
    masters = [optimizer.shard_fp32_from_float16_groups[0] for optimizer in training.optimizers]
    assert [one.copied for one in training.optimizers] == [list(map(id, of_one)) for of_one in masters]


def test_what_has_landed_steps_first_then_what_stays_then_what_is_on_its_way(monkeypatch):
    training = trained(4, layer=WHOLE // 2, budget=2 * WHOLE + WHOLE // 3)
    parts = training.parts()
    moving = [part for part in parts if not part.stays]
    staying = [part for part in parts if part.stays]
    assert len(moving) > 1 < len(staying)
    landed = set(moving[0].slabs)
    monkeypatch.setattr(training.schedule.transfers, "has_landed", lambda slab: slab in landed)
    order = []
    training.run_pass()
    training.schedule.step(parts, order.append, keep_masters=True, group_bytes=0)
    assert order == [moving[0], *staying, *moving[1:]]


def test_what_a_reader_or_writer_brings_back_in_a_pass_leaves_again_and_a_late_point_moves_nothing():
    # MXFP8's copy to the parameter buffer reads the masters after the pass has begun, when they may be on the host.
    training = trained(4, layer=WHOLE)
    training.schedule.release_everything()
    training.engine.begin_pass()
    training.engine.require_readable(masters_only=True)
    training.engine.release()
    for i in range(1, 5):
        training.schedule.point(mark(i, WHOLE))
    assert training.schedule.ledger.nbytes == 0
    training.step()

    training = trained(layer=WHOLE // 4)
    training.run_pass()
    held = training.schedule.ledger.nbytes
    training.engine.point(mark(1, WHOLE))
    assert training.schedule.ledger.nbytes == held > 0 and training.schedule.is_planned
    training.finish()
    # Given up and begun anew, a slab that was on its way is in the line twice, and its bytes go once.
    training = Training(optimizers=2, sizes=[1000] * 20)
    training.engine.begin_pass()
    training.engine.require_writable()
    training.engine.release()
    assert training.schedule.ledger.nbytes == 0


def test_a_slab_whose_copy_out_was_given_up_frees_nothing_and_others_are_released_for_it():
    training = trained(layer=WHOLE)
    training.engine.begin_pass()
    *slabs, last = training.slabs()
    largest = max(slabs, key=lambda slab: slab.nbytes)
    assert last.nbytes <= largest.nbytes
    largest.require_writable()
    training.schedule.queue.release_down_to(largest.nbytes)
    assert training.schedule.ledger.nbytes == largest.nbytes and largest.state is SlabState.RESIDENT
    assert {slab.state for slab in (*slabs, last) if slab is not largest} == {SlabState.RELEASED}


def test_slabs_that_are_sent_back_are_to_be_prefetched_again():
    training = trained(4, layer=WHOLE // 2, budget=2 * WHOLE + WHOLE // 3)
    training.away()
    queue = training.schedule.queue
    queue.bring_ahead(2 * WHOLE)
    assert queue.is_through and training.staying
    queue.send_back(training.staying + queue.slabs[0].gpu_bytes)
    assert [slab.state for slab in queue.slabs[:2]] == [SlabState.RELOADING, SlabState.OFFLOADING]
    assert list(queue.to_come) == queue.slabs[1:] and not queue.is_through
    training.engine.reload()
    training.finish()


def test_masters_that_could_not_leave_are_checked_before_they_are_packed(monkeypatch):
    # Somebody may write them before they leave.
    training = trained(1)
    training.check()
    masters = next(slab for slab in training.slabs() if slab.written_back)
    masters.codec.just_rounded = True  # updated just now

    def no_memory(slab):
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no memory"):
        patch.setattr(Slab, "adopt", no_memory)
        masters.offload()
    assert not masters.codec.just_rounded


def test_masters_of_a_group_whose_copy_out_is_refused_are_here_whole(monkeypatch):
    training = trained(**TOGETHER)
    training.run_pass()
    encode, encoded = schedule.encode_together, []

    def refuse(*args):
        raise RuntimeError("refused")

    def encodes(slabs):
        encoded[:] = encode(slabs)
        if encoded:
            patch.setattr(type(training.schedule.transfers), "copy_out", refuse)
        return set(encoded)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="refused"):
        patch.setattr(Transfers, "has_landed", lambda *of: False)
        patch.setattr(schedule, "encode_together", encodes)
        training.update()
    assert len(encoded) > 1 and not any(slab.is_encoded for slab in encoded)
    training.made.clear()  # parts of the optimizer are a step ahead
