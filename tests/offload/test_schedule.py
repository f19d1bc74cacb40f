"""The schedule on real AdamW optimizers in host memory, with made-up peaks: bits, order, what is chosen when."""

from types import SimpleNamespace

import pytest
import torch
from fake_training import MANY_SIZES, POINTS, SIZES, WHOLE, Training, mark, most_held_in, use_small_parts
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from bridge_fgo.engines.native import NativeEngine
from bridge_fgo.memory.remainders import Remainders
from bridge_fgo.memory.slab import Slab, SlabState
from bridge_fgo.offload import schedule
from bridge_fgo.offload.packing_policy import (
    IN_A_ROW,
    MOST_TIMED,
    MOST_UNPLANNED,
    PACKING_SECONDS_A_BYTE,
    WATCHED_STEPS,
)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    use_small_parts(monkeypatch)


@pytest.mark.parametrize("layer", [0, WHOLE // 10, WHOLE // 4, WHOLE])
@pytest.mark.parametrize("optimizers", [1, 2])
def test_bits_are_those_of_a_run_without_offload(layer, optimizers):
    training = Training(layer, optimizers=optimizers)
    for seed in range(6):
        training.step(seed)
    training.check()


def test_slabs_leave_late_and_come_early_once_peaks_are_known():
    training = Training(layer=WHOLE // 4)
    for seed in range(2):
        training.step(seed)
        assert training.held == [0] * (POINTS + 1)  # released throughout, until there are peaks to go by
    for seed in range(2, 5):
        training.step(seed)
        held = training.held
        assert held[0] > held[2] > 0 == held[4]
    assert held[-1] > held[-3] > 0


def test_states_that_have_not_left_yet_come_back_without_a_copy():
    # Activations need no more than states do: nothing has to leave at point 0.
    training = Training(layer=WHOLE)
    for seed in range(4):
        training.step(seed)
    before = training.engine.traffic.back
    training.step(9)
    moved = training.engine.traffic.back - before
    assert moved == sum(slab.codec.link_bytes for slab in training.slabs())
    assert training.held[-1] > 0


@pytest.mark.parametrize("remainders", [True, False])
@pytest.mark.parametrize(("optimizers", "calls"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_after_a_skipped_step_what_the_optimizer_needs_first_stays_and_no_more_is_held(optimizers, calls, remainders):
    # The step has more room than the pass: some of what is here when the pass begins need not leave.
    training = Training(WHOLE // 16, WHOLE // 2, optimizers, master_remainders=remainders)
    training.calls = calls
    for seed in range(5):
        training.step(seed)
    training.step(5, skip=True)
    first = training.schedule.parts[0].slabs[0]
    training.run_pass()
    assert first.state is SlabState.RESIDENT
    assert most_held_in(training, lambda: training.update(6)) <= training.schedule.step_limit
    training.end_step(updated=True)
    training.check()


@pytest.mark.parametrize("optimizers", [1, 2])
def test_masters_of_small_parts_are_packed_and_made_together(monkeypatch, optimizers):
    training = Training(WHOLE // 2, optimizers=optimizers, together=WHOLE, sizes=MANY_SIZES, master_remainders=True)
    for seed in range(3):
        training.step(seed)
    moves = {"encode": [], "decode": []}
    for name, seen in moves.items():
        real = getattr(Remainders, name)
        monkeypatch.setattr(
            Remainders, name, lambda family, of, real=real, seen=seen: (seen.append(len(of)), real(family, of))[1]
        )
    training.run_pass()
    for seen in moves.values():
        seen.clear()  # of what came or went between
    assert most_held_in(training, lambda: training.update(3)) <= training.schedule.step_limit
    training.end_step(updated=True)
    parts = len(training.schedule.parts)
    assert sum(moves["encode"]) == parts > 2 * len(moves["encode"])
    assert max(moves["decode"]) > 1
    training.check()


@pytest.mark.parametrize("together", [None, WHOLE])
def test_masters_that_leave_again_keep_the_memory_that_they_came_in(monkeypatch, together):
    training = Training(WHOLE // 2, together=together, sizes=MANY_SIZES, master_remainders=True)
    for seed in range(3):
        training.step(seed)
    take, taken = Slab._take_staging, []
    monkeypatch.setattr(Slab, "_take_staging", lambda slab: (taken.append(slab), take(slab)))
    training.run_pass()
    training.update(3)
    assert taken and len(set(taken)) == len(taken)
    training.end_step(updated=True)
    training.check()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_masters_whose_making_together_was_interrupted_are_lost(monkeypatch, error):
    # The launch zeroes the weights' sums, with which the masters would be checked.
    training = Training(WHOLE // 2, together=WHOLE, sizes=MANY_SIZES, master_remainders=True)
    for seed in range(3):
        training.step(seed)
    real = Remainders.decode

    def interrupted(family, moves):
        real(family, moves)
        if len(moves) > 1:
            raise error

    monkeypatch.setattr(Remainders, "decode", interrupted)
    training.run_pass()
    with pytest.raises(error):
        training.update(3)
    assert training.engine.is_lost
    with pytest.raises(RuntimeError, match=f"{error.__name__} came while a part of it"):
        training.engine.require_readable()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_masters_that_are_made_alone_are_as_they_were_after_an_error_and_lost_after_an_interruption(monkeypatch, error):
    training = Training(WHOLE // 2, master_remainders=True)  # groups of one part each
    for seed in range(3):
        training.step(seed)

    def interrupted(family, moves):
        assert len(moves) == 1
        raise error

    training.run_pass()
    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(Remainders, "decode", interrupted)
        training.update(3)
    assert training.engine.is_lost is (error is KeyboardInterrupt)
    if not training.engine.is_lost:
        training.check()  # no part was updated


@given(st.lists(st.integers(1, 100), max_size=30), st.integers(0, 300))
def test_groups_are_whole_in_order_and_no_larger_than_they_may_be(sizes, together):
    parts = [SimpleNamespace(transit_bytes=size) for size in sizes]
    groups = list(schedule._groups(parts, together))
    assert [part for group in groups for part in group] == parts
    held = [sum(part.transit_bytes for part in group) for group in groups]
    assert all(size <= together or len(group) == 1 for size, group in zip(held, groups, strict=True))
    assert all(size + group[0].transit_bytes > together for size, group in zip(held, groups[1:], strict=False))


def test_every_master_is_copied_to_the_model_once_a_step():
    training = Training(layer=WHOLE // 4)
    for seed in range(3):
        training.step(seed)
        masters = [id(m) for m in training.optimizers[0].shard_fp32_from_float16_groups[0]]
        assert sorted(training.optimizers[0].copied) == sorted(masters)


def test_quantized_weights_are_copied_in_one_go():
    training = Training(layer=WHOLE // 4)
    training.optimizers[0].ddp_config = SimpleNamespace(fp8_param_gather=True)
    calls = []
    copy = training.optimizers[0]._copy_main_params_to_model_params
    training.optimizers[0]._copy_main_params_to_model_params = lambda: (calls.append(1), copy())
    training.step(0)
    assert calls == [1]
    training.check()


@pytest.mark.parametrize(("optimizers", "remainders", "step"), [(1, True, 0), (2, False, WHOLE // 2)])
def test_masters_that_are_copied_in_one_go_do_not_leave_before(monkeypatch, optimizers, remainders, step):
    sizes = [300, 700, 300, 700, 700, 300, 64, 300, 300, 40, 100, 3000]
    write_back, gone = NativeEngine.write_back, []

    def writes_back(engine, source, copy):
        gone.append([slab for slab in engine._slabs_of(source) if slab.state is SlabState.RELEASED])
        return write_back(engine, source, copy)

    monkeypatch.setattr(NativeEngine, "write_back", writes_back)
    training = Training(0, step, optimizers=optimizers, sizes=sizes, master_remainders=remainders)
    for optimizer in training.optimizers:
        optimizer.ddp_config = SimpleNamespace(fp8_param_gather=True)
    for seed in range(6):
        training.step(seed)
    assert len(gone) == 6 * optimizers
    assert not any(slab.written_back for slabs in gone for slab in slabs)
    training.check()


def test_a_pass_that_ends_before_the_measured_one_is_planned_for_itself():
    training = Training(layer=WHOLE // 4)
    for seed in range(3):
        training.step(seed)
    for seed in range(3, 6):
        training.step(seed, points=POINTS - 2)
    assert training.held[0] > training.held[3] > training.held[4] == 0
    planned = sorted(len(plan.leave) for plan in training.schedule.holding.plans)
    assert planned == [POINTS - 1, POINTS + 1]
    training.check()


def test_another_number_of_microbatches_is_measured_for_itself():
    training = Training(layer=WHOLE // 4)
    for seed in range(3):
        training.step(seed)
    training.schedule.signature = 2
    training.step(3)
    assert training.held == [0] * (POINTS + 1)
    training.step(4)
    assert training.held[0] > 0
    training.schedule.signature = 1
    training.step(5)
    assert training.held[0] > 0


def test_what_has_landed_steps_first_then_what_stays_then_what_is_on_its_way(monkeypatch):
    training = Training(layer=WHOLE // 2, budget=2 * WHOLE + WHOLE // 3)
    for seed in range(4):
        training.step(seed)
    parts = training.schedule.parts
    moving = [part for part in parts if not part.stays]
    staying = [part for part in parts if part.stays]
    assert len(moving) > 1 < len(staying)
    landed = set(moving[0].slabs)
    monkeypatch.setattr(training.schedule.transfers, "has_landed", lambda slab: slab in landed)
    order = []
    training.run_pass()
    training.schedule.step(parts, order.append, keep_masters=True, group_bytes=0)
    assert order == [moving[0], *staying, *moving[1:]]


def test_ranks_keep_to_what_the_tightest_of_them_has_room_for():
    training = Training(layer=WHOLE // 2, budget=4 * WHOLE)
    training.schedule.holding.agree = lambda room, least: (0, least)
    for seed in range(4):
        training.step(seed)
    assert not any(part.stays for part in training.schedule.parts)
    training = Training(layer=WHOLE // 2, budget=4 * WHOLE)
    training.schedule.holding.agree = lambda room, least: (room, 5 * WHOLE)
    training.step(0)
    with pytest.raises(ValueError, match="cannot be met"):
        training.step(1)


class Waits:
    """A meter that has found the same seconds in every step that was timed."""

    def __init__(self, seconds):
        self.seconds, self.timed, self.is_timing, self._ended = seconds, 0, False, False

    def begin(self):
        self.is_timing = True

    def end(self):
        self._ended, self.is_timing = self.is_timing, False
        self.timed += self._ended

    def drop(self):
        self.is_timing = False

    def take(self):
        ended, self._ended = self._ended, False
        return self.seconds if ended else None


def time_waits(training, seconds):
    """Has the training packed as on a GPU, where it waits that long for copies; returns the meter and what is said."""
    waits, said = Waits(seconds), []
    packing = training.schedule.packing
    packing._waits, packing._announce, packing._why = waits, said.append, ""
    return waits, said


PACKING_SECONDS = PACKING_SECONDS_A_BYTE * 4 * sum(SIZES)


@pytest.mark.parametrize("packing_pays", [True, False])
def test_masters_are_copied_in_part_once_training_waits_longer_than_packing_takes(packing_pays):
    training = Training(layer=WHOLE // 4, master_remainders=None)
    waits, said = time_waits(training, PACKING_SECONDS * (1.1 if packing_pays else 0.9))
    copied = []
    for seed in range(14):
        before = training.engine.traffic.out
        training.step(seed)
        copied.append(training.engine.traffic.out - before)
    training.check()
    whole = [slab.nbytes for slab in training.slabs()]
    in_part = [slab.codec.link_bytes for slab in training.slabs()]
    # Steps 1 and 2 are measured, 3 is the first by a plan and brings nothing back early: 4 and 5 are timed.
    assert copied[4] == sum(whole)
    assert copied[-1] == sum(in_part if packing_pays else whole)
    assert waits.timed == (IN_A_ROW if packing_pays else MOST_TIMED)
    assert len(said) == packing_pays


def scale_weights(optimizer):
    for weight in optimizer.model_float16_groups[0]:
        weight.mul_(1.5)


@pytest.mark.parametrize("when", ["between steps", "in the pass"])
@pytest.mark.parametrize("every", [1, WATCHED_STEPS])
def test_masters_are_copied_whole_for_good_where_something_else_changes_weights(when, every):
    training = Training(layer=WHOLE // 4, master_remainders=None)
    _, said = time_waits(training, 1.0)
    warned = []
    training.schedule.holding.warn = warned.append
    for seed in range(14):
        if when == "in the pass":
            training.run_pass()
        if seed % every == 0:
            for optimizer in (*training.optimizers, *training.twins):
                scale_weights(optimizer)
        training.step(seed)
    training.check()
    assert not any(slab.is_encoded for slab in training.slabs())
    assert (len(warned), said) == (1, [])


def by_who_has_states_brought_back(engine, source, optimizer):
    engine.require_writable(source)
    scale_weights(optimizer)


def by_who_writes_masters_anew(engine, source, optimizer):
    scale_weights(optimizer)
    with engine.overwriting_masters(source):
        make_masters_anew(optimizer)


def make_masters_anew(optimizer):
    for master, weight in zip(
        optimizer.shard_fp32_from_float16_groups[0], optimizer.model_float16_groups[0], strict=True
    ):
        master.copy_(weight)


@pytest.mark.parametrize("change", [by_who_has_states_brought_back, by_who_writes_masters_anew])
def test_a_change_of_weights_that_packed_masters_would_allow_does_not_keep_them_whole(change):
    training = Training(layer=WHOLE // 4, master_remainders=None)
    time_waits(training, 1.0)
    (source,), (twin,) = training.sources, training.twins
    for seed in range(9):
        training.step(seed, skip=seed == 2, passes=1 + seed % 2)
        if seed % 3 == 0:
            change(training.engine, source, source.optimizer)
            scale_weights(twin)
            if change is by_who_writes_masters_anew:
                make_masters_anew(twin)
    assert training.schedule.packing.packs
    assert any(slab.is_encoded for slab in training.slabs())
    training.check()


@pytest.mark.parametrize("packing_pays", [True, False])
def test_under_a_budget_only_masters_that_move_are_weighed(packing_pays):
    training = Training(layer=WHOLE // 8, budget=int(1.3 * WHOLE), master_remainders=None)
    waits, _ = time_waits(training, 0.0)
    for seed in range(3):
        training.step(seed)
    parts = [part for part in training.schedule.parts if not part.stays]
    moving = sum(slab.nbytes for part in parts for slab in part.slabs if slab.codec.family is not None)
    assert 0 < moving < 4 * sum(SIZES)
    waits.seconds = PACKING_SECONDS_A_BYTE * moving * (1.1 if packing_pays else 0.9)
    for seed in range(3, 8):
        training.step(seed)
    assert training.schedule.packing.packs is packing_pays
    training.check()


def test_a_step_that_is_skipped_says_nothing_of_waits():
    training = Training(layer=WHOLE // 4, master_remainders=None)
    waits, _ = time_waits(training, 1.0)
    for seed in range(3):
        training.step(seed)
    training.step(3, skip=True)
    assert waits.timed == 0
    training.step(4)
    assert waits.timed == 1
    training.check()


def test_where_no_plan_holds_masters_are_packed_all_the_same():
    training = Training(layer=WHOLE // 4, master_remainders=None)
    waits, said = time_waits(training, 0.0)
    for seed in range(MOST_UNPLANNED):
        assert not training.schedule.packing.packs
        training.step(seed)
        training.meter.layer += 4  # each larger than all before
    assert training.schedule.packing.packs
    assert (waits.timed, len(said)) == (0, 1)
    training.step(9)
    training.check()


@pytest.mark.parametrize(
    "settings",
    [{"master_remainders": True}, {"master_remainders": False}, {"master_weights": False, "master_remainders": None}],
)
def test_nothing_is_timed_where_no_choice_is_left(settings):
    training = Training(layer=WHOLE // 4, **settings)
    waits, said = time_waits(training, 1.0)
    for seed in range(6):
        training.step(seed)
    assert (waits.timed, said) == (0, [])
    training.check()


class AnyOrder(RuleBasedStateMachine):
    """Steps, skips, second passes, readers, loads and evaluations in any order leave the bits of a resident run."""

    @initialize(
        layer=st.integers(0, WHOLE),
        step=st.integers(0, 4 * WHOLE),
        optimizers=st.integers(1, 2),
        budget=st.none() | st.integers(0, WHOLE),
        calls=st.integers(1, 2),
    )
    def start(self, layer, step, optimizers, budget, calls):
        if budget is not None:
            budget += max(4 * layer, step + WHOLE)
        self.training = Training(layer, step, optimizers, budget, master_remainders=None)
        self.training.calls = calls

    @rule(seed=st.integers(0, 99), passes=st.integers(1, 2), skip=st.booleans(), points=st.sampled_from([8, 8, 8, 6]))
    def step(self, seed, passes, skip, points):
        self.training.step(seed, passes, skip, points)

    @rule(points=st.integers(0, POINTS))
    def break_off_a_pass(self, points):
        self.training.run_pass(points)
        self.training.end_step(updated=False)

    @rule()
    def read(self):
        self.training.check()

    @rule(packs=st.booleans())
    def choose_how_masters_are_copied(self, packs):
        self.training.schedule.packing.packs = packs

    @rule()
    def evaluate(self):
        self.training.schedule.release_everything()

    @rule(seed=st.integers(0, 99))
    def write(self, seed):
        self.training.engine.require_writable()
        for pair in zip(self.training.optimizers, self.training.twins, strict=True):
            for one in pair:
                generator = torch.Generator().manual_seed(seed)
                for master in one.shard_fp32_from_float16_groups[0]:
                    master.copy_(torch.randn(master.shape, generator=generator))

    @rule(signature=st.integers(1, 2))
    def ramp_up(self, signature):
        self.training.schedule.signature = signature

    def teardown(self):
        if hasattr(self, "training"):
            self.training.check()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=80, stateful_step_count=20, deadline=None)


def test_what_a_reader_brings_back_before_forward_leaves_again():
    # MXFP8's copy to the parameter buffer reads the masters after the pass has begun, when they may be on the host.
    training = Training(layer=WHOLE)
    for seed in range(4):
        training.step(seed)
    training.schedule.release_everything()
    training.engine.begin_pass()
    training.engine.require_readable(masters_only=True)
    training.engine.release()
    for i in range(1, 5):
        training.schedule.point(mark(i, WHOLE))
    assert training.schedule.ledger.nbytes == 0
    training.step(4)
    training.check()


def test_masters_that_could_not_leave_are_checked_before_they_are_packed(monkeypatch):
    # Somebody may write them before they leave.
    training = Training(layer=0, master_remainders=True)
    training.step(0)
    training.check()
    masters = next(slab for slab in training.schedule.parts[0].slabs if slab.written_back)
    masters.codec.just_rounded = True  # updated just now

    def no_memory(slab):
        raise RuntimeError("no memory")

    monkeypatch.setattr(Slab, "adopt", no_memory)
    with pytest.raises(RuntimeError, match="no memory"):
        masters.offload()
    assert not masters.codec.just_rounded


def test_masters_of_a_group_whose_copy_out_is_refused_are_here_whole(monkeypatch):
    training = Training(WHOLE // 2, together=WHOLE, sizes=MANY_SIZES, master_remainders=True)
    for seed in range(3):
        training.step(seed)
    training.run_pass()
    encode, encoded = schedule.encode_together, []

    def refuse(*args):
        raise RuntimeError("refused")

    def encodes(slabs):
        encoded[:] = encode(slabs)
        if encoded:
            monkeypatch.setattr(type(training.schedule.transfers), "copy_out", refuse)
        return set(encoded)

    monkeypatch.setattr(schedule, "encode_together", encodes)
    with pytest.raises(RuntimeError, match="refused"):
        training.update(3)
    assert len(encoded) > 1 and not any(slab.is_encoded for slab in encoded)


def test_a_point_after_the_last_backward_moves_nothing():
    training = Training(layer=WHOLE // 4)
    for seed in range(3):
        training.step(seed)
    training.run_pass()
    held = training.schedule.ledger.nbytes
    training.engine.point(mark(1, WHOLE))
    assert training.schedule.ledger.nbytes == held > 0 and training.schedule.is_planned
    training.update(3)
    training.end_step(True)
    training.check()


def test_what_was_written_in_mid_pass_leaves_with_the_rest():
    # Given up and begun anew, a slab that was on its way is in the line twice, and its bytes go once.
    training = Training(layer=0, optimizers=2, master_remainders=True, sizes=[1000] * 20)
    training.engine.begin_pass()
    training.engine.require_writable()
    training.engine.release()
    assert training.schedule.ledger.nbytes == 0
