"""Arms that have ended, without a training."""

from __future__ import annotations

from bridge_fgo.tools.arms import runner


def step(number: int, loss: float = 1.0, grad_norm: float = 0.5, skipped: bool = False) -> runner.Event:
    """Returns a step's event as an arm writes it."""
    return {
        "event": "step",
        "step": number,
        "loss": loss,
        "loss_hex": loss.hex(),
        "grad_norm": grad_norm,
        "grad_norm_hex": grad_norm.hex(),
        "skipped": skipped,
        "passes": 1,
        "seconds": 0.1,
    }


def arm(name: str, steps: list[runner.Event], **digests: str) -> runner.ArmRun:
    """Returns a finished arm."""
    all_digests = {"params": "p", "masters": "m", "moments": "o"} | digests
    result = {"event": "result", "digests": all_digests, "released_bytes": 10, "state_bytes": 10}
    return runner.ArmRun(name, {"device": "cpu"}, steps, result)
