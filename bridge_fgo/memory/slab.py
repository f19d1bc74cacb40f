"""A slab: its memory, where its bytes are, how they are encoded, and what moving them costs; and moves of several."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import override

import torch

from bridge_fgo.memory.layout import SlabPlace
from bridge_fgo.memory.meters import Ledger, Traffic
from bridge_fgo.memory.residency import Residency, ResidencyMachine
from bridge_fgo.memory.shared_host_buffer import SharedHostBuffer
from bridge_fgo.memory.slab_memory import SlabMemory, decode, encode
from bridge_fgo.memory.transfers import Transfers


class Slab(SlabMemory, ResidencyMachine):
    """One slab. The verbs of `ResidencyMachine` move it by `transfers`; `traffic` counts what they move."""

    def __init__(
        self, place: SlabPlace, device: torch.device, transfers: Transfers, ledger: Ledger, traffic: Traffic
    ) -> None:
        SlabMemory.__init__(self, place, device, ledger)
        ResidencyMachine.__init__(self, traffic.touches)
        self.transfers = transfers
        self.traffic = traffic

    @override
    def tensors(self) -> Iterator[torch.Tensor]:
        for state in self.states:
            yield from state.handles()

    @override
    def name_of(self, tensor: torch.Tensor) -> str:
        names = (state.name for state in self.states if any(tensor is each for each in state.handles()))
        return f"optimizer state {next(names, '')!r} of shape {tuple(tensor.shape)}"

    @override
    def share_host(self, buffer: SharedHostBuffer) -> None:
        before = self.host_address
        super().share_host(buffer)
        self.transfers.forget(before)

    def drop_spare(self) -> None:
        """Let go of the second host buffer, as none is lent any more. What a writer has stays with the writer."""
        if self.spare is None:
            return
        self.transfers.finish_out()  # Race: of a buffer that is lent, what has not landed would not be in the other.
        self.own_host(keep=True)
        self.transfers.forget(self.spare.address)
        self.spare.close()
        self.spare = None

    def _start_offload(self) -> None:
        self._copy_out(encoded=False)

    def start_encoded(self) -> None:
        """Start the copy out of a slab that `encode_together` has encoded, in place of `_start_offload`."""
        self._copy_out(encoded=True)

    def _copy_out(self, encoded: bool) -> None:
        with self.traffic:
            try:
                self.own_host()
                written = False
                if encoded:
                    self.is_encoded = True
                else:
                    written = self.adopt()
                    if self.codec.family is not None:
                        with self.transfers.computing():
                            written = encode([self]) or written
                self.transfers.copy_out(self, written)
            except BaseException:
                self.is_encoded = self.codec.is_exact = False  # it has not left
                raise
        self.traffic.out += self.moving.numel()

    def _release(self) -> None:
        with self.traffic:
            self.transfers.release(self)
        self.traffic.release(self.state_bytes)

    @override
    def release_unchanged(self) -> None:
        if self.transfers.keeps_host_copies:
            super().release_unchanged()
        elif self.state is Residency.RESIDENT:  # debug mode has overwritten the host's copy
            self.send_away()

    def _give_up_offload(self) -> None:
        if self.staging is not None:
            with self.traffic:
                self.transfers.wait_out(self)
                self.drop_staging()
        self.is_encoded = False

    def _start_reload(self) -> None:
        with self.traffic:
            self.transfers.copy_in(self)
        self.traffic.back += self.moving.numel()
        self.traffic.released -= self.state_bytes

    def _wait_reload(self) -> None:
        if self.is_encoded:
            _verify([self])
        with self.traffic:
            self.transfers.wait_in(self)
            if self.is_encoded:
                with self.transfers.computing():
                    decode([self])


def _verify(slabs: Sequence[Slab]) -> None:
    """Raise RuntimeError where encoded slabs cannot be decoded (`CodecFamily.verify`); they are as they were then."""
    family = slabs[0].codec.family
    assert family is not None
    with slabs[0].transfers.computing():
        family.verify([slab.codec for slab in slabs])


MOST_IN_TRANSIT = 4
"""Slabs on their way at once where all come or go: what is copied in place of masters needs memory beside them."""


def require_readable(slabs: Iterable[Slab]) -> None:
    """Have work that the current stream gets from now on find the slabs' tensors readable."""
    coming: deque[Slab] = deque()
    for slab in slabs:
        if slab.state is Residency.RELEASED:
            slab.reload()
        coming.append(slab)
        if len(coming) == MOST_IN_TRANSIT:
            coming.popleft().require_readable()
    for slab in coming:
        slab.require_readable()


def send_off(slabs: Iterable[Slab]) -> None:
    """Start the copies out of slabs whose tensors exist. What is encoded for it goes at once, but for the newest."""
    leaving: deque[Slab] = deque()
    for slab in slabs:
        if slab.state in (Residency.RESIDENT, Residency.RELOADING) and slab.exists():
            slab.offload()
            if slab.is_encoded:
                leaving.append(slab)
            if len(leaving) == MOST_IN_TRANSIT:
                leaving.popleft().release()


def decode_together(slabs: Sequence[Slab]) -> None:
    """Wait for those of some slabs that are on their way back, and decode them by one launch, not one each.

    Where none is encoded, each is left to be waited for when it is asked for. They are to leave again. Their codecs are
    of one family.

    Raises:
        RuntimeError: `CodecFamily.verify` refused, or the driver did. The slabs are as they were, unless that was the
            launch for several: then they are lost.
    """
    coming = [slab for slab in slabs if slab.state is Residency.RELOADING]
    encoded = [slab for slab in coming if slab.is_encoded]
    if not encoded:
        return
    first = encoded[0]
    _verify(encoded)
    with first.traffic:
        for slab in reversed(coming):  # the last lands last: for those before it nothing need wait
            first.transfers.wait_in(slab)
        try:
            with first.transfers.computing():
                decode(encoded, keep_staging=True)
            for slab in coming:  # now: of one that counts as on its way the host's copy counts as its states
                slab.reloaded()
        except BaseException as error:
            for slab in encoded:  # of some the weights' sums may be gone, with which the masters would be checked
                if len(encoded) > 1 or not slab.is_encoded or not isinstance(error, RuntimeError):
                    slab.interrupted = type(error).__name__
            raise


def encode_together(slabs: Iterable[Slab]) -> set[Slab]:
    """Encode those of some slabs that were made exact just now by one launch, not one each, and return them.

    They are to leave, by `Slab.start_encoded`, before anything else happens to them.
    """
    ready = [slab for slab in slabs if slab.codec.is_exact and slab.codec.encodes and slab.state is Residency.RESIDENT]
    if len(ready) < 2:
        return set()
    first = ready[0]
    with first.traffic:
        for slab in ready:
            slab.adopt()
        with first.transfers.computing():
            encode(ready)
    encoded = {slab for slab in ready if slab.is_encoded}
    for slab in encoded:
        slab.is_encoded = False  # until it is on its way
    return encoded
