"""Small copies pass between the offload's, also with one queue."""

import json
import os
import subprocess
import sys

import pytest
from gpu_lane import NEEDS_CUDA

from bridge_fgo.memory.max_connections import OF_ALL, OF_COPIES

RAN_ON = "one H200"

pytestmark = NEEDS_CUDA

SMALL_COPY_BESIDE_A_GIB = """
import json, os, sys, time
import torch
if "late" in sys.argv:
    torch.cuda.is_available()
if len(sys.argv) > 1:
    import bridge_fgo
    bridge_fgo.install()
from bridge_fgo.memory.max_connections import shortage
from bridge_fgo.memory.transfers import Lane
from bridge_fgo.memory.cuda_driver import Copier, Event
nbytes = 2**30
gpu = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
small = torch.ones(1, device="cuda")
lane, done = Lane(gpu.device, 2**26, Copier(to_gpu=False)), Event()
lane.copy(host.data_ptr(), gpu.data_ptr(), nbytes, Event())
lane.synchronize()
small.add_(1).item()  # CUDA loads a kernel as it is first launched, and waits for all copies meanwhile
torch.cuda.synchronize()
began = time.perf_counter()
for _ in range(4):
    lane.copy(host.data_ptr(), gpu.data_ptr(), nbytes, done)
small.add_(1).item()
waited, was_over = time.perf_counter() - began, done.has_happened()
lane.synchronize()
copied = time.perf_counter() - began
queues = os.environ.get("CUDA_DEVICE_MAX_COPY_CONNECTIONS")
print(json.dumps({"waited": waited, "copied": copied, "was_over": was_over, "queues": queues, "shortage": shortage()}))
"""


def small_copy(connections: str, *arguments: str) -> dict[str, object]:
    environment = {name: value for name, value in os.environ.items() if name != OF_COPIES}
    environment[OF_ALL] = connections
    command = [sys.executable, "-c", SMALL_COPY_BESIDE_A_GIB, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    print(f"\n{connections} connections {arguments}: {result}")
    return result


@pytest.mark.parametrize("connections", ["1", "8", "32"])
def test_a_small_copy_does_not_wait_for_all_that_are_queued(connections: str) -> None:
    assert not small_copy(connections, "installed")["was_over"]


def test_an_install_after_cuda_has_begun_says_so_instead_of_setting_what_nobody_reads() -> None:
    result = small_copy("1", "late")
    assert result["was_over"] and result["queues"] is None and "export" in str(result["shortage"])


def test_with_one_queue_a_small_copy_waits_for_all_that_are_queued() -> None:
    """Without this, what the other test claims would say nothing of the variable."""
    assert small_copy("1")["was_over"]
