"""Adapter for generation 2: mcore's ChunkedOptimizerStateOffloader.

In Megatron-LM's `dev` branch from 2026-08-18 (#6244). Host memory holds the states between updates and
`optimizer.step()` streams them through the GPU chunk by chunk, so upstream itself decides where they are:
its step, its state dicts and its checkpoint scaffold restore what they read.
"""

from __future__ import annotations

from typing import Any

import torch

from bridge_fgo.engine.host_memory import power_of_two_at_least
from bridge_fgo.engine.states import bundles, home_device, live_bytes
from bridge_fgo.upstream.whole_step import WholeStep


def is_available(optimizer_class: type) -> bool:
    """Return whether a DistributedOptimizer class has generation 2's verbs."""
    verbs = ("offload_optimizer_state_for_forward", "prefetch_optimizer_state_for_gradient_finalization")
    return all(hasattr(optimizer_class, verb) for verb in verbs)


class Generation2Offloader(WholeStep):
    """See `bridge_fgo.engine.offloader.Offloader`.

    Args:
        optimizer: a DistributedOptimizer that was built with `config.chunked_optimizer_state_offload=True`.
    """

    engine = "mcore generation 2"

    def __init__(self, optimizer: Any) -> None:
        assert optimizer._optimizer_state_offloader is not None
        self._optimizer = optimizer
        config = optimizer.config
        # With MXFP8 and a shared gradient buffer the masters are read once more after grads are zeroed.
        self._masters_are_read_late = config.reuse_grad_buf_for_mxfp8_param_ag and config.overlap_param_gather
        self._home = home_device(optimizer)
        self._states = bundles(optimizer)
        selected = {id(p) for p in optimizer._optimizer_state_offloader.selected_params}
        self.state_bytes = sum(bundle.nbytes for bundle in self._states)
        self.planned_bytes = sum(bundle.nbytes for bundle in self._states if id(bundle.param) in selected)
        self.bytes_out = 0
        self.bytes_in = 0
        self.released_bytes = 0
        self._is_out = False

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host bytes, with the rounding of PyTorch's pinned allocator to powers of two."""
        offloader = self._optimizer._optimizer_state_offloader
        buffers = list(offloader._cpu_master.values())
        buffers += [b for by_key in offloader._cpu_state.values() for b in by_key.values()]
        return sum(power_of_two_at_least(buffer.nbytes) for buffer in buffers)

    def has_states(self) -> bool:
        """Return whether any state exists."""
        return self._existing_bytes() > 0

    def _existing_bytes(self) -> int:
        tensors = (ref.tensor() for bundle in self._states for ref in bundle.refs)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def offload(self) -> None:
        """Start the copy out; with late readers of the masters, of the moments alone."""
        self._optimizer.offload_optimizer_state_for_forward(offload_master=not self._masters_are_read_late)
        self._is_out = True

    def release(self) -> None:
        """Let the masters go too where they were still read."""
        self.released_bytes = 0
        if not self._is_out:
            return
        if self._masters_are_read_late:
            self._optimizer.offload_optimizer_state_for_forward()
        self.released_bytes = self._existing_bytes() - live_bytes(self._states, self._home)
        self.bytes_out += self.released_bytes

    def reload(self) -> None:
        """Start upstream's prefetch of the masters and the first chunk."""
        if not self._is_out:
            return
        self.bytes_in += self._existing_bytes() - live_bytes(self._states, self._home)
        self._optimizer.prefetch_optimizer_state_for_gradient_finalization()
        self._is_out = False

    def require_readable(self, masters_only: bool = False) -> None:
        """Restore what is on its way, and wait on the host for the moments' copies out.

        Race: upstream binds the moments to host tensors as soon as their copies are enqueued, and only its
        sharded state dict waits for them; another reader would see torn bytes.
        """
        self.settle()
        self._optimizer._optimizer_state_offloader._d2h_stream.synchronize()

    def require_writable(self, masters_only: bool = False) -> None:
        """Restore what is on its way: upstream's step and its loader bind the moments that they write themselves."""
        self.settle()

    def settle(self) -> None:
        """Restore the masters; the moments stay in host memory, where upstream keeps them between updates."""
        self._optimizer.ensure_master_weights_for_param_sync()
        # Race: of the moments the first chunk was bound to GPU memory when its copy was enqueued, for an update that
        # did not come; upstream's own event is for the masters, which land before.
        torch.cuda.current_stream().wait_stream(self._optimizer._optimizer_state_offloader._h2d_stream)

    def states_replaced(self) -> None:
        """See `Offloader.states_replaced`; upstream looks the tensors up each time."""

    def resident_note(self) -> str:
        """See `Offloader.resident_note`."""
        left = self.state_bytes - self.planned_bytes
        return f"{left / 2**30:.2f} GiB of state by optimizer.optimizer_state_offload_fraction" if left else ""

    def close(self) -> None:
        """See `Offloader.close`; upstream keeps its host buffers until the optimizer goes."""
        self.require_readable()
