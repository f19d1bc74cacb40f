"""Skips what needs a GPU where there is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def arm_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has arms find the modules of this folder, and each worker of pytest-xdist begin with another GPU."""
    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    import torch

    every = ",".join(str(i) for i in range(torch.cuda.device_count()))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", every).split(",")
    first = 2 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % len(gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(gpus[first:] + gpus[:first]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test with the ``gpu`` marker as skipped without CUDA."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch  # only where a GPU test was collected: it takes seconds

    if torch.cuda.is_available():
        return
    for item in gpu_items:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
