"""Optimizers with masters of whole parameters in phases: Adam that is not distributed, Muon, and LayerWise's chain."""

from __future__ import annotations

import contextlib

import pytest
from sleeping import KINDS, numbers, options, residency, resident
from test_sleep_and_wake import gone

import bridge_fgo
from bridge_fgo.tools.arms.cpu_training import CpuTraining

pytestmark = [pytest.mark.usefixtures("cpu_standins"), pytest.mark.usefixtures("poisoned")]

ADAM = {"distributed": False}
MUON = {"distributed": False, "optimizer": "muon"}
LAYER_WISE = {"distributed": False, "optimizer": "dist_muon"}
PACKED = bridge_fgo.OffloadConfig(engine="native", master_remainders=True, slab_bytes=2**20)


@pytest.mark.parametrize("config", [None, pytest.param(PACKED, marks=pytest.mark.slow)], ids=["whole", "packed"])
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(ADAM, id="adam"),
        pytest.param(MUON, id="muon"),
        pytest.param(LAYER_WISE, id="dist_muon"),
        pytest.param(MUON | {"experts": True}, id="muon_of_experts", marks=pytest.mark.slow),
        pytest.param(ADAM | {"precision": "fp32_params"}, id="adam_with_fp32_parameters", marks=pytest.mark.slow),
        pytest.param(ADAM | {"frozen": True}, id="adam_with_most_frozen", marks=pytest.mark.slow),
    ],
)
def test_training_that_sleeps_after_each_step_is_bitwise_a_resident_one(changes, config):
    with CpuTraining(options(**changes)) as training:
        res, seen = residency(training, config=config), []
        for number in range(3):
            seen.append(numbers(training.step()))
            moved = res.offload()
            assert gone(res) == set(KINDS) == res.away
            assert not any(p.untyped_storage().nbytes() for p in training.model[0].parameters())
            if number % 2:
                res.reload("params")
                assert res.offload("params").copied == 0
            res.reload()
            assert moved.copied_by_kind["params"] > 0  # no DDP buffer has them, and nobody rounds them again
        assert config or res.offload().copied == 0  # packed ones are copied anew
        res.reload()
        res.close()
        digests = training.digests()  # last: they share memory, which cannot be emptied then
    expected = resident(6, **changes)
    assert seen == [each for each, _ in expected[:3]] and digests == expected[2][1]


@pytest.mark.parametrize("changes", [MUON, pytest.param(ADAM, marks=pytest.mark.slow)], ids=["muon", "adam"])
@pytest.mark.parametrize("drives", [False, True], ids=["asleep", "in training steps too"])
def test_a_step_brings_states_back_where_patches_serve_it(changes, drives):
    expected = resident(6, **changes)
    with bridge_fgo.install(), CpuTraining(options(**changes)) as training:
        res, seen = residency(training), []
        for _ in range(3):
            with res.training_step(training.options.microbatches) if drives else contextlib.nullcontext():
                seen.append(numbers(training.step()))
            assert not drives or max(training.live_bytes) == 0
            res.offload()
            res.reload(*(("params", "grads") if drives else KINDS))
        res.reload()
        assert seen == [each for each, _ in expected[:3]] and training.digests() == expected[2][1]
        res.close()
