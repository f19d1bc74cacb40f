"""What stands in for CUDA and two packages, so that Bridge's real train_step runs on the CPU.

Real: Bridge, mcore, torch, gloo collectives, and torch's AdamW, which mcore takes by itself where Transformer
Engine is absent. Stood in for:

- `transformer_engine`. Importing `megatron.bridge` needs it (`megatron.bridge.peft` subclasses its layers in
  annotations and base classes); mcore does not. So mcore is imported first, with Transformer Engine hidden,
  and decides on its own fallbacks; then Bridge gets three hollow modules. A machine that has the real one
  hides it too: its FusedAdam steps only CUDA tensors.
- `nvidia_resiliency_ext`, where it is not installed. `megatron.bridge.training.pretrain` needs one class of
  it, for an annotation.
- CUDA. mcore creates tensors on `torch.cuda.current_device()` or "cuda", uses streams, and reads
  `Tensor.type()` to tell dtypes apart.

Nothing hollow computes: calling or instantiating any of it raises.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")

HOLLOW_MODULES = {
    "transformer_engine",
    "transformer_engine.pytorch",
    "transformer_engine.pytorch.ops",
    "nvidia_resiliency_ext",
    "nvidia_resiliency_ext.inprocess",
}
"""Modules that Bridge imports without a fallback. Other modules of these packages are said to be missing, so
that whoever asks for one takes the path for that."""

IMPORTED_WITHOUT_TRANSFORMER_ENGINE = (
    "extensions.transformer_engine",
    "optimizer",
    "models.gpt.gpt_model",
    "tensor_parallel.random",
)
"""Modules of `megatron.core` that ask for Transformer Engine when imported and serve a training step."""

PATCHED_BY_THE_PACKAGE = ("train", "setup", "pretrain", "setup_megatron_mimo", "train_megatron_mimo")
"""Modules of `megatron.bridge.training` that must be importable, for the package patches them."""


class HollowModule(types.ModuleType):
    """A module whose capitalised attributes are hollow classes and whose other attributes are submodules."""

    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        # importlib and inspect probe for dunder names and rely on AttributeError.
        if name.startswith("__"):
            raise AttributeError(f"stand-in module {self.__name__!r} has no {name!r}")
        if name[0].isupper():
            value: Any = type(name, (torch.nn.Module,), {"__module__": self.__name__, "__init__": _refuse})
        else:
            full = f"{self.__name__}.{name}"
            if full not in HOLLOW_MODULES:
                raise AttributeError(f"stand-in module {self.__name__!r} has no {name!r}")
            value = importlib.import_module(full)
        setattr(self, name, value)
        return value


def _refuse(self: object, *args: object, **kwargs: object) -> None:
    cls = type(self)
    raise RuntimeError(f"{cls.__module__}.{cls.__qualname__} is a stand-in for the CPU and computes nothing")


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers for the packages that stand in: missing while `hiding`, hollow afterwards."""

    def __init__(self) -> None:
        self.packages = {"transformer_engine"}
        if importlib.util.find_spec("nvidia_resiliency_ext") is None:
            self.packages.add("nvidia_resiliency_ext")
        self.hiding = True

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a hollow module's spec, or None for packages that are not this finder's."""
        if fullname.split(".")[0] not in self.packages:
            return None
        if self.hiding or fullname not in HOLLOW_MODULES:
            # Raised here, because the finders after this one might know the real package.
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Return the hollow module."""
        return HollowModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: attributes are made when they are asked for."""


class CudaAsCpu(TorchFunctionMode):
    """Makes device="cuda" mean the CPU or `device`, and lets `Tensor.type()` name CUDA types, which mcore asks for.

    Holds in the thread that installed it; autograd runs the backward of CPU tensors in that thread too.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = self.device
        result = func(*args, **kwargs)
        asks_for_name = func is torch.Tensor.type and len(args) == 1 and not kwargs
        return result.replace("torch.", "torch.cuda.") if asks_for_name else result


class NoStream:
    """A stream or event on a device that finishes each operation before the next begins."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __enter__(self) -> NoStream:
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def synchronize(self, *args: object) -> None:
        """Return at once, as does every other wait here."""

    wait_stream = wait_event = record_event = record = wait = synchronize

    def query(self) -> bool:
        """Everything is always done."""
        return True


def _nothing(*args: object, **kwargs: object) -> None:
    pass


def _itself(module_or_tensor: Any, *args: object, **kwargs: object) -> Any:
    return module_or_tensor


def _replacements() -> list[tuple[object, str, object]]:
    """Return (owner, attribute, stand-in) of each CUDA entry point that a training step reaches."""
    from megatron.core.tensor_parallel import random as mcore_random

    cuda = torch.cuda
    return [
        (cuda, "current_device", lambda: CPU),
        (cuda, "device_count", lambda: 1),
        (cuda, "current_stream", NoStream),
        (cuda, "stream", NoStream),
        (cuda, "Stream", NoStream),
        (cuda, "Event", NoStream),
        (cuda, "synchronize", _nothing),
        (cuda, "empty_cache", _nothing),
        (cuda.nvtx, "range_push", _nothing),
        (cuda.nvtx, "range_pop", _nothing),
        # One generator serves both devices: the rerun machine and mcore's RNG tracker save and restore
        # "CUDA" states, and dropout on the CPU must follow them.
        (cuda, "manual_seed", torch.manual_seed),
        (cuda, "get_rng_state", lambda *args, **kwargs: torch.get_rng_state()),
        (cuda.random, "get_rng_state", lambda *args, **kwargs: torch.get_rng_state()),
        (cuda, "set_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state)),
        (mcore_random, "_set_cuda_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state)),
        (torch.Tensor, "cuda", _itself),
        (torch.nn.Module, "cuda", _itself),
    ]


_installed: ExitStack | None = None


def install_standins() -> None:
    """Make the real train_step run on the CPU in this process, until `remove_standins`. Idempotent.

    Imports Bridge before CUDA is replaced, because its imports look at the real `torch.cuda`.

    Raises:
        RuntimeError: mcore was imported with Transformer Engine, whose Adam steps only CUDA tensors.
    """
    global _installed
    if _installed is not None:
        return
    if not any(isinstance(finder, StandInFinder) for finder in sys.meta_path):
        import_bridge()
    stack = ExitStack()
    for owner, name, stand_in in _replacements():
        stack.enter_context(mock.patch.object(owner, name, stand_in))
    stack.enter_context(CudaAsCpu())
    _installed = stack


def remove_standins() -> None:
    """Give CUDA's entry points back. The hollow modules stay: what Bridge imported cannot be undone."""
    global _installed
    if _installed is not None:
        _installed.close()
        _installed = None


def import_bridge() -> None:
    if "transformer_engine" in sys.modules:
        raise RuntimeError(
            "transformer_engine is imported already, so that mcore would build an Adam for CUDA tensors; run "
            "the CPU arm in a process of its own"
        )
    finder = StandInFinder()
    sys.meta_path.insert(0, finder)
    try:
        for name in IMPORTED_WITHOUT_TRANSFORMER_ENGINE:
            importlib.import_module(f"megatron.core.{name}")
        finder.hiding = False
        for name in PATCHED_BY_THE_PACKAGE:
            importlib.import_module(f"megatron.bridge.training.{name}")
    except BaseException:
        sys.meta_path.remove(finder)
        raise
