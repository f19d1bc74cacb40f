"""The weights of a model on this rank: what is copied as they are offloaded, and how they are made whole on reload."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from bridge_fgo.engines.ranks import on_every_rank
from bridge_fgo.memory.digest import digest_kernel
from bridge_fgo.memory.storage_slab import StorageSlab
from bridge_fgo.sleep.moved import RETURNED_BYTES, SideStream, Tally, return_to_driver, wait_for_gpu
from bridge_fgo.sleep.quantized import ColumnwiseCopies
from bridge_fgo.sleep.rounding import round_again
from bridge_fgo.sleep.states import OptimizerStates
from bridge_fgo.sleep.weight_groups import WeightGroup, buffer_group, digests_of, other_group, outside_of_buffers


class Weights:
    """Moves the weights of model chunks.

    Args:
        chunks: the model chunks.
        buffers: mcore's `_ParamAndGradBuffer`s of them.
        names: of parameters, by their `id`.
        device: the GPU that the model is on.
        states: what moves the optimizer's state, whose masters may round to the weights; None without an optimizer.

    Raises:
        ValueError: as `other_group`.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        buffers: Sequence[Any],
        names: Mapping[int, str],
        device: torch.device,
        states: OptimizerStates | None,
    ) -> None:
        digest_kernel(device)  # compiled before the first sleep
        self._chunks, self._device, self._states = chunks, device, states
        with_weights = [(i, buffer) for i, buffer in enumerate(buffers) if buffer.param_data is not None]
        self.groups = [buffer_group(buffer, f"DDP buffer {i}", names, states) for i, buffer in with_weights]
        self._in_buffers = {
            id(param): buffer.param_data.untyped_storage()._cdata
            for _, buffer in with_weights
            for param in buffer.params
        }
        if (others := other_group(chunks, self._in_buffers, device)) is not None:
            self.groups.append(others)
        self.columnwise = ColumnwiseCopies(param for _, buffer in with_weights for param in buffer.params)
        self._beside = SideStream(device)
        self._wakes_alone = False
        """Whether parameters were reloaded without their masters: then a copy of the shard is cheapest."""

    @property
    def slabs(self) -> list[StorageSlab]:
        """The storages of all weights."""
        return [slab for group in self.groups for slab in group.slabs]

    @property
    def is_away(self) -> bool:
        """Whether any of their memory is released."""
        return any(group.is_away for group in self.groups)

    @property
    def is_here(self) -> bool:
        """Whether any of their memory is on the GPU."""
        return bool(self.here)

    @property
    def here(self) -> list[WeightGroup]:
        """The groups on the GPU."""
        return [group for group in self.groups if not group.is_away]

    def require_known(self) -> None:
        """Raise RuntimeError where the model has a parameter that would not be offloaded with the others.

        Raises:
            ValueError: as `outside_of_buffers`.
        """
        known = {slab.storage._cdata for slab in self.slabs}
        for name, storage, _ in outside_of_buffers(self._chunks, self._in_buffers, self._device):
            if storage not in known:
                raise RuntimeError(
                    f"parameter {name!r} was added, or given other memory (`param.data =`, load_state_dict(assign="
                    "True)), since this Residency was made, and would stay on the GPU: close() it and make another"
                )

    def forget_masters(self) -> None:
        """Trust no masters of weights that are here: from now on either may be written."""
        for group in self.here:
            group.forget_masters()

    # Offload.

    def start_offload(self, groups: Sequence[WeightGroup], states: OptimizerStates | None, tally: Tally) -> None:
        """Start the copies of what masters do not round to and the host lacks, and note what masters round to.

        Masters are still here, and the GPU is idle. The copies go on afterwards: until `empty` nobody may write the
        weights.

        Args:
            groups: what is offloaded.
            states: the optimizer's states where they are offloaded too, else None.
            tally: counts the bytes and the time.
        """
        if self._wakes_alone:  # everything is copied, whatever masters say: they are compared meanwhile
            self._copy_out(groups, tally)
        with tally.part("compare"):
            self._compare_with_masters(groups, states)
        if not self._wakes_alone:
            self._copy_out(groups, tally)

    def _compare_with_masters(self, groups: Sequence[WeightGroup], states: OptimizerStates | None) -> None:
        """Compare masters with their weights, where both are here and one is offloaded; the host waits once.

        Where weights stay as their masters are offloaded, note the weights' sums: they may change until they follow.
        """
        compared, roundings = [], []
        for group in self.here:
            rounding = group.rounding
            if rounding is not None and (group in groups or states is not None) and rounding.masters_are_here():
                compared.append(group)
                roundings.append(rounding)
        if not compared:
            return
        for group, agrees in zip(compared, torch.stack([each.agrees() for each in roundings]).tolist(), strict=True):
            group.rounded_digests, group.is_rounded = None, agrees
        staying = [group for group in compared if group.is_rounded and group not in groups]
        for group, digests in zip(staying, digests_of(staying), strict=True):
            group.rounded_digests = digests

    def _copy_out(self, groups: Sequence[WeightGroup], tally: Tally) -> None:
        if not groups:
            return
        with tally.part("params"):
            copied = self._start_copies(groups)
        tally.copy("params", copied)
        if copied >= RETURNED_BYTES:  # meanwhile the driver takes back gradients, and what was cached
            with tally.part("driver"):
                return_to_driver(self._device)

    def _start_copies(self, groups: Sequence[WeightGroup]) -> int:
        """Start the copies of what masters do not round to and the host lacks; return the bytes."""
        summed = []
        for group in groups:
            group.is_on_host = False
            was_just_compared = group.is_rounded and group.rounded_digests is None
            if self._wakes_alone or not was_just_compared:
                summed.append(group)
        copied = 0
        for group, digests in zip(summed, digests_of(summed), strict=True):
            # Masters that were offloaded before round to what the weights were then.
            group.is_rounded = group.is_rounded and group.rounded_digests in (None, digests)
            if not group.is_rounded or self._wakes_alone or group.has_host_copy(digests):
                with self._beside.after_current():
                    copied += group.copy_out(digests)
                group.is_on_host = True
        return copied

    def empty(self, groups: Sequence[WeightGroup]) -> int:
        """Release the memory of weights after `start_offload`; return the bytes, 0 where it was released."""
        here = [group for group in groups if not group.is_away]
        if not here:
            return 0
        self._beside.synchronize()  # Race: their copies would read what is another's, or the driver's.
        self.columnwise.drop()
        return sum(group.empty() for group in here)

    # Reload.

    def reload(self, tally: Tally, first: Callable[[], None] = lambda: None) -> None:
        """Reload the weights that are away, but for columnwise copies; a collective, also where none are away.

        first: is called before. Where it fails on one rank, all raise: they would wait for that rank in the all-gather.
        """
        groups = [group for group in self.groups if group.is_away]
        filled: list[WeightGroup] = []

        def fill_and_write() -> None:
            first()
            with tally.part("params"):
                if not all(group.is_rounded or group.is_on_host for group in groups):
                    raise RuntimeError(
                        "parameters were sent off the GPU by something else than this Residency: bring them back the "
                        "same way"
                    )
                for group in groups:
                    tally.moved.freed -= group.fill()
                    filled.append(group)
                tally.copy("params", self._write(groups))

        try:
            on_every_rank(fill_and_write)
        except BaseException:
            # Nobody may take half-written weights for weights. Masters and the host's copies have not changed.
            wait_for_gpu(self._device)
            for group in filled:
                group.empty()
            raise
        for group in groups:
            group.forget_masters()
            group.is_on_host = False
        for group in self.groups:  # where this rank's weights had stayed, another's may not have
            group.gather()

    def _write(self, groups: Sequence[WeightGroup]) -> int:
        """Write this rank's weights; return the bytes that crossed the link."""
        roundings, copied = [], 0
        for group in groups:
            rounding = group.rounding if group.is_rounded else None
            are_here = rounding is not None and rounding.masters_are_here()
            if rounding is not None and not are_here:
                self._wakes_alone = True
            if rounding is not None and (are_here or not group.is_on_host):
                roundings.append(rounding)
            else:
                copied += group.copy_in()
        if roundings:
            assert self._states is not None
            copied += round_again(roundings, self._states)
        return copied

    def close(self) -> None:
        """Release the host memory, and forget the optimizer's states."""
        for group in self.groups:
            group.close()
        self._states = None
