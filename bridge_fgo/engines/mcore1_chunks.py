"""Generation 1 in chunks: `optimizer.offload_optimizer_states_chunk_numel` of Megatron-LM #6544.

The verbs are generation 1's, but `reload_offloaded_states()` moves nothing: `step_with_ready_grads` brings the states
of so many elements to the GPU, updates them and takes them back, one chunk after another. Masters are made in host
memory, and state dictionaries are made of the host's copies.
"""

from __future__ import annotations

from typing import Any, override

from bridge_fgo.engines.mcore import Member
from bridge_fgo.engines.mcore1 import Generation1, host_buffers, offload
from bridge_fgo.memory.meters import Traffic
from bridge_fgo.states.megatron import MegatronSource


class Generation1InChunks(Member):
    """Drives it, in an optimizer that was built with `config.offload_optimizer_states_chunk_numel` above 0."""

    name = "mcore generation 1 in chunks"
    verbs = (*Generation1.verbs, "_use_chunked_optimizer_state_reload")
    serves_saves = True

    def __init__(self, source: MegatronSource, traffic: Traffic) -> None:
        super().__init__(source, traffic)
        self._offloader: Any = self.optimizer._state_offloader
        self._is_out = False

    @override
    def host_buffers(self) -> list[Any]:
        return host_buffers(self._offloader)

    @override
    def offload(self) -> None:
        """Start the copy out of what a reader brought to the GPU, or a first step or a load made there."""
        offload(self.optimizer)
        self._is_out = True

    @override
    def release(self) -> None:
        if self._is_out:
            self.optimizer.release_offloaded_gpu_states()
            self._count_away()

    @override
    def reload(self) -> None:
        """Count what the step is going to bring and take back."""
        if self._is_out:
            self._count_back(self._bytes_off_gpu())
            self.optimizer.reload_offloaded_states()
            self._is_out = False

    @override
    def require_readable(self) -> None:
        """Bring every state to the GPU: masters and moments between two steps have no memory there."""
        # Which orders the copy in after a copy out that is under way, and after which `release` finds nothing.
        self._offloader.reload()
        # Race: a reader on any stream, and the host, would see states that have not landed.
        self._offloader.sync_pending_h2d()

    @override
    def require_writable(self) -> None:
        """Do as for a reader: after it the host's copies are not looked at again, but written anew."""
        self.require_readable()

    @override
    def settle(self) -> None:
        """Do nothing: the states stay where upstream's step left them, in host memory."""
