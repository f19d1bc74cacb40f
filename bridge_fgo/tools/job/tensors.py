"""One parameter of a rank, as far as its memory goes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Tensor:
    """A parameter as one rank holds it, after tensor and expert parallelism.

    dtype: of its elements; quantized: kept in FP8 (dtype is then what it was made from); expert: belongs to an
    expert that not every rank has, so that its states are spread over fewer ranks; own_bucket: a shared
    embedding, which mcore gives a bucket of its own; trainable: has gradients and states; matrix: of two dimensions
    and no embedding or output layer, so that Muon updates it (not said of jobs with Adam).
    """

    name: str
    numel: int
    dtype: torch.dtype = torch.bfloat16
    quantized: bool = False
    expert: bool = False
    own_bucket: bool = False
    trainable: bool = True
    matrix: bool = field(default=False, compare=False)


Chunk = list[Tensor]
"""The parameters of one model chunk, in the model's order."""
