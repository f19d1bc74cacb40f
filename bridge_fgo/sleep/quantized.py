"""FP8 parameters: DDP's buffers hold their rowwise data; Transformer Engine makes columnwise copies of it beside them.

With delayed and current scaling (`Float8Tensor`) a columnwise copy is the transposed bytes; with blockwise scaling
(`Float8BlockwiseQTensor`) of square blocks it is that and the transposed scales. So it need not be copied: it is
dropped with the parameters, and made again from them. Scales stay on the GPU: a number for a tensor, or for a block.
"""

from collections.abc import Iterable
from typing import Any

import torch

DERIVED = ("Float8Tensor", "Float8BlockwiseQTensor")
"""Transformer Engine's classes whose columnwise data follows from the rowwise data."""


class ColumnwiseCopies:
    """The columnwise copies of FP8 parameters on this rank; parameters of other classes are left out."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        self._params: list[Any] = [
            param
            for param in params
            # Blocks of one row have other scales columnwise.
            if any(cls.__name__ in DERIVED for cls in type(param).__mro__) and getattr(param, "_is_2D_scaled", True)
        ]
        self._dropped: list[Any] = []

    def drop(self) -> None:
        """Free them; all work on the GPU that reads them must be over."""
        used = [param for param in self._params if param.get_usages()["columnwise"]]
        dropped = {id(param) for param in self._dropped}
        self._dropped += [param for param in used if id(param) not in dropped]
        for param in self._params:
            param.update_usage(rowwise_usage=True, columnwise_usage=False)

    def make(self) -> None:
        """Make those that `drop` has freed, on the current stream; the rowwise data is whole."""
        for param in self._dropped:
            param.update_usage(rowwise_usage=True, columnwise_usage=True)
        self._dropped = []
