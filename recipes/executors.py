"""NeMo-Run executors for a `Job` of `entrypoint`: Slurm with one process a GPU, and this machine under torchrun."""

from __future__ import annotations

import os
import sys
from typing import Any

import nemo_run as run
from nemo_run.config import get_nemorun_home
from nemo_run.core.execution.launcher import SlurmTemplate

NODES_A_RACK = 18
"""Nodes that share NVLink in a GB200 NVL72."""


def segment_of(nodes: int) -> int:
    """Return the largest number of nodes within one rack that divides `nodes`.

    >>> segment_of(16), segment_of(32), segment_of(64)
    (16, 16, 16)
    """
    return next(size for size in range(min(nodes, NODES_A_RACK), 0, -1) if nodes % size == 0)


def near_cpu(gpus_per_node: int, command: str) -> str:
    """Return the lines of bash that run `command` on the CPU that the process's GPU hangs on, and in its memory.

    Pinned host buffers belong there. For nodes of two CPUs with as many GPUs each, in order, as GB200's: of three
    processes the first two are on the first.
    """
    node = f"$((SLURM_LOCALID / {-(-gpus_per_node // 2)}))"
    return f"exec numactl --cpunodebind={node} --membind={node} {command}"


def slurm(job: Any) -> run.SlurmExecutor:
    """Return the executor for whole nodes of two CPUs, a process a GPU, bound to the memory of its CPU.

    With `gpus_per_node=0` one process a node that is not bound. The job gets the recipe's environment as it is, and
    of the caller's environment PATH, HOME and what `job.env` names: those values travel with the submission and
    are in no file.
    """
    assert job.account is not None  # checked by Job
    environment, names, nodes = job.found.environment, job.env_names(), job.node_count
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
        container_mounts=[mount for mount in job.container_mounts.split(",") if mount],
        # What the image sets under these names must not win.
        container_env=sorted({*environment, *names}) if job.container_image else None,
        # Without --export, srun would obey sbatch's list, in SLURM_EXPORT_ENV, and leave out what the script exports.
        srun_args=["--export=ALL", *(["--no-container-mount-home"] if job.container_image else [])],
        env_vars=dict(environment),
        additional_parameters={"export": ",".join(["PATH", "HOME", *names]), "requeue": True},
        packager=run.Packager(),  # the package is installed in the container, or on the nodes
        tunnel=run.LocalTunnel(job_dir=os.path.join(get_nemorun_home(), "experiments")),
        retries=job.retries,
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
