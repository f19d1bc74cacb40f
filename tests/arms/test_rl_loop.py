"""The GRPO loop on the CPU: asleep between updates or not it trains the same, and each phase holds what it says."""

import os
from typing import Any

import pytest
import torch
from both import poison

from harness.arms.final_state import final_state, joined_digests
from harness.arms.rl.loop import Iteration, Loop
from harness.arms.rl.options import RlOptions

pytestmark = pytest.mark.usefixtures("cpu_standins")

SMALL: dict[str, Any] = {"hidden": 32, "prompts": 4, "group": 4, "micro_batch_size": 8, "length": 3}

PADDING = 0.03
"""Share of DDP's small buffers that is between parameters, which states and the reference model have not."""


@pytest.fixture(scope="module", autouse=True)
def quiet() -> None:
    os.environ["TQDM_DISABLE"] = "1"


def train(steps: int, **changes: Any) -> tuple[list[Iteration], dict[str, str]]:
    loop = Loop(RlOptions(steps=steps, **SMALL | changes))
    try:
        found = [loop.iterate(number) for number in range(1, steps + 1)]
        return found, joined_digests(final_state(loop.trainer.model, loop.trainer.optimizer))
    finally:
        loop.close()


@pytest.fixture(scope="module")
def sleeping() -> tuple[list[Iteration], dict[str, str]]:
    """A run whose memory is overwritten before it goes."""
    with pytest.MonkeyPatch.context() as patch:
        poison(patch)
        return train(3)


def test_a_trainer_that_sleeps_between_updates_ends_bitwise_as_one_that_does_not(sleeping: Any) -> None:
    mine, digests = sleeping
    theirs, resident_digests = train(3, sleep=False)
    assert digests == resident_digests
    for one, other in zip(mine, theirs, strict=True):
        assert (one.reward, one.loss, one.kl, one.grad_norm) == (other.reward, other.loss, other.kl, other.grad_norm)
    assert len({iteration.grad_norm for iteration in mine}) == 3, "training goes on"


def phase(iteration: Iteration, name: str) -> dict[str, Any]:
    return next(event for event in iteration.phases if event["phase"] == name)


def test_each_phase_holds_what_it_is_for(sleeping: Any) -> None:
    iterations, _ = sleeping
    awake = phase(iterations[-1], "trained")["memory"]
    scalars = 200
    """Adam's counts of steps, a few bytes each, stay."""
    for iteration in iterations:
        asleep, weights, both = (
            phase(iteration, name)["memory"] for name in ("asleep", "params wake", "reference wakes")
        )
        assert asleep["params"] == asleep["grads"] == asleep["reference"] == 0 and asleep["optimizer"] < scalars
        assert weights["params"] == awake["params"] > 0 and weights["grads"] == 0 and weights["optimizer"] < scalars
        assert both["reference"] == pytest.approx(awake["params"], rel=PADDING) and both["grads"] == 0
        after = phase(iteration, "awake")["memory"]
        assert (after["grads"], after["reference"]) == (awake["grads"], 0) and after["grads"] == 2 * after["params"]
    assert phase(iterations[-1], "reference sleeps")["copied"] == 0, "it is unchanged"


@pytest.fixture
def loop() -> Any:
    made = Loop(RlOptions(sleep=False, **SMALL))
    yield made
    made.close()


def test_old_probabilities_are_those_of_the_first_update_and_rollouts_leave_training_as_it_was(loop):
    found = loop.sampler.generate(loop.task.prompts(16, seed=5))
    old = loop.trainer.log_probs(loop.trainer.model, found)
    near = loop.trainer.log_probs(loop.trainer.reference, found)
    assert torch.equal(old, near), "the reference model is the policy as it was at first"
    assert old.shape == found.answers.shape and bool((old <= 0).all())

    state = torch.get_rng_state()
    loop.sampler.generate(loop.task.prompts(16, seed=5))
    assert torch.equal(torch.get_rng_state(), state), "the engine seeds the default generator anew"
