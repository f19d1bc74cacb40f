"""Several weights of one model: kept on the host under names, and swapped into its parameters for a block.

A rank keeps its own shard, as a sleep copies it, and persistent buffers of modules. For the block the model's own
weights are where a sleep has them, on the host; a copy there that is current is not made again.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from bridge_fgo.engines.ranks import gather_or_raise, on_every_rank, require_host_memory
from bridge_fgo.memory.guard import class_of
from bridge_fgo.memory.host_buffer import HostBuffer
from bridge_fgo.memory.storage_slab import find_aliases
from bridge_fgo.memory.transfers import wait_for_a_while
from bridge_fgo.memory.undo import undo_on_error
from bridge_fgo.sleep.moved import Moved, Tally, return_to_driver, wait_for_gpu
from bridge_fgo.sleep.moves import require_match, verb
from bridge_fgo.sleep.refusals import PLAIN
from bridge_fgo.sleep.trainer_memory import TrainerMemory
from bridge_fgo.sleep.weight_offloader import Sums, WeightSlab, Where, sums_of


class WeightSet:
    """Weights of some slabs on the host, each with the sums over its bytes, and buffers by name."""

    def __init__(self, slabs: Sequence[WeightSlab]) -> None:
        self.slabs = list(slabs)
        self.hosts = {each: HostBuffer(each.copied_nbytes) for each in slabs if each.copied_nbytes}
        self.sums: dict[WeightSlab, Sums] = {}
        self.buffers: dict[str, torch.Tensor] = {}

    def changed(self) -> set[WeightSlab]:
        """Return the slabs in whose memory its weights are not; the host waits for the sums."""
        sums = sums_of(slab for slab in self.slabs if slab.is_here)
        return {slab for slab in self.slabs if sums.get(slab) != self.sums.get(slab, ())}


class WeightSets:
    """The kept weights of a model. One set may be in the parameters.

    Args:
        memory: that of the model.
        is_training: returns whether a training step is running.
    """

    def __init__(self, memory: TrainerMemory, is_training: Callable[[], bool]) -> None:
        self._memory, self._is_training = memory, is_training
        self.by_name: dict[str, WeightSet] = {}
        self._swapped: list[WeightSlab] = []  # whose memory has a kept set's weights
        self._filled = set[WeightSlab]()  # those of them that were away before
        self._own_buffers: dict[str, torch.Tensor] = {}

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host bytes of all sets."""
        return sum(host.pinned_bytes for kept in self.by_name.values() for host in kept.hosts.values())

    # What all ranks do.

    @verb
    def keep(self, name: str, where: Where | None) -> Moved:
        """Copy parameters to the host under a name; see `Residency.keep`."""
        memory = self._memory

        def look() -> tuple[tuple[list[WeightSlab], bool, int, Tally], bool]:
            memory.require_open(in_block=True)
            _require_name("keep", name)
            memory.weights.require_known()
            slabs, matches = memory.weights.chosen(where)
            self._require_plain(slabs)
            is_new = name not in self.by_name or self.by_name[name].slabs != slabs
            needed = sum(slab.copied_nbytes for slab in slabs) if is_new else 0
            # A swap copies the model's own weights to the host too.
            has_room = not memory.weights.unhosted_bytes
            memory.budget.require(f"keep({name!r})", needed, "", " beside that of all parameters", has_room)
            if any(slab.is_away for slab in slabs):
                raise RuntimeError(f"keep({name!r}) while parameters are away: call reload('params') first")
            memory.wait_for_collectives()
            wait_for_gpu(memory.device)
            return (slabs, is_new, needed, Tally(memory.device)), matches

        (slabs, is_new, needed, tally), matches = gather_or_raise(look)
        require_match(matches)
        require_host_memory(needed if memory.pins else 0)

        def copy() -> Moved:
            if is_new:
                kept = WeightSet(slabs)
                memory.lock(list(kept.hosts.values()))
                self._drop(name)  # what had the name before
                self.by_name[name] = kept
                memory.budget.left -= needed
            self._copy_out(self.by_name[name], tally)
            wait_for_gpu(memory.device)
            return tally.end()

        # On an error the set would have another's values on some rank, or none.
        # Race: copies that are queued write host memory that is released.
        with undo_on_error(lambda: wait_for_gpu(memory.device), lambda: self.drop(name)):
            return on_every_rank(copy)

    @verb
    def drop(self, name: str) -> None:
        """Release the host memory of a set; see `Residency.drop`."""
        _require_name("drop", name)
        self._drop(name)

    @contextmanager
    def swapped(self, name: str) -> Iterator[Moved]:
        """Context in which the model has the weights of a set; see `Residency.weights`."""
        kept, slabs, tally = self._find(name)
        try:
            moved = self._swap_in(name, kept, slabs, tally)
            with torch.no_grad():
                yield moved
            self._swap_out()
        except BaseException as error:
            self._give_up(error)
            raise
        finally:
            self._memory.checks.swapped = ""

    @verb
    def _find(self, name: str) -> tuple[WeightSet, list[WeightSlab], Tally]:
        memory = self._memory

        def look() -> tuple[tuple[WeightSet, set[WeightSlab], Tally], tuple[set[Any], set[Any]]]:
            memory.require_open()
            _require_name("weights", name)
            if (kept := self.by_name.get(name)) is None:
                raise ValueError(f"weights({name!r}): kept are {sorted(self.by_name)}; call keep({name!r}) first")
            if memory.has_gradients or self._is_training():
                raise RuntimeError(
                    f"weights({name!r}) in a training step, or between a backward and its update: swap before, or after"
                )
            memory.weights.require_known()
            memory.wait_for_collectives()
            # Race: work on another stream may still write the weights that are summed, or read those that are evicted.
            wait_for_gpu(memory.device)
            changed, slabs = kept.changed(), set(kept.slabs)
            found = {(slab.place, slab.is_away, slab in slabs) for slab in memory.weights.slabs if slab.place}
            return (kept, changed, Tally(memory.device)), ({slab.place for slab in changed}, found)

        (kept, changed, tally), ranks = gather_or_raise(look)
        found = set[Any]().union(*(found for _, found in ranks))
        if len({place for place, *_ in found}) < len(found):  # some would gather, and others not
            raise RuntimeError(
                f"weights({name!r}): of one of DDP's buffers some ranks alone have parameters away, or kept: call "
                f"reload('params'), or keep({name!r}) with one `where`, on every rank"
            )
        alike = set[Any]().union(*(places for places, _ in ranks)) - {None}
        return kept, [slab for slab in kept.slabs if slab in changed or slab.place in alike], tally

    @verb
    def _swap_in(self, name: str, kept: WeightSet, slabs: Sequence[WeightSlab], tally: Tally) -> Moved:
        memory = self._memory

        def swap() -> None:
            memory.checks.swapped = name
            memory.caches.drop({"params"}, is_mid_step=False)
            self._copy_in(kept, slabs, tally)

        def end() -> Moved:
            wait_for_gpu(memory.device)  # whatever stream reads next
            return tally.end()

        on_every_rank(swap)
        for slab in slabs:
            slab.gather()
        return on_every_rank(end)

    @verb
    def _swap_out(self) -> None:
        memory = self._memory

        def swap() -> list[WeightSlab]:
            wait_for_gpu(memory.device)  # Race: forwards on another stream may still read what is written
            memory.caches.drop({"params"}, is_mid_step=False)
            for slab in (own := self._were_here):
                slab.copy_in()
            return own

        def end() -> None:
            wait_for_gpu(memory.device)  # whatever stream reads next, and before memory is released
            here = self._were_here
            self._release(self._filled)
            for slab in here:  # until then the host has them, in case that `_give_up` is what follows
                slab.is_on_host = False
            return_to_driver(memory.device)

        for slab in on_every_rank(swap):
            slab.gather()
        on_every_rank(end)

    @verb
    def _give_up(self, error: BaseException) -> None:
        """End a swap on this rank after an error; note on it what is in another place."""
        memory = self._memory
        try:
            wait_for_a_while(lambda: (memory.wait_for_collectives(), wait_for_gpu(memory.device)))
            memory.caches.drop({"params"}, is_mid_step=False)
            was_here = bool(self._were_here)
            self._release(set(self._swapped))  # a reload restores the model's own
            if was_here:
                error.add_note("bridge_fgo: 'params' stay off the GPU after this error: call reload() on every rank")
        except Exception as failure:
            error.add_note(f"bridge_fgo: the parameters may have another's weights: {failure}")

    # What each rank does by itself.

    def _drop(self, name: str) -> None:
        if (kept := self.by_name.get(name)) is not None:
            for host in kept.hosts.values():
                host.close()
            del self.by_name[name]
            self._memory.budget.left += sum(host.tensor.numel() for host in kept.hosts.values())

    def _copy_out(self, kept: WeightSet, tally: Tally) -> None:
        """Copy to the host what has changed of a set's slabs, which are on the GPU, since it was kept."""
        for slab, sums in sums_of(kept.slabs).items():
            if slab in kept.hosts and kept.sums.get(slab) != sums:
                kept.sums.pop(slab, None)  # until the copy is queued, which may raise
                tally.copy("params", slab.copy_out(kept.hosts[slab]))
                kept.sums[slab] = sums
        kept.buffers = self._buffers_on_host()

    def _copy_in(self, kept: WeightSet, slabs: Sequence[WeightSlab], tally: Tally) -> None:
        """Copy a set's weights into slabs, and first to the host what it lacks of those that are on the GPU."""
        own = sums_of(slab for slab in slabs if slab.is_here)
        self._own_buffers = self._buffers_on_host()
        for slab in slabs:
            if slab in own:
                slab.trust_masters_of(own[slab])  # after an error in the block they may be rounded from their masters
                tally.copy("params", slab.copy_changed(own[slab]))
                slab.is_on_host = True
            else:
                self._filled.add(slab)
            slab.holds_another = True
            self._swapped.append(slab)
            slab.fill(zeroed=True)  # noted before: if it fails half-way, `_give_up` releases it
            if slab in kept.hosts:
                tally.copy("params", slab.copy_in(kept.hosts[slab]))
        self._put(kept.buffers)

    @property
    def _were_here(self) -> list[WeightSlab]:
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
        for i, chunk in enumerate(self._memory.chunks):
            for path, module in chunk.named_modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None and name not in module._non_persistent_buffers_set:
                        yield f"{i}.{path}.{name}", buffer

    def close(self) -> None:
        """Release all host memory."""
        for name in list(self.by_name):
            self._drop(name)

    def _require_plain(self, slabs: Iterable[WeightSlab]) -> None:
        for name, param in (named for slab in slabs for named in slab.params):
            if class_of(param) not in PLAIN:
                raise ValueError(
                    f"keep() of parameter {name!r}, which is in FP8, and whose scales are not kept: set "
                    "ddp.fp8_param_gather=False"
                )
        for config in (getattr(chunk, "config", None) for chunk in self._memory.chunks):
            if getattr(config, "fp8", None) and getattr(config, "fp8_recipe", "delayed") == "delayed":
                raise ValueError(
                    "keep() with model.fp8_recipe='delayed': forwards of other weights would be in the model's amax "
                    "history; set model.fp8_recipe='tensorwise'"
                )


def _require_name(call: str, name: Any) -> None:
    """Raise ValueError unless a name is a text; an empty one would not end what `weights` refuses."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"{call}({name!r}): give a name, which is a text that is not empty")
