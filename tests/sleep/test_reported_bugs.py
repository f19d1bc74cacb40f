"""Bugs that users of other sleeps have reported, each as a claim that it is none here.

Others of them are in `test_sleep_and_wake.py` (gradients lost in mid-accumulation, fp32 gradients of shards left),
`test_mcore_verbs.py` (weights that never change again), `test_caches.py` (a reference model that is not freed) and
`gpu/test_phases_on_gpu.py` (expandable segments; memory reserved and not allocated).
"""

from __future__ import annotations

import itertools
import warnings
from unittest import mock

import pytest
import torch
from sleeping import KINDS, numbers, options, residency, weights_bytes
from test_sleep_and_wake import gone

import bridge_fgo
from bridge_fgo.memory.host_buffer import HostBuffer
from bridge_fgo.sleep import moved
from bridge_fgo.sleep import residency as residency_module
from bridge_fgo.tools.arms import cpu_training
from bridge_fgo.tools.arms.cpu_training import CpuTraining

pytestmark = [pytest.mark.usefixtures("cpu_standins"), pytest.mark.usefixtures("poisoned")]


@pytest.mark.parametrize("packed", [False, True], ids=["whole masters", "packed masters"])
def test_no_call_of_a_sleep_in_parts_brings_back_what_another_has_sent_away(packed):
    config = bridge_fgo.OffloadConfig(engine="native", master_remainders=packed)
    with CpuTraining(options()) as training:
        res = residency(training, config=config)
        for order in itertools.permutations(KINDS):
            training.step()
            for kind in order:
                res.offload(kind)
            assert gone(res) == set(KINDS) == res.away
            res.reload()


@pytest.mark.parametrize("name", ["start_grad_sync", "finish_grad_sync", "scale_gradients", "zero_grad_buffer"])
def test_gradient_buffers_that_are_away_are_not_read(name):
    with CpuTraining(options()) as training:
        training.step()
        res = residency(training)
        res.offload("grads")
        (ddp,) = training.model
        with pytest.raises(RuntimeError, match=r"reload\('grads'\)"):
            getattr(ddp, name)(*[2.0] * (name == "scale_gradients"))
        res.reload()
        training.step()
        res.close()
        assert name not in vars(ddp)


def test_host_memory_is_taken_once_and_exactly():
    taken = []
    make = HostBuffer.__init__

    def noted(buffer, nbytes, *args, **kwargs):
        taken.append(nbytes)
        make(buffer, nbytes, *args, **kwargs)

    with CpuTraining(options()) as training, mock.patch.object(HostBuffer, "__init__", noted):
        training.step()
        res = residency(training)
        for _ in range(3):
            training.step()
            res.offload()
            res.reload("params")
            res.offload("params")
            res.reload()
        assert sum(taken) == 7 * weights_bytes(training)  # 12 bytes of states and 2 of weights to each weight of 2


def test_the_driver_gets_memory_after_the_last_of_it_was_let_go_of(monkeypatch):
    with CpuTraining(options()) as training:
        training.step()
        res = residency(training)
        returns = []
        monkeypatch.setattr(residency_module, "return_to_driver", lambda device: returns.append(gone(res)))
        for kinds in (["grads"], ["params"], ["optimizer"]):
            res.offload(*kinds)
            assert returns[-1] == res.away
        res.reload()
        res.offload(grads="keep")
        assert returns[-1] == set(KINDS)
        res.close()


def test_fp32_gradients_beside_16_bit_buffers_leave_and_return(monkeypatch):
    make = cpu_training.make_config

    def make_config(of):
        cfg = make(of)
        cfg.ddp.grad_reduce_in_fp32 = False
        cfg.ddp.param_name_patterns_for_fp32_local_accumulation = ("all",)
        return cfg

    monkeypatch.setattr(cpu_training, "make_config", make_config)
    ends = []
    for sleeps in (False, True):
        with CpuTraining(options()) as training:
            res, seen = residency(training) if sleeps else None, []
            for _ in range(3):
                seen.append(numbers(training.step()))
                if res is None:
                    continue
                (buffer,) = training.model[0].buffers
                shards = [
                    p for g in training.optimizer.chained_optimizers[0].optimizer.param_groups for p in g["params"]
                ]
                assert buffer.extra_main_grads and all(shard.grad is not None for shard in shards)
                res.offload()
                assert not any(extra.untyped_storage().nbytes() for extra in buffer.extra_main_grads)
                assert all(shard.grad is None for shard in shards)
                res.reload()
                assert not any(extra.any() for extra in buffer.extra_main_grads)
            ends.append((seen, training.digests()))
    assert ends[0] == ends[1]


@pytest.mark.parametrize(("left", "warns"), [(0, False), (10**9, True)])
def test_memory_of_which_another_process_has_handles_is_said(monkeypatch, left, warns):
    """As an inference engine has them: what is let go of stays on the GPU, and no count of our own tells."""
    allocated = [4 * 10**9, left]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 * 10**9, 9 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated.pop(0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * 10**9)
    tally = moved.Tally(torch.device("cuda", 0))
    tally.freed = 4 * 10**9
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        tally.note_what_stays()
    assert [("1.00 GB" in str(each.message) and "weight sync" in str(each.message)) for each in said] == [True] * warns
    assert tally.stays == {"allocated": left, "cached": 3 * 10**9 - left, "outside": 10**9}
