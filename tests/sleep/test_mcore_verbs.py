"""mcore's six methods of sleep and wake, which RL frameworks call, with the package installed and no flag set."""

from __future__ import annotations

from unittest import mock

import fused_adam
import pytest
import torch
from sleeping import fail_once, numbers, options, residency, resident, weights_bytes

import bridge_fgo
from bridge_fgo.bridge.attaching import attach
from bridge_fgo.config import OffloadConfig
from bridge_fgo.engines.attachment import attachment_of
from bridge_fgo.memory.slab import StillShared
from bridge_fgo.memory.storage_slab import StorageSlab
from bridge_fgo.sleep import upstream
from bridge_fgo.sleep.movable import STATES, movable_optimizers
from bridge_fgo.tools.arms import cpu_training
from bridge_fgo.tools.arms.cpu_training import CpuTraining

pytestmark = [
    pytest.mark.usefixtures("cpu_standins"),
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.usefixtures("installed"),
]


def buffers(training):
    return [b for ddp in training.model for b in ddp.buffers + ddp.expert_parallel_buffers]


def live(training):
    """Return the bytes of weights, gradients, and states that are there."""
    found = (sum(getattr(b, name).untyped_storage().nbytes() for b in buffers(training)) for name in DATA)
    return *found, training.live_state_bytes()


DATA = ("param_data", "grad_data")


@pytest.mark.parametrize("changes", [{}, {"experts": True}, {"precision": "fp32_params"}])
def test_training_that_sleeps_by_mcores_own_verbs_is_bitwise_a_resident_one(changes):
    with CpuTraining(options(**changes)) as training:
        seen = []
        for _ in range(4):
            seen.append(numbers(training.step()))
            for ddp in training.model:
                ddp.offload_grad_buffers()
            for buffer in buffers(training):
                buffer.offload_to_cpu(move_grads=False)
                buffer.offload_to_cpu()
            training.optimizer.offload_to_cpu()
            training.optimizer.offload_to_cpu()
            assert live(training) == (0, 0, 0)
            for buffer in buffers(training):
                buffer.reload_from_cpu(True, False)
            for ddp in training.model:
                ddp.restore_grad_buffers()
            training.optimizer.restore_from_cpu()
            assert min(live(training)) > 0
            assert not any(buffer.grad_data.any() for buffer in buffers(training))
        digests = training.digests()
    expected = resident(6, **changes)
    assert seen == [each for each, _ in expected[:4]] and digests == expected[3][1]


def test_parameters_keep_their_storage_and_unchanged_ones_are_not_copied_again(monkeypatch):
    copied = []
    copy_out = StorageSlab.copy_out
    monkeypatch.setattr(StorageSlab, "copy_out", lambda slab: copied.append(copy_out(slab)) or copied[-1])
    with CpuTraining(options()) as training:
        training.step()
        weights = list(training.model[0].parameters())
        before = [(p, p.untyped_storage()._cdata) for p in weights]
        for _ in range(3):
            buffers(training)[0].offload_to_cpu()
            buffers(training)[0].reload_from_cpu()
        assert copied == [weights_bytes(training)]
        assert [(p, p.untyped_storage()._cdata) for p in weights] == before


def test_a_step_and_a_save_find_states_that_mcores_verb_has_sent_away():
    with CpuTraining(options()) as training:
        seen = [numbers(training.step())]
        training.optimizer.offload_to_cpu()
        (leaf,) = training.optimizer.chained_optimizers
        assert attachment_of(leaf) is not None
        assert leaf.state_dict()["optimizer"]
        training.optimizer.offload_to_cpu()
        seen.append(numbers(training.step()))
        training.optimizer.restore_from_cpu()
        assert attachment_of(leaf) is None
        seen.append(numbers(training.step()))
        digests = training.digests()
    expected = resident(6)
    assert seen == [each for each, _ in expected[:3]] and digests == expected[2][1]


@pytest.mark.parametrize("where", ["copy_out", "release"])
def test_a_step_after_a_verb_that_failed_half_way_finds_its_states_and_the_next_sleep_has_what_it_wrote(
    monkeypatch, where
):
    changes = {"hidden": 128, "sequence": 32, "vocab": 128}  # several slabs
    with CpuTraining(options(**changes)) as training:
        seen = [numbers(training.step())]
        (leaf,) = movable_optimizers(training.optimizer)
        upstream.offload_states(leaf, OffloadConfig(slab_bytes=2**20))
        upstream.restore_states(leaf)
        transfers = type(vars(leaf)[STATES].engine.schedule.transfers)
        seen.append(numbers(training.step()))
        with monkeypatch.context() as patch:
            fail_once(patch, transfers, where)
            with pytest.raises(StillShared):
                training.optimizer.offload_to_cpu()
        for _ in range(2):
            seen.append(numbers(training.step()))
            training.optimizer.offload_to_cpu()
            training.optimizer.restore_from_cpu()
        found = training.digests()
    expected = resident(4, **changes)
    assert (seen, found) == ([each for each, _ in expected], expected[-1][1])


