"""Budgets hold under PyTorch's own limits and block sizes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_lane import ACTIVATIONS, MANY_ACTIVATIONS, NEEDS_CUDA, arm

from harness.arms import runner

RAN_ON = "one H200 (blocks), one H100 (limits)"

# 1.1 billion parameters, 13.7 GB of masters and moments.
LARGE = ("--layers", "16", "--hidden", "2048", "--heads", "16", "--seq", "2048", "--mbs", "2", "--gbs", "8")
STEPS = ("--steps", "8")


@pytest.mark.gpu
@pytest.mark.parametrize("beside", [(), ACTIVATIONS], ids=["alone", "beside_activations"])
def test_auto_keeps_to_what_pytorch_may_take_of_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: tuple[str, ...]
) -> None:
    if beside:
        monkeypatch.setenv("NVTE_CPU_OFFLOAD_V1", "1")
    waits = ("--activation-waits",) if beside else ()
    resident = arm("resident", tmp_path, *LARGE, *STEPS, *beside, *waits, "--offload", "off")
    states, peak = (resident.result.get(name, 0) for name in ("state_bytes", "peak_allocated_bytes"))
    allowed = peak - states // 4
    auto = ("--offload", "on", "--gpu-memory-budget-gib", "auto", f"ALLOWED_BYTES={allowed}")
    offloaded = arm("offloaded", tmp_path, *LARGE, *STEPS, *beside, *auto)
    same = runner.compare(resident, offloaded)
    assert same.bitwise_equal, same.parts
    print(
        f"resident {peak / 1e9:.2f} GB, allowed {allowed / 1e9:.2f} GB, of {states / 1e9:.2f} GB of states off at once:"
    )
    print(offloaded.result["released_bytes"] / 1e9, "peak", offloaded.result["peak_allocated_bytes"] / 1e9, "GB")
    assert states // 4 <= offloaded.result["released_bytes"] < states
    assert offloaded.result["peak_allocated_bytes"] <= allowed


BLOCKS = """
import torch
from bridge_fgo.memory.meters import block_rounding
torch.empty(1, device="cuda")
rounded = block_rounding(torch.device("cuda", 0))
for mib in (3, 5, 9, 33, 100, 129, 256, 300, 513, 700, 1025):
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    block = torch.empty(mib * 2**20, dtype=torch.uint8, device="cuda")
    print(mib, torch.cuda.memory_allocated() - before, rounded(mib * 2**20))
    del block
"""


@NEEDS_CUDA[0]
@NEEDS_CUDA[1]
@pytest.mark.parametrize(
    "settings", ["", "roundup_power2_divisions:2", "roundup_power2_divisions:[64:8,256:4,>:2]"], ids=["", "2", "some"]
)
def test_blocks_are_as_large_as_they_are_counted(settings: str) -> None:
    allocator = ",".join(filter(None, ["expandable_segments:True", settings]))
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": allocator}
    done = subprocess.run([sys.executable, "-c", BLOCKS], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    print(f"{settings}: MiB, bytes of the block, and as counted\n{done.stdout}")
    assert all(taken == counted for _, taken, counted in map(str.split, done.stdout.splitlines()))


@pytest.mark.gpu
@pytest.mark.parametrize("settings", ["roundup_power2_divisions:2", "max_split_size_mb:64"])
def test_a_budget_holds_where_blocks_are_larger_than_slabs(tmp_path: Path, settings: str) -> None:
    def run(name: str, *budget: str) -> runner.ArmRun:
        options = (*MANY_ACTIVATIONS, "--steps", "12", "--offload", "on", *budget)
        return arm(name, tmp_path, *options, f"PYTORCH_CUDA_ALLOC_CONF={settings}")

    everything = run("everything")
    peaks = [peak or 0 for peak in everything.values("peak_bytes")]
    gib = (max(peaks) + everything.result["state_bytes"] // 2) / 2**30
    some = run("some", "--gpu-memory-budget-gib", str(gib))
    peaks = [peak or 0 for peak in some.values("peak_bytes")]
    released = [run.result["released_bytes"] / 1e9 for run in (everything, some)]
    print(f"{settings}: peaks of {max(peaks) / 2**30:.3f} GiB under {gib:.3f} GiB, {released} GB off the GPU")
    assert max(peaks) <= gib * 2**30 and "a training step allocated" not in (tmp_path / "some.log").read_text()
    assert some.result["released_bytes"] < everything.result["released_bytes"]
