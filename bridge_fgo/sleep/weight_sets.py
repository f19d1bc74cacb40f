"""Several weights of one model: kept on the host under names, and swapped into its parameters for a block.

A rank keeps its own shard, as a sleep copies it, and persistent buffers of modules. For the block the model's own
weights are where a sleep has them, on the host, of which a copy that is current is not made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from bridge_fgo.memory.host_buffer import HostBuffer
from bridge_fgo.memory.storage_slab import find_aliases
from bridge_fgo.sleep.moved import Tally
from bridge_fgo.sleep.weight_offloader import Sums, WeightSlab, sums_of


class WeightSet:
    """Weights of some slabs on the host, each with the sums over its bytes, and buffers by name."""

    def __init__(self, slabs: Sequence[WeightSlab]) -> None:
        self.slabs = list(slabs)
        self.hosts = {each: HostBuffer(each.copied_nbytes) for each in slabs if each.copied_nbytes}
        self.sums: dict[WeightSlab, Sums] = {}
        self.buffers: dict[str, torch.Tensor] = {}


class WeightSets:
    """The kept weights of model chunks, of which one may be in the parameters; `lock` page-locks host memory."""

    def __init__(self, chunks: Sequence[torch.nn.Module], lock: Callable[[Sequence[HostBuffer]], None]) -> None:
        self._chunks, self._lock = chunks, lock
        self.by_name: dict[str, WeightSet] = {}
        self._swapped: list[WeightSlab] = []  # whose memory has a kept set's weights
        self._filled = set[WeightSlab]()  # those of them that were away before
        self._own_buffers: dict[str, torch.Tensor] = {}

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host bytes of all."""
        return sum(host.pinned_bytes for kept in self.by_name.values() for host in kept.hosts.values())

    def make(self, name: str, slabs: Sequence[WeightSlab]) -> int:
        """Take host memory for slabs under a name; return the bytes of what had that name before, and is dropped."""
        kept = WeightSet(slabs)
        self._lock(list(kept.hosts.values()))
        dropped = self.drop(name)
        self.by_name[name] = kept
        return dropped

    def copy_out(self, name: str, tally: Tally) -> None:
        """Copy to the host what has changed of a set's slabs, which are on the GPU, since it was kept."""
        kept = self.by_name[name]
        for slab, sums in sums_of(kept.slabs).items():
            if slab in kept.hosts and kept.sums.get(slab) != sums:
                kept.sums.pop(slab, None)  # until the copy is queued, which may raise
                tally.copy("params", slab.copy_out(kept.hosts[slab]))
                kept.sums[slab] = sums
        kept.buffers = self._buffers_on_host()

    def has(self, name: str, slabs: Sequence[WeightSlab]) -> bool:
        """Return whether there is host memory for slabs under a name."""
        return name in self.by_name and self.by_name[name].slabs == list(slabs)

    def drop(self, name: str) -> int:
        """Release a set's host memory, if there is one of that name; return its bytes."""
        if (kept := self.by_name.get(name)) is None:
            return 0
        for host in kept.hosts.values():
            host.close()
        del self.by_name[name]
        return sum(host.tensor.numel() for host in kept.hosts.values())

    def changed(self, kept: WeightSet) -> set[WeightSlab]:
        """Return the slabs of a set in whose memory its weights are not; the host waits for the sums."""
        sums = sums_of(slab for slab in kept.slabs if slab.is_here)
        return {slab for slab in kept.slabs if sums.get(slab) != kept.sums.get(slab, ())}

    def swap_in(self, kept: WeightSet, slabs: Sequence[WeightSlab], tally: Tally) -> None:
        """Copy a set's weights into slabs, and first to the host what it lacks of those that are on the GPU."""
        own = sums_of(slab for slab in slabs if slab.is_here)
        self._own_buffers = self._buffers_on_host()
        for slab in slabs:
            if slab in own:
                slab.trust_masters_of(own[slab])  # after an error in the block they may come with the masters
                tally.copy("params", slab.copy_changed(own[slab]))
                slab.is_on_host = True
            else:
                self._filled.add(slab)
            slab.holds_another = True
            self._swapped.append(slab)
            slab.fill(zeroed=True)  # noted before: where it fails half-way, `give_up` releases it
            if slab in kept.hosts:
                tally.copy("params", slab.copy_in(kept.hosts[slab]))
        self._put(kept.buffers)

    def swap_out(self) -> list[WeightSlab]:
        """Copy the model's own weights back where they were; return the slabs, which are then to be gathered."""
        for slab in self._here:
            slab.copy_in()
        return self._here

    def end(self) -> None:
        """Release what was away before; the others are whole."""
        here = self._here
        self._release(self._filled)
        for slab in here:  # until then the host has them, in case that `give_up` is what follows
            slab.is_on_host = False

    def give_up(self) -> bool:
        """Release all that was swapped: a reload brings the model's own. Return whether any was on the GPU before."""
        was_here = bool(self._here)
        self._release(set(self._swapped))
        return was_here

    @property
    def _here(self) -> list[WeightSlab]:
        """The swapped slabs that were on the GPU before."""
        return [slab for slab in self._swapped if slab not in self._filled]

    def _release(self, slabs: set[WeightSlab]) -> None:
        find_aliases(slabs)
        for slab in slabs:
            slab.empty()
        for slab in self._swapped:
            slab.holds_another = False
        self._put(self._own_buffers)
        self._swapped, self._filled, self._own_buffers = [], set(), {}

    def _put(self, values: dict[str, torch.Tensor]) -> None:
        for name, buffer in self._buffers():
            if name in values:
                buffer.copy_(values[name])

    def _buffers_on_host(self) -> dict[str, torch.Tensor]:
        return {name: buffer.detach().to("cpu", copy=True) for name, buffer in self._buffers()}

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the persistent buffers of modules: an expert's bias in a router, say."""
        for i, chunk in enumerate(self._chunks):
            for path, module in chunk.named_modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None and name not in module._non_persistent_buffers_set:
                        yield f"{i}.{path}.{name}", buffer

    def close(self) -> None:
        """Release all host memory."""
        for name in list(self.by_name):
            self.drop(name)
