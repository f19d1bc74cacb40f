"""E with Megatron-FSDP beside E with the DistributedOptimizer, of arms that trained the same model in one run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class FsdpGap:
    """E of offloaded training, each over resident training of its kind.

    e_hybrid: of HybridDeviceOptimizer without Megatron-FSDP; None where that arm is not there.
    """

    strategy: str
    e_fsdp: float
    e_distributed: float
    e_hybrid: float | None

    @property
    def gap(self) -> float:
        """By how much the first is above the second."""
        return self.e_fsdp - self.e_distributed

    def __str__(self) -> str:
        peer = "" if self.e_hybrid is None else f"; of HybridDeviceOptimizer without it {self.e_hybrid:.2f}"
        return (
            f"E with Megatron-FSDP ({self.strategy}) {self.e_fsdp:.2f}, with DistributedOptimizer "
            f"{self.e_distributed:.2f}: {self.gap:+.2f}{peer}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        return asdict(self) | {"gap": self.gap}


def gap_of(e: Mapping[str, float | None], strategy: str | None) -> FsdpGap | None:
    """Return the comparison; None where an arm that it needs is not there.

    Args:
        e: of the arms that ended well, by name.
        strategy: what Megatron-FSDP shards.
    """
    fsdp, distributed = e.get("fsdp"), e.get("native")
    if strategy is None or fsdp is None or distributed is None:
        return None
    return FsdpGap(strategy, fsdp, distributed, e.get("hybrid"))
