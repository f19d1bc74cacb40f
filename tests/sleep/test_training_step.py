"""`Residency.training_step`: a loop on mcore alone trains with its states away, bitwise as one without the context."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
from sleeping import KINDS, options, residency

import bridge_fgo
from bridge_fgo.bridge.session import active_session
from bridge_fgo.engines.attachment import attachment_of
from bridge_fgo.sleep.movable import STATES
from bridge_fgo.tools.arms.cpu_training import CpuOptions, CpuTraining

pytestmark = [pytest.mark.usefixtures("cpu_standins"), pytest.mark.usefixtures("poisoned")]

CONFIGS = {
    "whole masters": None,
    "packed masters": bridge_fgo.OffloadConfig(engine="native", master_remainders=True, slab_bytes=2**20),
    "small slabs": bridge_fgo.OffloadConfig(engine="native", master_remainders=False, slab_bytes=2**20),
}
SCENARIOS = {
    "dense": {},
    "experts": {"experts": True},
    "native_fp32_parameters": {"precision": "fp32_params"},
    "a_step_that_is_skipped": {"found_inf_steps": (3,)},
    "fp16_with_skipped_steps": {"precision": "fp16"},
    "collectives_in_flight": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    "more_microbatches": {"microbatches": 4},
}


def passes(training, forwards=None):
    """Zero gradients, and run forward and backward of all microbatches by mcore's schedule; return the losses."""
    training.steps += 1
    training._forwards = 0
    for chunk in training.model:
        chunk.zero_grad_buffer()
    training.optimizer.zero_grad()
    training.live_bytes = []
    found = training._schedule(
        forward_step_func=forwards or training._forward_step,
        data_iterator=training._batches,
        model=training.model,
        num_microbatches=training.options.microbatches,
        seq_length=training.options.sequence,
        micro_batch_size=training.options.micro_batch_size,
        forward_only=False,
    )
    training._batches.advance()
    return [value.tolist() for losses in found for value in losses.values()]


def by_hand(training):
    """As `passes`, with no schedule: one microbatch, and DDP's own finish of gradients."""
    for chunk in training.model:
        chunk.zero_grad_buffer()
    training.optimizer.zero_grad()
    training.live_bytes = []
    output, loss = training._forward_step(training._batches, training.model[0])
    value, tokens, _ = loss(output)
    (value / tokens).backward()
    training.model[0].finish_grad_sync()
    return float(value)


def step(training, run=passes, context=contextlib.nullcontext):
    """Make a training step; return what it reported."""
    with context():
        losses = run(training)
        updated, norm, _ = training.optimizer.step()
    return losses, updated, norm


def trained(steps, run=passes, context_of=lambda training: contextlib.nullcontext, **changes):
    with CpuTraining(options(**changes)) as training:
        context = context_of(training)
        seen = [step(training, run, context) for _ in range(steps)]
        for res in [vars(leaf)[STATES] for leaf in training.optimizer.chained_optimizers if STATES in vars(leaf)]:
            res.reload()
        for ddp in training.model:
            ddp.start_param_sync(force_sync=True)
        return seen, training.digests()


def driven(held, training, config=None, **count):
    """Return the context of a training step, which notes in `held` the most bytes of state in a forward."""
    res = residency(training, config=config)

    @contextlib.contextmanager
    def context():
        with res.training_step(**count):
            yield
        held.append(max(training.live_bytes))

    return context


@pytest.mark.parametrize(
    ("changes", "config"),
    [
        pytest.param(
            changes, config, id=f"{name}-{settings}",
            marks=() if name == "dense" or settings == "packed masters" else pytest.mark.slow,
        )
        for name, changes in SCENARIOS.items() for settings, config in CONFIGS.items()
    ],
)  # fmt: skip
@pytest.mark.usefixtures("installed")
def test_a_loop_of_ones_own_is_bitwise_a_resident_one_with_no_state_held_in_its_passes(changes, config):
    held = []
    count = {"microbatches": changes["microbatches"]} if "microbatches" in changes else {}
    seen = trained(5, context_of=partial(driven, held, config=config, **count), **changes)
    assert seen == trained(5, **changes)
    assert held == [0] * 5
    assert len({str(losses) for losses, *_ in seen[0]}) == 5
    if "found_inf_steps" in changes:
        assert [updated for _, updated, _ in seen[0]] == [True, True, False, True, True]


@pytest.mark.usefixtures("installed")
def test_a_loop_without_a_schedule_gets_its_states_back_as_ddp_finishes_gradients(monkeypatch):
    held, found = [], []

    def noted(training):
        result = by_hand(training)
        found.append(training.live_state_bytes())
        return result

    seen = trained(4, run=noted, context_of=partial(driven, held))
    assert held == [0] * 4 and min(found[1:]) > 0
    assert seen == trained(4, run=by_hand)


