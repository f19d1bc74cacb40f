"""A storage that others hold views of: emptied and filled in place, with some of its byte ranges kept on the host."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from bridge_fgo.memory.guard import Guard, Views, empty, fill, look_for
from bridge_fgo.memory.host_buffer import FileBuffer, HostBuffer
from bridge_fgo.memory.slab import StillShared

Range = tuple[int, int]  # first byte of a storage, and the one after the last
Named = tuple[str, torch.Tensor]  # a tensor, and what to call it in a message


class StorageSlab:
    """One storage, which is never rebound: every view of it is the same object, at its place, when it is back.

    What is released (the storage) may be more than what is copied (`ranges`, in order and disjoint; the whole storage
    when None): of a buffer that all-gathers again a rank's own shard will do. The copies run on the current stream;
    the caller orders them.

    While it is away its tensors are guarded: whatever touches one gets a RuntimeError that names it, and `reloaded_by`,
    what to call to have it back. `named` are tensors on it that have a name of their own; others are looked for, see
    `find_aliases`.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        name: str,
        reloaded_by: str,
        ranges: Sequence[Range] | None = None,
        named: Iterable[Named] = (),
    ) -> None:
        self.name = name
        self._named = [*named, (name, tensor)]
        self._guard = Guard(self._touched)
        self._advice = f"used, and its memory is away: call {reloaded_by} first"
        self.storage = storage = tensor.untyped_storage()
        # Recorded once, while it is full: an emptied storage says 0.
        self.nbytes = storage.nbytes()
        assert self.nbytes, f"{name} is empty already"
        self._bytes = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # uint8 [nbytes]
        self.views = Views(self._bytes, users=0)
        self.ranges = tuple(ranges) if ranges is not None else ((0, self.nbytes),)
        self.copied_nbytes = sum(end - start for start, end in self.ranges)
        self.host: HostBuffer | None = None  # made by `map_host`; its page-locking is its owner's
        self.folder: Path | None = None  # `map_host` makes a file in this folder; None: it allocates anonymous memory
        self.host_digests: tuple[int, ...] | None = None  # `byte_sums(parts)` when the host copy was made, if taken

    @property
    def is_away(self) -> bool:
        """Whether the storage is empty."""
        return not self.storage.nbytes()

    @property
    def parts(self) -> list[torch.Tensor]:
        """The ranges that are copied, uint8 [end - start] each; views that are valid while it is not away."""
        return [self._bytes[start:end] for start, end in self.ranges]

    def map_host(self) -> list[HostBuffer]:
        """Map the host memory of the ranges, once; return the buffer while it is to be page-locked, or nothing."""
        if self.host is None and self.copied_nbytes:
            nbytes, folder = self.copied_nbytes, self.folder
            self.host = HostBuffer(nbytes) if folder is None else FileBuffer(nbytes, folder)
        return [self.host] if self.host is not None and self.host.is_to_lock else []

    @property
    def unmapped_bytes(self) -> int:
        """Bytes of host memory, beside files, that `map_host` would map."""
        return 0 if self.host is not None or self.folder is not None else self.copied_nbytes

    def require_resizable(self) -> None:
        """Raise StillShared if somebody else holds the memory, so that it cannot be emptied."""
        if not self.storage.resizable():
            raise StillShared(f"{self.name} cannot be emptied: something (numpy, another process) shares its memory")

    def copy_out(self, to: HostBuffer | None = None) -> int:
        """Copy the ranges to the host, or another buffer there, on the current stream; return their bytes."""
        for part, home in self._pairs(to):
            home.copy_(part, non_blocking=True)
        return self.copied_nbytes

    def copy_in(self, source: HostBuffer | None = None) -> int:
        """Copy the ranges from the host, or another buffer there, on the current stream; return their bytes."""
        for part, home in self._pairs(source):
            part.copy_(home, non_blocking=True)
        return self.copied_nbytes

    def on_host(self, start: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield what the host has, uint8, of the storage's bytes from `start` to `end`, each with its first byte.

        Of a storage that is not away it yields copies of the same ranges.
        """
        if self.is_away:
            yield from self.host_parts(start, end)
            return
        for first, last in self.ranges:
            begin, stop = max(start, first), min(end, last)
            if begin < stop:
                yield begin, self._bytes[begin:stop].cpu()

    def host_parts(self, start: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Do as `on_host`, and yield the host's own memory, even if the storage is not away."""
        before = 0
        for first, last in self.ranges:
            begin, stop = max(start, first), min(end, last)
            if begin < stop:
                assert self.host is not None
                yield begin, self.host.tensor[before + begin - first : before + stop - first]
            before += last - first

    def _pairs(self, host: HostBuffer | None) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if not self.copied_nbytes:
            return []
        host = host or self.host
        assert host is not None
        homes = host.tensor.split([end - start for start, end in self.ranges])
        return list(zip(self.parts, homes, strict=True))

    def empty(self) -> int:
        """Give the memory back; return its bytes, 0 if it is away already, or raise as `require_resizable`.

        Nothing on any stream may read or write it any more: PyTorch knows of the stream alone that it was made on.
        """
        if self.is_away:
            return 0
        self.require_resizable()
        self._guard.put_on(tensor for _, tensor in self._named)
        self._guard.put_on(self.views.found)
        empty(self.storage, f"{self.name} was {self._advice}")
        return self.nbytes

    def fill(self, zeroed: bool = False) -> int:
        """Take memory again, of undefined content or `zeroed`, on the current stream; return its bytes."""
        if not self.is_away:
            return 0
        fill(self.storage, self.nbytes, f"{self.name} was {self._advice}")
        self._guard.take_off()
        if zeroed:
            self._bytes.zero_()
        return self.nbytes

    def _touched(self, tensor: torch.Tensor) -> None:
        name = next((name for name, each in self._named if each is tensor), f"a view of {self.name}")
        raise RuntimeError(f"{name}, of shape {tuple(tensor.shape)}, was {self._advice}")

    def close(self) -> None:
        """Let go of the host memory."""
        if self.host is not None:
            self.host.close()
            self.host = self.host_digests = None


def find_aliases(slabs: Iterable[StorageSlab]) -> None:
    """Find the tensors on storages that are about to be emptied, in whatever holds them: state dictionaries, say."""
    look_for(slab.views for slab in slabs if not slab.is_away)
