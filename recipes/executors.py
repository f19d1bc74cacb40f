"""NeMo-Run executors for the recipes: Slurm with one process a GPU, and this machine under torchrun."""

from __future__ import annotations

import os

import nemo_run as run
from nemo_run.config import get_nemorun_home
from nemo_run.core.execution.launcher import SlurmTemplate

from bridge_fgo.recipes.catalog import Recipe

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

    Pinned host buffers belong there. For nodes of two CPUs with as many GPUs each, in order, as GB200's.
    """
    node = f"$((SLURM_LOCALID / {max(1, gpus_per_node // 2)}))"
    return f"exec numactl --cpunodebind={node} --membind={node} {command}"


def slurm(
    recipe: Recipe,
    *,
    account: str,
    partition: str | None,
    nodes: int,
    gpus_per_node: int,
    segment: int | None,
    time: str,
    container_image: str | None,
    container_mounts: list[str],
    env_names: list[str],
    retries: int,
) -> run.SlurmExecutor:
    """Return the executor for whole nodes of two CPUs, a process a GPU, bound to the memory of its CPU.

    With `gpus_per_node=0` one process a node that is not bound. `segment` is as in `Job`. Slurm gets the
    recipe's environment as it is, and of the caller's environment PATH, HOME and `env_names` alone: their values
    travel with the submission and are in no file.
    """
    executor = run.SlurmExecutor(
        account=account,
        partition=partition,
        nodes=nodes,
        ntasks_per_node=gpus_per_node or 1,
        gpus_per_node=gpus_per_node or None,
        segment=segment_of(nodes) if segment is None else segment or None,
        exclusive=True,
        mem="0",
        time=time,
        container_image=container_image,
        container_mounts=container_mounts,
        # What the image sets under these names must not win.
        container_env=sorted({*recipe.environment, *env_names}) if container_image else None,
        srun_args=["--no-container-mount-home"] if container_image else None,
        env_vars=dict(recipe.environment),
        additional_parameters={"export": ",".join(["PATH", "HOME", *env_names]), "requeue": True},
        packager=run.Packager(),  # the package is installed in the container, or on the nodes
        tunnel=run.LocalTunnel(job_dir=os.path.join(get_nemorun_home(), "experiments")),
        retries=retries,
    )
    if gpus_per_node:
        executor.launcher = SlurmTemplate(template_inline=near_cpu(gpus_per_node, "{{ command | safe }}"))
    return executor


def local(recipe: Recipe) -> run.LocalExecutor:
    """Return the executor for this machine: torchrun with a process a GPU of the recipe."""
    return run.LocalExecutor(
        ntasks_per_node=recipe.gpus,
        launcher="torchrun",
        env_vars=dict(recipe.environment),
        packager=run.Packager(),
    )
