"""Megatron-FSDP on a CPU: what it asks of CUDA beside what `bridge_fgo.tools.standins.cuda` answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch.distributed.device_mesh import DeviceMesh


def _mesh_of_cpus(group: Any, device_type: str, *args: Any, **kwargs: Any) -> DeviceMesh:
    return _from_group(group, "cpu", *args, **kwargs)


_from_group = DeviceMesh.from_group


@contextlib.contextmanager
def fsdp_on_cpu() -> Iterator[None]:
    """Context in which Megatron-FSDP wraps and trains a model on the CPU, with gloo; CUDA stands in already.

    It formats the current device as an integer, and makes its meshes of CUDA devices.
    """
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", lambda: 0))
        stack.enter_context(mock.patch.object(DeviceMesh, "from_group", staticmethod(_mesh_of_cpus)))
        yield
