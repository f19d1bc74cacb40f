"""Gradients that training manages sleep bitwise, at the least cost."""

import contextlib
import dataclasses
from unittest.mock import MagicMock

import pytest
import torch
from both import CONFIGURED, PACKED, SMALL, WHOLE, both, exact, poison, session_of, steps, training
from lanes import in_lanes
from sleeping import KINDS, buffers, lock_fails_once
from spies import before, fail

import bridge_fgo
from bridge_fgo.engines.gradients import gradients_of
from bridge_fgo.memory.gradient_bucket import BucketState, GradientBucket
from bridge_fgo.memory.guard import is_guarded

THREE = SMALL | {"overlap_grad_reduce": True, "bucket_size": 20_000, "microbatches": 3}
LAZY = dataclasses.replace(WHOLE, gradients="lazy", master_remainders=False)
OFF = dataclasses.replace(PACKED, gradients=True)
SETTINGS = pytest.mark.parametrize("config", [pytest.param(LAZY, marks=pytest.mark.slow), OFF], ids=["lazy", "off"])
MODELS = {
    "dense": {},
    "experts_in_chunks": {"experts": True, "chunks": 2},
    "adam_not_distributed": {"distributed": False},
    "fp32_local_accumulation": {"configured": CONFIGURED["fp32_local_accumulation"]},
}


@pytest.fixture(autouse=True)
def poisoned_buckets(cpu_standins, monkeypatch):
    """Memory is overwritten before it goes, so that nothing can come back by chance."""
    poison(monkeypatch)
    before(monkeypatch, GradientBucket, "free", lambda bucket: bucket.gpu is None or bucket.gpu.fill_(0xFF))


def sleeper_of(run, *optimizer):
    """Return the Residency of a training with offload, and a stand-in for that of a resident one."""
    return bridge_fgo.Residency(run.model, *optimizer) if run.options.offload else MagicMock()


def buckets(run):
    return session_of(run).gradients.buckets


def params(run):
    return [param for chunk in run.model for param in chunk.parameters()]


def zero(run):
    for chunk in run.model:
        chunk.zero_grad_buffer()


def require_asleep(run, res):
    """Nothing has memory, and whoever uses a gradient is told what to call."""
    assert res.away == set(KINDS) and all(bucket.gpu is None and bucket.asleep for bucket in buckets(run))
    plain = next(param for param in params(run) if "_bridge_fgo_bucket" in vars(param))
    for use in (lambda: plain.main_grad, lambda: buffers(run)[0].buckets[0].grad_data.norm()):
        with pytest.raises(RuntimeError, match=r"call Residency\.reload\('grads'\) first"):
            use()
    assert is_guarded(plain), "whatever class it has for its gradient"
    with pytest.raises(RuntimeError, match=r"reload\('params'\)"):
        plain.norm()


@SETTINGS
@pytest.mark.parametrize("model", in_lanes(MODELS, ("dense", "fp32_local_accumulation")))
def test_training_that_sleeps_after_each_step_is_bitwise_equal_and_its_gradients_cost_nothing(model, config):
    def train(run):
        res, seen = sleeper_of(run, run.optimizer), []
        assert not run.options.offload or all(bucket.gpu is None for bucket in buckets(run))
        for number in range(4):
            seen.append(steps(run))
            if number % 2:
                zero(run)
            if not run.options.offload:
                continue
            held = sum(bucket.nbytes for bucket in buckets(run) if bucket.gpu is not None)
            assert (held == 0) is bool(number % 2)
            extras = sum(extra.nbytes for buffer in buffers(run) for extra in buffer.extra_main_grads)
            if number == 2:
                res.offload("params")
            assert res.offload("grads").freed >= held + extras
            assert "grads" not in res.offload().copied_by_kind
            masters_round = config is LAZY and model != "adam_not_distributed"
            assert {slab.rounding is not None for slab in res._memory.weights.slabs} == {masters_round}
            require_asleep(run, res)
            with res.only("params"):
                assert res.away == {"grads", "optimizer"}
            back = res.reload("grads")
            assert (back.copied, back.freed, res.away) == (0, -extras, {"params", "optimizer"})
            res.reload()
            assert {bucket.state for bucket in buckets(run)} == {BucketState.ABSENT} and not res.away
        res.close()
        return seen

    both(train, config, **THREE | MODELS[model])


