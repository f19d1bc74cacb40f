"""What the policy learns: to repeat a prompt, by group-relative policy optimization (GRPO)."""

from __future__ import annotations

import string
from dataclasses import dataclass

import torch

END = "|"  # ends a prompt; the answer follows


class Copying:
    """Prompts such as "caab|", to be answered with "caab"; the reward is the share of letters that are right.

    Serves mcore's engine as its tokenizer: a token is a letter. `symbols`: letters that prompts are made of; `length`:
    of a prompt without its end.
    """

    def __init__(self, symbols: int, length: int) -> None:
        if not 2 <= symbols <= len(string.ascii_lowercase):
            raise ValueError(f"symbols={symbols}: use from 2 to {len(string.ascii_lowercase)}")
        self.length = length
        self._letters = string.ascii_lowercase[:symbols] + END
        self.vocab_size = -(-len(self._letters) // 8) * 8  # padded, for tensor-parallel ranks to share evenly
        self.bos = self.eod = symbols  # the end: whoever pads and strips takes a token that no answer has

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return [self._letters.index(letter) for letter in text]

    def detokenize(self, tokens: list[int]) -> str:
        """Return the text of tokens; padding, which a policy may sample, is a question mark."""
        return "".join(self._letters[token] if token < len(self._letters) else "?" for token in tokens)

    def prompts(self, count: int, seed: int) -> list[str]:
        """Return prompts that the seed alone determines."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(len(self._letters) - 1, (count, self.length), generator=generator)
        return [self.detokenize(row) + END for row in tokens.tolist()]

    def reward(self, prompt: str, answer: str) -> float:
        """Return the share of the prompt's letters that the answer has at their places."""
        return sum(asked == given for asked, given in zip(prompt, answer, strict=False)) / self.length


@dataclass(frozen=True)
class Rollouts:
    """Answers of an iteration on this rank; all on the model's device.

    Args:
        tokens: prompts with their answers, int64 (sequences, length of both).
        rewards: of each answer, fp32 (sequences,).
        answers: 1 where the next token is one of the answer's, fp32 (sequences, length of both - 1).
    """

    tokens: torch.Tensor
    rewards: torch.Tensor
    answers: torch.Tensor

    def inputs(self) -> dict[str, torch.Tensor]:
        """Return what the model sees and what it is to say next, int64 (sequences, length of both - 1)."""
        return {"tokens": self.tokens[:, :-1].contiguous(), "labels": self.tokens[:, 1:].contiguous()}


def advantages(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """Return how much better each answer is than the others to its prompt, in their standard deviation.

    `rewards` are fp32 (sequences,), those of `group` answers to one prompt after another.
    """
    grouped = rewards.view(-1, group)
    spread = grouped.std(dim=1, keepdim=True)
    return ((grouped - grouped.mean(dim=1, keepdim=True)) / (spread + 1e-4)).view(-1)


def grpo_loss(
    losses: torch.Tensor, batch: dict[str, torch.Tensor], clip: float, kl: float
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return Bridge's loss function's three: the sum over tokens, how many there are, and what to report.

    Args:
        losses: cross entropies of the labels, fp32 (sequences, length): with labels mcore's model returns these, of
            vocabularies that ranks share too, and they are minus the log-probabilities.
        batch: "answers", "advantages" (sequences,), "old" and "reference" (log-probabilities, as `losses`).
        clip: range around 1 in which the ratio of new to old probabilities has a gradient.
        kl: weight of the distance to the reference model.
    """
    logp, mask = -losses.float(), batch["answers"]
    ratio = torch.exp(logp - batch["old"])
    advantage = batch["advantages"][:, None]
    gain = torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    apart = batch["reference"] - logp
    distance = torch.exp(apart) - apart - 1  # never negative, and its mean over samples is the KL divergence
    loss = ((kl * distance - gain) * mask).sum()
    tokens = mask.sum()
    # With two numbers in each Bridge sums both over ranks and microbatches, and reports their quotient.
    report = {
        "grpo loss": torch.stack([loss.detach(), tokens]),
        "kl": torch.stack([(distance * mask).sum().detach(), tokens]),
    }
    return loss, tokens.int(), report
