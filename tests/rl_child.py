"""One rank of the GRPO loop, in a process of its own."""

import os
from typing import Any

from children import Ranks, join_group

from bridge_fgo.tools.standins.cuda import install_standins

install_standins()

import torch  # noqa: E402

from bridge_fgo.tools.arms.final_state import final_state, joined_digests  # noqa: E402
from bridge_fgo.tools.arms.rl.loop import Loop  # noqa: E402
from bridge_fgo.tools.arms.rl.options import RlOptions  # noqa: E402
from bridge_fgo.tools.arms.rl.task import Rollouts  # noqa: E402

SMALL: dict[str, Any] = {"hidden": 32, "prompts": 4, "group": 4, "micro_batch_size": 8, "length": 3}


def _loop(rank: int, job: Ranks, **changes: Any) -> Loop:
    os.environ["TQDM_DISABLE"] = "1"  # mcore's engine has a bar for each call
    join_group(rank, job)
    return Loop(RlOptions(**SMALL | changes))


def train(rank: int, job: Ranks, changes: dict[str, Any]) -> dict[str, Any]:
    """Run two iterations as a rank; return what was seen. changes: options."""
    loop = _loop(rank, job, **changes)
    found = [loop.iterate(number) for number in (1, 2)]
    same = {
        "numbers": [(one.reward, one.loss, one.kl, one.grad_norm) for one in found],
        "digests": joined_digests(final_state(loop.trainer.model, loop.trainer.optimizer)),
    }
    asleep = next(event for event in found[-1].phases if event["phase"] == "asleep")
    weights = sum(2 * parameter.numel() for parameter in loop.trainer.inner.parameters())
    loop.close()
    return {"same": same, "copied": asleep["copied"], "weights": weights}


def first_norm(rank: int, job: Ranks, forgets: bool) -> float:
    """Run one update as a rank by its share of one batch; return the gradient's norm."""
    loop = _loop(rank, job, prompts=8 // job.ranks, sleep=False)
    trainer, sequences = loop.trainer, loop.options.sequences
    if forgets:
        trainer.model[0].config.finalize_model_grads_func = None
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
