"""The memory of a slab: a group of whole tensors with one GPU allocation and one host buffer of the same layout."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import torch

from bridge_fgo.memory.codec import Codec, Move
from bridge_fgo.memory.guard import empty, fill
from bridge_fgo.memory.host_side import HostSide
from bridge_fgo.memory.layout import SlabPlace
from bridge_fgo.memory.meters import Ledger
from bridge_fgo.memory.residency import StillShared

AWAY = (
    "offloaded optimizer state was used in a way that does not bring it back (by a kernel of an extension, a "
    "collective, or a view that was made before): call bridge_fgo.reload_states() first, or "
    "Residency.reload('optimizer')"
)
"""The error that such code gets."""


class SlabMemory(HostSide):
    """The memory of a slab, the state tensors that live in it, and what is copied in its place.

    The tensors keep their identity: only the storage behind each moves into the slab, so every holder of
    one (param groups, the keys of `optimizer.state`, `param.main_param`) goes on seeing it. States that have a
    home are not moved: their storage, as it is, is the slab's GPU memory, emptied and filled.

    Args:
        place: layout, states and codec.
        device: where the states are when resident.
        ledger: counts the GPU memory of all slabs of the rank.
    """

    def __init__(self, place: SlabPlace, device: torch.device, ledger: Ledger) -> None:
        super().__init__(place)
        self.layout = place.layout
        self.nbytes = place.layout.nbytes
        """Size of the slab in bytes, on the GPU and on the host alike."""
        self.block_bytes = ledger.block_bytes(self.nbytes)
        """Bytes of GPU memory that it takes."""
        self.states = place.states
        self.state_bytes = sum(state.nbytes for state in place.states)
        """Bytes of its states, without what lies between them."""
        self.written_back = place.written_back
        self.codec: Codec = place.codec
        self.gpu: torch.Tensor | None = None  # uint8 [nbytes]; its storage is empty while released
        self.staging: torch.Tensor | None = None
        """What is copied in place of the slab, uint8 [codec.staging_bytes]; on the GPU while the slab is on its way. In
        one allocation with the slab the allocator reserved 0.75 GB more on an H200 (of 19.7 GB of states)."""
        self.is_encoded = False
        """Whether `staging` was in the newest copy out, until it is decoded."""
        self._staging_bytes = ledger.block_bytes(place.codec.staging_bytes)
        self.transit_bytes = self.block_bytes + self._staging_bytes
        """Most bytes of GPU memory that the slab holds: while it is on its way."""
        self._ledger = ledger
        self._make = partial(torch.empty, dtype=torch.uint8, device=device)
        self._is_in_place = any(state.home is not None for state in place.states)
        self._storage: torch.UntypedStorage | None = None
        """Storage of `gpu`: asked for in each move, and PyTorch would make an object around it each time."""
        self._staging_home: tuple[torch.Tensor, torch.UntypedStorage] | None = None
        """`staging` and its storage, emptied or not: cheaper for the host than new ones."""

    @property
    def gpu_bytes(self) -> int:
        """Bytes of GPU memory that the slab holds now."""
        whole = self.block_bytes if self._storage is not None and self._storage.nbytes() else 0
        return whole if self.staging is None else whole + self._staging_bytes

    @property
    def move(self) -> Move:
        """The slab as its codec's family encodes and decodes it."""
        assert self.gpu is not None and self.staging is not None
        return self.codec, self.gpu, self.staging

    @property
    def moving(self) -> torch.Tensor:
        """GPU memory that is copied, uint8: the staging memory where the slab is encoded, else the slab."""
        moving = self.staging if self.is_encoded else self.gpu
        assert moving is not None
        return moving

    def adopt(self) -> bool:
        """Move every tensor that is not in the slab yet into it, bit for bit, on the current stream; return if one was.

        One that was made without memory is made here (`State.take_first`).

        Needed before the first offload, and again for tensors that a checkpoint load replaced. The memory
        that a tensor had before goes back to the allocator, so for a moment one slab is held twice.

        Raises:
            RuntimeError: a tensor is not of the size that was planned; nothing is moved then.
        """
        if self._is_in_place:
            return self._take_in_place()
        gpu = self.gpu
        if gpu is None:
            gpu = self._ledger.change(self.block_bytes, self._make, self.nbytes)
            self._live_in(gpu)
        return self._bind(gpu, copy=True)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lives in the slab's GPU memory, be it released or not."""
        return self._storage is not None and tensor.untyped_storage()._cdata == self._storage._cdata

    def exists(self) -> bool:
        """Return whether any tensor of the slab exists; moments are made by the first step."""
        for state in self.states:  # noqa: SIM110 - asked several times a step, and `any` takes twice as long
            if state.read() is not None:
                return True
        return False

    def _bind(self, gpu: torch.Tensor, copy: bool) -> bool:
        """Make `gpu` (uint8 [nbytes]) the memory behind every tensor, its bytes copied or not; return if it was not."""
        start = gpu.data_ptr()
        strangers = [
            (state, tensor, offset)
            for state, offset in zip(self.states, self.layout.offsets, strict=True)
            if (tensor := state.read()) is not None and tensor.data_ptr() != start + offset
        ]
        for state, tensor, _ in strangers:
            state.check_size(tensor)
        for state, tensor, offset in strangers:
            home = gpu[offset : offset + state.nbytes].view(tensor.dtype).view(tensor.shape)
            if copy:
                first = state.take_first()
                home.copy_(tensor if first is None else first)
            tensor.data = home
        self._live_in(gpu)
        return bool(strangers)

    def _take_in_place(self) -> bool:
        """Take the storage that all states of the slab are in as its GPU memory; return False: nothing is written.

        Raises:
            RuntimeError: it is another storage than was planned, or a tensor is not at its place there, of its size.
        """
        tensors = [state.read() for state in self.states]
        first = tensors[0]
        if first is None:
            return False
        storage = first.untyped_storage()
        for state, tensor, offset in zip(self.states, tensors, self.layout.offsets, strict=True):
            assert tensor is not None, f"{state.name!r} has a home and does not exist"
            state.check_size(tensor)
            is_there = tensor.untyped_storage()._cdata == storage._cdata
            if not is_there or storage.nbytes() != self.nbytes or tensor.storage_offset() * tensor.itemsize != offset:
                raise RuntimeError(
                    f"{state.name!r} is not at byte {offset} of a storage of {self.nbytes} bytes, but at "
                    f"{tensor.storage_offset() * tensor.itemsize} of one of {tensor.untyped_storage().nbytes()}: only "
                    "a whole storage can be emptied in place"
                )
        if not self.holds(first):
            self._ledger.change(self.block_bytes - self.gpu_bytes, self._live_in, self._make(0).set_(storage))
        return False

    def _live_in(self, gpu: torch.Tensor | None) -> None:
        if gpu is not self.gpu:
            self.gpu, self._storage = gpu, None if gpu is None else gpu.untyped_storage()

    def drop_if_left(self) -> None:
        """Give the GPU memory back where no tensor lives in it any more, because all were replaced."""
        tensors = (state.read() for state in self.states)
        if self.gpu_bytes and not any(tensor is not None and self.holds(tensor) for tensor in tensors):
            self._ledger.change(-self.gpu_bytes, self._let_go)

    def _let_go(self) -> None:
        self._empty_staging()
        self._live_in(None)

    def allocate(self) -> None:
        """Take GPU memory again for the tensors and for what is copied; its content is undefined."""
        storage = self._storage
        assert storage is not None
        was_empty = not storage.nbytes()
        if was_empty:
            self._ledger.change(self.block_bytes, fill, storage, self.nbytes, AWAY)
        if self.is_encoded and self.staging is None:
            try:
                self._take_staging()
            except torch.cuda.OutOfMemoryError:
                if was_empty:  # else nobody would give it back: the slab is not on its way
                    self._ledger.change(-self.block_bytes, empty, storage, AWAY)
                raise

    def _take_staging(self) -> None:
        nbytes = self.codec.staging_bytes
        if self._staging_home is None:
            memory = self._ledger.change(self._staging_bytes, self._make, nbytes)
            self._staging_home = memory, memory.untyped_storage()
        else:
            self._ledger.change(self._staging_bytes, self._staging_home[1].resize_, nbytes)
        self.staging = self._staging_home[0]

    def _empty_staging(self) -> None:
        if self.staging is not None and self._staging_home is not None:
            self._staging_home[1].resize_(0)
            self.staging = None

    @property
    def stepping_bytes(self) -> int:
        """Bytes of GPU memory that the slab holds from when it comes for the optimizer step until it has left."""
        return self.transit_bytes if self.codec.encodes else self.block_bytes

    def reserve(self) -> bool:
        """Take the staging memory that `encode` needs, and return whether there was as much.

        Before the step where the slab came whole: once it is stepped there may be no room.
        """
        with suppress(torch.cuda.OutOfMemoryError):
            self._take_staging()
        return self.staging is not None

    def drop_staging(self) -> None:
        """Give back the staging memory; what reads or writes it must be ordered before."""
        if self.staging is not None:
            self._ledger.change(-self._staging_bytes, self._empty_staging)

    def free(self) -> None:
        """Give the GPU memory back; the tensors keep their shape and device and must not be read.

        Memory that a checkpoint writer shares with the slab (by numpy or another process) cannot be emptied
        under it. Then the tensors move to an allocation of their own, and the old one goes with the writer.
        """
        self._ledger.change(-self.gpu_bytes, self._free)

    def _free(self) -> None:
        assert self.gpu is not None and self._storage is not None
        if not self._storage.resizable():
            if self._is_in_place:
                raise StillShared(
                    f"{self.states[0].name!r} cannot be emptied: something (numpy, another process) shares its memory"
                )
            self._bind(torch.empty_like(self.gpu), copy=False)
        empty(self._storage, AWAY)
        self._empty_staging()

    def close(self) -> None:
        """Let go of the host memory; the tensors stay in the slab's GPU memory, which counts no more."""
        self._ledger.change(-self.gpu_bytes, self.close_host)


