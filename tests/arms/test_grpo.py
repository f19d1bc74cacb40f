"""The parts of the GRPO loop that need no Megatron: task, advantages, loss, second process."""

import pytest
import torch

from harness.arms.rl.neighbour import OWN_BYTES, Holder, Neighbour
from harness.arms.rl.task import Copying, advantages, grpo_loss


def test_prompts_are_those_of_their_seed_and_the_reward_is_the_share_of_letters_at_their_places():
    task = Copying(symbols=4, length=4)
    prompts = task.prompts(20, seed=3)
    assert prompts == task.prompts(20, seed=3) != task.prompts(20, seed=4)
    assert [task.detokenize(task.tokenize(prompt)) for prompt in prompts] == prompts
    assert task.vocab_size % 8 == 0 and max(map(max, map(task.tokenize, prompts))) < task.vocab_size
    task = Copying(symbols=4, length=4)
    (prompt,) = task.prompts(1, seed=3)
    copy = prompt[:-1]
    assert task.reward(prompt, copy) == 1.0
    assert task.reward(prompt, "?" + copy[1:]) == 0.75
    assert task.reward(prompt, "????") == 0.0


def batch(logp: torch.Tensor, **changes: torch.Tensor) -> dict[str, torch.Tensor]:
    found = {"answers": torch.ones_like(logp), "advantages": torch.ones(len(logp)), "old": logp, "reference": logp}
    return {**found, **changes}


def gradient(losses: torch.Tensor, batch: dict[str, torch.Tensor], kl: float = 0.0) -> torch.Tensor:
    losses = losses.clone().requires_grad_()
    loss, _, _ = grpo_loss(losses, batch, clip=0.2, kl=kl)
    (found,) = torch.autograd.grad(loss, losses)
    return found


def test_better_answers_become_likelier_up_to_the_clip_and_the_reference_pulls():
    better = advantages(torch.tensor([0.0, 1.0, 0.5, 0.5]), group=2)
    assert better[0] < 0 < better[1] and better[2:].tolist() == [0.0, 0.0], "alike answers teach nothing"
    logp = torch.log(torch.tensor([[0.5, 0.5], [0.5, 0.5]]))
    answers = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    found = gradient(-logp, batch(logp, answers=answers, advantages=torch.tensor([1.0, -2.0])))
    assert found.tolist() == [[0.0, 1.0], [0.0, -2.0]]  # of the cross entropy, which is minus the log-probability
    logp = torch.log(torch.tensor([[0.9], [0.9], [0.1], [0.1]]))
    old = torch.log(torch.full((4, 1), 0.5))
    found = gradient(-logp, batch(logp, old=old, advantages=torch.tensor([1.0, -1.0, 1.0, -1.0])))
    assert [bool(value) for value in found[:, 0]] == [False, True, True, False]
    reference = torch.log(torch.tensor([[0.8], [0.2]]))
    found = gradient(-old[:2], batch(old[:2], reference=reference, advantages=torch.zeros(2)), kl=1.0)
    assert found[0] > 0 > found[1]


@pytest.mark.slow
def test_the_second_process_holds_bytes_as_it_left_them_and_ends_with_its_context():
    holder = Holder("cpu")
    assert holder.hold(1000) == 1000 and holder.hold(2000) == 2000 and holder.hold(0) == 0
    holder.hold(1000)
    holder._held[0][500] = 0
    with pytest.raises(RuntimeError, match="written by somebody else"):
        holder.hold(0)
    with Neighbour("cpu") as neighbour:
        assert neighbour.lend(OWN_BYTES + 12345) == 12345
        assert neighbour.lend(0) == 0
    assert neighbour._process.exitcode == 0
