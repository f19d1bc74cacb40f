"""Whether two runs are the same to the last bit, and where they part."""

from __future__ import annotations

from bridge_fgo.tools.arms.comparator import Parity, compare_digests, compare_scalar
from bridge_fgo.tools.report.runs import GRAD_NORM, LOSS, Run

BY_THE_BENCH = "all that the bench compared"


def compare_runs(first: Run, second: Run) -> list[Parity]:
    """Compare every loss and the gradient norm of two runs, and the digests of arms.

    Where only the table of a bench is there, what the bench found is returned.
    """
    names = [name for name in first.scalars if name in second.scalars and _is_compared(name)]
    # TensorBoard keeps 32 bits of a number, so that is what can be compared. Bridge's losses have no more.
    as_fp32 = first.is_fp32 or second.is_fp32
    parts = [compare_scalar(name, first.scalars[name], second.scalars[name], as_fp32) for name in names]
    if first.digests and second.digests:
        digests = compare_digests(first.digests, second.digests)
        parts += [Parity(part=f"final {name}", equal=equal) for name, equal in digests.items()]
    if not parts and second.row.get("bitwise_equal") is not None:
        parts.append(Parity(part=BY_THE_BENCH, equal=second.row["bitwise_equal"]))
    return parts


def _is_compared(name: str) -> bool:
    return name in (LOSS, GRAD_NORM) or (name.endswith("loss") and "validation" not in name)


def is_bitwise_equal(parts: list[Parity]) -> bool:
    """Return whether equality was shown: all parts are equal, and a loss of at least one step is among them."""
    shown = any((part.part == LOSS and part.steps) or part.part == BY_THE_BENCH for part in parts)
    return shown and all(part.equal for part in parts)