def encode(slabs: Sequence[SlabMemory]) -> bool:
    """Encode slabs of one codec family on the current stream, where wanted and possible; return if any was enqueued.

    A slab is left whole where its encoding would lose something (a master is not what its weight was rounded from),
    and where there is no memory for more than the slab.
    """
    encoding = []
    for slab in slabs:
        codec = slab.codec
        was_exact, codec.is_exact, slab.is_encoded = codec.is_exact, False, False
        # Else it was kept since the slab was decoded, reserved, or a copy out has failed.
        if codec.encodes and (slab.staging is not None or slab.reserve()):
            encoding.append((slab, was_exact))
    if encoding:
        family = slabs[0].codec.family
        assert family is not None
        family.encode([slab.move for slab, _ in encoding])
    for slab, was_exact in encoding:
        if was_exact or not slab.codec.loses():
            slab.is_encoded = True
        else:
            slab.drop_staging()
    return bool(encoding)


def decode(slabs: Sequence[SlabMemory], keep_staging: bool = False) -> None:
    """Decode slabs of one codec family, at least one, on the current stream; `keep_staging`: to be encoded again."""
    family = slabs[0].codec.family
    assert family is not None
    family.decode([slab.move for slab in slabs])
    for slab in slabs:
        slab.is_encoded = False
        if not keep_staging:
            slab.drop_staging()
