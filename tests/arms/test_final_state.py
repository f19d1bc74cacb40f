"""Digests of what training left behind are the same, however the states are read."""

import pytest
from both import session_of
from storage_meter import PART_BYTES
from test_construction import PARTS, training

import bridge_fgo
from harness.arms.final_state import digests_by_parameter, final_state, joined_digests

pytestmark = pytest.mark.usefixtures("cpu_standins")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr("bridge_fgo.memory.layout.LEAST_PART_BYTES", PART_BYTES)


@pytest.mark.parametrize("experts", [pytest.param(False, marks=pytest.mark.slow), True], ids=["dense", "experts"])
@pytest.mark.parametrize("remainders", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_states_read_where_they_are_have_the_digests_of_those_on_the_gpu(remainders, experts):
    config = bridge_fgo.OffloadConfig(engine=PARTS.engine, master_remainders=remainders)
    seen = []
    for offload in (False, True):
        with training(offload, config, experts=experts) as run:
            run.train(2)
            found, nbytes = digests_by_parameter(run.model, run.optimizer)
            if offload:
                engine = session_of(run).engine
                engine.offload_now()
                back = engine.traffic.back
                assert (digests_by_parameter(run.model, run.optimizer), run.live_state_bytes()) == ((found, nbytes), 0)
                assert remainders or engine.traffic.back == back, "nothing came to the GPU"
            bridge_fgo.reload_states()
            assert found == joined_digests(final_state(run.model, run.optimizer))
            assert nbytes == run.live_state_bytes()
            seen.append(found)
    assert seen[0] == seen[1]


def test_digests_of_no_states_are_an_error():
    with training(True) as run, pytest.raises(RuntimeError, match="found no moments"):
        digests_by_parameter(run.model, run.optimizer)