@pytest.mark.usefixtures("installed")
def test_training_steps_and_sleeps_alternate_and_change_no_bit():
    expected = trained(5)
    with CpuTraining(options()) as training:
        res, seen = residency(training), []
        for number in range(5):
            seen.append(step(training, context=res.training_step))
            assert res.away <= {"optimizer"}
            first = res.offload()
            assert res.away == set(KINDS) and training.live_state_bytes() == 0
            assert res.offload().freed == 0 < first.freed
            with pytest.raises(RuntimeError, match=r"call reload\('params'\)"), res.training_step():
                pytest.fail("asleep")
            if number % 2:
                res.reload()
            else:
                res.reload("params", "grads")  # the step brings the states itself
        res.close()
        (leaf,) = training.optimizer.chained_optimizers
        assert attachment_of(leaf) is None and STATES not in vars(leaf) and training.live_state_bytes() > 0
        assert (seen, training.digests()) == expected


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("where", ["before forward", "in a forward", "after backward"])
def test_an_error_in_the_block_loses_no_state_and_the_next_block_works(where):
    def fails(training):
        def forward(*args):
            raise ZeroDivisionError

        if where == "in a forward":
            passes(training, forward)
        elif where == "after backward":
            passes(training)
        raise ZeroDivisionError

    ends = []
    for context_of in (lambda training: contextlib.nullcontext, lambda training: residency(training).training_step):
        with CpuTraining(options()) as training:
            context, seen = context_of(training), []
            for number in range(4):
                if number == 2:
                    with pytest.raises(ZeroDivisionError), context():
                        fails(training)
                    assert active_session() is None
                seen.append(step(training, context=context))
            bridge_fgo.reload_states()
            ends.append((seen, training.digests()))
    assert ends[0] == ends[1]


@pytest.mark.usefixtures("installed")
def test_a_training_step_inside_another_is_refused_and_the_outer_one_goes_on():
    expected = trained(2)
    with CpuTraining(options()) as training:
        res, seen = residency(training), []
        for _ in range(2):
            with res.training_step():
                with pytest.raises(RuntimeError, match="inside of a training step"), res.training_step():
                    pytest.fail("nested")
                losses = passes(training)
                updated, norm, _ = training.optimizer.step()
            seen.append((losses, updated, norm))
        res.close()
        assert (seen, training.digests()) == expected


def test_what_cannot_drive_a_step_is_refused_by_name():
    with CpuTraining(options()) as training:
        res = residency(training)
        with pytest.raises(RuntimeError, match=r"call bridge_fgo\.install\(\) first"), res.training_step():
            pytest.fail("not installed")
        with pytest.raises(ValueError, match="microbatches=0"), res.training_step(0):
            pytest.fail("no microbatch")
        res.close()
        alone = bridge_fgo.Residency(training.model)
        with pytest.raises(ValueError, match="optimizer=None"), alone.training_step():
            pytest.fail("no optimizer")
        alone.close()
    with (
        bridge_fgo.install(bridge_fgo.OffloadConfig(engine="native")),
        CpuTraining(CpuOptions(offload=True, hidden=64, sequence=16, vocab=64)) as training,
    ):
        res = residency(training)
        with (
            pytest.raises(ValueError, match=r"optimizer\.offload_optimizer_states=True: Bridge's train_step"),
            res.training_step(),
        ):
            pytest.fail("attached by the flag")
        training.step()


def test_a_package_that_is_installed_after_the_residency_was_made_serves_its_steps_and_may_go_in_between():
    expected = trained(4)
    with CpuTraining(options()) as training:
        res, seen = residency(training), []
        for _ in range(2):
            with bridge_fgo.install(bridge_fgo.OffloadConfig(engine="native")):
                seen.append(step(training, context=res.training_step))
                assert max(training.live_bytes) == 0
                res.offload("optimizer")
                assert res.away == {"optimizer"}
            assert res.away == set()  # an uninstall makes states resident
            seen.append(step(training))
        assert (seen, training.digests()) == expected


def test_figures_of_the_newest_step_are_there():
    with bridge_fgo.install(bridge_fgo.OffloadConfig(engine="native")), CpuTraining(options()) as training:
        res = residency(training)
        for _ in range(2):
            step(training, context=res.training_step)
        stats = bridge_fgo.stats()
        assert stats is not None and stats.steps == 2 and stats.released_bytes == stats.offloaded_bytes > 0
        res.close()
        assert all(torch.isfinite(p).all() for p in training.model[0].parameters())
