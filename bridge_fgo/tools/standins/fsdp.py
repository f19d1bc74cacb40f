"""Megatron-FSDP on a CPU or without memory: what it asks beside what `bridge_fgo.tools.standins.cuda` answers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, override
from unittest import mock

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

IS_META: Any = vars(torch._C.TensorBase)["is_meta"].__get__  # type: ignore[reportAttributeAccessIssue]


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


class MetaAsMemory(TorchFunctionMode):
    """Has tensors without memory say that they have it, and stay where they are: Megatron-FSDP asks for memory."""

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == IS_META:
            return False
        if func is torch.Tensor.to and args[0].is_meta:
            args = tuple(args[0].device if isinstance(arg, str | torch.device) else arg for arg in args)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def fsdp_on_meta() -> Iterator[None]:
    """Context in which Megatron-FSDP wraps a model without memory; CUDA stands in already."""
    with fsdp_on_cpu(), MetaAsMemory():
        yield
