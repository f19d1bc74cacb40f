"""A training job as `plan` and `doctor` know it: its settings, its size and each stage's tensors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from bridge_fgo.cli.demo import missing_packages
from bridge_fgo.cli.job.formula import stages_from_numbers
from bridge_fgo.cli.job.saved_config import load_saved_config
from bridge_fgo.cli.job.tensors import Chunk, Tensor
from bridge_fgo.config import OffloadConfig


@dataclass(frozen=True)
class Parallel:
    """How many ranks share what."""

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

    def shards(self, expert: bool) -> int:
        """Return over how many ranks the states of dense or expert parameters are spread."""
        model_ranks = self.expert * self.expert_tensor if expert else self.tensor
        return self.stage_ranks // model_ranks // self.optimizer_instances

    def shard_index(self, stage_rank: int, expert: bool) -> int:
        """Return which of these shards a rank of a stage holds, in mcore's order of ranks (tp, cp, ep, dp)."""
        model_ranks = self.expert * self.expert_tensor if expert else self.tensor
        return stage_rank // model_ranks % self.shards(expert)


@dataclass(frozen=True)
class Job:
    """What is known of a job.

    config: sections of settings as namespaces; dtypes are `torch.dtype`s.
    stages: of each pipeline stage its model chunks; empty where the model was not asked for.
    source: "Megatron-Bridge's model builder" or "the config's numbers".
    refusals: why this package refuses the config; bridge_refuses: why Bridge does.
    bridge_estimate: bytes that Bridge's own estimator expects; None where it was not asked.
    """

    config: SimpleNamespace
    parallel: Parallel
    stages: list[list[Chunk]]
    source: str
    refusals: list[str] = field(default_factory=list)
    bridge_refuses: str | None = None
    bridge_estimate: dict[str, float] | None = None

    @property
    def microbatches(self) -> int:
        """Microbatches of a step, on each replica."""
        train = self.config.train
        return max(1, train.global_batch_size // (train.micro_batch_size * self.parallel.data))


def read_job(target: str, gpus: int | None, offload: dict[str, Any], model: bool) -> Job:
    """Find a job out without running it.

    Args:
        target: see `bridge_fgo.cli.job.recipes.load_config`; without Megatron a saved run config alone.
        gpus: how many the job has; None for the fewest that it can have.
        offload: arguments of OffloadConfig.
        model: whether to find out its tensors, too.

    Raises:
        ValueError: there is no such recipe or file, it cannot be built, or the GPUs do not suit it.
        RuntimeError: the builder died.
    """
    OffloadConfig(**offload)
    missing = missing_packages()
    if missing:
        return _from_numbers(target, gpus, model, missing)
    found = _build({"target": target, "gpus": gpus, "offload": offload, "model": model})
    if "error" in found:
        raise ValueError(found["error"])
    config = SimpleNamespace(**{name: SimpleNamespace(**_dtypes(values)) for name, values in found["config"].items()})
    stages = [
        [[Tensor(**{**t, "dtype": getattr(torch, t["dtype"])}) for t in chunk] for chunk in stage]
        for stage in found.get("stages", [])
    ]
    return Job(
        config,
        parallel_of(config, found["gpus"]),
        stages,
        "Megatron-Bridge's model builder",
        found["refusals"],
        found["bridge_refuses"],
        found.get("bridge_estimate"),
    )


def parallel_of(config: SimpleNamespace, gpus: int | None) -> Parallel:
    """Return the parallelism of a config on `gpus` ranks; on the fewest where that is None."""
    model = config.model
    tensor, context = model.tensor_model_parallel_size, model.context_parallel_size
    experts = getattr(model, "num_moe_experts", None) is not None
    expert = model.expert_model_parallel_size if experts else 1
    expert_tensor = (model.expert_tensor_parallel_size or tensor) if experts else 1
    fewest = model.pipeline_model_parallel_size * max(tensor * context, expert * expert_tensor)
    instances = getattr(config.ddp, "num_distributed_optimizer_instances", 1)
    pipeline = model.pipeline_model_parallel_size
    return Parallel(gpus or fewest, tensor, pipeline, context, expert, expert_tensor, instances)


def _from_numbers(target: str, gpus: int | None, model: bool, missing: list[str]) -> Job:
    from bridge_fgo.wiring.refusals import config_refusals

    if Path(target).suffix not in (".yaml", ".yml"):
        raise ValueError(
            f"{', '.join(missing)} not installed: a recipe like {target!r} cannot be built here; give a saved "
            "run_config.yaml, or install it"
        )
    config = load_saved_config(Path(target))
    parallel = parallel_of(config, gpus)
    stages = stages_from_numbers(config) if model else []
    return Job(config, parallel, stages, "the config's numbers", list(config_refusals(config)))


def _build(request: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "bridge_fgo.cli.job.builder", json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        tail = "\n".join(done.stderr.strip().splitlines()[-15:])
        raise RuntimeError(f"the model of {request['target']} could not be built:\n{tail}")
    return json.loads(done.stdout)


def _dtypes(values: dict[str, Any]) -> dict[str, Any]:
    """Return settings with "torch.bfloat16" and the like as dtypes again."""
    return {
        name: getattr(torch, value.removeprefix("torch."))
        if isinstance(value, str) and value.startswith("torch.")
        else value
        for name, value in values.items()
    }


def all_tensors(stage: list[Chunk]) -> Iterator[Tensor]:
    """Yield the tensors of all model chunks of a stage."""
    for chunk in stage:
        yield from chunk
