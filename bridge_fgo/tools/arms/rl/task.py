"""The task: repeat a prompt. Its reward can be checked: the share of letters that are right."""

from __future__ import annotations

import string

import torch

END = "|"
"""Ends a prompt; the answer follows."""


class Copying:
    """Prompts such as "caab|", to be answered with "caab".

    Serves mcore's engine as its tokenizer: a token is a letter.

    Args:
        symbols: letters that prompts are made of.
        length: of a prompt without its end.
    """

    def __init__(self, symbols: int, length: int) -> None:
        if not 2 <= symbols <= len(string.ascii_lowercase):
            raise ValueError(f"symbols={symbols}: use from 2 to {len(string.ascii_lowercase)}")
        self.length = length
        self._letters = string.ascii_lowercase[:symbols] + END
        self.vocab_size = -(-len(self._letters) // 8) * 8
        """Tokens with padding, so that tensor-parallel ranks share them evenly."""
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
