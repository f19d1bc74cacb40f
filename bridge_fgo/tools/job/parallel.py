"""The parallelism of a job: how many ranks share its parameters and states."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Parallel:
    """The parallelism of a job; ValueError where the ranks cannot be shared like that."""

    gpus: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    expert_tensor: int
    optimizer_instances: int = 1

    def __post_init__(self) -> None:
        if self.gpus % (self.pipeline * self.tensor * self.context):
            raise ValueError(
                f"--gpus {self.gpus}: not divisible by tensor {self.tensor} x pipeline {self.pipeline} x context "
                f"{self.context} parallel ranks"
            )
        if self.stage_ranks % (self.expert * self.expert_tensor):
            raise ValueError(
                f"--gpus {self.gpus}: a pipeline stage has {self.stage_ranks} ranks, not divisible by expert "
                f"{self.expert} x expert tensor {self.expert_tensor} parallel ranks"
            )

    @property
    def stage_ranks(self) -> int:
        """Ranks of a pipeline stage."""
        return self.gpus // self.pipeline

    @property
    def data(self) -> int:
        """Replicas of the model."""
        return self.stage_ranks // (self.tensor * self.context)

    def _model_ranks(self, expert: bool) -> int:
        return self.expert * self.expert_tensor if expert else self.tensor

    def shards(self, expert: bool) -> int:
        """Return the number of ranks over which the states of dense or expert parameters are spread."""
        return self.stage_ranks // self._model_ranks(expert) // self.optimizer_instances

    def shard_index(self, stage_rank: int, expert: bool) -> int:
        """Return the index of the shard that a rank of a stage holds, in mcore's order of ranks (tp, cp, ep, dp)."""
        return stage_rank // self._model_ranks(expert) % self.shards(expert)


def parallel_of(config: Any, gpus: int | None) -> Parallel:
    """Return the parallelism of a config on `gpus` ranks; None: the fewest, as data parallelism fills what there is."""

    def size(name: str, default: int | None = None) -> int:
        value = getattr(config.model, f"{name}_parallel_size", None)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise ValueError(f"model.{name}_parallel_size={value!r}: use a number of ranks of at least 1")
        return value

    tensor, context, pipeline = size("tensor_model"), size("context"), size("pipeline_model")
    expert = expert_tensor = 1
    if getattr(config.model, "num_moe_experts", None) is not None:
        expert, expert_tensor = size("expert_model"), size("expert_tensor", default=tensor)
    fewest = pipeline * math.lcm(tensor * context, expert * expert_tensor)
    instances = getattr(config.ddp, "num_distributed_optimizer_instances", 1)
    return Parallel(gpus or fewest, tensor, pipeline, context, expert, expert_tensor, instances)
