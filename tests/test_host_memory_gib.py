"""`OffloadConfig.host_memory_gib` is kept by the ranks of a node together, and changes no bit."""

import dataclasses

import both
import pytest
from both import WHOLE, session_of, steps

import bridge_fgo
from bridge_fgo.engines import ranks
from bridge_fgo.memory import host_memory

RAN_ON = "CPU"


def with_limit(nbytes):
    return dataclasses.replace(WHOLE, host_memory_gib=nbytes / 2**30)


def states_on_host():
    with both.training(True, WHOLE) as run:
        steps(run)
        return session_of(run).engine.host_bytes


@pytest.mark.parametrize("options", [{}, both.OPTIMIZERS["dist_muon"]], ids=["Adam", "Muon"])
def test_states_that_do_not_fit_stay_on_the_gpu_and_training_is_bitwise_the_same(options, capsys):
    with both.training(False, **options) as resident:
        expected = steps(resident, 4), resident.digests()
    limit = states_on_host() // 2
    with both.training(True, with_limit(limit), **options) as run:
        run.offloads_all = False
        assert (steps(run, 4), run.digests()) == expected
        engine = session_of(run).engine
        assert 0.6 * limit < engine.host_bytes <= limit and engine.unhosted_bytes > 0
    said = capsys.readouterr().out
    assert "of state by OffloadConfig.host_memory_gib" in said


def test_ranks_of_a_node_share_the_limit_and_auto_is_a_part_of_what_is_free(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert ranks.host_share(with_limit(2**30)) == 2**28
    assert ranks.host_share(WHOLE) == float("inf")
    monkeypatch.setattr(host_memory, "pools", lambda: [host_memory.Pool("host", 2**40, 2**36)])
    share = ranks.host_share(dataclasses.replace(WHOLE, host_memory_gib="auto"))
    assert share == 7 / 8 * 2**34


def test_all_ranks_take_what_the_one_with_the_least_can_have(monkeypatch):
    monkeypatch.setattr(ranks, "gather_or_raise", lambda act: (None, [act()[1], act()[1] - 5]))
    assert ranks.host_share(with_limit(100)) == 95


def test_a_limit_that_holds_nothing_is_refused_before_training():
    refused = pytest.raises(
        ValueError, match=r"host_memory_gib=9.*: this rank's part of it.*holds none of .* of states"
    )
    with refused, both.training(True, with_limit(100)):
        pass


def test_auto_takes_no_more_than_its_part_of_what_is_free(monkeypatch):
    pool = host_memory.Pool("host", 2**40, states_on_host() // 2)
    monkeypatch.setattr(host_memory, "pools", lambda: [pool])
    with both.training(True, dataclasses.replace(WHOLE, host_memory_gib="auto")) as run:
        assert 0.6 * pool.free < session_of(run).engine.host_bytes <= 7 / 8 * pool.free


def test_a_residency_names_its_own_limit(cpu_standins):
    with both.training(False) as run:
        given = with_limit(2**30)
        with pytest.raises(ValueError, match=r"use Residency\(host_memory_limit_gib=...\)"):
            bridge_fgo.Residency(run.model, run.optimizer, given)
        with (
            bridge_fgo.install(given),
            pytest.raises(ValueError, match=r"Residency with OffloadConfig\(host_memory_gib="),
        ):
            bridge_fgo.Residency(run.model, run.optimizer)
