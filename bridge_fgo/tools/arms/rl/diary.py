"""Notes the phases of an iteration: when each ended, the bytes that it moved, and the memory then."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

from bridge_fgo.sleep.moved import Moved
from bridge_fgo.tools.arms.final_state import states


class Diary:
    """Phases of an iteration, and the bytes of the models and states in them, found without asking the package."""

    def __init__(self, model: Any, optimizer: Any, reference: Any) -> None:
        self._model, self._optimizer, self._reference = model, optimizer, reference
        self._device = next(model[0].parameters()).device
        self._began = 0.0
        self.phases: list[dict[str, Any]] = []

    def begin(self) -> None:
        """Begin an iteration."""
        self._began, self.phases = time.perf_counter(), []
        self.note("begins")

    def note(self, phase: str, moved: Moved | None = None) -> None:
        """Note that a phase is over, and where it moved anything, what."""
        figures: dict[str, Any] = {"phase": phase, "at": time.perf_counter() - self._began}
        if moved is not None:
            figures |= {name: getattr(moved, name) for name in ("copied", "freed", "returned", "seconds")}
        self.phases.append(figures | {"memory": self.memory() | self._allocated()})

    def memory(self) -> dict[str, int]:
        """Return the bytes on the device now, by kind."""
        parameters = [parameter for chunk in self._model for parameter in chunk.parameters()]
        found = states(self._model, self._optimizer)
        tensors: dict[str, Iterable[torch.Tensor]] = {
            "params": parameters,
            "grads": [parameter.main_grad for parameter in parameters if hasattr(parameter, "main_grad")],
            "optimizer": [tensor for kind, _, tensor in found if kind != "params"],
            "reference": [parameter for chunk in self._reference for parameter in chunk.parameters()],
        }
        counted: set[int] = set()  # masters of fp32 parameters, say, are these parameters
        return {kind: self._bytes(of_kind, counted) for kind, of_kind in tensors.items()}

    def _allocated(self) -> dict[str, int]:
        """Return what PyTorch's allocator has in use on a GPU, and most of it since the last call; else nothing."""
        if self._device.type != "cuda":
            return {}
        found = {
            "allocated": torch.cuda.memory_allocated(self._device),
            "peak": torch.cuda.max_memory_allocated(self._device),
            "reserved": torch.cuda.memory_reserved(self._device),
        }
        torch.cuda.reset_peak_memory_stats(self._device)
        return found

    def _bytes(self, tensors: Iterable[torch.Tensor], counted: set[int]) -> int:
        total = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device == self._device and storage._cdata not in counted:
                counted.add(storage._cdata)
                total += storage.nbytes()
        return total
