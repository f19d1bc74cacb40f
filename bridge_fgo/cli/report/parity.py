"""Whether two runs are the same to the last bit, and where they part."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass

from bridge_fgo.cli.report.runs import GRAD_NORM, LOSS, Run
from bridge_fgo.harness.runner import DIGESTS

BY_THE_BENCH = "all that the bench compared"


@dataclass(frozen=True, kw_only=True)
class Parity:
    """One part of two runs: a scalar over the steps that both logged, or a digest of the final state."""

    part: str
    equal: bool
    steps: int | None = None
    """How many steps both logged; None for a digest."""
    first_different: int | None = None
    values: tuple[float, float] | None = None
    """Both values at the first different step."""
    largest: float | None = None
    """Largest absolute difference; NaN where one of the two is."""


def compare_runs(first: Run, second: Run) -> list[Parity]:
    """Returns the comparison of every loss, of the gradient norm, and of the digests of arms.

    Where only the table of a bench is there: what that found.
    """
    names = [name for name in first.scalars if name in second.scalars and _is_compared(name)]
    # TensorBoard keeps 32 bits of a number, so that is what can be compared. Bridge's losses have no more.
    as_fp32 = first.is_fp32 or second.is_fp32
    parts = [_scalar(name, first.scalars[name], second.scalars[name], as_fp32) for name in names]
    if first.digests and second.digests:
        parts += [
            Parity(part=f"final {name}", equal=bool(a := first.digests.get(name)) and a == second.digests.get(name))
            for name in DIGESTS
        ]
    if not parts and second.row.get("bitwise_equal") is not None:
        parts.append(Parity(part=BY_THE_BENCH, equal=second.row["bitwise_equal"]))
    return parts


def _is_compared(name: str) -> bool:
    return name in (LOSS, GRAD_NORM) or (name.endswith("loss") and "validation" not in name)


def is_bitwise_equal(parts: list[Parity]) -> bool:
    """Returns whether equality was shown: all parts are equal, and a loss of at least one step is among them."""
    shown = any((part.part == LOSS and part.steps) or part.part == BY_THE_BENCH for part in parts)
    return shown and all(part.equal for part in parts)


def _scalar(name: str, first: dict[int, float], second: dict[int, float], as_fp32: bool) -> Parity:
    steps = sorted(first.keys() & second.keys())
    different = [step for step in steps if _bits(first[step], as_fp32) != _bits(second[step], as_fp32)]
    at = different[0] if different else None
    return Parity(
        part=name,
        equal=not different,
        steps=len(steps),
        first_different=at,
        values=None if at is None else (first[at], second[at]),
        # A NaN makes no order; sorted last by being told apart from itself.
        largest=max((abs(first[step] - second[step]) for step in different), key=lambda d: (d != d, d), default=0.0),
    )


def _bits(value: float, as_fp32: bool) -> bytes:
    """Returns the bits, because == holds 0.0 and -0.0 for equal, and a NaN for different from itself."""
    return struct.pack("<d", ctypes.c_float(value).value if as_fp32 else value)
