"""The bitwise comparator: whether the numbers and the final states of two runs are the same to the last bit."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass

from bridge_fgo.tools.arms.runner import ArmRun, Event, exact_number

DIGESTS = ("params", "masters", "moments")  # parts of the final state of which an arm leaves a digest


def bits(value: float | None, as_fp32: bool = False) -> bytes:
    """Return the bits of a number, none for None: by `==` 0.0 would equal -0.0, and a NaN would differ from itself."""
    if value is None:
        return b""
    return struct.pack("<d", ctypes.c_float(value).value if as_fp32 else value)


@dataclass(frozen=True)
class Comparison:
    """The parts of two arms that are equal to the last bit, by name. `steps[i]` is the i-th step's loss."""

    steps: tuple[bool, ...]
    parts: dict[str, bool]

    @property
    def bitwise_equal(self) -> bool:
        """Whether all parts are equal."""
        return all(self.parts.values())


def compare(resident: ArmRun, offloaded: ArmRun) -> Comparison:
    """Compare losses, gradient norms, skipped steps and the digests of the final state of two arms."""
    pairs = list(zip(resident.steps, offloaded.steps, strict=False))
    whole = len(resident.steps) == len(offloaded.steps) > 0

    def are_equal(name: str) -> tuple[bool, ...]:
        return tuple(bits(exact_number(a, name)) == bits(exact_number(b, name)) for a, b in pairs)

    def ran_alike(a: Event, b: Event) -> bool:
        return a["step"] == b["step"] and bool(a["skipped"]) == bool(b["skipped"])

    losses = are_equal("loss")
    mine, theirs = (arm.result.get("digests", {}) for arm in (resident, offloaded))
    parts = {
        "losses": whole and all(ran_alike(a, b) for a, b in pairs) and all(losses),
        "grad norms": whole and all(are_equal("grad_norm")),
        # One that is missing counts as different: equality has to be shown.
        **{name: bool(mine.get(name)) and mine.get(name) == theirs.get(name) for name in DIGESTS},
    }
    return Comparison(losses, parts)
