"""Options of a run of the GRPO loop: task, model sizes and parallelism."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class RlOptions:
    """Options of a run. The defaults are those of the CPU."""

    device: str = "cpu"  # "cpu", by the stand-ins of CUDA and Transformer Engine, or "cuda"
    sleep: bool = True  # whether the trainer sleeps between updates; without it everything stays on the device
    crowd: bool = False
    """GPU: whether the second process also holds what is free while the trainer is awake, but for some room. Then it
    can only take in a sleep what the sleep gives back. For a GPU that nobody else uses."""
    steps: int = 200  # iterations: rollouts and the updates by them
    updates: int = 2  # calls of `train_step` by the same rollouts
    prompts: int = 8  # prompts of an iteration on a data-parallel rank
    group: int = 8  # answers to a prompt, which are judged beside each other
    micro_batch_size: int = 32  # sequences of a microbatch
    symbols: int = 7  # letters that prompts are made of
    length: int = 4  # letters of a prompt, and of the answer
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    lr: float = 1e-3  # Adam's; the larger the hidden size, the smaller
    kl: float = 0.01  # weight of the distance to the reference model in the loss
    clip: float = 0.2  # range around 1 in which the ratio of new to old probabilities has a gradient
    tp: int = 1
    pp: int = 1
    seed: int = 1234

    @property
    def sequences(self) -> int:
        """Answers of an iteration on a data-parallel rank."""
        return self.prompts * self.group

    @property
    def sequence(self) -> int:
        """Tokens that the model sees of a prompt and its answer; of the whole, all but the last."""
        return 2 * self.length

    def as_json(self) -> str:
        """Return them as the arm takes them."""
        return json.dumps(asdict(self))
