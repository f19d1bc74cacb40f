"""Generation 1 of mcore's offloader: OptimizerStateOffloader.

In Megatron-LM's `dev` branch from January to 2026-08-18, and in #6544. `DistributedOptimizer` has `offload_states()`,
`release_offloaded_gpu_states()` and `reload_offloaded_states()`. Its root flaw is that a reload in flight is
forgotten: only the inner optimizer step waits for it. The waits that are missing are supplied here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, override

import torch

from bridge_fgo.engines.mcore import Member
from bridge_fgo.memory.meters import Traffic
from bridge_fgo.memory.slab import SlabStateMachine
from bridge_fgo.states.megatron import MegatronSource


def host_buffers(offloader: Any) -> list[Any]:
    """Return the page-locked host tensors of an OptimizerStateOffloader."""
    masters = [buffer for group in offloader._shard_fp32_from_float16_cpu_buffers for buffer in group]
    return masters + [b for by_key in offloader._opt_state_cpu_buffers.values() for b in by_key.values()]


def offload(optimizer: Any) -> None:
    """Start the copy out of all states of an optimizer that are on the GPU."""
    if any(optimizer.optimizer.state.values()):
        # Upstream counts the moments as made only after a step of this process, so those that came
        # from a checkpoint would stay on the GPU in the first forward after a resume.
        optimizer._state_offloader.mark_optimizer_states_initialized()
    optimizer.offload_states()


class Generation1(SlabStateMachine, Member):
    """Drives it as one residency for all states of an optimizer built with `config.offload_optimizer_states=True`."""

    name = "mcore generation 1"
    verbs = ("offload_states", "release_offloaded_gpu_states", "reload_offloaded_states")

    def __init__(self, source: MegatronSource, traffic: Traffic) -> None:
        SlabStateMachine.__init__(self, traffic.touches)
        Member.__init__(self, source, traffic)
        self._offloader: Any = self.optimizer._state_offloader

    @override
    def host_buffers(self) -> list[Any]:
        return host_buffers(self._offloader)

    @override
    def tensors(self) -> Iterator[torch.Tensor]:
        for bundle in self.states:
            for state in bundle.states:
                yield from state.handles()

    def _start_offload(self) -> None:
        offload(self.optimizer)

    def _release(self) -> None:
        self.optimizer.release_offloaded_gpu_states()  # which keeps the memory from reuse with record_stream
        self._count_away()

    def _give_up_offload(self) -> None:
        """Do nothing: what upstream copied is not looked at again."""

    def _start_reload(self) -> None:
        self.optimizer.reload_offloaded_states()  # which orders the copy in after the copy out
        self._count_back(self._away)

    def _wait_reload(self) -> None:
        # Race: a second pass of the rerun loop, a skipped step, an early exit's checkpoint and the next step's copy
        # out would read states that have not landed. Upstream waits before the inner step alone.
        self._offloader.sync_before_step()
