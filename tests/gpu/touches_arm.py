"""The GPU arm with a callback that touches optimizer state after each step, as `tests/test_touches.py` does on the CPU.

`TOUCHED` in the environment: the file that gets what each access has found.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from bridge_fgo.tools.arms import gpu, gpu_recorder

sys.path.append(str(Path(__file__).parents[1]))
FIRST = 3
"""Steps before the first access: in those everything is offloaded and the memory beside is measured."""


def brief(found: Any) -> Any:
    """Returns what an access has found, of tensors a sum and the first elements, as exact values."""
    if isinstance(found, torch.Tensor):
        return [float(found.double().sum()), found.flatten()[:4].tolist()]
    if isinstance(found, (list, tuple, dict)):
        return [brief(each) for each in (found.values() if isinstance(found, dict) else found)]
    return found


class Toucher(gpu_recorder.ArmRecorder):
    """Touches states after each step."""

    def on_train_step_end(self, context: Any) -> None:
        """Ends the step, and has the next access."""
        from test_touches import ACCESSES

        super().on_train_step_end(context)
        names = list(ACCESSES)
        if not FIRST <= self.step < FIRST + len(names):
            return
        name = names[self.step - FIRST]
        new = SimpleNamespace(model=context.model, optimizer=context.optimizer, cfg=context.state.cfg)
        training = context.user_state.setdefault("touched", new)
        with torch.no_grad():
            found = brief(ACCESSES[name](training))
        with open(os.environ["TOUCHED"], "a") as file:
            file.write(json.dumps([name, found]) + "\n")


if __name__ == "__main__":
    gpu_recorder.ArmRecorder = Toucher  # type: ignore[misc]
    gpu.main()
