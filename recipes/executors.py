"""NeMo-Run executors for a `Job` of `entrypoint`: Slurm with one process a GPU, and this machine under torchrun."""

from __future__ import annotations

import os
import re
import shlex
import sys
from typing import Any

import nemo_run as run
from nemo_run.config import get_nemorun_home
from nemo_run.core.execution.launcher import SlurmTemplate

NODES_A_RACK = 18
"""Nodes that share NVLink in a GB200 NVL72."""
SENT_EARLIER = 60
"""Seconds by which Slurm may send a signal earlier than it was asked to."""


def segment_of(nodes: int) -> int:
    """Return the largest number of nodes within one rack that divides `nodes`."""
    return next(size for size in range(min(nodes, NODES_A_RACK), 0, -1) if nodes % size == 0)


def seconds_of(limit: str) -> int | None:
    """Return the seconds of a time limit in any of Slurm's forms, None for no limit; ValueError for another form."""
    if limit.upper() in ("UNLIMITED", "INFINITE"):
        return None
    form = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if form is None:
        raise ValueError("use HH:MM:SS, MINUTES, MM:SS, DAYS-HH or DAYS-HH:MM:SS")
    days, *parts = form.groups()
    units = (3600, 60, 1) if days or parts[-1] else (60, 1)
    found = int(days or 0) * 86400 + sum(int(part or 0) * unit for part, unit in zip(parts, units, strict=False))
    return found or None  # of Slurm's 0 is no limit


def checkpoint_overrides(folder: str) -> list[str]:
    """Return the overrides that resume from a folder, save to it, and save and end when the time is up."""
    path = folder if re.fullmatch(r"/[\w./-]+", folder) else f"'{folder}'"  # to Hydra, which overrides go through
    handlers = ("train.exit_signal_handler=true", "train.exit_signal_handler_for_dataloader=true")
    return [f"checkpoint.save={path}", f"checkpoint.load={path}", *handlers] if folder else []


def setup_lines(job: Any, limit: int | None) -> str:
    """Return the lines of bash before training: what each node is asked first, and when the job is queued again."""
    lines, preflight = [], job.preflight_command()
    if job.preflight and job.node_gpus:  # a node's last process binds to the last CPU
        last = (job.node_gpus - 1) // gpus_of_a_cpu(job.node_gpus)
        check = f'numactl --cpunodebind={last} --membind={last} true && "$@"'
        preflight = ["bash", "-c", check, "preflight", *preflight]
    if preflight:
        container = []
        if job.container_image:
            mounts = ["--container-mounts", job.container_mounts] if job.container_mounts else []
            container = ["--container-image", job.container_image, *mounts, "--no-container-mount-home"]
            container += ["--container-env", ",".join(container_env(job))]
        nodes = ["srun", f"--ntasks={job.node_count}", "--ntasks-per-node=1", "--export=ALL", *container]
        lines.append(f"{shlex.join([*nodes, *preflight])} || {{ echo 'the preflight refuses this job'; exit 1; }}")
    lines.append("trap 'case $? in 126|127) TORCHX_MAX_RETRIES=0 ;; esac' ERR  # the command is not there")
    if job.checkpoints and limit is not None:
        up = limit - seconds_to_save(limit) - SENT_EARLIER
        lines.append(f"""trap '(($? == 0 && SECONDS > {up})) && scontrol requeue "$SLURM_JOB_ID"' EXIT""")
    return "\n".join(lines)


def seconds_to_save(limit: int) -> int:
    """Return how long before its time limit a job is told to save."""
    return min(600, limit // 4)


def container_env(job: Any) -> list[str]:
    """Return the names of variables that the image's own must not win over."""
    return sorted({*job.found.environment, *job.env_names()})


def gpus_of_a_cpu(gpus_per_node: int) -> int:
    """Return how many GPUs hang on each of a node's two CPUs, in order, as on GB200's."""
    return -(-gpus_per_node // 2)


def near_cpu(gpus_per_node: int, command: str) -> str:
    """Return the lines of bash that run `command` on the CPU that the process's GPU hangs on, and in its memory.

    Pinned host buffers belong there. Of three processes the first two are on the first.
    """
    node = f"$((SLURM_LOCALID / {gpus_of_a_cpu(gpus_per_node)}))"
    return f"exec numactl --cpunodebind={node} --membind={node} {command}"


def slurm(job: Any) -> run.SlurmExecutor:
    """Return the executor for whole nodes of two CPUs, a process a GPU, bound to the memory of its CPU.

    With `gpus_per_node=0` one process a node that is not bound. The job gets the recipe's environment as it is, and
    of the caller's environment PATH, HOME and what `job.env` names: those values travel with the submission and
    are in no file.
    """
    assert job.account is not None  # checked by Job
    environment, names, nodes, limit = job.found.environment, job.env_names(), job.node_count, seconds_of(job.time)
    executor = run.SlurmExecutor(
        account=job.account,
        partition=job.partition,
        nodes=nodes,
        ntasks_per_node=job.node_gpus or 1,
        gpus_per_node=job.node_gpus or None,
        segment=segment_of(nodes) if job.segment is None and job.found.is_of_racks else job.segment or None,
        exclusive=True,
        mem="0",
        time=job.time,
        container_image=job.container_image,
        container_mounts=job.mounts(),
        container_env=container_env(job) if job.container_image else None,
        # Without --export, srun would obey sbatch's list, in SLURM_EXPORT_ENV, and leave out what the script exports.
        srun_args=["--export=ALL", *(["--no-container-mount-home"] if job.container_image else [])],
        env_vars=dict(environment),
        additional_parameters={"export": ",".join(["PATH", "HOME", *names]), "requeue": True},
        packager=run.Packager(),  # the package is installed in the container, or on the nodes
        tunnel=run.LocalTunnel(job_dir=os.path.join(get_nemorun_home(), "experiments")),
        retries=job.retries,
        setup_lines=setup_lines(job, limit),
        # To the processes; `recipes.train` has why it is this one.
        signal=f"URG@{seconds_to_save(limit)}" if job.checkpoints and limit is not None else None,
    )
    if job.node_gpus:
        executor.launcher = SlurmTemplate(template_inline=near_cpu(job.node_gpus, "{{ command | safe }}"))
    return executor


def local(job: Any) -> run.LocalExecutor:
    """Return the executor for this machine: torchrun with a process a GPU, or one that sees no GPU."""
    hidden = {} if job.node_gpus else {"CUDA_VISIBLE_DEVICES": ""}
    return run.LocalExecutor(
        ntasks_per_node=job.node_gpus or 1,
        launcher="torchrun",
        # NeMo-Run puts PATH in front of this process's own: torchrun is beside python also where no venv is active.
        env_vars=job.found.environment | hidden | {"PATH": os.path.dirname(sys.executable)},
        packager=run.Packager(),
    )
