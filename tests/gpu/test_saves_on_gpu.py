"""Background saves of a trainer that sleeps, by the real workers of NVRx and mcore.

    pytest -m gpu -s tests/gpu/test_saves_on_gpu.py

What was measured is printed (`-s`). Without a GPU `python tests/gpu/saves_arm.py --strategy mcore` runs an arm with a
tiny model on the CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ARM = Path(__file__).with_name("saves_arm.py")
LEAST_RETURNED = 0.98
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(
    "options",
    [
        ("--strategy", "nvrx", "--constant-structure"),
        ("--strategy", "nvrx"),
        ("--strategy", "mcore", "--constant-structure"),
    ],
    ids=["nvrx-constant_structure", "nvrx", "mcore-constant_structure"],
)
def test_each_save_has_the_bytes_of_its_step_and_a_sleep_gets_all_memory_while_it_is_written(
    options: tuple[str, ...],
) -> None:
    path = os.pathsep.join([str(ARM.parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(ARM), "--layers", "8", *options],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    run = json.loads(done.stdout.splitlines()[-1])
    for sleep in run["sleeps"]:
        print(sleep)
    print(f"{run['tensors']} tensors a save, stale: {run['stale']}, {run['warnings']}")
    assert run["tensors"] and run["stale"] == {"3": [], "6": [], "9": []}
    assert not run["warnings"]
    whole = 18 * run["parameters"]
    for sleep in run["sleeps"]:
        assert sleep["returned"] >= LEAST_RETURNED * whole
        assert sleep["stays"]["allocated"] + sleep["stays"]["cached"] <= (1 - LEAST_RETURNED) * whole
