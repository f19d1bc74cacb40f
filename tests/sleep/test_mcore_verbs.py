"""mcore's six methods of sleep and wake, which RL frameworks call, with the package installed and no flag set."""

import math
import warnings
import weakref
from dataclasses import replace

import pytest
import torch
from sleeping import SEVERAL_SLABS, WHOLE, buffers, counted, fail, note, precision_aware, residency
from stream_order import StreamOrder

import bridge_fgo
from bridge_fgo.bridge.framework_names import LIMIT
from bridge_fgo.bridge.session import attach
from bridge_fgo.config import OffloadConfig
from bridge_fgo.engines.engine import attachment_of
from bridge_fgo.memory.storage_slab import StorageSlab
from bridge_fgo.sleep import upstream
from bridge_fgo.sleep.states import STATES, movable_optimizers

pytestmark = pytest.mark.usefixtures("cpu_standins", "poisoned", "installed")


def live(training):
    """Return the bytes of weights, gradients, and states that are there."""
    weights = sum(buffer.param_data.untyped_storage().nbytes() for buffer in buffers(training))
    gradients = sum(buffer.grad_data.untyped_storage().nbytes() for buffer in buffers(training))
    return weights, gradients, training.live_state_bytes()


def sleep(training):
    for ddp in training.model:
        ddp.offload_grad_buffers()
    for buffer in buffers(training):
        buffer.offload_to_cpu(move_grads=False)
        buffer.offload_to_cpu()
    training.optimizer.offload_to_cpu()
    training.optimizer.offload_to_cpu()
    assert live(training) == (0, 0, 0)


def wake(training):
    for buffer in buffers(training):
        buffer.reload_from_cpu(True, False)
    for ddp in training.model:
        ddp.restore_grad_buffers()
    training.optimizer.restore_from_cpu()
    assert min(live(training)) > 0
    assert not any(buffer.grad_data.any() for buffer in buffers(training))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"experts": True},
        {"precision": "fp32_params"},
        *({"prepare": precision_aware(remainders), "experts": True} for remainders in (False, True)),
    ],
)
def test_training_that_sleeps_by_mcores_own_verbs_is_bitwise_a_resident_one(sleeper, changes):
    me = sleeper(0, **changes)
    for _ in range(4):
        me.train()
        sleep(me.training)
        wake(me.training)
    me.assert_as_resident()


@pytest.mark.parametrize("share", [0.001, 0.4, 1])
def test_a_limit_of_host_memory_in_the_environment_is_kept_by_all_of_them_and_what_has_no_room_stays(
    sleeper, monkeypatch, share
):
    me = sleeper(0, experts=True)
    me.train()
    monkeypatch.setattr(upstream, "_buffers", weakref.WeakSet())
    monkeypatch.setattr(upstream, "_states", weakref.WeakSet())
    weights, _, states = live(me.training)
    limit = share * (weights + 1.01 * states)
    monkeypatch.setenv(LIMIT, str(limit / 2**30))
    for _ in range(3):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for buffer in buffers(me.training):
                buffer.offload_to_cpu()
            me.training.optimizer.offload_to_cpu()
        stays, gradients, of_states = live(me.training)
        assert gradients == 0 and bool(stays + of_states) == (share < 1)
        taken = sum(each.host_bytes for each in (*upstream._buffers, *upstream._states))
        assert weights + states - stays - of_states <= taken <= limit
        assert any("the limit of host memory has no room for" in str(each.message) for each in said) or share == 1
        wake(me.training)
        me.train()
    monkeypatch.setenv(LIMIT, "64 GiB")
    with pytest.raises(ValueError, match=f"{LIMIT}='64 GiB': use a number of GiB above 0"):
        me.training.optimizer.offload_to_cpu()
    me.assert_as_resident()


@pytest.mark.parametrize("gradients", [False, True])
def test_what_the_flag_has_of_host_memory_counts_to_the_limit_and_is_refused_where_it_is_over(
    sleeper, monkeypatch, gradients
):
    monkeypatch.setattr(upstream, "_buffers", weakref.WeakSet())
    monkeypatch.setattr(upstream, "_states", weakref.WeakSet())
    bridge_fgo.uninstall()
    changes = {"overlap_grad_reduce": True, "bucket_size": 20_000, "microbatches": 3}
    with counted() as mapped:
        me = sleeper(flag=replace(WHOLE, gradients=gradients), **changes)
    (buffer,), weights, taken = buffers(me.training), me.weights_bytes, sum(mapped)
    assert (taken > 6.5 * weights) == gradients
    for verb in (me.training.optimizer.offload_to_cpu, buffer.offload_to_cpu):
        monkeypatch.setenv(LIMIT, str((taken - 1) / 2**30))
        with pytest.raises(ValueError, match=f"{LIMIT}=.*offload_optimizer_states=True has .* already: raise the lim"):
            verb()
        assert live(me.training)[0] == weights
    monkeypatch.setenv(LIMIT, str((taken + weights - 1) / 2**30))
    with pytest.warns(UserWarning, match="the limit of host memory has no room"):
        buffer.offload_to_cpu()
    me.training.optimizer.offload_to_cpu()
    assert live(me.training)[0] == weights and live(me.training)[2] == 0
    monkeypatch.setenv(LIMIT, str((taken + weights) / 2**30))
    buffer.offload_to_cpu()
    assert live(me.training)[0] == 0
    buffer.reload_from_cpu()
    me.train(2)
    me.assert_as_resident()


