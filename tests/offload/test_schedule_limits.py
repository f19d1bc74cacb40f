"""What the GPU holds at most: in the pass, in the optimizer step, under a budget; with made-up peaks."""

from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import pytest
from fake_training import (
    MANY_SIZES,
    POINTS,
    SHAPE,
    SIZES,
    WHOLE,
    Meter,
    Training,
    held_in_steps,
    mark,
    most_held_in,
    seen_at_changes,
    trained,
    use_small_parts,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from spies import note
from torch.optim.optimizer import register_optimizer_step_post_hook

from bridge_fgo.memory.layout import part_bytes
from bridge_fgo.memory.slab import MOST_IN_TRANSIT
from bridge_fgo.memory.transfers import Transfers
from bridge_fgo.offload import policy
from bridge_fgo.offload.slab_queue import SlabQueue


def two_parts(training):
    return 2 * max(part.transit_bytes for part in training.parts())


@contextmanager
def hooked(hook):
    """A hook hangs on the steps of all optimizers."""
    handle = register_optimizer_step_post_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def average_of_weights(optimizer, args, kwargs):
    assert all(tensor.untyped_storage().nbytes() for state in optimizer.state.values() for tensor in state.values())


# The step.


HOW = {
    "layer": st.sampled_from([0, WHOLE // 16, WHOLE // 2]),
    "step": st.sampled_from([0, WHOLE // 2, 2 * WHOLE]),
    "optimizers": st.integers(1, 2),
    "sizes": st.sampled_from([SIZES, MANY_SIZES, [1000] * 40]),
    "together": st.sampled_from([None, WHOLE // 4, WHOLE]),
    "quantized": st.booleans(),
    "master_weights": st.sampled_from([True, True, False]),  # of TE's precision-aware Adam all states are new
}
STEPS = st.lists(
    st.sampled_from(["update", "update", "skip", "read before", "pack from now on"]), min_size=4, max_size=7
)


@settings(max_examples=25, deadline=None)
@given(st.fixed_dictionaries(HOW), st.none() | st.sampled_from([0.3, 0.5, 0.8]), STEPS, st.integers(1, 2))
def test_no_step_holds_more_than_its_limit_nor_than_a_budget_leaves(how, share, steps, calls):
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_small_parts(monkeypatch)
        training = Training(**how)
        in_any_case = training.schedule.holding.held_through_step + two_parts(training)
        if share is not None:
            budget = max(POINTS // 2 * how["layer"], how["step"] + in_any_case) + int(share * training.whole)
            training = Training(budget=budget, **how)
        schedule, training.calls = training.schedule, calls
        training.pack(False)
        held = held_in_steps(monkeypatch, training)
        for what in steps:
            if what == "pack from now on":
                training.pack(True)
            elif what == "read before":
                training.engine.require_readable()
            training.run_pass()
            held[:], limit = [schedule.ledger.nbytes], schedule.step_limit
            assert schedule.is_planned or limit == in_any_case + training.staying
            if what == "skip":
                training.end_step(False)
            else:
                training.finish()
            assert max(held) <= limit
            assert share is None or not schedule.is_planned or max(held) + how["step"] <= budget


def test_a_few_slabs_at_a_time_are_on_their_way_packed(monkeypatch):
    training = trained(1, sizes=[1000] * 40)
    training.check()
    slabs = training.slabs()
    staged = seen_at_changes(monkeypatch, lambda: sum(slab.staging is not None for slab in slabs))
    for move in (training.engine.begin_pass, training.check):
        staged.clear()
        move()
        assert 0 < max(staged) <= MOST_IN_TRANSIT + 1 < len(training.parts())


def test_by_a_new_plan_nothing_comes_before_the_allocator_has_returned_what_it_caches_once(monkeypatch):
    training, order = trained(2, layer=WHOLE // 2), []
    for owner, name in ((SlabQueue, "return_cached"), (Transfers, "copy_in")):
        note(monkeypatch, order, owner, name, name)
    training.run_pass()
    assert order[0] == "return_cached" and set(order[1:]) == {"copy_in"}
    training.finish()
    order.clear()
    training.run_pass()
    assert set(order) == {"copy_in"} and any(before < after for before, after in pairwise(training.held))


# Between steps, and at the begin and the end.


def test_states_that_do_not_exist_take_no_memory_and_parts_that_are_no_more_offloaded_are_forgotten():
    training = Training()
    training.run_pass()
    unmade = [slab for slab in training.schedule.queue.slabs if not slab.exists()]
    assert unmade and all(slab.gpu is None for slab in unmade)

    training = trained(layer=WHOLE)
    training.engine.begin_pass()
    queue = training.schedule.queue
    assert queue.leaving and queue.slabs
    training.engine.close()
    assert not (queue.leaving or queue.slabs or queue._position or training.parts())
    point = partial(training.engine.point, mark(1, WHOLE))
    for verb in (training.engine.release, point, training.engine.reload, training.engine.begin_pass):
        verb()  # somebody still calls it: the host memory is gone


# The margin.


@pytest.mark.parametrize("expands", [True, False])
def test_held_slabs_leave_a_margin_for_holes_that_grows_with_the_activations(monkeypatch, expands):
    monkeypatch.setattr(policy, "MARGIN_SHARE", 1 / 12)
    monkeypatch.setattr(Meter, "expands", expands)
    training = trained(4, layer=WHOLE // 2)
    activations = 4 * (WHOLE // 2)
    margin = activations // 12 * (1 if expands else 3)
    assert any(training.held[1:-1])
    in_use = [held + WHOLE // 2 * SHAPE[i] for i, held in enumerate(training.held)]
    assert all(training.held[i] == 0 or in_use[i] <= activations - margin for i in range(len(in_use)))


@pytest.mark.parametrize(("while_enqueuing", "part", "margin"), [(1, 1024, 4 * 1024), (200, 4029, WHOLE // 16)])
def test_the_least_margin_is_four_parts_and_at_most_a_16th_of_the_states(monkeypatch, while_enqueuing, part, margin):
    monkeypatch.setattr("bridge_fgo.memory.layout.BYTES_WHILE_ENQUEUING", while_enqueuing)
    monkeypatch.setattr("bridge_fgo.memory.layout.LEAST_PART_BYTES", 1024)
    monkeypatch.setattr("bridge_fgo.engines.offloaded_source.MARGIN_PARTS", 4)
    training = Training(layer=WHOLE)
    assert part_bytes(training.sources[0].states(), training.engine.config) == part
    assert training.schedule.holding.margin_bytes == margin


# A budget.


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
def test_a_budget_keeps_what_fits_and_the_peak_under_it(share):
    layer = WHOLE // 2
    budget = 4 * layer + int(share * WHOLE)
    training = trained(6, layer=layer, budget=budget)
    assert share * WHOLE - max(p.nbytes for p in training.parts()) < training.staying <= share * WHOLE
    assert all(held + layer * SHAPE[i] <= budget for i, held in enumerate(training.held))
    before = training.engine.traffic.out
    training.step()
    assert training.engine.traffic.out - before <= WHOLE - training.staying + 256 * len(SIZES) * 3


class BlockMeter(Meter):
    """Peaks of an allocator whose blocks are half as large again as what is asked for."""

    def end_interval(self):
        slabs = [slab for part in self.schedule.parts for slab in part.slabs if slab.gpu is not None]
        blocks = sum(half_more(slab.gpu.untyped_storage().nbytes()) for slab in slabs)
        return super().end_interval() - self.schedule.ledger.nbytes + blocks


def half_more(nbytes):
    return nbytes * 3 // 2


@pytest.mark.parametrize("share", [0.3, 0.8])
def test_a_budget_holds_also_where_blocks_are_larger_than_slabs(monkeypatch, share):
    monkeypatch.setattr("bridge_fgo.engines.native.block_rounding", lambda device: half_more)
    budget = 4 * WHOLE + int(share * WHOLE)
    meter = BlockMeter(WHOLE)
    training = Training(budget=budget, meter=meter, master_remainders=False)
    point, peaks = training.engine.point, []
    monkeypatch.setattr(training.engine, "point", lambda mark: (point(mark), peaks.append(meter.end_interval())))
    training.steps(4)
    assert max(peaks) <= budget and training.staying


def test_a_budget_that_cannot_be_met_is_an_error_and_one_that_holds_no_more_is_said():
    training = trained(1, layer=WHOLE, budget=4 * WHOLE - 1)
    with pytest.raises(ValueError, match=r"gpu_memory_budget_gib=.*cannot be met.*needs 0\.01 GiB"):
        training.step()
    # Another number of microbatches needs more, perhaps on another rank than 0: ranks agree on the first kind only.
    training = trained(layer=WHOLE // 2, budget=3 * WHOLE)
    assert not training.said
    training.meter.layer, training.schedule.kind = WHOLE, 2
    training.steps(3)
    (said,) = training.said
    assert "gpu_memory_budget_gib" in said and "holds no more" in said


@pytest.mark.parametrize("whole_step", [False, True])
def test_memory_that_was_reserved_to_pack_what_then_stays_is_given_back(whole_step):
    # With a hook the step is not divided, and needs room for all states.
    training = Training(WHOLE // 10, budget=int((2 if whole_step else 1.6) * WHOLE))
    if whole_step:
        training.optimizers[0].optimizer.register_step_post_hook(lambda *args: None)
    training.step()
    training.engine.require_writable()
    for pair in training.pairs(*training.sources):
        for param in pair:
            param.data.mul_(1.25)  # masters that are not what the weights were rounded from leave whole
    training.steps(4)
    staying = [slab for part in training.parts() if part.stays for slab in part.slabs]
    assert any(slab.codec.family is not None for slab in staying)
    assert not any(slab.staging is not None for slab in staying)


@pytest.mark.parametrize("layer", [WHOLE // 4, WHOLE])
def test_steps_outside_of_training_hold_no_more_than_their_limit(layer):
    training = trained(5, layer=layer, step=4 * layer)
    training.engine.offload_now()
    for _ in range(3):
        assert most_held_in(training, training.update) <= training.schedule.step_limit < training.whole


# A step that a hook keeps whole.


@pytest.mark.parametrize("optimizers", [1, 2])
def test_a_step_that_a_hook_keeps_whole_is_planned_with_all_states_and_that_is_said_once(monkeypatch, optimizers):
    training = Training(layer=WHOLE // 4, step=WHOLE, optimizers=optimizers)
    held = held_in_steps(monkeypatch, training)

    def train(steps):
        for _ in range(steps):
            held.clear()
            training.step()
            held.append(training.schedule.ledger.nbytes)
        return training.schedule._plan.step

    divided = train(4)
    assert max(held) <= divided < training.whole
    with hooked(average_of_weights):
        # The first is measured, as plans do not count all states yet.
        planned = train(4)
        assert training.whole <= max(held) <= planned
    (line,) = training.said
    assert average_of_weights.__name__ in line
    assert train(3) == divided
    assert max(held) <= divided


@pytest.mark.parametrize("steps_before", [0, 4])
def test_a_budget_that_a_step_kept_whole_cannot_meet_is_refused_or_said_to_hold_no_more(steps_before):
    training = trained(steps_before, layer=WHOLE // 8, step=WHOLE, budget=int(1.75 * WHOLE))
    with hooked(average_of_weights):
        training.step()
        if steps_before:
            training.step()
            assert [average_of_weights.__name__ in line for line in training.said] == [True, False]
            assert "holds no more" in training.said[1]
        else:
            with pytest.raises(ValueError, match=r"gpu_memory_budget_gib=.*cannot be met"):
                training.step()
