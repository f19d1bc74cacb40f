"""The bytes of weights and gradients of a rank, without its states and activations."""

from __future__ import annotations

from dataclasses import dataclass

from bridge_fgo.tools.job.tensors import Tensor
from bridge_fgo.tools.plan.layout import Buffer

MXFP8_BYTES = 2 * (1 + 1 / 32)
"""Bytes of a parameter's element in MXFP8: its rows and its columns, each one byte, and one for every 32 (the
microscaling format's block). Without the padding of the scales."""
FP8_BYTES = 2.0
"""Bytes of a parameter's element in FP8 with another recipe: the value, in DDP's buffer, and its transpose."""


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of a rank, beside its states and activations.

    parameters, gradients: of the buffers, with padding, and of parameters that have none. Under Megatron-FSDP also
    gathered: the most beside them in forward and backward, of weights that all ranks gather and of gradients that are
    not reduced yet; in_step: what of these stays in the optimizer step, and the step's gradients in the masters' dtype.
    """

    parameters: int
    gradients: int
    gathered: int = 0
    in_step: int = 0


def ddp_weights(tensors: list[Tensor], buffers: list[Buffer], is_mxfp8: bool) -> WeightBytes:
    """Return the weights and gradients of the ranks of a pipeline stage in mcore's DDP.

    Args:
        tensors: of the stage's model chunks.
        buffers: that they lie in, but for those that do not train.
        is_mxfp8: whether quantized weights are MXFP8's.
    """
    parameters = sum(tensor.numel * tensor.dtype.itemsize for tensor in tensors if not tensor.trainable)
    for buffer in buffers:
        if buffer.places[0][0].quantized:
            numel = sum(tensor.numel for tensor, *_ in buffer.places) if is_mxfp8 else buffer.numel
            parameters += int(numel * (MXFP8_BYTES if is_mxfp8 else FP8_BYTES))
        else:
            parameters += buffer.numel * buffer.dtype.itemsize
    return WeightBytes(parameters, sum(buffer.numel * buffer.gradient.itemsize for buffer in buffers))
