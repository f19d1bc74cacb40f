"""Residency over the engine that Bridge's training steps by: packed masters, and the weights that they need."""

from __future__ import annotations

import pytest
from sleeping import KINDS, SMALL, numbers, residency, resident, states_bytes, weights_bytes

import bridge_fgo
from bridge_fgo.memory.remainders import Remainders
from bridge_fgo.sleep.weight_moves import WeightMoves
from bridge_fgo.tools.arms.cpu_training import CpuOptions, CpuTraining

pytestmark = [pytest.mark.usefixtures("cpu_standins"), pytest.mark.usefixtures("poisoned")]

SLABS = {"engine": "native", "slab_bytes": 2**20, "piece_bytes": 2**16}
PACKED = bridge_fgo.OffloadConfig(**SLABS, master_remainders=True)


@pytest.mark.parametrize("masters", [True, False, None])
def test_training_with_offload_that_sleeps_is_bitwise_a_resident_one(masters):
    expected = resident(5)
    config = bridge_fgo.OffloadConfig(**SLABS, master_remainders=masters)
    with bridge_fgo.install(config), CpuTraining(CpuOptions(offload=True, **SMALL)) as training:
        res, seen = residency(training), []
        for number in range(5):
            seen.append(numbers(training.step()))
            res.offload()
            assert res.away == set(KINDS) and states_bytes(res) == 0
            with res.only("params"):
                assert res.away == {"grads", "optimizer"}
            if number % 2:
                res.reload()
            else:
                res.reload("params", "grads")  # the step brings the states itself
        assert seen == [each for each, _ in expected]
        assert training.digests() == expected[-1][1]


def test_packed_masters_wake_their_weights_first_and_the_call_says_so():
    with bridge_fgo.install(PACKED), CpuTraining(CpuOptions(offload=True, **SMALL)) as training:
        training.step()
        bridge_fgo.reload_states()
        res, nbytes = residency(training), weights_bytes(training)
        out = res.offload()
        assert out.copied_by_kind["params"] == nbytes  # they are what the masters come back by
        assert nbytes < out.copied_by_kind["optimizer"] - 4 * nbytes < 1.2 * nbytes  # 17 bits of 32
        back = res.reload("optimizer")
        assert back.woke == ("params",) and res.away == {"grads"}
        res.offload("params")
        again = res.offload("optimizer")
        assert again.woke == ("params",) and again.copied_by_kind["params"] == nbytes  # in alone: nothing had changed
        assert res.away == set(KINDS)
        res.reload()
        training.step()


def test_an_engine_of_its_own_packs_where_the_settings_say_so():
    expected = resident(3)
    with CpuTraining(CpuOptions(**SMALL)) as training:
        res, nbytes, seen = residency(training, config=PACKED), weights_bytes(training), []
        for _ in range(3):
            seen.append(numbers(training.step()))
            out = res.offload()
            assert nbytes < out.copied_by_kind["optimizer"] - 4 * nbytes < 1.2 * nbytes
            res.reload()
        assert seen == [each for each, _ in expected] and training.digests() == expected[-1][1]
        res.close()


def test_masters_are_packed_with_weights_that_were_looked_up_after_they_had_woken(monkeypatch):
    """A buffer that was asleep may come back to another address, and kernels keep a table of addresses."""
    calls = []
    locate, encode = Remainders.locate, Remainders.encode
    monkeypatch.setattr(Remainders, "locate", lambda self: calls.append("locate") or locate(self))
    monkeypatch.setattr(Remainders, "encode", lambda self, moves: calls.append("encode") or encode(self, moves))
    wake = WeightMoves.wake
    monkeypatch.setattr(WeightMoves, "wake", lambda self, tally: wake(self, tally) or calls.append("wake"))
    with CpuTraining(CpuOptions(**SMALL)) as training:
        res = residency(training, config=PACKED)
        training.step()
        res.offload("params")
        calls.clear()
        res.offload("optimizer")
        assert calls[:3] == ["wake", "locate", "encode"]
        res.close()


def test_an_engine_that_does_not_fit_is_refused_by_name():
    with (
        bridge_fgo.install(PACKED),
        CpuTraining(CpuOptions(offload=True, **SMALL)) as training,
        pytest.raises(ValueError, match="leave config out"),
    ):
        residency(training, config=PACKED)
    with CpuTraining(CpuOptions(**SMALL)) as training:
        (leaf,) = training.optimizer.chained_optimizers
        leaf.config.offload_optimizer_states = True
        with pytest.raises(ValueError, match=r"no engine is attached.*unset the flag and use `res\.training_step\(\)`"):
            residency(training)
