"""A training job as `plan` and `doctor` know it: its settings, its size and each stage's tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch

from bridge_fgo.bridge.compat import settings_in
from bridge_fgo.config import OffloadConfig
from bridge_fgo.recipes.catalog import RECIPES
from bridge_fgo.recipes.hf_config import kept_configs
from bridge_fgo.tools.job.answers import ask_builder, kept_answer, missing_packages
from bridge_fgo.tools.job.held import Chunk, Held, Tensor
from bridge_fgo.tools.job.parallel import Parallel, parallel_of
from bridge_fgo.tools.job.target import without_folder
from bridge_fgo.tools.show import are_not_installed


@dataclass(frozen=True)
class Job:
    """A job, as far as it is known without running it."""

    config: SimpleNamespace  # sections of settings as namespaces; dtypes are `torch.dtype`s
    parallel: Parallel
    stages: list[list[Chunk]]  # of each pipeline stage its model chunks; empty if Bridge refuses the config
    source: str  # "Megatron-Bridge's model builder", with the versions where its answer is kept
    offload: OffloadConfig = field(default_factory=OffloadConfig)  # in force, from the command line and the config
    flag: bool = False  # whether the config asks for the offload
    refusals: list[str] = field(default_factory=list)  # why this package refuses it with the flag set
    engine: str | None = None  # that would serve it; None if it is refused
    bridge_refuses: str | None = None  # why Bridge itself refuses the config
    gpus_given: bool = True  # whether the user or the recipe says on how many GPUs; else `parallel` is of the fewest
    held: list[Held] = field(default_factory=list)  # by stage, by mcore's own layout; empty if that is not known
    not_held: str = ""  # why it is not
    # of kinds of recomputation that Bridge does not take as they are: what has to be turned off, or why it refuses them
    recomputations: dict[str, list[str] | str] = field(default_factory=dict)

    @property
    def gpus_note(self) -> str:
        """What is assumed where the number of GPUs was not given; "" if it was."""
        return "" if self.gpus_given else f"on {self.parallel.gpus} GPUs, the fewest it can have; give --gpus"

    @property
    def microbatches(self) -> int:
        """Microbatches of a step, on each replica."""
        train = self.config.train
        return max(1, train.global_batch_size // (train.micro_batch_size * self.parallel.data))

    def tensors(self, stage: int) -> list[Tensor]:
        """Return the tensors of all model chunks of a pipeline stage."""
        return [tensor for chunk in self.stages[stage] for tensor in chunk]


def read_job(
    target: str,
    gpus: int | None,
    offload: dict[str, Any],
    vocab_size: int | None = None,
    overrides: Sequence[str] | None = (),
    found: dict[str, Any] | None = None,
) -> Job:
    """Return what is known of a job, without running it, from the builder's answer where it was asked already.

    target: see `bridge_fgo.tools.job.recipes.load_config`; without Megatron one of this project's recipes as it is.
    gpus: None for the fewest that it can have. vocab_size: where neither the model nor the tokenizer's config says it.

    Raises:
        ValueError: the builder died, or the job is none, or wrong, or Megatron does not import with the package.
    """
    found = found or kept_answer(target, gpus, offload, vocab_size, overrides)
    if not found and (missing := missing_packages()):
        job = " ".join([target, *(overrides or ())])
        raise ValueError(
            f"{job}: {are_not_installed(missing)}, whose model builder makes a job of that: pip install "
            "'megatron-bridge>=0.6,<0.7' (no GPU is needed). Without it this project's recipes are known as they are, "
            "see `bridge-fgo recipes list`"
        )
    found = found or ask_builder(target, gpus, offload, vocab_size, overrides=overrides)
    for name in ("install_refuses", "error"):
        if name in found:
            raise ValueError(found[name])
    job, model = job_of(found), RECIPES[target].hf_model if target in RECIPES else ""
    is_of_plan = model in kept_configs(planning=True).keys() - kept_configs().keys()
    if is_of_plan and without_folder(overrides or ())[1] is None:
        of_model = f"config.json of {model}: put together from public sources; training reads the release's own"
        return replace(job, source=f"{job.source}; {of_model}")
    return job


def job_of(found: dict[str, Any]) -> Job:
    """Return the job of a builder's answer."""
    config = sections_of(found["config"])
    versions = ", ".join(f"{name} {version}" for name, version in found.get("kept_of", {}).items())
    return Job(
        config,
        parallel_of(config, found["gpus"]),
        [
            [[Tensor(**{**tensor, "dtype": getattr(torch, tensor["dtype"])}) for tensor in chunk] for chunk in stage]
            for stage in found.get("stages", [])
        ],
        f"Megatron-Bridge's model builder{f', kept with this package ({versions})' if versions else ''}",
        OffloadConfig(**found["settings"]),
        found["flag"],
        found["refusals"],
        found["engine"],
        found["bridge_refuses"],
        found["gpus_given"],
        [Held.read(of_stage) for of_stage in found.get("held", [])],
        found.get("not_held", ""),
        found.get("recomputations", {}),
    )


def sections_of(config: dict[str, dict[str, Any]]) -> SimpleNamespace:
    """Return the builder's plain config as namespaces, with "torch.bfloat16" and the like as dtypes again."""

    def read(value: Any) -> Any:
        is_dtype = isinstance(value, str) and value.startswith("torch.")
        return getattr(torch, value.removeprefix("torch.")) if is_dtype else value

    return SimpleNamespace(
        **{
            section: SimpleNamespace(**{name: read(value) for name, value in settings_in(values).items()})
            for section, values in config.items()
        }
    )
