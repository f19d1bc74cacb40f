"""When masters are packed."""

from contextlib import contextmanager

import pytest
import torch
from fake_training import WHOLE, Training, masters_of, weights_of

from bridge_fgo.engines.packed_masters import PACKING_SECONDS, WATCHED_STEPS
from bridge_fgo.memory.remainders import Remainders
from bridge_fgo.memory.transfers import Transfers


def watched(layer=WHOLE // 4, master_remainders=None, **how):
    """Return a training that packs masters by default, and the lines that announce it."""
    training, announced = Training(layer, master_remainders=master_remainders, **how), []
    training.engine.masters._announce = announced.append
    return training, announced


def packing_seconds(training):
    return PACKING_SECONDS * sum(slab.nbytes for slab in training.slabs() if slab.codec.family is not None)


class Waits(Transfers):
    """Copies that are waited for `each` seconds, and the clock that times these waits."""

    each, measured = 0.0, None

    def wait_in(self, slab):
        with self.timing():
            pass

    wait_out = wait_in

    @contextmanager
    def measure(self):
        yield
        self.measured = (self.measured or 0.0) + self.each

    def begin_step(self):
        self.measured = None

    def seconds(self):
        return self.measured


def waiting(share):
    """Return a training whose undisturbed step waits for that share of what packing takes, and its `Waits`."""
    training, announced = watched(transfers=(waits := Waits()))
    training.engine.masters._waits = waits
    training.step()  # makes the moments
    waits.each = 1.0
    training.step()
    waits.each = share * packing_seconds(training) / waits.measured
    training.engine.masters._watched = 0
    return training, announced, waits


def scale_weights(*optimizers):
    for weight in (weight for optimizer in optimizers for weight in weights_of(optimizer)):
        weight.mul_(1.5)


@pytest.mark.parametrize(
    "said",
    [
        [0.9] * 20,
        [1.1, 1.1, 0.9, 1.1] * 5,
        [1.1, None] * 10,
        [0.9, *[1.1] * 19],
        [*[1.1] * WATCHED_STEPS, 0.9, *[1.1] * 15],
    ],
)
def test_masters_are_packed_once_so_many_steps_in_a_row_waited_for_copies_for_longer_than_packing_takes(
    said, monkeypatch
):
    training, announced = watched()
    masters = training.engine.masters
    is_long = [True]  # the step before each that is watched; nothing is known before the first
    for number, times in enumerate(said):  # that this step waits so long as packing takes; None: it ends too late
        training.step()
        in_a_row = number > WATCHED_STEPS and all(is_long[-WATCHED_STEPS - 2 :])
        assert masters.remainders.wanted is in_a_row is bool(announced)
        if in_a_row:
            break
        assert masters.checks_weights is is_long[-1]
        seconds = None if times is None else times * packing_seconds(training)
        monkeypatch.setattr(masters._waits, "seconds", lambda seconds=seconds: seconds)
        is_long.append(is_long[-1] if times is None else times > 1)
    assert in_a_row is (said[2] != 0.9 and said[3] != 0.9)
    training.check()


@pytest.mark.parametrize("among", ["passes that are run again", "skipped steps"])
def test_passes_without_an_update_keep_no_step_from_being_long(among):
    training, announced, _ = waiting(1.1)
    for _ in range(2 + WATCHED_STEPS):
        if among == "skipped steps":
            training.step(skip=True)  # waits for less
        training.step(passes=2 if among == "passes that are run again" else 1)
    assert training.engine.masters.remainders.wanted and announced
    training.check()


def test_what_is_waited_for_between_steps_is_not_timed_and_makes_no_step_long():
    training, _, waits = waiting(0.5)
    for _ in range(3 + 2 * WATCHED_STEPS):
        training.step()
        before = waits.measured
        for _ in range(4):  # a save, or a sleep and a wake
            training.engine.require_readable()
            training.engine.offload_now()
        assert waits.measured == before
    assert not training.engine.masters.remainders.wanted


def test_a_change_of_weights_is_remembered_where_steps_that_hide_their_copies_are_not_watched():
    training, announced, waits = waiting(1.1)
    for number in range(12 + WATCHED_STEPS):
        if number == 2:
            scale_weights(*training.optimizers, *training.twins)
        waits.each *= {3: 0.1, 8: 10}.get(number, 1)
        training.step()
    assert len(training.said) == 1 and not announced
    training.check()


@pytest.mark.parametrize("by_plan", [True, False])
def test_masters_are_copied_in_part_once_their_weights_were_seen_unchanged_with_and_without_a_plan(by_plan):
    training, announced = watched()
    copied = []
    training.step(skip=True)  # counts for nothing
    for _ in range(2 + WATCHED_STEPS):
        before = training.engine.traffic.out
        training.step()
        copied.append(training.engine.traffic.out - before)
        training.meter.layer += 0 if by_plan else 4  # each pass is larger than all before
    training.check()
    whole = sum(slab.nbytes for slab in training.slabs())
    in_part = sum(slab.codec.link_bytes for slab in training.slabs())
    assert copied[-2] == whole and copied[-1] == in_part < whole
    assert len(announced) == 1 and "OffloadConfig.master_remainders" in announced[0]
    assert not training.said and not training.engine.masters.checks_weights


@pytest.mark.parametrize("when", ["between steps", "in the pass"])
@pytest.mark.parametrize("every", [1, WATCHED_STEPS])
def test_masters_are_copied_whole_for_good_where_something_else_changes_weights(when, every):
    training, announced = watched()
    for number in range(14):
        if when == "in the pass":
            training.run_pass()
        if number % every == 0:
            scale_weights(*training.optimizers, *training.twins)
        training.step()
    assert not any(slab.is_encoded for slab in training.slabs())
    assert not training.engine.masters.remainders.wanted and not training.engine.masters.checks_weights
    (said,) = training.said
    assert "OffloadConfig.master_remainders" in said and not announced


def test_a_change_of_weights_is_seen_where_kernels_write_new_sums_over_those_before(monkeypatch):
    sums_now, memory = Remainders.sums_now, torch.zeros(0, dtype=torch.int64)
    monkeypatch.setattr(Remainders, "sums_now", lambda *of: torch.add(sums_now(*of), 0, out=memory))
    test_masters_are_copied_whole_for_good_where_something_else_changes_weights("between steps", every=1)


@pytest.mark.parametrize("writes_masters", [False, True])
def test_a_change_of_weights_that_packed_masters_would_allow_does_not_keep_them_whole(writes_masters):
    training, _ = watched()
    (source,) = training.sources
    both = training.both(source)
    for number in range(9):
        training.step(skip=number == 2, passes=1 + number % 2)
        if number % 3 == 0 and writes_masters:
            scale_weights(*both)
            with training.engine.overwriting_masters(source):
                for one in both:
                    for master, weight in zip(masters_of(one), weights_of(one), strict=True):
                        master.copy_(weight)
        elif number % 3 == 0:
            training.engine.require_writable(source)
            scale_weights(*both)
    assert training.engine.masters.remainders.wanted
    assert any(slab.is_encoded for slab in training.slabs())


@pytest.mark.parametrize(
    "settings",
    [
        {"master_remainders": True},
        {"master_remainders": False},
        {"master_weights": False},
        {"budget": 9 * WHOLE},  # all stay
    ],
)
def test_no_weight_is_watched_where_no_choice_is_left(settings):
    training, announced = watched(**settings)
    training.steps(3 + WATCHED_STEPS)
    assert not training.engine.masters.checks_weights
    assert training.engine.masters.remainders.wanted is bool(settings.get("master_remainders"))
    assert not announced


@pytest.mark.parametrize("first", range(4, 4 + WATCHED_STEPS))
def test_masters_that_stayed_so_far_are_watched_as_long_once_a_larger_pass_has_them_move(first):
    training, announced = watched(budget=9 * WHOLE)
    for number in range(1, 4 + 4 * WATCHED_STEPS):
        if number == 4:
            training.schedule.kind, training.meter.layer = 2, 8 * WHOLE
        training.step()
        if number >= 4 and (number - first) % WATCHED_STEPS == 0:
            scale_weights(*training.optimizers, *training.twins)
    assert any(not part.stays for part in training.parts())
    assert sum("master_remainders" in line for line in training.said) == 1 and not announced


def test_masters_go_on_being_copied_whole_after_a_save_in_a_step_that_has_them_whole():
    masters = watched()[0].engine.masters
    with masters.copied_whole():
        with masters.copied_whole():
            pass
        assert masters.remainders.is_paused
    assert not masters.remainders.is_paused
