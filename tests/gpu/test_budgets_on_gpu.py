"""Budgets that PyTorch's settings narrow, through Bridge's own ``pretrain()``."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_pretrain import ARM

from bridge_fgo.harness import comparator, runner

# 1.1 billion parameters, 13.7 GB of masters and moments.
LARGE = ("--layers", "16", "--hidden", "2048", "--heads", "16", "--seq", "2048", "--mbs", "2", "--gbs", "8")
STEPS = ("--steps", "8")


@pytest.mark.gpu
def test_auto_keeps_to_what_pytorch_may_take_of_the_gpu(tmp_path: Path) -> None:
    resident = runner.run_arm("resident", ARM, [*LARGE, *STEPS, "--offload", "off"], tmp_path, timeout=300)
    states, peak = (resident.result.get(name, 0) for name in ("state_bytes", "peak_allocated_bytes"))
    allowed = peak - states // 4
    offloaded = runner.run_arm(
        "offloaded",
        "allowance_arm",
        [*LARGE, *STEPS, "--offload", "on", "--gpu-memory-budget-gib", "auto"],
        tmp_path,
        environment={"ALLOWED_BYTES": str(allowed)},
        timeout=300,
    )
    same = comparator.compare(resident, offloaded)
    assert same.bitwise_equal, same.parts
    print(
        f"resident {peak / 1e9:.2f} GB, allowed {allowed / 1e9:.2f} GB, of {states / 1e9:.2f} GB of states off at once:"
    )
    print(offloaded.result["released_bytes"] / 1e9, "peak", offloaded.result["peak_allocated_bytes"] / 1e9, "GB")
    assert states // 4 <= offloaded.result["released_bytes"] < states
    assert offloaded.result["peak_allocated_bytes"] <= allowed
