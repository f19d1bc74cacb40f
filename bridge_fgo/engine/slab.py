"""A slab: a group of whole tensors with one GPU allocation and one host buffer of the same layout."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from bridge_fgo.engine.host_buffer import HostBuffer
from bridge_fgo.engine.plan import SlabLayout

if TYPE_CHECKING:
    from bridge_fgo.engine.remainders import SlabRemainders
    from bridge_fgo.engine.states import StateRef


Result = TypeVar("Result")


class Ledger:
    """Bytes of GPU memory that all slabs of the rank hold now."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.observer: weakref.WeakMethod[Callable[[bool], None]] | None = None
        """Called with True before slabs take or give back memory, and with False after, when `nbytes` is up to date.
        Weak: a slab that a copy keeps alive must not keep alive whoever looks on."""

    def change(self, difference: int, action: Callable[..., Result], *args: Any) -> Result:
        """Call what takes (or, negative, gives back) that many bytes; they count if it succeeds."""
        told = None if self.observer is None else self.observer()
        if told is not None:
            told(True)
        result = action(*args)
        self.nbytes += difference
        if told is not None:
            told(False)
        return result


class Slab:
    """The memory of one slab and the state tensors that live in it.

    The tensors keep their identity: only the storage behind each moves into the slab, so every holder of
    one (param groups, the keys of `optimizer.state`, `param.main_param`) goes on seeing it.

    Args:
        layout: where each tensor lies, in bytes.
        refs: the state tensors, in the order of `layout.members`.
        device: where the states are when resident.
        ledger: counts the GPU memory of all slabs of the rank.
        remainders: how to copy less than the slab; None copies it as it is.
    """

    def __init__(
        self,
        layout: SlabLayout,
        refs: Sequence[StateRef],
        device: torch.device,
        ledger: Ledger,
        remainders: SlabRemainders | None = None,
    ) -> None:
        assert len(refs) == len(layout.offsets)
        self.layout = layout
        self.nbytes = layout.nbytes
        """Size of the slab in bytes, on the GPU and on the host alike."""
        self.refs = list(refs)
        self.device = device
        self.host = HostBuffer(layout.nbytes)
        self.host_address = self.host.tensor.data_ptr()
        self._ledger = ledger
        self.gpu: torch.Tensor | None = None  # uint8 [layout.nbytes]; its storage is empty while released
        self._storage: torch.UntypedStorage | None = None
        """Of `gpu`: asked for in each move, and PyTorch would make an object around it each time."""
        self.remainders = remainders
        self.transit_bytes = layout.nbytes + (0 if remainders is None else remainders.nbytes)
        """Most bytes of GPU memory that the slab holds: while it is on its way."""
        self.packed: torch.Tensor | None = None
        """What is copied in place of the slab, uint8 [remainders.nbytes]; on the GPU while the slab is on its way. In
        one allocation with the slab the allocator reserved 0.75 GB more on an H200 (of 19.7 GB of states)."""
        self._packed_home: torch.Tensor | None = None
        self._packed_storage: torch.UntypedStorage | None = None
        self.is_packed = False
        """Whether it was in the newest copy out, until the slab is unpacked."""
        self.is_rounded = False
        """Whether its masters were copied to the model just now: one `pack_masters` need not check them."""

    @property
    def gpu_bytes(self) -> int:
        """Bytes of GPU memory that the slab holds now."""
        whole = 0 if self._storage is None else self._storage.nbytes()
        return whole if self.packed is None else whole + self.packed.numel()

    @property
    def moving(self) -> torch.Tensor:
        """What is copied, uint8, on the GPU."""
        moving = self.packed if self.is_packed else self.gpu
        assert moving is not None
        return moving

    def adopt(self) -> bool:
        """Move every tensor that is not in the slab yet into it, bit for bit, on the current stream.

        Returns whether there was one.

        Needed before the first offload, and again for tensors that a checkpoint load replaced. The memory
        that a tensor had before goes back to the allocator, so for a moment one slab is held twice.

        Raises:
            RuntimeError: a tensor is not of the size that was planned; nothing is moved then.
        """
        gpu = self.gpu
        if gpu is None:
            gpu = self._ledger.change(self.nbytes, self._make, self.nbytes)
            self._live_in(gpu)
        return self._bind(gpu, copy=True)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lives in the slab's GPU memory, be it released or not."""
        return self._storage is not None and tensor.untyped_storage()._cdata == self._storage._cdata

    def exists(self) -> bool:
        """Return whether any tensor of the slab exists; moments are made by the first step."""
        for ref in self.refs:  # noqa: SIM110 - asked for each slab several times a step, and `any` takes twice as long
            if ref.tensor() is not None:
                return True
        return False

    def _bind(self, gpu: torch.Tensor, copy: bool) -> bool:
        """Make `gpu` (uint8 [nbytes]) the memory behind every tensor, with the tensor's bytes in it or not.

        Returns whether it was not so before.
        """
        start = gpu.data_ptr()
        strangers = [
            (ref, tensor, offset)
            for ref, offset in zip(self.refs, self.layout.offsets, strict=True)
            if (tensor := ref.tensor()) is not None and tensor.data_ptr() != start + offset
        ]
        for ref, tensor, _ in strangers:
            ref.check_size(tensor)
        for ref, tensor, offset in strangers:
            home = gpu[offset : offset + ref.nbytes].view(tensor.dtype).view(tensor.shape)
            if copy:
                home.copy_(tensor)
            tensor.data = home
        self._live_in(gpu)
        return bool(strangers)

    def _make(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def _live_in(self, gpu: torch.Tensor | None) -> None:
        if gpu is not self.gpu:
            self.gpu, self._storage = gpu, None if gpu is None else gpu.untyped_storage()

    def drop_if_left(self) -> None:
        """Give the GPU memory back where no tensor lives in it any more, because all were replaced."""
        if self.gpu is None or self.gpu_bytes == 0:
            return
        tensors = (ref.tensor() for ref in self.refs)
        if not any(tensor is not None and self.holds(tensor) for tensor in tensors):
            self._ledger.change(-self.gpu_bytes, self._let_go)

    def _let_go(self) -> None:
        self._empty_packed()
        self._live_in(None)

    def allocate(self) -> None:
        """Take GPU memory again for every tensor of the slab, and for what is copied; its content is undefined."""
        storage = self._storage
        assert storage is not None
        was_empty = not storage.nbytes()
        if was_empty:
            self._ledger.change(self.nbytes, storage.resize_, self.nbytes)
        if self.is_packed and self.packed is None:
            try:
                self._take_packed()
            except torch.cuda.OutOfMemoryError:
                if was_empty:  # else nobody would give it back: the slab is not on its way
                    self._ledger.change(-self.nbytes, storage.resize_, 0)
                raise

    def _take_packed(self) -> None:
        assert self.remainders is not None
        nbytes = self.remainders.nbytes
        if self._packed_home is None or self._packed_storage is None:
            self._packed_home = self._ledger.change(nbytes, self._make, nbytes)
            self._packed_storage = self._packed_home.untyped_storage()
        else:  # the same tensor again: cheaper for the host than a new one
            self._ledger.change(nbytes, self._packed_storage.resize_, nbytes)
        self.packed = self._packed_home

    def _empty_packed(self) -> None:
        if self.packed is not None:
            assert self._packed_storage is not None
            self._packed_storage.resize_(0)
            self.packed = None

    @property
    def packs(self) -> bool:
        """Whether the slab is packed when it leaves, where that is possible."""
        return self.remainders is not None and self.remainders.owner.wanted()

    @property
    def stepping_bytes(self) -> int:
        """Bytes of GPU memory that the slab holds from when it comes for the optimizer step until it has left."""
        return self.transit_bytes if self.packs else self.nbytes

    def reserve(self) -> bool:
        """Take the memory that `pack_masters` needs, and return whether there was as much.

        Before the step where the slab came whole: once it is stepped there may be no room.
        """
        with suppress(torch.cuda.OutOfMemoryError):
            self._take_packed()
        return self.packed is not None

    def drop_packed(self) -> None:
        """Give back the memory of what was copied; what reads or writes it must be ordered before."""
        if self.packed is not None:
            self._ledger.change(-self.packed.numel(), self._empty_packed)

    def free(self) -> None:
        """Give the GPU memory back; the tensors keep their shape and device and must not be read.

        Memory that a checkpoint writer shares with the slab (by numpy or another process) cannot be emptied
        under it. Then the tensors move to an allocation of their own, and the old one goes with the writer.
        """
        self._ledger.change(-self.gpu_bytes, self._free)

    def _free(self) -> None:
        assert self.gpu is not None and self._storage is not None
        if not self._storage.resizable():
            self._bind(torch.empty_like(self.gpu), copy=False)
        self._storage.resize_(0)
        self._empty_packed()

    def close(self) -> None:
        """Let go of the host buffer; the tensors stay in the slab's GPU memory, which counts no more."""
        self._ledger.change(-self.gpu_bytes, self.host.close)


def pack_masters(slabs: Iterable[Slab]) -> bool:
    """Have the next copies out of slabs take what the model's weights do not have, where that is wanted and possible.

    On the current stream. A slab is copied whole where a master is not what its weight was rounded from, and where
    there is no memory for more than the slab.

    Args:
        slabs: of one optimizer, with remainders.

    Returns:
        whether anything was enqueued.
    """
    moves, packing = [], []
    for slab in slabs:
        was_rounded = slab.is_rounded
        slab.is_rounded = slab.is_packed = False
        assert slab.remainders is not None and slab.gpu is not None
        # Else it was kept since the masters were unpacked, reserved, or a copy out has failed.
        if slab.packs and (slab.packed is not None or slab.reserve()):
            assert slab.packed is not None
            moves.append((slab.remainders, slab.gpu, slab.packed))
            packing.append((slab, was_rounded))
    if moves:
        moves[0][0].owner.pack(moves)
    for slab, was_rounded in packing:
        assert slab.remainders is not None
        if was_rounded or not slab.remainders.differs():
            slab.is_packed = True
        else:
            slab.drop_packed()
    return bool(moves)


def unpack_masters(slabs: Sequence[Slab]) -> None:
    """Make the masters of what has come back of slabs of one optimizer, on the current stream."""
    moves = []
    for slab in slabs:
        assert slab.remainders is not None and slab.gpu is not None and slab.packed is not None
        moves.append((slab.remainders, slab.gpu, slab.packed))
    owner = moves[0][0].owner
    owner.unpack(moves)
    for slab in slabs:
        slab.is_packed = False
        if not owner.is_stepping:  # where they are about to leave again
            slab.drop_packed()
