"""A part: the parameters that one call of the inner optimizer updates, with the slabs of their states."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from bridge_fgo.engine.residency import Residency, ResidencyTracker
from bridge_fgo.engine.slab import Slab
from bridge_fgo.engine.transfers import Transfers


@dataclass
class Traffic:
    """What one offloader has moved, in bytes, and what it cost the host: the host time inside its blocks counts."""

    out: int = 0
    back: int = 0
    released: int = 0
    """Off the GPU now."""
    most_released: int = 0
    """The most that was off the GPU at once since the newest pass began."""
    seconds: float = 0.0
    """Host time spent on the moves."""

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
        with self.traffic:
            try:
                written = self.slab.adopt()
                if self.slab.remainders is not None:
                    with self.transfers.computing():
                        written = self.slab.pack() or written
                self.transfers.copy_out(self.slab, written)
            except BaseException:
                self.slab.is_packed = self.slab.is_rounded = False  # it has not left
                raise
        self.traffic.out += self.slab.moving.numel()

    def release(self) -> None:
        """Free the slab's GPU memory."""
        with self.traffic:
            self.transfers.release(self.slab)
        self.traffic.released += self.slab.nbytes
        self.traffic.most_released = max(self.traffic.most_released, self.traffic.released)

    def give_up_offload(self) -> None:
        """Let go of what was being copied in place of the slab."""
        if self.slab.packed is not None:
            with self.traffic:
                self.transfers.wait_out(self.slab)
                self.slab.drop_packed()
        self.slab.is_packed = False

    def start_reload(self) -> None:
        """Start the copy in."""
        with self.traffic:
            self.transfers.copy_in(self.slab)
        self.traffic.back += self.slab.moving.numel()
        self.traffic.released -= self.slab.nbytes

    def wait_reload(self) -> None:
        """Order the current stream after the copy in.

        Raises:
            RuntimeError: see `MasterRemainders.require_unchanged`. The slab is as it was.
        """
        remainders = self.slab.remainders if self.slab.is_packed else None
        if remainders is not None:
            with self.transfers.computing():
                remainders.owner.require_unchanged([remainders])
        with self.traffic:
            self.transfers.wait_in(self.slab)
            if remainders is not None:
                with self.transfers.computing():
                    self.slab.unpack()


class TrackedSlab:
    """A slab and the tracker of where its bytes are.

    is_copied_to_model: whether it holds masters that mcore copies to the model's weights after the update.
        Masters that TE's FusedAdam keeps in its own state are not: it writes the weights itself.
    """

    def __init__(self, slab: Slab, is_copied_to_model: bool, transfers: Transfers, traffic: Traffic) -> None:
        self.slab = slab
        self.nbytes = slab.nbytes
        """Size in bytes."""
        self.transit_bytes = slab.transit_bytes
        """See `Slab.transit_bytes`."""
        self.is_copied_to_model = is_copied_to_model
        self.tracker = ResidencyTracker(SlabMover(slab, transfers, traffic))


@dataclass(eq=False)
class StepPart:
    """Parameters that are updated in one go, and the slabs of their states (masters, moments, or one of them)."""

    params: list[torch.Tensor]
    slabs: list[TrackedSlab]
    stays: bool = False
    """Whether its states stay on the GPU for good, because the memory budget has room for them."""
    packable_bytes: int = 0
    """Bytes of its masters that are packed if training is seen to wait for copies; see `PackingChoice`."""
    ids: frozenset[int] = field(init=False)
    """`id` of each parameter."""

    has_masters: bool = field(init=False)
    """Whether mcore copies some of its masters to the model's weights."""

    nbytes: int = field(init=False)
    """Size of the slabs in bytes."""

    transit_bytes: int = field(init=False)
    """Most bytes of GPU memory that they hold while they are on their way."""

    def __post_init__(self) -> None:
        self.has_masters = any(slab.is_copied_to_model for slab in self.slabs)
        self.ids = frozenset(id(param) for param in self.params)
        self.nbytes = sum(slab.nbytes for slab in self.slabs)
        self.transit_bytes = sum(slab.transit_bytes for slab in self.slabs)


MOST_IN_TRANSIT = 4
"""Slabs that are on their way at once where all of them come or go: what is copied in place of masters needs memory
beside them."""


def require_readable(slabs: Iterable[TrackedSlab]) -> None:
    """Have work that the current stream gets from now on find the slabs' tensors readable."""
    coming: deque[TrackedSlab] = deque()
    for slab in slabs:
        if slab.tracker.state is Residency.RELEASED:
            slab.tracker.reload()
        coming.append(slab)
        if len(coming) == MOST_IN_TRANSIT:
            coming.popleft().tracker.require_readable()
    for slab in coming:
        slab.tracker.require_readable()


def send_off(slabs: Iterable[TrackedSlab]) -> None:
    """Start the copies out of slabs whose tensors exist. What is packed for it goes at once, but for the newest."""
    leaving: deque[TrackedSlab] = deque()
    for slab in slabs:
        if slab.tracker.state in (Residency.RESIDENT, Residency.RELOADING) and slab.slab.exists():
            slab.tracker.offload()
            if slab.slab.is_packed:
                leaving.append(slab)
            if len(leaving) == MOST_IN_TRANSIT:
                leaving.popleft().tracker.release()
