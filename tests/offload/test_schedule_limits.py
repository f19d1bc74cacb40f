"""What the GPU holds at most: in the pass, in the optimizer step, under a budget; with made-up peaks."""

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
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
    use_small_parts,
)
from torch.optim.optimizer import register_optimizer_step_post_hook

from bridge_fgo.memory.layout import part_bytes
from bridge_fgo.memory.slab import MOST_IN_TRANSIT, SlabState
from bridge_fgo.offload import policy, schedule


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    use_small_parts(monkeypatch)


def test_the_step_holds_two_parts_where_there_is_no_room():
    training = Training(layer=0, step=WHOLE)  # the step itself is the peak
    for seed in range(3):
        training.step(seed)
    parts = sorted(part.transit_bytes for part in training.schedule.parts)
    assert most_held_in(training, lambda: training.step(3)) <= 2 * parts[-1]
    training.check()


@pytest.mark.parametrize("masters", [True, False])  # of Transformer Engine's precision-aware Adam all states are new
@pytest.mark.parametrize("together", [None, 4000])
def test_the_step_that_makes_the_states_holds_two_parts_too(monkeypatch, masters, together):
    training = Training(
        layer=0, sizes=MANY_SIZES * 4, together=together, master_weights=masters, master_remainders=masters or None
    )
    training.run_pass()
    held = held_in_steps(monkeypatch, training)
    training.update(0)
    assert 0 < max(held) <= training.schedule.step_limit < sum(part.nbytes for part in training.schedule.parts) / 10
    training.end_step(True)
    training.check()


def test_parts_go_together_only_where_the_step_has_room_for_what_comes_and_leaves():
    training = Training(0, step=WHOLE, together=WHOLE, sizes=MANY_SIZES)  # the step itself is the peak
    sizes = [part.transit_bytes for part in training.schedule.parts]
    training.step(0)
    for seed in range(1, 4):
        held = most_held_in(training, lambda seed=seed: training.step(seed))
        assert held <= training.schedule.step_limit == 2 * max(sizes)
    training.check()


