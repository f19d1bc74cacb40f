"""Caches and workspaces of Transformer Engine, mcore and cuBLAS, which their owners make again when they need them.

They hold no state of training, and nothing else empties them. Each is dropped once nothing on the GPU can need it:
those that a forward makes of parameters with "params", those that a backward writes to with "grads", and the
workspaces of the process once both are away.
"""

import sys
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from bridge_fgo.memory.meters import is_graphs, segments
from bridge_fgo.sleep.moved import Kind

_WEIGHT_CACHE = "_fp8_workspaces"
"""Attribute of Transformer Engine's modules: a dictionary of weights in FP8, made in the first microbatch of a step."""

_TE = "transformer_engine.pytorch"

_OF_BACKWARD = ((f"{_TE}.module.base", "_dummy_wgrads"),)
"""Tensors of weights' shapes, which autograd takes for gradients where the real ones are fused."""

_OF_PROCESS = (
    (f"{_TE}.attention.dot_product_attention.softmax", "_default_causal_mask"),
    (f"{_TE}.cpp_extensions.gemm", "get_cublas_workspace"),
    ("megatron.core.parallel_state", "_GLOBAL_MEMORY_BUFFER"),
)
"""Caches of the process: dictionaries, functions with a cache, and mcore's object around a dictionary."""


class Caches:
    """The caches of model chunks on a device, and those of the process."""

    def __init__(self, chunks: Iterable[torch.nn.Module], device: torch.device) -> None:
        self._modules = [module for chunk in chunks for module in chunk.modules()]
        self._device = device
        # RotaryEmbedding's forward, and those like it, keep what they have returned, and the module with it.
        forwards = {vars(cls).get("forward") for cls in {type(module) for module in self._modules}}
        self._cached_forwards: list[Any] = [forward for forward in forwards if hasattr(forward, "cache_clear")]

    def drop(self, away: AbstractSet[Kind], is_mid_step: bool) -> int:
        """Drop what nothing can need; return the bytes of GPU memory. All work on the GPU must be over.

        Args:
            away: the kinds that are not on the GPU.
            is_mid_step: whether a backward has run since the last update. Weights that are quantized again within a
                step may get another scale.
        """
        is_cuda = self._device.type == "cuda"
        before = torch.cuda.memory_allocated(self._device) if is_cuda else 0
        if "params" in away:
            for forward in self._cached_forwards:
                forward.cache_clear()
            for module in () if is_mid_step else self._modules:
                if isinstance(cache := getattr(module, _WEIGHT_CACHE, None), dict):
                    cache.clear()
        if "grads" in away:
            _clear(_OF_BACKWARD)
        if away >= {"params", "grads"} and not has_graph_memory(self._device):
            _clear(_OF_PROCESS)
            if is_cuda:
                torch._C._cuda_clearCublasWorkspaces()
        return before - torch.cuda.memory_allocated(self._device) if is_cuda else 0

    def close(self) -> None:
        """Let go of the modules, and of what their forwards keep of them."""
        for forward in self._cached_forwards:
            forward.cache_clear()
        self._modules, self._cached_forwards = [], []


def has_graph_memory(device: torch.device) -> bool:
    """Return whether PyTorch has memory in private pools: a CUDA graph may have a workspace's address baked in."""
    if device.type != "cuda":
        return False
    if torch.cuda.get_allocator_backend() != "native":
        return True  # it does not say, and there may be graphs
    index = device.index if device.index is not None else torch.cuda.current_device()
    return any(is_graphs(each) for each in segments() if each["device"] == index)


def of_module(module: str, name: str) -> Any:
    """Return an attribute of a module; None if it was not imported, or if it is of another version."""
    return vars(sys.modules[module]).get(name) if module in sys.modules else None


def _clear(caches: Iterable[tuple[str, str]]) -> None:
    for module, name in caches:
        found = of_module(module, name)
        found = getattr(found, "buffer", found)
        clear = found.clear if isinstance(found, dict) else getattr(found, "cache_clear", None)
        if clear is not None:
            clear()
