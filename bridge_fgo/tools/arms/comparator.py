"""The bitwise comparator: whether the numbers and the final states of two runs are the same to the last bit."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from bridge_fgo.tools.arms.runner import ArmRun, Event, exact_number

DIGESTS = ("params", "masters", "moments")  # parts of the final state of which an arm leaves a digest


@dataclass(frozen=True, kw_only=True)
class Parity:
    """One part of two runs: a scalar over the steps that both logged, or a digest of the final state."""

    part: str
    equal: bool
    steps: int | None = None  # how many steps both logged; None for a digest
    first_different: int | None = None  # the first step that differs
    values: tuple[float | None, float | None] | None = None  # both values there
    largest: float | None = None  # largest absolute difference; NaN where one of the two is, or is missing


def bits(value: float | None, as_fp32: bool = False) -> bytes:
    """Return the bits of a number, none for None: by `==` 0.0 would equal -0.0, and a NaN would differ from itself."""
    if value is None:
        return b""
    return struct.pack("<d", ctypes.c_float(value).value if as_fp32 else value)


def compare_scalar(
    part: str, first: Mapping[int, float | None], second: Mapping[int, float | None], as_fp32: bool = False
) -> Parity:
    """Compare a scalar of two runs in the steps that both have; `as_fp32`: 32 bits, as one of them kept no more."""
    steps = sorted(first.keys() & second.keys())
    different = [step for step in steps if bits(first[step], as_fp32) != bits(second[step], as_fp32)]
    pairs = [(first[step], second[step]) for step in different]
    apart = [math.nan if a is None or b is None else abs(a - b) for a, b in pairs]
    return Parity(
        part=part,
        equal=not different,
        steps=len(steps),
        first_different=different[0] if different else None,
        values=pairs[0] if pairs else None,
        # A NaN makes no order; sorted last by being told apart from itself.
        largest=max(apart, key=lambda d: (d != d, d), default=0.0),
    )


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
