"""Skips what needs a GPU where there is none."""

from __future__ import annotations

import pytest


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
