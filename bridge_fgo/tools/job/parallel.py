"""The parallelism of a job: how many ranks share its parameters and states."""

import math
from dataclasses import dataclass, replace
from typing import Any

from bridge_fgo.bridge.compat import as_named_in

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""Values of `ddp.data_parallel_sharding_strategy`; each shards what the one before does, and one thing more."""

SIZES = (
    "train.micro_batch_size", "train.global_batch_size", "model.seq_length", "model.num_layers",
    "model.hidden_size", "model.num_attention_heads", "model.num_query_groups",
    "model.virtual_pipeline_model_parallel_size", "ddp.num_distributed_optimizer_instances",
)  # fmt: skip
"""Sizes that may be left out, beside those of the ranks that share a model; Megatron divides by most of them."""


@dataclass(frozen=True)
class Parallel:
    """The parallelism of a job; ValueError if the ranks cannot be shared like that."""

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
    """Return the parallelism of a config on `gpus` ranks; None: the fewest, as data parallelism fills what there is.

    ValueError for a size that is none, also of those that others are divided by (`SIZES`), and for a number of GPUs on
    which the model or the global batch cannot be shared: names the nearest that work.
    """

    def size(name: str, default: int | None = None) -> int:
        section, _, field = name.partition(".")
        value = getattr(getattr(config, section, None), field, None)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise ValueError(as_named_in(config.model, f"{name}={value!r}: use a whole number of at least 1"))
        return value

    def ranks(name: str, default: int | None = None) -> int:
        return size(f"model.{name}_parallel_size", default)

    tensor, context, pipeline = ranks("tensor_model"), ranks("context"), ranks("pipeline_model")
    heads = getattr(config.model, "num_attention_heads", None)
    if type(heads) is int and heads % tensor:  # on no number of GPUs
        of = f"model.tensor_model_parallel_size={tensor}: model.num_attention_heads={heads} is not divisible by it"
        raise ValueError(as_named_in(config.model, f"{of}; use a divisor of {heads}"))
    expert = expert_tensor = 1
    if getattr(config.model, "num_moe_experts", None) is not None:
        expert, expert_tensor = ranks("expert_model"), ranks("expert_tensor", default=tensor)
    fewest = pipeline * math.lcm(tensor * context, expert * expert_tensor)
    sizes = {name: size(name, default=1) for name in SIZES}
    instances = sizes["ddp.num_distributed_optimizer_instances"]

    on_fewest = Parallel(fewest, tensor, pipeline, context, expert, expert_tensor, instances)
    if gpus is None:
        return on_fewest
    try:
        parallel = replace(on_fewest, gpus=gpus)
        if why := batch_refusal(config, parallel):
            raise ValueError(f"--gpus {gpus}: {why}")
        return parallel
    except ValueError as error:
        most = max(gpus + fewest, fewest * sizes["train.global_batch_size"] // sizes["train.micro_batch_size"])
        first = gpus // fewest * fewest
        below, above = range(first, 0, -fewest), range(first + fewest, most + 1, fewest)
        near = [next((str(n) for n in counts if goes_with(n, on_fewest, config)), "") for counts in (below, above)]
        do = f"; {' or '.join(filter(None, near))} GPUs would do" if any(near) else ""
        raise ValueError(f"{error}{do}") from None


def goes_with(gpus: int, layout: Parallel, config: Any) -> bool:
    """Return whether so many GPUs have the ranks of a layout, and the global batch their replicas."""
    try:
        parallel = replace(layout, gpus=gpus)
    except ValueError:
        return False
    return not batch_refusal(config, parallel) and not parallel.stage_ranks % parallel.optimizer_instances


def batch_refusal(config: Any, parallel: Parallel) -> str:
    """Return why the replicas of a model cannot share the global batch; "" if they can or its size is not known.

    An interleaved schedule takes microbatches in groups, one for each stage.
    """
    train = getattr(config, "train", None)
    micro, whole = (getattr(train, f"{name}_batch_size", None) for name in ("micro", "global"))
    if not micro or not whole or getattr(train, "rampup_batch_size", None) is not None:
        return ""
    microbatches, rest = divmod(whole, micro * parallel.data)
    if rest:
        return (
            f"train.global_batch_size={whole} is not divisible by {parallel.data} replicas x "
            f"train.micro_batch_size={micro}"
        )
    chunks = getattr(config.model, "virtual_pipeline_model_parallel_size", None) or 1
    group = getattr(config.model, "microbatch_group_size_per_vp_stage", None) or parallel.pipeline
    if chunks > 1 and group == parallel.pipeline and microbatches % group:
        return f"a replica has {microbatches} microbatches, which pipeline {group} x {chunks} chunks does not divide"
    return ""
