"""FP8 parameters: DDP's buffers hold their rowwise data; Transformer Engine makes columnwise copies of it beside them.

With delayed and current scaling (`Float8Tensor`) a columnwise copy is the transposed bytes; with blockwise scaling
(`Float8BlockwiseQTensor`) of square blocks it is that and the transposed scales. So it need not be copied: it is
dropped with the parameters, and made again from them. Scales stay on the GPU: a number for a tensor, or for a block.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

DERIVED = ("Float8Tensor", "Float8BlockwiseQTensor")
"""Transformer Engine's classes whose columnwise data follows from the rowwise data."""


def derives_columnwise(param: torch.Tensor) -> bool:
    """Return whether Transformer Engine can make the columnwise data of a parameter from its rowwise data."""
    names = {cls.__name__ for cls in type(param).__mro__}
    # Blocks of one row have other scales columnwise.
    return not names.isdisjoint(DERIVED) and getattr(param, "_is_2D_scaled", True)


class ColumnwiseCopies:
    """The columnwise copies of FP8 parameters on this rank.

    Args:
        params: parameters; those of other classes are left out.
    """

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        self._params: list[Any] = [param for param in params if derives_columnwise(param)]
        self._dropped: list[Any] = []

    def drop(self) -> None:
        """Let go of them; all work on the GPU that reads them must be over."""
        used = [param for param in self._params if param.get_usages()["columnwise"]]
        self._dropped += [param for param in used if not any(param is other for other in self._dropped)]
        for param in self._params:
            param.update_usage(rowwise_usage=True, columnwise_usage=False)

    def make(self) -> None:
        """Make those that `drop` has let go of, on the current stream; the rowwise data is whole."""
        for param in self._dropped:
            param.update_usage(rowwise_usage=True, columnwise_usage=True)
        self._dropped = []
