"""`tiny`: a small GPT on made-up data, on one GPU of any kind or on the CPU, to try a launch from end to end."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer

STEPS = 10
SIZE = ("--layers", "4", "--hidden", "256", "--heads", "8", "--vocab", "1024", "--seq", "256", "--gbs", "8")


def tiny_config(on_cpu: bool) -> ConfigContainer:
    """Return Bridge's configuration, of 4 layers of 256 and `STEPS` steps; on a CPU for `tools.standins.cuda`."""
    from bridge_fgo.tools.arms import gpu
    from bridge_fgo.tools.arms.gpu import build_config
    from bridge_fgo.tools.arms.shared_config import put_on_cpu

    as_in_jobs = ("--no-deterministic", "--fused-loss")
    config = build_config(gpu.parse([*SIZE, "--steps", str(STEPS), *as_in_jobs, "--events", "unused"]))
    return put_on_cpu(config) if on_cpu else config
