"""A part: the parameters that one call of the inner optimizer updates, with the slabs of their states."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from bridge_fgo.engine.residency import Residency, ResidencyTracker
from bridge_fgo.engine.slab import Slab, pack_masters, unpack_masters
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
        self._copy_out(self._gather)

    def start_packed(self) -> None:
        """Start the copy out of a slab that `pack_together` has packed, in place of `start_offload`."""
        self._copy_out(self._take_as_packed)

    def _gather(self) -> bool:
        written = self.slab.adopt()
        if self.slab.remainders is not None:
            with self.transfers.computing():
                written = pack_masters([self.slab]) or written
        return written

    def _take_as_packed(self) -> bool:
        self.slab.is_packed = True
        return False

    def _copy_out(self, prepare: Callable[[], bool]) -> None:
        """Copy the slab out after `prepare`, which returns whether it enqueued anything that writes what is copied."""
        with self.traffic:
            try:
                self.transfers.copy_out(self.slab, prepare())
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
        packed = self.slab.is_packed
        if packed:
            self.require_unchanged([self.slab])
        with self.traffic:
            self.transfers.wait_in(self.slab)
            if packed:
                with self.transfers.computing():
                    unpack_masters([self.slab])

    def require_unchanged(self, packed: Iterable[Slab]) -> None:
        """See `MasterRemainders.require_unchanged`: for slabs of this one's optimizer whose masters are packed."""
        away = [slab.remainders for slab in packed if slab.remainders is not None]
        with self.transfers.computing():
            away[0].owner.require_unchanged(away)


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
        self.mover = SlabMover(slab, transfers, traffic)
        self.tracker = ResidencyTracker(self.mover)


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


def unpack_together(slabs: Sequence[TrackedSlab]) -> None:
    """Have the masters among slabs of one optimizer that are on their way back made by one launch, not one each.

    The trackers find that done when each slab is asked for.

    Raises:
        RuntimeError: see `MasterRemainders.require_unchanged`, or the driver refused something. The slabs are as they
            were, unless that was a launch: then they are lost.
    """
    coming = [slab for slab in slabs if slab.tracker.state is Residency.RELOADING]
    packed = [slab for slab in coming if slab.slab.is_packed]
    if len(packed) < 2:
        return
    mover = packed[0].mover
    mover.require_unchanged([slab.slab for slab in packed])
    with mover.traffic:
        mover.transfers.wait_in(coming[-1].slab)  # the last lands last: for those before it nothing need wait
        for slab in packed:
            mover.transfers.wait_in(slab.slab)
        try:
            with mover.transfers.computing():
                unpack_masters([slab.slab for slab in packed])
        except BaseException as error:
            for slab in packed:  # of some the weights' sums may be gone, with which the masters would be checked
                slab.tracker.interrupted = type(error).__name__
            raise


def pack_together(slabs: Iterable[TrackedSlab]) -> set[TrackedSlab]:
    """Have the masters among slabs of one optimizer that were rounded just now packed by one launch, not one each.

    Returns the slabs that are packed: they are to leave before anything else happens to them.
    """
    ready = [
        slab for slab in slabs if slab.slab.is_rounded and slab.slab.packs and slab.tracker.state is Residency.RESIDENT
    ]
    if len(ready) < 2:
        return set()
    mover = ready[0].mover
    with mover.traffic:
        for slab in ready:
            slab.slab.adopt()
        with mover.transfers.computing():
            pack_masters([slab.slab for slab in ready])
    packed = {slab for slab in ready if slab.slab.is_packed}
    for slab in packed:
        slab.slab.is_packed = False  # until it is on its way
    return packed


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
