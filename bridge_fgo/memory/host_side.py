"""The host memory of a slab, and lending it to a checkpoint's writer in place of a copy."""

from __future__ import annotations

import torch

from bridge_fgo.memory.host_buffer import HostBuffer
from bridge_fgo.memory.layout import SlabPlace
from bridge_fgo.memory.shared_host_buffer import SharedHostBuffer


class HostSide:
    """One host buffer, or two that take turns: while a checkpoint's writer reads the one, copies out go to the other.

    A buffer is lent only while the other is free, so that a copy out, which comes in mid-step, neither waits nor
    allocates.
    """

    def __init__(self, place: SlabPlace) -> None:
        self.host: HostBuffer = HostBuffer(place.layout.nbytes)
        """Copies out write it, and copies in read it."""
        self.spare: SharedHostBuffer | None = None
        """A second buffer, for while `host` is lent; `host` is shared too then."""

    @property
    def host_address(self) -> int:
        """Address of the host buffer."""
        return self.host.address

    def host_view(self, tensor: torch.Tensor, offset: int) -> torch.Tensor:
        """Return the host buffer at an offset in bytes as a tensor like one that lives there."""
        return self.host.tensor[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def make_shared_host(self) -> SharedHostBuffer:
        """Return a host buffer that can be lent, for `share_host` or as `spare`, yet to be page-locked.

        Raises:
            RuntimeError: as `HostBuffer`.
        """
        return SharedHostBuffer(self.host.tensor.numel())

    def share_host(self, buffer: SharedHostBuffer) -> None:
        """Copy the host buffer's bytes to a buffer that can be lent, and use that from now on.

        No copy out may be under way. Copies in may: `HostBuffer.close` waits until they have ended.
        """
        buffer.tensor.copy_(self.host.tensor)
        before, self.host = self.host, buffer
        before.close()

    @property
    def is_lent(self) -> bool:
        """Whether a checkpoint's writer may still read the host buffer."""
        return self.spare is not None and isinstance(self.host, SharedHostBuffer) and self.host.is_lent

    @property
    def can_lend(self) -> bool:
        """Whether the host buffer may be lent, for the first time or once more."""
        return self.spare is not None and not self.spare.is_lent

    def lend(self, tensor: torch.Tensor, offset: int) -> torch.Tensor:
        """Return the host memory of a tensor that lives at an offset in bytes, which nothing writes until it goes."""
        assert isinstance(self.host, SharedHostBuffer) and self.can_lend
        return self.host.lend(tensor, offset)

    def own_host(self, keep: bool = False) -> None:
        """Make sure that the host buffer, which is about to be written, is not lent; `keep`: its bytes stay."""
        if not self.is_lent:
            return
        # Race: for minutes a checkpoint's writer reads the buffer; it would save what is written there now.
        assert self.can_lend
        lent, free = self.host, self.spare
        assert isinstance(lent, SharedHostBuffer) and free is not None
        if keep:
            free.tensor.copy_(lent.tensor)
        self.host, self.spare = free, lent

    @property
    def pinned_bytes(self) -> int:
        """Host bytes that are page-locked for the slab."""
        return self.host.pinned_bytes + (0 if self.spare is None else self.spare.pinned_bytes)

    def close_host(self) -> None:
        """Unlock the host memory; what is lent stays with the writer."""
        self.host.close()
        if self.spare is not None:
            self.spare.close()