@pytest.mark.parametrize("expands", [True, False])
def test_held_slabs_leave_a_margin_for_holes_that_grows_with_the_activations(monkeypatch, expands):
    monkeypatch.setattr(policy, "MARGIN_SHARE", 1 / 12)
    monkeypatch.setattr(Meter, "expands", expands)
    training = Training(layer=WHOLE // 2)
    for seed in range(4):
        training.step(seed)
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
    (source,) = training.sources
    assert part_bytes(source.states(), training.engine._config) == part
    assert training.schedule.holding.margin_bytes == margin


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
def test_a_budget_keeps_what_fits_and_the_peak_under_it(share):
    layer = WHOLE // 2
    budget = 4 * layer + int(share * WHOLE)
    training = Training(layer, budget=budget)
    for seed in range(6):
        training.step(seed)
    staying = sum(part.nbytes for part in training.schedule.parts if part.stays)
    assert share * WHOLE - max(p.nbytes for p in training.schedule.parts) < staying <= share * WHOLE
    assert all(held + layer * SHAPE[i] <= budget for i, held in enumerate(training.held))
    before = training.engine.traffic.out
    training.step(9)
    assert training.engine.traffic.out - before <= WHOLE - staying + 256 * len(SIZES) * 3
    training.check()


def test_a_budget_that_cannot_be_met_is_an_error_with_the_least_one():
    training = Training(layer=WHOLE, budget=4 * WHOLE - 1)
    training.step(0)
    with pytest.raises(ValueError, match=r"gpu_memory_budget_gib=.*cannot be met.*needs 0\.01 GiB"):
        training.step(1)


@pytest.mark.parametrize("room", [0, 0.1, 0.4])
@pytest.mark.parametrize("sizes", [[1000] * 64, [1000, 300, 2000, 64, 1500, 700, 1200] * 9])
def test_the_step_in_which_masters_are_first_packed_holds_no_more_than_others(monkeypatch, sizes, room):
    whole = 12 * sum(sizes)
    training = Training(layer=whole // 8, step=int(whole * (0.5 - room)), sizes=sizes, master_remainders=None)
    training.schedule.packing.packs = False
    held = held_in_steps(monkeypatch, training)
    for seed in range(4):
        training.step(seed)
    training.schedule.packing.packs = True
    for seed in range(4, 6):
        held.clear()
        training.step(seed)
        assert 0 < max(held) <= training.schedule._plan.step
    training.check()


def test_an_evaluation_finds_nothing_held():
    training = Training(layer=WHOLE)
    for seed in range(4):
        training.step(seed)
    assert training.schedule.ledger.nbytes > 0
    training.schedule.release_everything()
    assert training.schedule.ledger.nbytes == 0
    assert {slab.state for slab in training.slabs()} == {SlabState.RELEASED}
    training.step(4)
    training.check()


def test_masters_that_cannot_leave_in_the_step_are_counted():
    training = Training(layer=WHOLE // 4, step=WHOLE)
    training.optimizers[0].ddp_config = SimpleNamespace(fp8_param_gather=True)
    training.schedule.holding.held_through_step = 4 * sum(SIZES)
    for seed in range(4):
        training.step(seed)
    assert not training.schedule.queue.to_come
    assert training.schedule._plan.step >= 4 * sum(SIZES)
    training.check()


def test_the_first_step_with_a_budget_stays_under_it_while_what_stays_comes_back():
    layer, step = WHOLE // 2, WHOLE // 2
    budget = 4 * layer + WHOLE // 2
    training = Training(layer, step, budget=budget)
    training.step(0)
    training.step(1)
    assert most_held_in(training, lambda: training.step(2)) + step <= budget
    training.check()


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_the_step_in_which_many_parts_come_to_stay_keeps_to_the_budget_too(share):
    whole, layer = 12 * 90_000 * 40, 2_500_000
    beside = POINTS // 2 * layer  # as much in the step as in forward and backward
    budget = beside + int(share * whole)
    training = Training(layer=layer, step=beside, budget=budget, sizes=[90_000] * 40)  # each a part of its own
    peaks = [most_held_in(training, lambda seed=seed: training.step(seed)) for seed in range(4)]
    assert 0 < sum(not part.stays for part in training.schedule.parts) < (1 - share) * 40 + 4
    assert max(peaks[2:]) + beside <= budget
    training.check()


def test_a_budget_that_holds_no_more_is_said_by_the_rank_that_it_concerns():
    # Another number of microbatches needs more, perhaps on another rank than 0: ranks agree on the first kind only.
    training = Training(layer=WHOLE // 2, budget=3 * WHOLE)
    said = []
    training.schedule.holding.warn = said.append
    for seed in range(3):
        training.step(seed)
    assert not said
    training.meter.layer, training.schedule.signature = WHOLE, 2
    for seed in range(3):
        training.step(seed)
    assert len(said) == 1 and "gpu_memory_budget_gib" in said[0] and "holds no more" in said[0]


def test_what_a_reader_brought_back_leaves_before_the_step_where_that_has_no_room_for_it():
    training = Training(layer=0, step=WHOLE)
    for seed in range(3):
        training.step(seed)
    training.check()  # the pass has room for what it brings back
    training.run_pass()
    assert training.held[-1] > training.schedule.step_limit >= training.schedule.ledger.nbytes
    training.update(3)
    training.end_step(True)
    training.check()


def test_states_that_do_not_exist_take_no_memory():
    training = Training(layer=0)
    training.run_pass()
    unmade = [slab for slab in training.schedule.queue.slabs if not slab.exists()]
    assert unmade and all(slab.gpu is None for slab in unmade)


def test_parts_that_are_no_more_offloaded_are_forgotten():
    training = Training(layer=WHOLE)
    for seed in range(3):
        training.step(seed)
    training.engine.begin_pass()
    schedule = training.schedule
    assert schedule.queue.leaving and schedule.queue.slabs
    training.engine.close()
    assert not (schedule.queue.leaving or schedule.queue.slabs or schedule.queue._position or schedule.parts)
    assert schedule.packing.packable_bytes == 0
    point = partial(training.engine.point, mark(1, WHOLE))
    for verb in (training.engine.release, point, training.engine.reload, training.engine.begin_pass):
        verb()  # somebody still calls it: the host memory is gone
    training.check()


@pytest.fixture
def hooked():
    """A context in which a hook hangs on the steps of all optimizers."""

    @contextmanager
    def context(hook):
        handle = register_optimizer_step_post_hook(hook)
        try:
            yield
        finally:
            handle.remove()

    return context


def average_of_weights(optimizer, args, kwargs):
    assert all(tensor.untyped_storage().nbytes() for state in optimizer.state.values() for tensor in state.values())


def test_kinetos_hook_leaves_the_step_divided(hooked):
    training = Training(layer=0, step=WHOLE)  # the step itself is the peak
    with hooked(torch.profiler._optimizer_post_hook):
        for seed in range(3):
            training.step(seed)
        largest = max(part.transit_bytes for part in training.schedule.parts)
        assert most_held_in(training, lambda: training.step(3)) <= 2 * largest
    training.check()


@pytest.mark.parametrize("optimizers", [1, 2])
def test_a_step_that_a_hook_keeps_whole_is_planned_with_all_states_and_that_is_said_once(
    monkeypatch, hooked, optimizers
):
    training = Training(layer=WHOLE // 4, step=WHOLE, optimizers=optimizers)
    warned, held = [], held_in_steps(monkeypatch, training)
    training.schedule.holding.warn = warned.append
    whole = sum(part.nbytes for part in training.schedule.parts)

    def train(seeds):
        for seed in seeds:
            held.clear()
            training.step(seed)
        return training.schedule._plan.step

    divided = train(range(4))
    assert max(held) <= divided < whole
    with hooked(average_of_weights):
        # The first is measured, as plans do not count all states yet.
        planned = train(range(4, 8))
        assert whole <= max(held) <= planned
    (line,) = warned
    assert average_of_weights.__name__ in line
    assert train(range(8, 11)) == divided
    assert max(held) <= divided
    training.check()


@pytest.mark.parametrize("when", ["from the start", "later"])
def test_a_budget_that_a_step_kept_whole_cannot_meet_is_refused_or_said_to_hold_no_more(hooked, when):
    training = Training(layer=WHOLE // 8, step=WHOLE, budget=int(1.75 * WHOLE))
    warned = []
    training.schedule.holding.warn = warned.append
    for seed in range(0 if when == "from the start" else 4):
        training.step(seed)
    with hooked(average_of_weights):
        training.step(4)
        if when == "from the start":
            with pytest.raises(ValueError, match=r"gpu_memory_budget_gib=.*cannot be met"):
                training.step(5)
        else:
            training.step(5)
            assert [average_of_weights.__name__ in line for line in warned] == [True, False]
            assert "holds no more" in warned[1]
            training.check()


@pytest.mark.parametrize("held", ["masters of quantized weights", "parts that stay"])
def test_what_goes_together_leaves_room_for_what_is_held(monkeypatch, held):
    whole = 12 * sum(MANY_SIZES)
    if held == "parts that stay":
        training = Training(whole // 2, 2 * whole, budget=2 * whole + whole // 2, sizes=MANY_SIZES, together=whole)
    else:
        training = Training(0, step=3 * whole, together=whole, sizes=MANY_SIZES, master_remainders=False)
        training.optimizers[0].ddp_config = SimpleNamespace(fp8_param_gather=True)
        training.schedule.holding.held_through_step = whole // 3 + 1024 * len(training.schedule.parts)
    for seed in range(3):
        training.step(seed)
    groups, asked = schedule._groups, []
    monkeypatch.setattr(schedule, "_groups", lambda run, together: asked.append(together) or groups(run, together))
    assert most_held_in(training, lambda: training.step(3)) <= training.schedule.step_limit
    staying = sum(part.nbytes for part in training.schedule.parts if part.stays)
    nbytes = staying + training.schedule.holding.held_through_step
    assert nbytes and asked and max(asked) <= (training.schedule._plan.step - nbytes) // schedule.GROUPS_HELD


def test_a_few_slabs_at_a_time_are_on_their_way_packed(monkeypatch):
    training = Training(layer=0, sizes=[1000] * 40, master_remainders=True)
    training.step(0)
    training.check()
    slabs = training.slabs()
    staged = seen_at_changes(monkeypatch, lambda: sum(slab.staging is not None for slab in slabs))
    for move in (training.engine.begin_pass, training.check):
        staged.clear()
        move()
        assert 0 < max(staged) <= MOST_IN_TRANSIT + 1 < len(training.schedule.parts)


@pytest.mark.parametrize("hooked", [False, True])
def test_memory_that_was_reserved_to_pack_what_then_stays_is_given_back(monkeypatch, hooked):
    use_small_parts(monkeypatch)
    # With a hook the step is not divided, and needs room for all states.
    training = Training(WHOLE // 10, budget=int((2 if hooked else 1.6) * WHOLE), master_remainders=True)
    (source,) = training.sources
    if hooked:
        training.optimizers[0].optimizer.register_step_post_hook(lambda *args: None)
    training.step(0)
    training.engine.require_writable()
    for mine, of_twin in training.pairs(source):
        mine.data.mul_(1.25)  # masters that are not what the weights were rounded from leave whole
        of_twin.data.mul_(1.25)
    for seed in range(1, 5):
        training.step(seed)
    staying = [slab for part in training.parts() if part.stays for slab in part.slabs]
    assert any(slab.codec.family is not None for slab in staying)
    assert not any(slab.staging is not None for slab in staying)
    training.check()
