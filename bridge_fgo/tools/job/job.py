"""A training job as `plan` and `doctor` know it: its settings, its size and each stage's tensors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from bridge_fgo.bridge.compat import as_if_set, native_only_refusal
from bridge_fgo.bridge.settings import settings_of
from bridge_fgo.config import OffloadConfig
from bridge_fgo.tools.demo import missing_packages
from bridge_fgo.tools.job.formula import stages_from_numbers
from bridge_fgo.tools.job.held import Held, held_from
from bridge_fgo.tools.job.kept import kept_answer
from bridge_fgo.tools.job.parallel import Parallel, parallel_of
from bridge_fgo.tools.job.saved_config import load_saved_config
from bridge_fgo.tools.job.target import is_saved_config
from bridge_fgo.tools.job.tensors import Chunk, Tensor
from bridge_fgo.tools.show import spinner


@dataclass(frozen=True)
class Job:
    """A job, as far as it is known without running it.

    config: sections of settings as namespaces; dtypes are `torch.dtype`s.
    stages: of each pipeline stage its model chunks; empty where Bridge refuses the config.
    source: "Megatron-Bridge's model builder", with the versions where its answer is kept; or "the config's numbers".
    offload: the settings in force, from the command line and the config.
    flag: whether the config asks for the offload; refusals: why this package refuses it with the flag set.
    engine: that would serve it; None where it is refused, or where there is no mcore to ask.
    bridge_refuses: why Bridge itself refuses the config.
    bridge_estimate: bytes that Bridge's own estimator expects; None where it was not asked.
    gpus_given: whether the user or the recipe says on how many GPUs; else `parallel` is of the fewest.
    held: of each pipeline stage what its ranks hold, by mcore's own layout; empty where that is not known.
    not_held: why it is not.
    """

    config: SimpleNamespace
    parallel: Parallel
    stages: list[list[Chunk]]
    source: str
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    flag: bool = False
    refusals: list[str] = field(default_factory=list)
    engine: str | None = None
    bridge_refuses: str | None = None
    bridge_estimate: dict[str, float] | None = None
    gpus_given: bool = True
    held: list[Held] = field(default_factory=list)
    not_held: str = "Megatron-Bridge is not installed"

    @property
    def gpus_note(self) -> str:
        """What is assumed where the number of GPUs was not given; "" where it was."""
        return "" if self.gpus_given else f"on {self.parallel.gpus} GPUs, the fewest it can have; give --gpus"

    @property
    def microbatches(self) -> int:
        """Microbatches of a step, on each replica."""
        train = self.config.train
        return max(1, train.global_batch_size // (train.micro_batch_size * self.parallel.data))


def read_job(
    target: str,
    gpus: int | None,
    offload: dict[str, Any],
    vocab_size: int | None = None,
    overrides: Sequence[str] = (),
    found: dict[str, Any] | None = None,
) -> Job:
    """Return what is known of a job, without running it.

    Args:
        target: see `bridge_fgo.tools.job.recipes.load_config`; without Megatron a saved run config, or one of this
            project's recipes as it is.
        gpus: how many the job has; None for the fewest that it can have.
        offload: arguments of OffloadConfig.
        vocab_size: of the tokenizer, where neither the model nor the tokenizer's config says it.
        overrides: of the config, `section.field=value` in Bridge's syntax.
        found: the builder's answer to all this, where it was asked already.

    Raises:
        ValueError: there is no such recipe, file or setting, it cannot be built, or the GPUs do not suit it.
        RuntimeError: the builder died, or Megatron could not be imported with the package installed.
    """
    settings = OffloadConfig(**offload)
    kept = kept_answer(target, gpus, offload, vocab_size, overrides) if not found else None
    missing = missing_packages()
    if kept is None and missing:
        if overrides:
            raise ValueError(
                f"{' '.join(overrides)}: Megatron-Bridge reads overrides; {', '.join(missing)} not installed"
            )
        return _from_numbers(target, gpus, vocab_size, missing, settings)
    if kept is not None:
        found = kept
    elif found is None:
        found = ask_builder(target=target, gpus=gpus, offload=offload, vocab_size=vocab_size, overrides=overrides)
    if "install_refuses" in found:
        raise RuntimeError(found["install_refuses"])
    if "error" in found:
        raise ValueError(found["error"])
    return job_of(found, settings if kept is not None else None)


def job_of(found: dict[str, Any], settings: OffloadConfig | None = None) -> Job:
    """Return the job of a builder's answer, with its settings, or with others that the answer does not depend on."""
    config = sections_of(found["config"])
    stages = [
        [[Tensor(**{**t, "dtype": getattr(torch, t["dtype"])}) for t in chunk] for chunk in stage]
        for stage in found.get("stages", [])
    ]
    return Job(
        config,
        parallel_of(config, found["gpus"]),
        stages,
        _source(found),
        OffloadConfig(**found["settings"]) if settings is None else settings,
        found["flag"],
        found["refusals"],
        found["engine"],
        found["bridge_refuses"],
        found.get("bridge_estimate"),
        found["gpus_given"],
        [held_from(of_stage) for of_stage in found.get("held", [])],
        found.get("not_held", ""),
    )


