"""`demo --rl` is bitwise, and a second process gets the freed memory.

    pytest -m gpu -s tests/gpu/test_rl_on_gpu.py

A policy of 0.27 billion parameters; some minutes. `-s` prints what was measured. Without pytest-xdist the second
process crowds the GPU: nothing else can run on it meanwhile.
"""

import json
import os
from typing import Any

import pytest
from gpu_lane import LEAST_RETURNED, NEEDS_CUDA, needs_gpus

from harness import rl_demo
from harness.demo import Settings

RAN_ON = "one and two H100, two and four H200"

pytestmark = NEEDS_CUDA

KINDS = ("params", "grads", "optimizer")


@pytest.fixture(scope="module")
def run() -> Any:
    """Returns a function that runs the demo and returns what it prints; each of one kind runs once."""
    known: dict[str, dict[str, Any]] = {}

    def run(capfd: Any, ranks: int = 1, **options: Any) -> dict[str, Any]:
        key = json.dumps([ranks, options])
        if key not in known:
            crowd = "PYTEST_XDIST_WORKER" not in os.environ  # beside other tests it would take their memory
            given = Settings(rl=True, crowd=crowd, **options, json_output=True, device="cuda", ranks=ranks)
            status = rl_demo.run(given)
            captured = capfd.readouterr()
            assert captured.out, captured.err[-6000:]
            known[key] = {"status": status, **json.loads(captured.out)}
        return known[key]

    return run


def test_training_that_sleeps_is_bitwise_a_resident_one_and_the_reward_rises(run: Any, capfd: Any) -> None:
    found = run(capfd)
    with capfd.disabled():
        print(f"\n{found['device']}: reward {found['reward']}, seconds an iteration {found['seconds']}")
    assert found["status"] == 0 and found["bitwise_equal"], found["equal"]
    assert found["reward"]["last"] > 2 * found["reward"]["first"]


def test_a_second_process_gets_in_each_sleep_what_the_trainer_held(run: Any, capfd: Any) -> None:
    found = run(capfd)
    wanted = sum(found["bytes"][kind] for kind in KINDS)
    with capfd.disabled():
        print(f"\n{found['held_bytes'] / 1e9:.2f} of {wanted / 1e9:.2f} GB held; {found['bytes']}")
        for name, move in found["moves"].items():
            print(f"{rl_demo.MOVES[name]}: {move}")
    assert found["held_bytes"] >= LEAST_RETURNED * wanted
    weights = found["bytes"]["params"]
    assert found["moves"]["params wake"]["copied"] <= 1.01 * weights
    assert found["moves"]["asleep"]["copied"] <= 1.01 * 7 * weights, "gradients cross no link"
    assert found["moves"]["reference sleeps"]["copied"] == 0, "what is unchanged is not copied again"


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [(2, {"tp": 2}), (2, {"pp": 2}), (2, {}), (4, {"tp": 2, "pp": 2}), (4, {"tp": 2})],
    ids=["tp2", "pp2", "dp2", "tp2 pp2", "tp2 dp2"],
)
def test_several_ranks_that_sleep_are_bitwise_resident_ones(
    ranks: int, parallel: dict[str, int], run: Any, capfd: Any
) -> None:
    needs_gpus(ranks)
    found = run(capfd, ranks, steps=10, **parallel)
    assert found["status"] == 0 and found["bitwise_equal"], found["equal"]
