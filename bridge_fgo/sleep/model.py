"""The memory of a model on this rank, as what leaves and returns: gradients, and units of weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bridge_fgo.memory.digest import digest_kernel
from bridge_fgo.memory.host_buffer import HostBuffer
from bridge_fgo.memory.storage_slab import StorageSlab, find_aliases
from bridge_fgo.sleep.gradients import Backwards, Gradients
from bridge_fgo.sleep.parameters import Weights, buffer_weights, other_weights, outside_of_buffers
from bridge_fgo.sleep.quantized import ColumnwiseCopies
from bridge_fgo.sleep.refusals import ddp_of
from bridge_fgo.sleep.rounding import Rounding, rounding_of
from bridge_fgo.sleep.states import OptimizerStates


class Unit:
    """Weights that leave together, and where they are to come from when they return.

    Args:
        weights: their memory and their copies.
        rounding: the masters that tell them; None where there are none.
    """

    def __init__(self, weights: Weights, rounding: Rounding | None = None) -> None:
        self.weights = weights
        self.rounding = rounding
        self.told_digests: list[tuple[int, ...]] | None = None
        """The weights' sums when masters that tell them left; None where these do not, or are on the GPU."""
        self.is_told = False
        """Whether masters tell the weights that are away."""
        self.is_on_host = False
        """Whether the host has a copy of the weights that are away."""

    def forget_masters(self) -> None:
        """Count the weights as told by no masters until they are compared again."""
        self.told_digests, self.is_told = None, False

    def came_back(self) -> None:
        """Note that the weights are on the GPU, where they and their masters may change apart."""
        self.forget_masters()
        self.is_on_host = False


class Model:
    """The gradients and weights of model chunks on this rank.

    Raises:
        ValueError: as `other_weights`.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], states: OptimizerStates | None) -> None:
        self.ddps = [ddp for chunk in chunks for ddp in ddp_of(chunk)]
        buffers = [buffer for ddp in self.ddps for buffer in ddp.buffers + ddp.expert_parallel_buffers]
        self.device = _device(chunks, buffers)
        digest_kernel(self.device)  # compiled before the first sleep
        names = {id(param): name for chunk in chunks for name, param in chunk.named_parameters()}
        self.gradients = [Gradients(buffer, f"DDP buffer {i}", names) for i, buffer in enumerate(buffers)]
        with_weights = [(i, buffer) for i, buffer in enumerate(buffers) if buffer.param_data is not None]
        self.units = [
            Unit(buffer_weights(buffer, f"DDP buffer {i}", names), rounding_of(buffer, states))
            for i, buffer in with_weights
        ]
        self._chunks = chunks
        self._in_buffers = {
            id(param): buffer.param_data.untyped_storage()._cdata
            for _, buffer in with_weights
            for param in buffer.params
        }
        others = other_weights(chunks, self._in_buffers, self.device)
        if others.slabs:
            self.units.append(Unit(others))
        self.columnwise = ColumnwiseCopies(param for _, buffer in with_weights for param in buffer.params)
        self.backwards = [Backwards(ddp) for ddp in self.ddps]
        find_aliases(self.weight_slabs + self.gradient_slabs)

    @property
    def weight_slabs(self) -> list[StorageSlab]:
        """The storages of all weights."""
        return [slab for unit in self.units for slab in unit.weights.slabs]

    @property
    def gradient_slabs(self) -> list[StorageSlab]:
        """The storages of all gradients."""
        return [slab for gradients in self.gradients for slab in gradients.slabs]

    def require_parameters(self) -> None:
        """Raise RuntimeError where the model has a parameter that would not leave with the others.

        Raises:
            ValueError: as `outside_of_buffers`.
        """
        known = {slab.storage._cdata for slab in self.weight_slabs}
        for name, storage, _ in outside_of_buffers(self._chunks, self._in_buffers, self.device):
            if storage not in known:
                raise RuntimeError(
                    f"parameter {name!r} was added, or given other memory (`param.data =`, load_state_dict(assign="
                    "True)), since this Residency was made, and would stay on the GPU: close() it and make another"
                )

    @property
    def has_backward(self) -> bool:
        """Whether a backward has run since gradients were last used or zeroed."""
        return any(backwards.is_pending for backwards in self.backwards)

    def forget_masters(self) -> None:
        """Count weights that are here as told by no masters: either may be written from now on."""
        for unit in self.units:
            if not unit.weights.is_away:
                unit.forget_masters()

    def gradients_are_used(self) -> None:
        """Note that an update is over: whatever gradients there are, nobody needs them."""
        for backwards in self.backwards:
            backwards.is_pending = False

    def wait_for_collectives(self) -> None:
        """Have the current stream wait for gathers and reductions that DDP has in flight.

        Their handles stay where they are, for DDP to wait once more: its own notes are as they were.
        """
        for ddp in self.ddps:
            for group in ddp.bucket_groups + ddp.expert_parallel_bucket_groups:
                for handle in (group.param_gather_handle, group.grad_reduce_handle):
                    if handle is not None:
                        # Race: the collective would write into memory that has gone, or not be in the copy.
                        handle.wait()

    def close(self) -> None:
        """Take the hooks off, and let go of the host memory."""
        for part in (*self.backwards, *self.gradients, *(unit.weights for unit in self.units)):
            part.close()


def map_hosts(slabs: Sequence[StorageSlab]) -> list[HostBuffer]:
    """Map the host memory of storages that have none yet; return the buffers, to be page-locked."""
    return [buffer for slab in slabs for buffer in slab.map_host()]


def _device(chunks: Sequence[torch.nn.Module], buffers: Sequence[Any]) -> torch.device:
    """Return the GPU that the model is on; the CPU where it is on none."""
    devices = [buffer.grad_data.device for buffer in buffers]
    devices += [parameter.device for chunk in chunks for parameter in chunk.parameters()]
    return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))