def _source(found: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in found.get("kept_of", {}).items())
    return f"Megatron-Bridge's model builder{f', kept with this package ({versions})' if versions else ''}"


def sections_of(config: dict[str, dict[str, Any]]) -> SimpleNamespace:
    """Return the builder's plain config as namespaces."""
    return SimpleNamespace(**{name: SimpleNamespace(**_dtypes(values)) for name, values in config.items()})


def _from_numbers(
    target: str, gpus: int | None, vocab_size: int | None, missing: list[str], settings: OffloadConfig
) -> Job:
    from bridge_fgo.bridge.refusals import config_refusals, master_refusals

    if not is_saved_config(target):
        raise ValueError(
            f"{', '.join(missing)} not installed: a recipe like {target!r} cannot be built here; give a saved "
            "run_config.yaml, or install it"
        )
    config = load_saved_config(Path(target))
    parallel = parallel_of(config, gpus)
    if config.model.vocab_size is None and getattr(config.tokenizer, "vocab_size", None) is None:
        config.model.vocab_size = vocab_size
    stages = stages_from_numbers(config)
    settings = settings_of(config.optimizer, settings)
    flag, config.optimizer = as_if_set(config.optimizer)
    refusals = [*config_refusals(config), *master_refusals(config, settings)]
    if refusal := native_only_refusal(settings):
        refusals.append(refusal)
    return Job(config, parallel, stages, "the config's numbers", settings, flag, refusals, gpus_given=gpus is not None)


def ask_builder(
    target: str | None = None,
    gpus: int | None = None,
    offload: dict[str, Any] | None = None,
    vocab_size: int | None = None,
    patches: bool = False,
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the answer of `bridge_fgo.tools.job.builder`, which runs in a process of its own.

    Raises:
        RuntimeError: it died; shows the end of what it printed.
    """
    request = {"target": target, "gpus": gpus, "offload": offload or {}, "vocab_size": vocab_size, "patches": patches}
    request["overrides"] = list(overrides)
    command = [sys.executable, "-m", "bridge_fgo.tools.job.builder", json.dumps(request)]
    with spinner(f"importing Megatron{f' and building {target} without a GPU' if target else ''}: about a minute"):
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        tail = "\n".join(done.stderr.strip().splitlines()[-15:])
        raise RuntimeError(f"{target or 'Megatron-Bridge'} could not be built without a GPU:\n{tail}")
    return json.loads(done.stdout)


def _dtypes(values: dict[str, Any]) -> dict[str, Any]:
    """Return settings with "torch.bfloat16" and the like as dtypes again."""
    return {
        name: getattr(torch, value.removeprefix("torch."))
        if isinstance(value, str) and value.startswith("torch.")
        else value
        for name, value in values.items()
    }
