"""Hollow Transformer Engine and NVRx, with which Bridge imports where they are missing and mcore does without.

- `transformer_engine`: `megatron.bridge` needs it for annotations and base classes (its `peft`), mcore does not. So
  mcore is imported first, with Transformer Engine hidden, and decides on its own fallbacks; then Bridge gets three
  hollow modules. A machine that has the real one hides it too: its FusedAdam steps only CUDA tensors.
- `nvidia_resiliency_ext`, where it is not installed: Bridge's `pretrain` needs a class of it for an annotation.

Nothing hollow computes: calling or instantiating any of it raises.
"""

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

IMPORTED_WITHOUT_TRANSFORMER_ENGINE = (
    "extensions.transformer_engine",
    "optimizer",
    "models.gpt.gpt_model",
    "tensor_parallel.random",
)
"""Modules of `megatron.core` that ask for Transformer Engine when imported and serve a training step."""

PATCHED_BY_THE_PACKAGE = ("train", "setup", "pretrain", "setup_megatron_mimo", "train_megatron_mimo")
"""Modules of `megatron.bridge.training` that must be importable, for the package patches them."""

TRANSFORMER_ENGINE = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.ops")
NVRX = ("nvidia_resiliency_ext", "nvidia_resiliency_ext.inprocess")
"""Modules that Bridge imports without a fallback. No other of these packages exists then."""


def _refuse(self: object, *args: object, **kwargs: object) -> None:
    cls = type(self)
    raise RuntimeError(f"{cls.__module__}.{cls.__qualname__} is a stand-in for the CPU and computes nothing")


class HollowModule(ModuleType):
    """A module that has a class, which cannot be made, for each capitalised name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.__version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if not name[0].isupper():
            raise AttributeError(f"stand-in module {self.__name__!r} has no {name!r}")
        value = type(name, (torch.nn.Module,), {"__module__": self.__name__, "__init__": _refuse})
        setattr(self, name, value)
        return value


def import_bridge() -> None:
    """Import mcore as if Transformer Engine were not there, then Bridge with the hollow one. Idempotent.

    RuntimeError if mcore was imported with Transformer Engine, whose Adam steps only CUDA tensors.
    """
    top = TRANSFORMER_ENGINE[0]
    if isinstance(sys.modules.get(top), HollowModule):
        return
    if top in sys.modules:
        raise RuntimeError(
            "transformer_engine is imported already, so that mcore would build an Adam for CUDA tensors; run "
            "the CPU arm in a process of its own"
        )
    names = TRANSFORMER_ENGINE if importlib.util.find_spec(NVRX[0]) else (*TRANSFORMER_ENGINE, *NVRX)
    sys.modules[top] = None  # type: ignore[assignment]  (its import raises ModuleNotFoundError)
    try:
        for name in IMPORTED_WITHOUT_TRANSFORMER_ENGINE:
            importlib.import_module(f"megatron.core.{name}")
        for name in names:
            sys.modules[name] = module = HollowModule(name)
            parent, _, last = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], last, module)
        # mcore asks of each weight whether it is quantized, as it does with the real one: that reads weights that may
        # be away.
        fp8: Any = importlib.import_module("megatron.core.fp8_utils")
        fp8.HAVE_TE_FP8_TENSOR_CLASS, fp8.FP8_TENSOR_CLASS = True, sys.modules[top].QuantizedTensor
        for name in PATCHED_BY_THE_PACKAGE:
            importlib.import_module(f"megatron.bridge.training.{name}")
    except BaseException:
        for name in names:
            sys.modules.pop(name, None)
        raise
