"""Every use of what is off the GPU is refused by name there, and ends no process: see `asleep_touches_arm.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ARM = Path(__file__).with_name("asleep_touches_arm.py")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def run(*options: str) -> dict:
    path = os.pathsep.join([str(ARM.parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(ARM), *options],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_use_of_what_is_away_is_refused_by_name_and_training_goes_on_bitwise() -> None:
    sleeper, never = run(), run("never")
    print(json.dumps(sleeper["refused"], indent=1))
    assert not sleeper["others"] and len(sleeper["refused"]) > 15
    assert (sleeper["losses"], sleeper["sums"]) == (never["losses"], never["sums"])
