"""Generation 2 of mcore's offloader: ChunkedOptimizerStateOffloader.

In Megatron-LM's `dev` branch from 2026-08-18 (#6244). Host memory holds the states between updates and
`optimizer.step()` streams them through the GPU chunk by chunk, so upstream itself decides where they are:
its step, its state dicts and its checkpoint scaffold restore what they read.
"""

from __future__ import annotations

from typing import Any, override

import torch

from bridge_fgo.engines.mcore import Member
from bridge_fgo.memory.meters import Traffic
from bridge_fgo.states.megatron import MegatronSource


class Generation2(Member):
    """Drives it, in an optimizer that was built with `config.chunked_optimizer_state_offload=True`."""

    name = "mcore generation 2"
    verbs = ("offload_optimizer_state_for_forward", "prefetch_optimizer_state_for_gradient_finalization")

    def __init__(self, source: MegatronSource, traffic: Traffic) -> None:
        super().__init__(source, traffic)
        self._offloader: Any = self.optimizer._optimizer_state_offloader
        config = self.optimizer.config
        # With MXFP8 and a shared gradient buffer the masters are read once more after grads are zeroed.
        self._masters_are_read_late = config.reuse_grad_buf_for_mxfp8_param_ag and config.overlap_param_gather
        selected = {id(param) for param in self._offloader.selected_params}
        self.planned_bytes = sum(bundle.nbytes for bundle in self.states if id(bundle.param) in selected)
        self._is_out = False

    @override
    def host_buffers(self) -> list[Any]:
        states = [buffer for by_key in self._offloader._cpu_state.values() for buffer in by_key.values()]
        return [*self._offloader._cpu_master.values(), *states]

    @override
    def offload(self) -> None:
        """Start the copy out; with late readers of the masters, of the moments alone."""
        self.optimizer.offload_optimizer_state_for_forward(offload_master=not self._masters_are_read_late)
        self._is_out = True

    @override
    def release(self) -> None:
        """Count what is away; let the masters go too where they were still read."""
        if not self._is_out:
            return
        if self._masters_are_read_late:
            self.optimizer.offload_optimizer_state_for_forward()
        self._count_away()

    @override
    def reload(self) -> None:
        """Start upstream's prefetch of the masters and the first chunk."""
        if not self._is_out:
            return
        self._count_back(self._bytes_off_gpu())
        self.optimizer.prefetch_optimizer_state_for_gradient_finalization()
        self._is_out = False

    @override
    def require_readable(self) -> None:
        self.settle()
        # Race: upstream binds the moments to host tensors as soon as their copies are enqueued, and only its
        # sharded state dict waits for them; another reader would see torn bytes.
        self._offloader._d2h_stream.synchronize()

    @override
    def require_writable(self) -> None:
        """Restore what is on its way: upstream's step and its loader bind the moments that they write themselves."""
        self.settle()

    @override
    def settle(self) -> None:
        """Restore the masters; the moments stay in host memory, where upstream keeps them between updates."""
        self.optimizer.ensure_master_weights_for_param_sync()
        # Race: of the moments the first chunk was bound to GPU memory when its copy was enqueued, for an update that
        # did not come; upstream's own event is for the masters, which land before.
        torch.cuda.current_stream().wait_stream(self._offloader._h2d_stream)