def test_restore_without_offload_changes_nothing_and_an_uninstall_in_between_loses_no_weight():
    with CpuTraining(options()) as training:
        training.step()
        before = [p.detach().clone() for p in training.model[0].parameters()]
        training.optimizer.restore_from_cpu()
        buffers(training)[0].reload_from_cpu()
        assert STATES not in vars(training.optimizer.chained_optimizers[0])
        buffers(training)[0].offload_to_cpu()
        bridge_fgo.uninstall()
        buffers(training)[0].reload_from_cpu()  # mcore's own
        assert all(torch.equal(p, was) for p, was in zip(training.model[0].parameters(), before, strict=True))


def test_a_residency_and_mcores_verbs_share_one_engine():
    with CpuTraining(options()) as training:
        training.step()
        res = residency(training)
        states = vars(training.optimizer.chained_optimizers[0])[STATES]
        assert states is res._states
        training.optimizer.offload_to_cpu()
        assert res.away == {"optimizer"}
        res.reload()
        with pytest.raises(ValueError, match="has a Residency already"):
            residency(training)
        buffers(training)[0].offload_to_cpu()
        with pytest.raises(RuntimeError, match="by something else"):
            res.reload("params")
        buffers(training)[0].reload_from_cpu()
        res.close()
        buffers(training)[0].offload_to_cpu()
        with pytest.raises(ValueError, match="whose memory is away"):
            bridge_fgo.Residency(training.model)
        buffers(training)[0].reload_from_cpu()
        assert STATES not in vars(training.optimizer.chained_optimizers[0])


def test_refusals_name_the_buffer(monkeypatch):
    with CpuTraining(options()) as training:
        (buffer,) = buffers(training)
        monkeypatch.setattr(buffer, "nccl_ub", True)
        with pytest.raises(ValueError, match=r"ddp\.nccl_ub=True"):
            buffer.offload_to_cpu()
        assert live(training)[0] > 0


def test_training_with_the_flag_does_not_attach_to_states_that_a_verb_has_moved_before():
    with CpuTraining(options()) as training:
        training.step()
        before = training.digests()
        training.optimizer.offload_to_cpu()
        with pytest.raises(ValueError, match=r"offload_to_cpu\(\) has moved the states.*build the optimizer anew"):
            attach(training.optimizer, training.model[0].config, OffloadConfig())
        training.optimizer.restore_from_cpu()
        assert training.digests() == before


@pytest.fixture(params=[False, True], ids=["whole masters", "remainders"])
def precision_aware(request):
    """mcore builds a precision-aware Adam, whose parameters are views of the model's weights."""
    original = cpu_training.make_config

    def make_config(of):
        cfg = original(of)
        cfg.optimizer.use_precision_aware_optimizer = True
        cfg.optimizer.store_param_remainders = request.param
        return cfg

    with pytest.MonkeyPatch.context() as patch, mock.patch.object(cpu_training, "make_config", make_config):
        fused_adam.have_mcore_make_it_precision_aware(patch)
        yield


def precision_aware_steps(between, **changes):
    """Train for four steps with `between` after each; return what each reported, and the digests after each."""
    seen = []
    with CpuTraining(options(**changes)) as training:
        for _ in range(4):
            seen.append(numbers(training.step()))
            between(training)
            seen.append(training.digests())
    return seen


@pytest.mark.usefixtures("precision_aware")
@pytest.mark.parametrize("experts", [False, True])
def test_weights_move_after_the_states_of_precision_aware_adam_were_away(experts):
    def sleeps(training):
        leaves = training.optimizer.chained_optimizers
        params = [p for leaf in leaves for group in leaf.optimizer.param_groups for p in group["params"]]
        storages = [p.untyped_storage()._cdata for p in params]
        assert {b.param_data.untyped_storage()._cdata for b in buffers(training)} == set(storages)
        training.optimizer.offload_to_cpu()
        assert live(training)[2] == 0 < live(training)[0]
        training.optimizer.restore_from_cpu()
        assert live(training)[2] > 0
        assert [p.untyped_storage()._cdata for p in params] == storages

    expected = precision_aware_steps(lambda training: None, experts=experts)
    weights = [digests["params"] for digests in expected[1::2]]
    assert len(set(weights)) == 4
    assert precision_aware_steps(sleeps, experts=experts) == expected


@pytest.mark.usefixtures("precision_aware")
def test_a_residency_of_precision_aware_adam_is_bitwise_a_resident_run():
    ends = []
    for sleeps in (False, True):
        with CpuTraining(options()) as training:
            res, seen = residency(training) if sleeps else None, []
            for _ in range(4):
                seen.append(numbers(training.step()))
                if res is not None:
                    res.offload()
                    assert live(training) == (0, 0, 0)
                    res.reload()
            ends.append((seen, training.digests()))  # last: the digests share memory, which cannot be emptied then
    assert ends[0] == ends[1]
