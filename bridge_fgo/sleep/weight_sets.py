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
from bridge_fgo.sleep.weights import WeightGroup, digests_of


class WeightSet:
    """Weights of some groups on the host, each with the sums over its bytes, and buffers by name."""

    def __init__(self, groups: Sequence[WeightGroup]) -> None:
        self.groups = list(groups)
        self.hosts = {each: HostBuffer(each.copied_nbytes) for each in groups if each.copied_nbytes}
        self.sums: dict[WeightGroup, tuple[int, ...]] = {}
        self.buffers: dict[str, torch.Tensor] = {}


class WeightSets:
    """The kept weights of model chunks, of which one may be in the parameters; `lock` page-locks host memory."""

    def __init__(self, chunks: Sequence[torch.nn.Module], lock: Callable[[Sequence[HostBuffer]], None]) -> None:
        self._chunks, self._lock = chunks, lock
        self.by_name: dict[str, WeightSet] = {}
        self._swapped: list[WeightGroup] = []  # whose memory has a kept set's weights
        self._filled = set[WeightGroup]()  # those of them that were away before
        self._own_buffers: dict[str, torch.Tensor] = {}

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host bytes of all."""
        return sum(host.pinned_bytes for kept in self.by_name.values() for host in kept.hosts.values())

    def make(self, name: str, groups: Sequence[WeightGroup]) -> int:
        """Take host memory for groups under a name; return the bytes of what had that name before, and is dropped."""
        kept = WeightSet(groups)
        self._lock(list(kept.hosts.values()))
        dropped = self.drop(name)
        self.by_name[name] = kept
        return dropped

    def copy_out(self, name: str, tally: Tally) -> None:
        """Copy to the host what has changed of a set's groups, which are on the GPU, since it was kept."""
        kept = self.by_name[name]
        for group, (sums,) in zip(kept.groups, digests_of(kept.groups), strict=True):
            if group in kept.hosts and kept.sums.get(group) != sums:
                kept.sums.pop(group, None)  # until the copy is queued, which may raise
                tally.copy("params", group.slabs[0].copy_out(kept.hosts[group]))
                kept.sums[group] = sums
        kept.buffers = self._buffers_on_host()

    def has(self, name: str, groups: Sequence[WeightGroup]) -> bool:
        """Return whether there is host memory for groups under a name."""
        return name in self.by_name and self.by_name[name].groups == list(groups)

    def drop(self, name: str) -> int:
        """Release a set's host memory, if there is one of that name; return its bytes."""
        if (kept := self.by_name.get(name)) is None:
            return 0
        for host in kept.hosts.values():
            host.close()
        del self.by_name[name]
        return sum(host.tensor.numel() for host in kept.hosts.values())

    def changed(self, kept: WeightSet) -> set[WeightGroup]:
        """Return the groups of a set in whose memory its weights are not; the host waits for the sums."""
        here = [group for group in kept.groups if not group.is_away]
        sums = {group: sums for group, (sums,) in zip(here, digests_of(here), strict=True)}
        return {group for group in kept.groups if sums.get(group) != kept.sums.get(group, ())}

    def swap_in(self, kept: WeightSet, groups: Sequence[WeightGroup], tally: Tally) -> None:
        """Copy a set's weights into groups, and first to the host what it lacks of those that are on the GPU."""
        here = [group for group in groups if not group.is_away]
        own = dict(zip(here, digests_of(here), strict=True))
        self._own_buffers = self._buffers_on_host()
        for group in groups:
            if group in own:
                group.trust_masters_of(own[group])  # after an error in the block they may come with the masters
                tally.copy("params", group.copy_out(own[group]))
                group.is_on_host = True
            else:
                group.fill(zeroed=True)
                self._filled.add(group)
            group.holds_another = True
            self._swapped.append(group)
            if group in kept.hosts:
                tally.copy("params", group.slabs[0].copy_in(kept.hosts[group]))
        self._put(kept.buffers)

    def swap_out(self) -> list[WeightGroup]:
        """Copy the model's own weights back where they were; return the groups, which are then to be gathered."""
        for group in self._here:
            group.copy_in()
        return self._here

    def end(self) -> None:
        """Release what was away before; the others are whole."""
        here = self._here
        self._release(self._filled)
        for group in here:  # until then the host has them, in case that `give_up` is what follows
            group.is_on_host = False

    def give_up(self) -> bool:
        """Release all that was swapped: a reload brings the model's own. Return whether any was on the GPU before."""
        was_here = bool(self._here)
        self._release(set(self._swapped))
        return was_here

    @property
    def _here(self) -> list[WeightGroup]:
        """The swapped groups that were on the GPU before."""
        return [group for group in self._swapped if group not in self._filled]

    def _release(self, groups: set[WeightGroup]) -> None:
        find_aliases(slab for group in groups for slab in group.slabs)
        for group in groups:
            group.empty()
        for group in self._swapped:
            group.holds_another = False
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
