"""Adapter for generation 1: mcore's OptimizerStateOffloader.

In Megatron-LM's `dev` branch from January to 2026-08-18. `DistributedOptimizer` has `offload_states()`,
`release_offloaded_gpu_states()` and `reload_offloaded_states()`. Its root flaw is that a reload in flight is
forgotten: only the inner optimizer step waits for it. The waits that are missing are supplied here.
"""

from __future__ import annotations

from typing import Any

from bridge_fgo.engine.host_memory import power_of_two_at_least
from bridge_fgo.engine.residency import ResidencyTracker
from bridge_fgo.engine.states import bundles, home_device, live_bytes
from bridge_fgo.upstream.whole_step import WholeStep


def is_available(optimizer_class: type) -> bool:
    """Return whether a DistributedOptimizer class has generation 1's three verbs."""
    verbs = ("offload_states", "release_offloaded_gpu_states", "reload_offloaded_states")
    return all(hasattr(optimizer_class, verb) for verb in verbs)


class Generation1Mover:
    """The actions of a residency tracker, by generation 1's verbs."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.states = bundles(optimizer)
        self._home = home_device(optimizer)
        self.released = 0

    def live_bytes(self) -> int:
        """Return the bytes of GPU memory that the states hold now."""
        return live_bytes(self.states, self._home)

    def start_offload(self) -> None:
        """Start the copy out of whatever states exist."""
        if any(self.optimizer.optimizer.state.values()):
            # Upstream counts the moments as made only after a step of this process, so those that came
            # from a checkpoint would stay on the GPU in the first forward after a resume.
            self.optimizer._state_offloader.mark_optimizer_states_initialized()
        self.optimizer.offload_states()

    def release(self) -> None:
        """Free the GPU memory; upstream keeps it from reuse with record_stream."""
        before = self.live_bytes()
        self.optimizer.release_offloaded_gpu_states()
        self.released = before - self.live_bytes()

    def give_up_offload(self) -> None:
        """What upstream copied is not looked at again."""

    def start_reload(self) -> None:
        """Start the copy in; upstream orders it after the copy out."""
        self.optimizer.reload_offloaded_states()

    def wait_reload(self) -> None:
        """Supply the wait that upstream leaves out everywhere but before the inner step.

        Race: a second pass of the rerun loop, a skipped step, an early exit's checkpoint and the next
        step's copy out would read states that have not landed.
        """
        self.optimizer._state_offloader.sync_before_step()


class Generation1Offloader(WholeStep):
    """See `bridge_fgo.engine.offloader.Offloader`.

    Args:
        optimizer: a DistributedOptimizer that was built with `config.offload_optimizer_states=True`.
    """

    engine = "mcore generation 1"

    def __init__(self, optimizer: Any) -> None:
        assert optimizer._state_offloader is not None
        self._mover = Generation1Mover(optimizer)
        self._tracker = ResidencyTracker(self._mover)
        self.state_bytes = sum(bundle.nbytes for bundle in self._mover.states)
        self.planned_bytes = self.state_bytes
        self.bytes_out = 0
        self.bytes_in = 0
        self.released_bytes = 0

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host bytes, with the rounding of PyTorch's pinned allocator to powers of two."""
        offloader = self._mover.optimizer._state_offloader
        buffers = [b for group in offloader._shard_fp32_from_float16_cpu_buffers for b in group]
        buffers += [b for by_key in offloader._opt_state_cpu_buffers.values() for b in by_key.values()]
        return sum(power_of_two_at_least(buffer.nbytes) for buffer in buffers)

    def has_states(self) -> bool:
        """Return whether any state exists."""
        return self._mover.live_bytes() > 0

    def offload(self) -> None:
        """Start the copy out."""
        self._tracker.offload()

    @property
    def is_lost(self) -> bool:
        """See `Offloader.is_lost`."""
        return bool(self._tracker.interrupted)

    def release(self) -> None:
        """Free the GPU memory."""
        self._mover.released = 0
        self._tracker.release()
        self.bytes_out += self._mover.released
        self.released_bytes = self._mover.released

    def reload(self) -> None:
        """Start the copy in."""
        before = self._mover.live_bytes()
        self._tracker.reload()
        self.bytes_in += self._mover.live_bytes() - before

    def require_readable(self, masters_only: bool = False) -> None:
        """See `Offloader.require_readable`."""
        self._tracker.require_readable()

    def require_writable(self, masters_only: bool = False) -> None:
        """See `Offloader.require_writable`."""
        self._tracker.require_writable()

    def settle(self) -> None:
        """See `Offloader.settle`."""
        self._tracker.require_readable()

    def states_replaced(self) -> None:
        """See `Offloader.states_replaced`; upstream looks the tensors up each time."""

    def resident_note(self) -> str:
        """See `Offloader.resident_note`; generation 1 offloads every state."""
        return ""

    def close(self) -> None:
        """See `Offloader.close`; upstream keeps its host buffers until the optimizer goes."""
        self.require_writable()
