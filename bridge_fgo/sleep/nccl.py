"""NCCL's memory: its bytes, and its release while everything that a process trains is off the GPU.

NCCL's `ncclCommSuspend` unmaps what a communicator uses of GPU memory, and `ncclCommResume` maps it at the same
addresses. Both wait for all ranks of the communicator on the host, without a timeout. A kernel of a suspended one reads
unmapped memory: neither NCCL nor PyTorch refuses it (NCCL 2.30.7, `src/mem_manager.cc`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch

from bridge_fgo.config import readable

LEAST_NCCL = (2, 29, 7)

OFF_BY = {"NCCL_CUMEM_ENABLE": "0", "NCCL_DISABLE_MEM_MANAGER": "1", "NCCL_COMM_SPLIT_SHARE_RESOURCES": "1"}
"""Settings with which NCCL counts no memory, or counts the same twice, and suspends none."""

LAZY = "ProcessGroupNCCLLazy"
"""Suspends its communicators of pairs of ranks in any order, so that ranks could wait for each other in a circle
(PyTorch 2.15, `lazy/LazyBackend.hpp`)."""

BACKENDS = ("ProcessGroupNCCL", "ProcessGroupNCCL2", LAZY)

HOOK = 0x6272_6964  # any number that no other hook of a process group has

Key = tuple[str, int, int]
"""A process group as each of its ranks tells it: its name, how many ranks it has, and a hash of their numbers."""

_suspended: dict[Key, tuple[Any, Any]] = {}
"""The groups of this process that are suspended, and their backends; one for all, as a process's groups are."""


def require_nccl(setting: str | None) -> str | None:
    """Return `Residency(nccl=...)`, or raise ValueError where it is no setting or cannot be honoured here."""
    if setting not in (None, "suspend"):
        raise ValueError(f"Residency(nccl={setting!r}): use 'suspend', or None to let NCCL keep its memory")
    if setting is not None and (why := refusal()):
        raise ValueError(f"Residency(nccl='suspend'): {why}, or leave nccl out")
    return setting


def refusal() -> str:
    """Return why NCCL's memory can be neither counted nor suspended here, and what to do; empty where it can be."""
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return f"PyTorch {torch.__version__} was built without NCCL: install one with it"
    of_nccl: Any = torch.distributed.ProcessGroupNCCL  # its stub has static methods take a self
    built, runs = of_nccl.get_build_nccl_version(), of_nccl.get_runtime_nccl_version()
    if not hasattr(of_nccl, "suspend") or min(built, runs) < LEAST_NCCL:
        return (
            f"PyTorch {torch.__version__}, built with NCCL {_dotted(built)}, runs NCCL {_dotted(runs)}, and this takes "
            f"PyTorch 2.12 and NCCL {_dotted(LEAST_NCCL)} of both: install newer ones"
        )
    for name, value in OFF_BY.items():
        if os.environ.get(name) == value:
            return f"the environment variable {name}={value} keeps NCCL from it: unset it"
    return ""


def _dotted(version: Iterable[int]) -> str:
    return ".".join(map(str, version))


def _nccl_of(group: Any) -> Any:
    """Return the NCCL backend of a process group, None where it has none."""
    cuda, c10d = torch.device("cuda"), torch.distributed.distributed_c10d
    if cuda not in group._device_types:
        return None
    backend = group._get_backend(cuda)
    while isinstance(backend, getattr(c10d, "_ProcessGroupWrapper", ())):  # by TORCH_DISTRIBUTED_DEBUG=DETAIL
        backend = backend.wrapped_pg
    classes = tuple(getattr(c10d, name) for name in BACKENDS if hasattr(c10d, name))
    return backend if isinstance(backend, classes) else None


def _communicators() -> dict[Key, tuple[Any, Any, dict[str, int]]]:
    """Return this rank's groups with a communicator of NCCL's, their backends and `memory_stats()`, as they were made.

    PyTorch has all ranks make groups in one order, so that ranks that take theirs in it never wait for each other in
    a circle.
    """
    found: dict[Key, tuple[Any, Any, dict[str, int]]] = {}
    for group in torch.distributed.distributed_c10d._world.pg_map:
        if (backend := _nccl_of(group)) is None:
            continue
        try:
            stats = backend.memory_stats()
        except RuntimeError as error:
            if "not initialized" not in str(error):
                raise
            continue  # PyTorch makes the communicator in the group's first collective
        ranks = tuple(torch.distributed.get_process_group_ranks(group))
        found[group.group_name, len(ranks), hash(ranks)] = group, backend, stats
    return found


