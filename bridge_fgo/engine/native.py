"""The native engine: offload of one DistributedOptimizer's states, slab by slab."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bridge_fgo.config import OffloadConfig
from bridge_fgo.engine.plan import pack, select
from bridge_fgo.engine.residency import Residency, ResidencyTracker
from bridge_fgo.engine.slab import Slab
from bridge_fgo.engine.states import StateRef, bundles, home_device
from bridge_fgo.engine.transfers import Transfers


@dataclass(frozen=True)
class SlabMover:
    """The actions of a residency tracker, on one slab."""

    slab: Slab
    transfers: Transfers

    def start_offload(self) -> None:
        """Gather the slab's tensors and start the copy out."""
        self.slab.adopt()
        self.transfers.copy_out(self.slab)

    def release(self) -> None:
        """Free the slab's GPU memory."""
        self.transfers.release(self.slab)

    def start_reload(self) -> None:
        """Start the copy in."""
        self.transfers.copy_in(self.slab)

    def wait_reload(self) -> None:
        """Order the current stream after the copy in."""
        self.transfers.wait_in(self.slab)


class NativeOffloader:
    """See `bridge_fgo.engine.offloader.Offloader`.

    Host memory is planned, allocated and page-locked here, before training: the master weights exist, and
    the moments' sizes and dtypes are known before the first step makes them. Master weights and tensors of
    `optimizer.state` lie in slabs of their own, because the former go from the first step on and the latter
    as soon as they exist.

    Args:
        optimizer: a DistributedOptimizer that is not a stub, with Adam inside.
        config: what to offload.
        transfers: the streams, shared by the optimizers of the rank.

    Raises:
        RuntimeError: host memory could not be mapped or page-locked.
    """

    engine = "native"

    def __init__(self, optimizer: Any, config: OffloadConfig, transfers: Transfers) -> None:
        self._config = config
        self._transfers = transfers
        device = home_device(optimizer)
        everything = bundles(optimizer)
        self.state_bytes = sum(bundle.nbytes for bundle in everything)
        for bundle in everything:
            bundle.refs = [ref for ref in bundle.refs if self._wanted(ref)]
        chosen = [everything[i] for i in select([bundle.nbytes for bundle in everything], config.fraction)]
        refs = [ref for bundle in chosen for ref in bundle.refs]
        self.planned_bytes = sum(ref.nbytes for ref in refs)
        self._slabs: list[Slab] = []
        self._trackers: list[ResidencyTracker] = []
        pin = config.pin_memory and device.type == "cuda"
        for group in ([r for r in refs if r.key is None], [r for r in refs if r.key is not None]):
            for layout in pack([ref.nbytes for ref in group], config.slab_bytes):
                slab = Slab(layout, [group[i] for i in layout.members], device, pin)
                self._slabs.append(slab)
                self._trackers.append(ResidencyTracker(SlabMover(slab, transfers)))
        self.bytes_out = 0
        self.bytes_in = 0

    def _wanted(self, ref: StateRef) -> bool:
        return self._config.moments if ref.kind == "moment" else self._config.master_weights

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host bytes; 0 where the states live on the CPU."""
        return sum(slab.host.pinned_bytes for slab in self._slabs)

    @property
    def slabs(self) -> list[Slab]:
        """The slabs, in the order in which they move."""
        return self._slabs

    @property
    def residencies(self) -> list[Residency]:
        """The residency of each slab."""
        return [tracker.state for tracker in self._trackers]

    def has_states(self) -> bool:
        """Return whether any tensor of any slab exists."""
        return any(_exists(slab) for slab in self._slabs)

    def offload(self) -> None:
        """Start the copies out of every slab whose tensors exist."""
        before = self._transfers.bytes_out
        for slab, tracker in zip(self._slabs, self._trackers, strict=True):
            if _exists(slab):
                tracker.offload()
        self.bytes_out += self._transfers.bytes_out - before

    def release(self) -> int:
        """Free the GPU memory of every slab that is on its way out; return the bytes freed."""
        freed = 0
        for slab, tracker in zip(self._slabs, self._trackers, strict=True):
            held = slab.gpu_bytes
            tracker.release()
            freed += held - slab.gpu_bytes
        return freed

    def reload(self) -> None:
        """Start the copies in."""
        before = self._transfers.bytes_in
        for tracker in self._trackers:
            tracker.reload()
        self.bytes_in += self._transfers.bytes_in - before

    def require_readable(self) -> None:
        """See `Offloader.require_readable`."""
        self.reload_released()
        for tracker in self._trackers:
            tracker.require_readable()

    def require_writable(self) -> None:
        """See `Offloader.require_writable`."""
        self.reload_released()
        for tracker in self._trackers:
            tracker.require_writable()

    def reload_released(self) -> None:
        """Start the copies in of released slabs, all before the first is waited for; leave others alone."""
        before = self._transfers.bytes_in
        for tracker in self._trackers:
            if tracker.state is Residency.RELEASED:
                tracker.reload()
        self.bytes_in += self._transfers.bytes_in - before

    def settle(self) -> None:
        """See `Offloader.settle`."""
        self.require_readable()

    def states_replaced(self) -> None:
        """See `Offloader.states_replaced`; the next offload takes the new tensors into the slabs."""
        for slab, tracker in zip(self._slabs, self._trackers, strict=True):
            if tracker.state is Residency.RESIDENT:
                slab.drop_if_left()

    def resident_note(self) -> str:
        """See `Offloader.resident_note`."""
        left = self.state_bytes - self.planned_bytes
        if left == 0:
            return ""
        reasons = [
            f"OffloadConfig.{name}"
            for name, asked in (
                ("fraction", self._config.fraction < 1.0),
                ("moments", not self._config.moments),
                ("master_weights", not self._config.master_weights),
            )
            if asked
        ]
        return f"{left / 2**30:.2f} GiB of state by {', '.join(reasons)}"

    def close(self) -> None:
        """See `Offloader.close`."""
        self.require_writable()
        for slab in self._slabs:
            slab.close()


def _exists(slab: Slab) -> bool:
    return any(ref.tensor() is not None for ref in slab.refs)