@SETTINGS
@pytest.mark.parametrize("moment", ["before the update", "in a forward", "after an error"])
def test_gradients_that_are_kept_in_the_midst_of_a_step_come_back_as_they_were(config, moment):
    def train(run):
        res, seen = sleeper_of(run, run.optimizer), steps(run)
        update, forward = run.optimizer.step, run._forward_step
        forwards = 0

        def sleep():
            if not run.options.offload:
                return
            with pytest.raises(RuntimeError, match="a backward has run"):
                res.offload()
            held = sum(bucket.nbytes for bucket in buckets(run) if bucket.gpu is not None)
            done = {bucket.state for bucket in buckets(run)} - {BucketState.ABSENT}
            moved = res.offload(grads="keep")
            assert moved.copied_by_kind["grads"] == held
            require_asleep(run, res)
            assert {bucket.state for bucket in buckets(run)} <= {BucketState.ABSENT, BucketState.OFFLOADED}
            assert res.offload(grads="keep").freed == 0
            assert res.reload("params", "grads").copied_by_kind["grads"] >= held  # a step brings states itself
            assert done == {BucketState.HERE} or config is OFF

        def update_after_a_sleep():
            sleep()
            return update()

        def forward_after_a_sleep(*args):
            nonlocal forwards
            forwards += 1
            if forwards == 3:  # the first of the last microbatch
                sleep()
                if moment == "after an error":
                    raise ZeroDivisionError
            return forward(*args)

        if moment == "before the update":
            run.optimizer.step = update_after_a_sleep
        else:
            run._forward_step = forward_after_a_sleep
        if moment == "after an error":
            step_that_fails(run)
            sleep()
            seen.append(exact([param.main_grad for param in params(run)]))
        seen += steps(run, 2)
        run.optimizer.step = update
        res.close()
        assert not run.options.offload or all(bucket.moves or bucket._host is None for bucket in buckets(run))
        return seen, steps(run)

    both(train, config, **THREE)


def step_that_fails(run):
    from megatron.bridge.training.initialize import init_rerun_state
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine

    with pytest.raises(ZeroDivisionError):
        run.step()
    destroy_rerun_state_machine()  # it is in the midst of a pass
    init_rerun_state(run.cfg.rerun_state_machine)


@SETTINGS
def test_a_wake_without_memory_for_kept_gradients_leaves_all_of_them_away_and_may_be_tried_again(monkeypatch, config):
    def train(run):
        res, update = sleeper_of(run, run.optimizer), run.optimizer.step

        def sleep():
            if run.options.offload:
                res.offload("grads", grads="keep")
                with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
                    fail(patch, GradientBucket, "allocate", torch.OutOfMemoryError)
                    res.reload()
                assert res.away == {"grads"} and all(bucket.gpu is None for bucket in buckets(run))
                res.reload()
            return update()

        run.optimizer.step = sleep
        return steps(run, 2)

    both(train, config, **THREE)


@SETTINGS
@pytest.mark.parametrize("sleep", ["awake", "dropped", "kept"])
def test_a_residency_that_is_older_than_the_offload_of_gradients_outlives_it(config, sleep):
    def train(run):
        offloads = run.options.offload
        res, seen = sleeper_of(run), []
        run.offloads_all = False
        for round in range(2):
            with bridge_fgo.install(config) if offloads else contextlib.nullcontext():
                if offloads and not round:
                    res.offload("grads")
                    with pytest.raises(ValueError, match=r"gradients are off the GPU: call Residency\.reload"):
                        run.step()
                    res.reload()
                seen.append(steps(run))
                res.offload(grads="keep")  # it knows of no update
                assert not offloads or all(bucket.gpu is None for bucket in buckets(run))
                res.reload()
                seen.append(steps(run))
                if sleep == "dropped":
                    zero(run)
                if sleep != "awake":
                    res.offload("grads", grads="keep" if sleep == "kept" else "drop")
            assert not offloads or not res.away, "an uninstall brings gradients back, as it does states"
            assert not any(gradients_of(buffer) for buffer in buffers(run))
            seen.append(exact([param.main_grad for param in params(run)]))
            res.reload()
            run.cfg.optimizer.offload_optimizer_states = False
            seen.append(steps(run))
            zero(run)
            res.offload()
            assert not offloads or not any(buffer.grad_data.untyped_storage().nbytes() for buffer in buffers(run))
            res.reload()
            seen.append(steps(run))
            run.cfg.optimizer.offload_optimizer_states = offloads
        return seen

    both(train, config, installed=False, **THREE)


def test_gradients_in_the_settings_of_a_residency_are_refused_by_name():
    with training(False, **THREE) as run, pytest.raises(ValueError, match=r"gradients='lazy'\).*leave config out"):
        bridge_fgo.Residency(run.model, run.optimizer, LAZY)


@pytest.mark.parametrize("pins", [True, False])
def test_a_residency_locks_what_a_failed_lock_left_and_nothing_that_the_settings_have_unlocked(monkeypatch, pins):
    with training(True, dataclasses.replace(OFF, pin_memory=pins), **THREE) as run:
        res = sleeper_of(run, run.optimizer)
        assert res._memory.states.lease.settings.pin_memory is pins
        run.step()
        moving = {id(bucket) for bucket in buckets(run) if bucket.moves}
        asked = lock_fails_once(monkeypatch, res)
        hosts = {id(bucket.host): id(bucket) in moving for bucket in buckets(run)}
        locked = {id(host) for host in asked} & set(hosts)
        assert locked == {host for host, moves in hosts.items() if not moves} != set()
        res.close()
