"""Hollow Transformer Engine and NVRx, with which Bridge imports where they are missing and mcore does without.

- `transformer_engine`: importing `megatron.bridge` needs it (`megatron.bridge.peft` subclasses its layers in
  annotations and base classes); mcore does not. So mcore is imported first, with Transformer Engine hidden,
  and decides on its own fallbacks; then Bridge gets three hollow modules. A machine that has the real one
  hides it too: its FusedAdam steps only CUDA tensors.
- `nvidia_resiliency_ext`, where it is not installed: `megatron.bridge.training.pretrain` needs one class of
  it, for an annotation.

Nothing hollow computes: calling or instantiating any of it raises.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

import torch

from bridge_fgo.tools.standins.finder import StandInFinder

IMPORTED_WITHOUT_TRANSFORMER_ENGINE = (
    "extensions.transformer_engine",
    "optimizer",
    "models.gpt.gpt_model",
    "tensor_parallel.random",
)
"""Modules of `megatron.core` that ask for Transformer Engine when imported and serve a training step."""

PATCHED_BY_THE_PACKAGE = ("train", "setup", "pretrain", "setup_megatron_mimo", "train_megatron_mimo")
"""Modules of `megatron.bridge.training` that must be importable, for the package patches them."""

_finder: StandInFinder | None = None


def _refuse(self: object, *args: object, **kwargs: object) -> None:
    cls = type(self)
    raise RuntimeError(f"{cls.__module__}.{cls.__qualname__} is a stand-in for the CPU and computes nothing")


def _hollow_class(module: str, name: str) -> type | None:
    """Return a class that cannot be made for a capitalised name; None for any other."""
    return type(name, (torch.nn.Module,), {"__module__": module, "__init__": _refuse}) if name[0].isupper() else None


def import_bridge() -> None:
    """Import mcore as if Transformer Engine were not there, then Bridge with the hollow one. Idempotent.

    Raises:
        RuntimeError: mcore was imported with Transformer Engine, whose Adam steps only CUDA tensors.
    """
    global _finder
    if _finder is not None:
        return
    if "transformer_engine" in sys.modules:
        raise RuntimeError(
            "transformer_engine is imported already, so that mcore would build an Adam for CUDA tensors; run "
            "the CPU arm in a process of its own"
        )
    missing = [] if importlib.util.find_spec("nvidia_resiliency_ext") else ["nvidia_resiliency_ext"]
    finder = StandInFinder(
        packages=frozenset({"transformer_engine", *missing}),
        # Those that Bridge imports without a fallback.
        modules=frozenset(
            {
                "transformer_engine",
                "transformer_engine.pytorch",
                "transformer_engine.pytorch.ops",
                "nvidia_resiliency_ext",
                "nvidia_resiliency_ext.inprocess",
            }
        ),
        submodules=frozenset({"pytorch", "ops", "inprocess"}),
        attribute=_hollow_class,
        version="0.0.0",
        is_hiding=True,
    )
    sys.meta_path.insert(0, finder)
    try:
        for name in IMPORTED_WITHOUT_TRANSFORMER_ENGINE:
            importlib.import_module(f"megatron.core.{name}")
        finder.is_hiding = False
        for name in PATCHED_BY_THE_PACKAGE:
            importlib.import_module(f"megatron.bridge.training.{name}")
    except BaseException:
        sys.meta_path.remove(finder)
        raise
    _finder = finder
