"""The loop: sleep, wake the weights, sample and judge, wake the rest, train.

Everything that is particular to a shared GPU is in `iterate`: five calls of `bridge_fgo.Residency`. Nothing else
changes where the trainer does not sleep, and the weights end bitwise the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

import bridge_fgo
from bridge_fgo.engines.ranks import gather
from bridge_fgo.sleep.moved import Moved
from harness.arms.final_state import states
from harness.arms.rl.neighbour import Neighbour
from harness.arms.rl.options import RlOptions
from harness.arms.rl.task import Copying, advantages
from harness.arms.rl.trainer import Sampler, Trainer


class Diary:
    """Phases of an iteration, and the bytes of the models and states in them, found without asking the package."""

    def __init__(self, model: Any, optimizer: Any, reference: Any) -> None:
        self._model, self._optimizer, self._reference = model, optimizer, reference
        self._device = next(model[0].parameters()).device
        self._began = 0.0
        self.phases: list[dict[str, Any]] = []

    def begin(self) -> None:
        """Begin an iteration."""
        self._began, self.phases = time.perf_counter(), []
        self.note("begins")

    def note(self, phase: str, moved: Moved | None = None) -> None:
        """Note that a phase is over, and where it moved anything, what."""
        figures: dict[str, Any] = {"phase": phase, "at": time.perf_counter() - self._began}
        if moved is not None:
            figures |= {name: getattr(moved, name) for name in ("copied", "freed", "returned", "seconds")}
        self.phases.append(figures | {"memory": self.memory()})

    def memory(self) -> dict[str, int]:
        """Return the bytes on the device now, by kind."""
        parameters = [parameter for chunk in self._model for parameter in chunk.parameters()]
        found = states(self._model, self._optimizer)
        tensors: dict[str, Iterable[torch.Tensor]] = {
            "params": parameters,
            "grads": [parameter.main_grad for parameter in parameters if hasattr(parameter, "main_grad")],
            "optimizer": [tensor for kind, _, tensor in found if kind != "params"],
            "reference": [parameter for chunk in self._reference for parameter in chunk.parameters()],
        }
        counted: set[int] = set()  # masters of fp32 parameters, say, are these parameters
        return {kind: self._bytes(of_kind, counted) for kind, of_kind in tensors.items()}

    def _bytes(self, tensors: Iterable[torch.Tensor], counted: set[int]) -> int:
        total = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device == self._device and storage._cdata not in counted:
                counted.add(storage._cdata)
                total += storage.nbytes()
        return total


class Awake:
    """Stands in for a Residency where nothing leaves the GPU."""

    def offload(self, *what: str) -> Moved:
        """Move nothing."""
        return Moved()

    reload = offload


@dataclass
class Iteration:
    """Figures of one iteration. Rewards and losses are of all ranks, phases of this one."""

    step: int
    reward: float
    loss: float
    kl: float
    grad_norm: float
    skipped: bool
    held: int  # bytes that the second process held while the trainer slept; 0 where there is none
    phases: list[dict[str, Any]] = field(default_factory=list)


class Loop:
    """GRPO on the copying task; `neighbour` is a second process that takes the memory while the trainer sleeps."""

    def __init__(self, options: RlOptions, neighbour: Neighbour | None = None) -> None:
        self.options, self.neighbour = options, neighbour
        self.task = Copying(options.symbols, options.length)
        self.trainer = Trainer(options, self.task.vocab_size)
        self.sampler = Sampler(self.trainer.inner, options, self.task)
        trainer = self.trainer
        self.diary = Diary(trainer.model, trainer.optimizer, trainer.reference)
        self.policy: Any = bridge_fgo.Residency(trainer.model, trainer.optimizer) if options.sleep else Awake()
        self.reference: Any = bridge_fgo.Residency(trainer.reference) if options.sleep else Awake()
        self.reference.offload()

    def iterate(self, number: int) -> Iteration:
        """Run an iteration; iterations count from 1."""
        options, trainer, policy, reference = self.options, self.trainer, self.policy, self.reference
        diary = self.diary
        diary.begin()

        # Asleep. In a job with an inference engine of its own this is where that one has the GPU.
        moved = policy.offload()
        diary.note("asleep", moved)
        held = 0
        if self.neighbour is not None:
            held = self.neighbour.lend(moved.returned)
            diary.note("lent")

        # The weights alone: mcore's engine samples with them, and log-probabilities need no more.
        diary.note("params wake", policy.reload("params"))
        seed = options.seed + 1000 * number + trainer.groups.dp.rank()
        prompts = self.task.prompts(options.prompts, seed)
        rollouts = self.sampler.generate([prompt for prompt in prompts for _ in range(options.group)])
        diary.note("rollouts")
        old = trainer.log_probs(trainer.model, rollouts)
        diary.note("reference wakes", reference.reload())
        near = trainer.log_probs(trainer.reference, rollouts)
        diary.note("reference sleeps", reference.offload())

        # Awake: gradients are zeros, masters and moments what they were.
        diary.note("awake", policy.reload())
        batch = rollouts.inputs() | {
            "answers": rollouts.answers,
            "advantages": advantages(rollouts.rewards, options.group),
            "old": old,
            "reference": near,
        }
        figures: dict[str, Any] = {}
        for _ in range(options.updates):
            figures = trainer.update(batch)
        diary.note("trained")
        if self.neighbour is not None and options.crowd and number == 1:  # the allocator has what training needs
            self.neighbour.crowd()
        ranks = gather((float(rollouts.rewards.mean()), figures))
        reward = sum(reward for reward, _ in ranks) / len(ranks)
        # The last rank's pipeline stage has the loss.
        return Iteration(number, reward, **ranks[-1][1], held=held, phases=diary.phases)

    def close(self) -> None:
        """Bring everything back and tear down what Bridge has set up."""
        if self.options.sleep:
            self.reference.close()
            self.policy.close()
        self.trainer.close()