def held_bytes() -> int | None:
    """Return the bytes of GPU memory that NCCL's communicators hold now, as NCCL counts them; None where it cannot."""
    try:
        found = {} if refusal() else _communicators()
    except RuntimeError:  # a communicator was aborted: a figure ends no sleep
        return None
    if not found:
        return None
    return sum(stats["total"] - (stats["suspend"] if stats["suspended"] else 0) for *_, stats in found.values())


def suspendable() -> list[Key]:
    """Return this rank's groups that can be suspended: no lazy one, nor the default, over which the ranks agree."""
    found, default = _communicators(), torch.distributed.group.WORLD
    return [key for key, (group, nccl, _) in found.items() if group is not default and type(nccl).__name__ != LAZY]


def suspended() -> list[Key]:
    """Return this rank's groups that are suspended, and forget those that were destroyed."""
    alive = torch.distributed.distributed_c10d._world.pg_map
    for key in [key for key, (group, _) in _suspended.items() if group not in alive]:
        del _suspended[key]
    return list(_suspended)


def _told_by_all(told: Sequence[Sequence[Key]]) -> set[Key]:
    """Return the groups of which every rank has told; of one with processes outside the job some have not."""
    return {key for key, times in Counter(chain.from_iterable(told)).items() if times == key[1]}


def suspend(told: Sequence[Sequence[Key]]) -> None:
    """Suspend the groups of this rank that all their ranks have told; a collective of each of them.

    The device must be idle. What fails at one is raised after all, as other ranks wait for this one in the next.
    """
    whole, errors = _told_by_all(told), list[Exception]()
    for key, (group, backend, _) in _communicators().items():
        if key not in whole:
            continue
        try:
            backend.suspend()
        except Exception as error:
            errors.append(error)
            continue
        _suspended[key] = group, backend
        if hasattr(group, "register_pre_hook"):  # pytorch#186300
            group.register_pre_hook(HOOK, partial(_refuse, group.group_desc))
    if errors:
        raise errors[0]


def _refuse(name: str, args: Any) -> None:
    tensors = [*args.input_tensors, *args.output_tensors]
    if tensors and all(tensor.device.type == "cpu" for tensor in tensors):
        return  # gloo's, in a group that has both
    raise RuntimeError(
        f"a collective of the process group {name!r}, which Residency(nccl='suspend') has suspended: call reload() on "
        "every rank first, or use the default group, which is never suspended"
    )


def resumable(told: Sequence[Sequence[Key]], device: torch.device) -> list[Key]:
    """Return this rank's groups to resume, in the order of their suspension; `told` has what is suspended on each rank.

    Raises:
        torch.OutOfMemoryError: there is no memory for them.
        RuntimeError: a group is suspended on some of its ranks only, as NCCL failed on the others.
    """
    if halves := set(chain.from_iterable(told)) - _told_by_all(told):
        names = ", ".join(sorted(name for name, *_ in halves))
        raise RuntimeError(f"NCCL has suspended process groups ({names}) on some of their ranks alone: end the job")
    if device.type == "cuda":
        # Race: what has run in the meantime, an inference engine's kernels say, may still use what is cached.
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        needed = sum(backend.memory_stats()["suspend"] for _, backend in _suspended.values())
        if needed > (free := torch.cuda.mem_get_info(device)[0]):
            raise torch.OutOfMemoryError(
                f"NCCL's communicators take {readable(needed)} of GPU memory again, and {readable(free)} are free: "
                "have the inference engine return memory first"
            )
    return suspended()


def resume(keys: Iterable[Key]) -> None:
    """Resume groups; a collective of each. One that fails on this rank alone leaves the others waiting, as any does."""
    for key in keys:
        group, backend = _suspended[key]
        backend.resume()
        del _suspended[key]
        if hasattr(group, "unregister_pre_hook"):
            group.unregister_pre_hook(HOOK)
