"""The NeMo-Run command `fgo pretrain`: entry point `fgo` in group `nemo_run.cli`, and `python -m recipes.launch`.

    nemorun fgo pretrain --factory dsv4_flash_64gpu account=me partition=gb200 container_image=... --dryrun

`--factory` takes the name of a recipe. NeMo-Run finds all of this when it loads this module.
"""

# No `from __future__ import annotations`: NeMo-Run parses the command line by the types of the fields, as objects,
# and knows Optional[X] but not X | None.
import difflib
import os
import re
import shlex
import traceback
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Optional, get_args

import fiddle as fdl
import nemo_run as run
import typer
from nemo_run.cli.api import RunContext
from nemo_run.cli.cli_parser import CLIException
from torchx.specs import AppState

from bridge_fgo.config import OffloadConfig, needing_offload
from bridge_fgo.recipes import catalog, dry_run, executors, hf_config
from bridge_fgo.recipes.overrides import refuse_without_value
from bridge_fgo.tools.options import OffloadOptions, command_line, mistake, settings

SCHEDULERS = ("slurm", "local")
SLURM_ONLY = (
    *("account", "partition", "nodes", "segment", "time", "container_image", "container_mounts", "env", "python"),
    *("checkpoints", "preflight", "retries"),
)


@dataclass(kw_only=True)
class Job(OffloadOptions):
    """Pretrain one of the recipes, on Slurm (GB200 by default) or on this machine.

    The settings of the offload are OffloadConfig's: engine, fraction, gpu_memory_budget_gib, ...

    Args:
        recipe: name of a recipe, which `--factory` sets. Required.
        offload: offload the optimizer's states. Without it, exactly upstream's recipe.
        hf_config: Hugging Face config: auto (its cache, else kept in the project), hub, kept, or the folder of a
            config.json, with a / in it.
        overrides: overrides of Bridge's config, `section.field=value` with spaces between; on the command line each may
            also stand by itself.
        scheduler: slurm, or local: this machine, where the settings from account on are errors.
        gpus_per_node: GPUs of a node, a process each; 0 for one process without a GPU. Default: what the recipe is
            for, on Slurm at most those of a node of its system (4 of a GB200).
        account: Slurm account. Required for slurm.
        partition: Slurm partition.
        nodes: nodes. Default: as many as the recipe is for.
        segment: nodes that must share an NVLink domain, a divisor of nodes; 0 leaves it to Slurm. Default: the most
            that a rack holds.
        time: Slurm time limit, HH:MM:SS or another of Slurm's forms.
        container_image: container to run in. Default: none.
        container_mounts: HOST:CONTAINER, with commas between.
        env: names of environment variables to pass on, with commas between. Values never reach a file.
        python: Python that has the packages, in the container or on the nodes.
        checkpoints: folder that is saved to and resumed from. The job then saves before its time limit ends, and is
            queued again. Default: as the recipe.
        preflight: run bridge-fgo doctor on every node first, except for a resident run, and try that numactl binds.
        retries: how often Slurm queues the job again after a failure.

    Raises:
        ValueError: a setting that is not there or makes no sense; the message names it.
    """

    recipe: str = ""
    offload: bool = True
    hf_config: str = "auto"
    overrides: str = ""
    scheduler: str = "slurm"
    gpus_per_node: Optional[int] = None  # noqa: UP045
    account: Optional[str] = None  # noqa: UP045
    partition: Optional[str] = None  # noqa: UP045
    nodes: Optional[int] = None  # noqa: UP045
    segment: Optional[int] = None  # noqa: UP045
    time: str = "04:00:00"
    container_image: Optional[str] = None  # noqa: UP045
    container_mounts: str = ""
    env: str = ""
    python: str = "python"
    checkpoints: str = ""
    preflight: bool = True
    retries: int = 3

    def __post_init__(self) -> None:
        if not self.recipe:
            raise ValueError(f"recipe='': give --factory NAME, one of {', '.join(catalog.RECIPES)}")
        self.found = catalog.find(self.recipe)
        given = settings(vars(self))
        OffloadConfig(**given)
        refuse_without_value(shlex.split(self.overrides))
        of_offload = needing_offload(given)
        if of_offload and not self.offload:
            raise ValueError(f"offload=false with {', '.join(of_offload)}: leave out one or the other")
        if self.hf_config not in get_args(hf_config.Choice) and "/" not in self.hf_config:  # a folder there
            names = ", ".join(get_args(hf_config.Choice))
            raise ValueError(f"hf_config={self.hf_config!r}: use one of {names}, or a folder (./DIR)")
        if self.scheduler not in SCHEDULERS:
            raise ValueError(f"scheduler={self.scheduler!r}: use one of {', '.join(SCHEDULERS)}")
        if self.gpus_per_node is not None and self.gpus_per_node < 0:
            raise ValueError(f"gpus_per_node={self.gpus_per_node}: use a number of at least 0")
        if self.scheduler == "slurm":
            self._check_slurm()
        else:
            self._check_local()

    def _check_slurm(self) -> None:
        if not self.account:
            raise ValueError(f"account={self.account!r}: Slurm needs an account; give account=NAME, or scheduler=local")
        if self.nodes is not None and self.nodes < 1:
            raise ValueError(f"nodes={self.nodes}: use a number of at least 1")
        if self.segment and (self.segment < 0 or self.node_count % self.segment):
            raise ValueError(f"segment={self.segment}: use a divisor of nodes={self.node_count}, or 0")
        try:
            executors.seconds_of(self.time)
        except ValueError as error:
            raise ValueError(f"time={self.time!r}: {error}") from None
        if "python" not in self.python or self.python.split() != [self.python]:  # NeMo-Run asks for the former
            raise ValueError(f"python={self.python!r}: use a name or path with 'python' in it and no space")
        self._check_checkpoints()
        if self.retries < 0:
            raise ValueError(f"retries={self.retries}: use a number of at least 0")
        for name in self.env_names():
            if name not in os.environ:
                raise ValueError(f"env: {name!r} is not set here; give names only, of variables that are set")

    def _check_checkpoints(self) -> None:
        folder = self.checkpoints
        if folder and (not folder.startswith("/") or "'" in folder):
            raise ValueError(f"checkpoints={folder!r}: use an absolute path without '")
        inside = [Path(mount.split(":")[1 if ":" in mount else 0]) for mount in self.mounts()]
        if folder and self.container_image and not any(map(Path(folder).is_relative_to, inside)):
            given = f"container_mounts={self.container_mounts!r}"
            raise ValueError(f"checkpoints={folder!r} with {given}: mount the folder, or it ends with the container")

    def _check_local(self) -> None:
        changed = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if field.name in SLURM_ONLY and getattr(self, field.name) != field.default
        ]
        if changed:
            raise ValueError(f"scheduler=local with {', '.join(changed)}, for Slurm only: leave out one or the other")
        import torch

        here = torch.cuda.device_count()
        if self.node_gpus > max(1, here):  # without GPUs one process, which tiny can train in
            raise ValueError(
                f"scheduler=local: recipe {self.recipe} with gpus_per_node={self.node_gpus} does not fit this machine "
                f"of {here} GPUs; use scheduler=slurm, or a smaller gpus_per_node"
            )

    @property
    def node_count(self) -> int:
        """Nodes of the job."""
        if self.scheduler != "slurm":
            return 1
        return self.nodes or -(-self.found.gpus // max(1, self.node_gpus))

    @property
    def node_gpus(self) -> int:
        """GPUs of each node, 0 for a process without one."""
        if self.gpus_per_node is not None:
            return self.gpus_per_node
        return min(self.found.gpus, self.found.gpus_a_node) if self.scheduler == "slurm" else self.found.gpus

    def mounts(self) -> list[str]:
        """Return the mounts in `container_mounts`, each HOST:CONTAINER or with flags after it."""
        return [mount for mount in self.container_mounts.split(",") if mount]

    def env_names(self) -> list[str]:
        """Return the names in `env`."""
        return [name for name in self.env.split(",") if name]

    def all_overrides(self) -> list[str]:
        """Return the overrides of Bridge's config: those that `checkpoints` asks for, and the user's."""
        return [*executors.checkpoint_overrides(self.checkpoints), *shlex.split(self.overrides)]

    def arguments(self) -> list[str]:
        """Return the arguments of `bridge_fgo.recipes.train`."""
        hf = [] if self.hf_config == "auto" else ["--hf-config", self.hf_config]
        on_or_off = "--offload" if self.offload else "--no-offload"
        return [self.recipe, on_or_off, *command_line(vars(self)), *hf, *self.all_overrides()]

    def preflight_command(self) -> list[str]:
        """Return the command that examines the job on a node, which is about what is offloaded; [] for none."""
        if not (self.preflight and self.offload):
            return []
        gpus = self.node_count * self.node_gpus
        words = [self.python, "-m", "bridge_fgo", "doctor", self.recipe, *([f"--gpus={gpus}"] if gpus else [])]
        hf = [f"hf_config={self.hf_config}"] if "/" in self.hf_config else []
        return [*words, *command_line(vars(self)), *hf, *self.all_overrides()]

    def task(self) -> run.Script:
        """Return what each rank runs."""
        arguments = self.arguments()
        if self.scheduler == "slurm":  # NeMo-Run joins them with spaces into a line of shell
            arguments = [shlex.quote(argument) for argument in arguments]
        return run.Script(path="bridge_fgo.recipes.train", m=True, entrypoint=self.python, args=arguments)

    def check(self) -> list[str]:
        """Raise ValueError where training would refuse the job; return what could not be checked here, a line each."""
        overrides, gpus = self.all_overrides(), self.node_count * self.node_gpus
        if not gpus:  # tiny's, of which nothing is laid out
            return []
        if (Path(self.hf_config) / "config.json").is_file():
            overrides.append(f"hf_config={self.hf_config}")
        try:
            note = dry_run.check(self.found, gpus, command_line(vars(self)) if self.offload else None, overrides)
        except ValueError as error:
            given = f"nodes={self.node_count} with gpus_per_node={self.node_gpus}"
            raise ValueError(str(error).replace(f"--gpus {gpus}", f"{given}, {gpus} GPUs", 1)) from None
        return [] if note is None else [note]

    def notes(self) -> list[str]:
        """Return what to know before the launch, a line each, with the command that each process will run."""
        recipe, lines = self.found, []
        if recipe.mcore_module:
            lines.append(
                f"recipe {recipe.name} needs a container with Megatron-LM's dev branch ({recipe.mcore_module})"
            )
        if recipe.hf_model and recipe.hf_model not in hf_config.kept_configs() and "/" not in self.hf_config:
            lines.append(
                f"recipe {recipe.name} reads config.json of {recipe.hf_model} from Hugging Face or its cache where it "
                "trains; or give hf_config=FOLDER"
            )
        gpus = self.node_count * self.node_gpus
        if gpus not in (0, recipe.gpus):
            lines.append(f"recipe {recipe.name} is laid out for {recipe.gpus} GPUs, this job has {gpus}")
        if self.scheduler == "slurm" and not self.checkpoints:
            lines.append(
                "nothing is saved before the time limit ends, and the job is not queued again then: checkpoints=FOLDER"
            )
        command = shlex.join([self.python, "-m", "bridge_fgo.recipes.train", *self.arguments()])
        if self.scheduler == "slurm" and self.node_gpus:
            command = executors.near_cpu(self.node_gpus, command)
        return [*lines, "each process runs:", command]

    def executor(self) -> run.Executor:
        """Return where and how the ranks run."""
        return executors.local(self) if self.scheduler == "local" else executors.slurm(self)


NUMBERS = {
    field.name: kind
    for field in fields(Job)
    for kind in (int, float)
    if kind in (field.type, *get_args(field.type)) and str not in get_args(field.type)
}
"""The settings of a job that are numbers alone, with their types."""
OF_NEMO_RUN = ("run", "executor", "plugins")
"""First parts of names that NeMo-Run reads itself, as in `run.executor=...`."""


def gather_overrides(arguments: list[str]) -> list[str]:
    """Return arguments with `section.field=value` put into `overrides=`; ValueError where there is no such setting."""
    of_job = {field.name for field in fields(Job)}
    found: list[str] = []
    others: list[str] = []
    for argument in arguments:
        name = argument.partition("=")[0].lstrip("+~")
        section, dot, _ = name.partition(".")
        is_override = bool(dot) and "=" in argument and section not in of_job and section not in OF_NEMO_RUN
        if "=" in argument and not is_override and re.split(r"\W", name)[0] not in {*of_job, *OF_NEMO_RUN}:
            near = difflib.get_close_matches(name, of_job, n=1)
            raise ValueError(f"{argument}: there is no setting {name}{f'; did you mean {near[0]}?' if near else ''}")
        if (kind := NUMBERS.get(name)) is not None and "=" in argument:
            try:  # NeMo-Run names the types of Python that it has tried, twice
                kind(argument.partition("=")[2])
            except ValueError:
                raise ValueError(f"{argument}: use a {'whole number' if kind is int else 'number'}") from None
        (found if is_override else others).append(argument)
    if not found:
        return arguments
    before = [argument.partition("=")[2] for argument in others if argument.startswith("overrides=")]
    others = [argument for argument in others if not argument.startswith("overrides=")]
    return [*others, f"overrides={' '.join([*before, shlex.join(found)])}"]


class PretrainContext(RunContext):
    """Turns the parsed `Job` into a script and an executor, so that the training container needs no NeMo-Run."""

    def cli_execute(self, fn: Any, args: list[str], entrypoint_type: Literal["task", "experiment"] = "task") -> None:
        """Execute as upstream's does, but end with status 2 after a mistake, and 1 after an error; upstream's is 0."""
        try:
            if unknown := [arg for arg in args if arg.startswith("-")]:  # NeMo-Run would go on without them
                raise ValueError(f"there is no option {unknown[0]}: settings are NAME=VALUE, --help lists the options")
            arguments = gather_overrides(args)
            if self.factory and self.factory.isidentifier():  # else NeMo-Run's own: a path or a call
                catalog.find(self.factory)
            super().cli_execute(fn, arguments, entrypoint_type)
        except (ValueError, CLIException) as error:
            raise mistake(self.name, error) from None
        except typer.Abort:  # no answer to its question
            raise SystemExit(f"{self.name}: nothing is launched; --yes launches without a question") from None
        except Exception:
            traceback.print_exc()
            raise SystemExit(1) from None

    def _execute_task(self, fn: Any, task_args: list[str]) -> None:
        if self.to_yaml or self.to_toml or self.to_json:
            super()._execute_task(fn, task_args)  # exports and ends
            return
        job = fdl.build(self.parse_fn(fn, task_args))()
        unchecked = job.check() if self.dryrun else []
        self.executor = self.executor or job.executor()
        for line in [*unchecked, *job.notes()]:
            print(line)
        with run.Experiment(f"fgo-{job.recipe}") as experiment:
            experiment.add(job.task(), executor=self.executor, name="train")
            if self.dryrun or self._should_continue(self.skip_confirmation):
                self.launch(experiment)
        (task,) = experiment.jobs
        if task.state in (AppState.FAILED, AppState.CANCELLED):  # of one that was waited for
            raise SystemExit(f"{self.name}: recipe {job.recipe} failed; its logs are in {task.executor.job_dir}")


def _register(name: str) -> None:
    def factory() -> run.Partial[Job]:
        return run.Partial(Job, recipe=name, scheduler="local" if name == "tiny" else "slurm")

    factory.__doc__ = f"The recipe {name}."
    run.cli.factory(factory, target=Job, name=name)


run.cli.entrypoint(Job, name="pretrain", namespace="fgo", run_ctx_cls=PretrainContext)
for _name in catalog.RECIPES:
    _register(_name)
