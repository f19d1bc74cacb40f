"""A part: the parameters that one call of the inner optimizer updates, with the slabs of their states."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from bridge_fgo.engine.residency import Residency, ResidencyTracker
from bridge_fgo.engine.slab import Slab
from bridge_fgo.engine.transfers import Transfers


@dataclass
class Traffic:
    """What one offloader has moved, in bytes, and what it cost the host."""

    out: int = 0
    back: int = 0
    released: int = 0
    """Off the GPU now."""
    most_released: int = 0
    """The most that was off the GPU at once since the newest pass began."""
    seconds: float = 0.0
    """Host time spent on the moves."""

    def timed(self) -> Traffic:
        """Count the host time inside the block."""
        return self

    def __enter__(self) -> None:
        self.seconds -= time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self.seconds += time.perf_counter()


@dataclass(frozen=True)
class SlabMover:
    """The actions of a residency tracker, on one slab."""

    slab: Slab
    transfers: Transfers
    traffic: Traffic

    def start_offload(self) -> None:
        """Gather the slab's tensors and start the copy out."""
        with self.traffic.timed():
            self.slab.adopt()
            self.transfers.copy_out(self.slab)
        self.traffic.out += self.slab.nbytes

    def release(self) -> None:
        """Free the slab's GPU memory."""
        with self.traffic.timed():
            self.transfers.release(self.slab)
        self.traffic.released += self.slab.nbytes
        self.traffic.most_released = max(self.traffic.most_released, self.traffic.released)

    def start_reload(self) -> None:
        """Start the copy in."""
        with self.traffic.timed():
            self.transfers.copy_in(self.slab)
        self.traffic.back += self.slab.nbytes
        self.traffic.released -= self.slab.nbytes

    def wait_reload(self) -> None:
        """Order the current stream after the copy in."""
        with self.traffic.timed():
            self.transfers.wait_in(self.slab)


class TrackedSlab:
    """A slab and the tracker of where its bytes are.

    is_copied_to_model: whether it holds masters that mcore copies to the model's weights after the update.
        Masters that TE's FusedAdam keeps in its own state are not: it writes the weights itself.
    """

    def __init__(self, slab: Slab, is_copied_to_model: bool, transfers: Transfers, traffic: Traffic) -> None:
        self.slab = slab
        self.nbytes = slab.nbytes
        """Size in bytes."""
        self.is_copied_to_model = is_copied_to_model
        self.tracker = ResidencyTracker(SlabMover(slab, transfers, traffic))


@dataclass(eq=False)
class StepPart:
    """Parameters that are updated in one go, and the slabs of their states (masters, moments, or one of them)."""

    params: list[torch.Tensor]
    slabs: list[TrackedSlab]
    stays: bool = False
    """Whether its states stay on the GPU for good, because the memory budget has room for them."""
    ids: frozenset[int] = field(init=False)
    """`id` of each parameter."""

    has_masters: bool = field(init=False)
    """Whether mcore copies some of its masters to the model's weights."""

    nbytes: int = field(init=False)
    """Size of the slabs in bytes."""

    def __post_init__(self) -> None:
        self.has_masters = any(slab.is_copied_to_model for slab in self.slabs)
        self.ids = frozenset(id(param) for param in self.params)
        self.nbytes = sum(slab.nbytes for slab in self.slabs)


def require_readable(slabs: Iterable[TrackedSlab]) -> None:
    """Have work that the current stream gets from now on find the slabs' tensors readable.

    All copies in are started before the first is waited for.
    """
    slabs = list(slabs)
    for slab in slabs:
        if slab.tracker.state is Residency.RELEASED:
            slab.tracker.reload()
    for slab in slabs:
        slab.tracker.require_readable()
