"""Offloaded gradients are right beside late streams, and between sleeps.

pytest -m gpu tests/gpu/test_gradients_on_gpu.py
"""

from pathlib import Path

import pytest
import torch
from gpu_lane import NEEDS_CUDA, SMALL, arm, assert_bitwise_equal, side_by_side

from bridge_fgo.config import OffloadConfig
from bridge_fgo.engines.native import make_transfers
from bridge_fgo.memory.gradient_bucket import GradientBucket
from bridge_fgo.memory.host_buffer import page_lock
from bridge_fgo.memory.meters import Traffic
from harness.arms import runner

RAN_ON = "one H200"

pytestmark = NEEDS_CUDA

LATE = 200_000_000
"""Cycles by which a side stream is late, some 0.1 s."""


class Alone:
    """Nobody else wants to know of the bucket."""

    def needed(self, bucket: GradientBucket) -> None:
        """Do nothing."""


def test_what_a_side_stream_adds_late_is_in_the_copy() -> None:
    """DDP's hooks add on the stream that DDP was built on, as where Bridge builds it on one of its own."""
    device = torch.device("cuda")
    alone, transfers = Alone(), make_transfers(device, OffloadConfig())
    data = torch.zeros(2**20, device=device)
    param = torch.nn.Parameter(torch.zeros(2**20, dtype=torch.bfloat16, device=device))
    param.main_grad = data.view(-1)  # type: ignore[attr-defined]
    bucket = GradientBucket(data, [param.main_grad], [param], transfers, alone.needed, Traffic())
    page_lock(bucket.map_host())
    bucket.moves = True
    side = torch.cuda.Stream()
    transfers.begin_pass()
    for _ in range(3):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            gradient = param.main_grad  # type: ignore[attr-defined]
            torch.cuda._sleep(LATE)
            gradient.add_(1)
        bucket.offload()
        bucket.release()
    # Memory that was freed too early is another's by now, and would be added to.
    others = torch.zeros(2**20, device=device)
    torch.cuda.synchronize()
    assert not others.any()
    assert torch.equal(param.main_grad, torch.full_like(data, 3))  # type: ignore[attr-defined]


@pytest.mark.parametrize("gradients", ["lazy", "true"])
def test_training_that_sleeps_between_steps_is_bitwise_a_resident_one(gradients: str, tmp_path: Path) -> None:
    def run(offload: str) -> runner.ArmRun:
        options = (*SMALL, "--steps", "12", "--offload", offload)
        if offload == "off":
            return arm("resident", tmp_path, *options)
        return arm("sleeping", tmp_path, *options, "--gradients", gradients, "SLEEP_FROM_STEP=4")

    assert_bitwise_equal(*side_by_side(run), steps=12)
