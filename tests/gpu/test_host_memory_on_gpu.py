"""Frozen parameters sleep in files; what a limit has no room for stays.

    pytest -m gpu -s tests/gpu/test_host_memory_on_gpu.py

Seconds of files are printed beside those of pinned memory.
"""

from pathlib import Path

import pytest
import torch
from gpu_lane import LEAST_RETURNED, NEEDS_CUDA

import bridge_fgo
from bridge_fgo.memory import host_buffer

RAN_ON = "one H200"

pytestmark = NEEDS_CUDA

LAYERS, LAYER_BYTES = 16, 2 * 8192 * 4096


def model() -> torch.nn.Module:
    """Returns frozen layers of 64 MiB each in bf16."""
    layers = [torch.nn.Linear(8192, 4096, bias=False, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)]
    return torch.nn.ModuleList(layers).requires_grad_(False)


def cycle_of_a_small_one() -> None:
    """Has CUDA load what the first sleep of a process uses (74 MiB on an H200), which is no part of what it returns."""
    res = bridge_fgo.Residency(torch.nn.Linear(8, 8, device="cuda").requires_grad_(False))
    res.offload()
    res.reload()
    res.close()


@pytest.mark.parametrize("in_files", [False, True], ids=["pinned", "files"])
def test_frozen_parameters_in_files_are_not_page_locked_and_wake_bitwise(
    tmp_path: Path, in_files: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = host_buffer.file_system(tmp_path.stat().st_dev)
    monkeypatch.setattr(host_buffer, "file_system", lambda device: "")  # pytest's folder may be on a tmpfs
    cycle_of_a_small_one()
    frozen, nbytes = model(), LAYERS * LAYER_BYTES
    before = [param.detach().cpu() for param in frozen.parameters()]
    res = bridge_fgo.Residency(frozen, frozen_folder=tmp_path if in_files else None)
    assert res.pinned_bytes == (0 if in_files else nbytes)
    for cycle in range(3):
        asleep, awake = res.offload(), res.reload()
        assert asleep.freed == nbytes and asleep.returned >= LEAST_RETURNED * nbytes
        assert (asleep.copied, awake.copied) == (0 if cycle else nbytes, nbytes)
        assert all(torch.equal(param.cpu(), was) for param, was in zip(frozen.parameters(), before, strict=True))
        where = f"files on {kind}" if in_files else "pinned"
        print(f"{where}: {nbytes} B, {asleep.seconds:.3f} s out, {awake.seconds:.3f} s back")
    res.close()


def test_what_a_limit_has_no_room_for_stays_and_is_counted() -> None:
    res = bridge_fgo.Residency(model(), host_memory_limit_gib=3.5 * LAYER_BYTES / 2**30)
    asleep = res.offload()
    assert asleep.freed == res.pinned_bytes == 3 * LAYER_BYTES and asleep.stays is not None
    assert asleep.stays["unhosted"] == (LAYERS - 3) * LAYER_BYTES <= asleep.stays["allocated"]
    res.close()
