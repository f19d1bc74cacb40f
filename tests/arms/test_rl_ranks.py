"""The GRPO loop over several ranks, each a process: data, tensor and pipeline parallel."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from children import Ranks, join_group, run_ranks
from test_rl_loop import SMALL

from bridge_fgo.tools.standins.cuda import install_standins
from harness.arms.final_state import final_state, joined_digests
from harness.arms.rl.loop import Loop
from harness.arms.rl.options import RlOptions
from harness.arms.rl.task import Rollouts

pytestmark = [pytest.mark.usefixtures("cpu_standins"), pytest.mark.slow]


def loop_of_rank(rank: int, job: Ranks, **changes: Any) -> Loop:
    install_standins()
    os.environ["TQDM_DISABLE"] = "1"  # mcore's engine has a bar for each call
    join_group(rank, job)
    return Loop(RlOptions(**SMALL | changes))


def train(rank: int, job: Ranks, changes: dict[str, Any]) -> dict[str, Any]:
    """Run two iterations as a rank; return what was seen. changes: options."""
    loop = loop_of_rank(rank, job, **changes)
    found = [loop.iterate(number) for number in (1, 2)]
    same = {
        "numbers": [(one.reward, one.loss, one.kl, one.grad_norm) for one in found],
        "digests": joined_digests(final_state(loop.trainer.model, loop.trainer.optimizer)),
    }
    asleep = next(event for event in found[-1].phases if event["phase"] == "asleep")
    weights = sum(2 * parameter.numel() for parameter in loop.trainer.inner.parameters())
    loop.close()
    return {"same": same, "copied": asleep["copied"], "weights": weights}


@pytest.mark.parametrize("parallel", [{}, {"tp": 2}, {"pp": 2}], ids=["data", "tensor", "pipeline"])
def test_two_ranks_that_sleep_are_bitwise_two_that_do_not(parallel: dict[str, int], tmp_path: Path) -> None:
    sleeping, resident = (
        run_ranks(partial(train, changes=parallel | {"sleep": sleep}), Ranks(tmp_path / str(sleep), 2))
        for sleep in (True, False)
    )
    for mine, theirs in zip(sleeping, resident, strict=True):
        assert mine["same"] == theirs["same"]
        # States of 12 bytes a parameter and weights of 2 leave: of data-parallel ranks each its half.
        assert mine["copied"] == pytest.approx(7 * mine["weights"] / (1 if parallel else 2), rel=0.05)


def first_norm(rank: int, job: Ranks) -> float:
    """Run one update as a rank by its share of one batch; return the gradient's norm."""
    loop = loop_of_rank(rank, job, prompts=8 // job.ranks, sleep=False)
    trainer, sequences = loop.trainer, loop.options.sequences
    generator = torch.Generator().manual_seed(1)
    whole = (8 * loop.options.group, loop.options.sequence + 1)
    mine = slice(rank * sequences, (rank + 1) * sequences)
    tokens = torch.randint(8, whole, generator=generator)[mine]
    better = torch.randn(whole[0], generator=generator)[mine]
    rollouts = Rollouts(tokens, better, torch.ones(sequences, whole[1] - 1))
    old = trainer.log_probs(trainer.model, rollouts)
    batch = {"answers": rollouts.answers, "advantages": better, "old": old, "reference": old}
    norm = trainer.update(rollouts.inputs() | batch)["grad_norm"]
    loop.close()
    return norm


def test_an_update_of_two_ranks_has_the_gradients_of_one_that_has_all_data(tmp_path: Path) -> None:
    (alone,), both = (run_ranks(first_norm, Ranks(tmp_path / str(ranks), ranks)) for ranks in (1, 2))
    assert both == pytest.approx([alone] * 2, rel=0.01)