def test_unchanged_parameters_are_copied_once_and_an_uninstall_in_between_loses_no_weight(sleeper, monkeypatch):
    copied = []
    note(monkeypatch, copied, StorageSlab, "copy_out", "copy")
    me = sleeper()
    before = [(p, p.untyped_storage()._cdata) for p in me.ddp.parameters()]
    for _ in range(3):
        buffers(me.training)[0].offload_to_cpu()
        buffers(me.training)[0].reload_from_cpu()
    assert copied == ["copy"]
    assert [(p, p.untyped_storage()._cdata) for p in me.ddp.parameters()] == before

    me = sleeper()
    before = [p.detach().clone() for p in me.ddp.parameters()]
    me.training.optimizer.restore_from_cpu()
    buffers(me.training)[0].reload_from_cpu()
    assert STATES not in vars(me.leaf)
    buffers(me.training)[0].offload_to_cpu()
    bridge_fgo.uninstall()
    buffers(me.training)[0].reload_from_cpu()  # mcore's own
    assert min(live(me.training)[:2]) > 0
    assert all(torch.equal(p, was) for p, was in zip(me.ddp.parameters(), before, strict=True))


def test_a_step_and_a_save_find_states_that_mcores_verb_has_sent_away(sleeper):
    me = sleeper()
    me.training.optimizer.offload_to_cpu()
    assert attachment_of(me.leaf) is not None
    assert me.leaf.state_dict()["optimizer"]
    me.training.optimizer.offload_to_cpu()
    me.train()
    me.training.optimizer.restore_from_cpu()
    assert attachment_of(me.leaf) is None
    me.train()
    me.assert_as_resident()


@pytest.mark.parametrize("where", ["copy_out", "release"])
def test_after_a_verb_that_failed_half_way_a_step_finds_its_states_and_the_next_sleep_the_new(sleeper, where):
    me = sleeper(**SEVERAL_SLABS)
    (leaf,) = movable_optimizers(me.training.optimizer)
    upstream.offload_states(leaf, OffloadConfig(slab_bytes=2**20), math.inf)
    upstream.restore_states(leaf)
    me.train()
    with me.failing(type(vars(leaf)[STATES].engine.schedule.transfers), where):
        me.training.optimizer.offload_to_cpu()
    for _ in range(2):
        me.train()
        me.training.optimizer.offload_to_cpu()
        me.training.optimizer.restore_from_cpu()
    me.assert_as_resident()


def test_parameters_whose_copy_in_failed_are_away_and_the_next_reload_brings_them(sleeper, monkeypatch):
    me = sleeper()
    (buffer,) = buffers(me.training)
    buffer.offload_to_cpu()
    fail(monkeypatch, StorageSlab, "copy_in", call=1, error=MemoryError)
    with pytest.raises(MemoryError):
        buffer.reload_from_cpu()
    buffer.reload_from_cpu()
    me.train()
    me.assert_as_resident()


def test_a_residency_and_mcores_verbs_share_one_engine(sleeper):
    me = sleeper()
    (buffer,), res = buffers(me.training), me.res
    assert vars(me.leaf)[STATES] is res._states
    me.training.optimizer.offload_to_cpu()
    assert res.away == {"optimizer"}
    res.reload()
    with pytest.raises(ValueError, match="has a Residency already"):
        residency(me.training)
    buffer.offload_to_cpu()
    with pytest.raises(RuntimeError, match="by something else"):
        res.reload("params")
    buffer.reload_from_cpu()
    res.close()
    buffer.offload_to_cpu()
    with pytest.raises(ValueError, match="whose memory is away"):
        bridge_fgo.Residency(me.training.model)
    buffer.reload_from_cpu()
    assert STATES not in vars(me.leaf)


def test_the_flag_does_not_attach_to_states_that_a_verb_has_moved_and_refusals_name_the_buffer(sleeper, monkeypatch):
    me = sleeper()
    before = me.training.digests()
    me.training.optimizer.offload_to_cpu()
    with pytest.raises(ValueError, match=r"offload_to_cpu\(\) has moved the states.*build the optimizer anew"):
        attach(me.training.optimizer, me.ddp.config, OffloadConfig())
    me.training.optimizer.restore_from_cpu()
    assert me.training.digests() == before
    me = sleeper(0)
    (buffer,) = buffers(me.training)
    monkeypatch.setattr(buffer, "nccl_ub", True)
    with pytest.raises(ValueError, match=r"ddp\.nccl_ub=True"):
        buffer.offload_to_cpu()
    assert live(me.training)[0] > 0


def test_weights_are_copied_once_a_gather_in_flight_and_an_earlier_wake_are_over(sleeper, monkeypatch):
    me, order, copy_out = sleeper(0), StreamOrder(), StorageSlab.copy_out
    (buffer,) = buffers(me.training)
    weights = ("weights", buffer)

    def copies_out(slab, *to):
        order.read(weights)
        return copy_out(slab, *to)

    monkeypatch.setattr(upstream, "wait_for_gpu", order.finish_all)
    monkeypatch.setattr(StorageSlab, "copy_out", copies_out)
    order.write(weights, stream=1)  # of an all-gather
    buffer.offload_to_cpu()
    assert order.reads[weights]
    wake(me.training)
