"""What is offloaded of each source: its parts and slabs, their page-locked memory, and whether its step divides."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from bridge_fgo.config import OffloadConfig
from bridge_fgo.memory.host_buffer import HostBuffer, page_lock
from bridge_fgo.memory.host_memory import local_cpus
from bridge_fgo.memory.layout import ChooseCodec, SlabPlace, lay_out, offloaded_bundles, part_bytes, pipeline_bytes
from bridge_fgo.memory.slab import Slab, SlabState
from bridge_fgo.offload.part import Part
from bridge_fgo.offload.policy import HoldPolicy
from bridge_fgo.states.source import Source

MARGIN_PARTS = 4
"""The least margin of the schedule, in parts (`HoldPolicy.margin_bytes`)."""

MARGIN_OF_STATES = 16
"""It is no more than a 16th of the states: of few bytes a part is a large share."""


class OffloadedSource:
    """What is offloaded of one source: `codec_of` says how each slab is copied, `make_slab` gives it its memory."""

    def __init__(
        self, source: Source, config: OffloadConfig, codec_of: ChooseCodec, make_slab: Callable[[SlabPlace], Slab]
    ) -> None:
        everything = source.states()
        chosen = offloaded_bundles(everything, config)
        target = part_bytes(chosen, config)
        # in the order in which they step
        self.parts = [
            Part([bundle.param for bundle in layout.bundles], [make_slab(place) for place in layout.slabs])
            for layout in lay_out(chosen, target, codec_of)
        ]
        self.slabs = [slab for part in self.parts for slab in part.slabs]
        self.owners = {i: part for part in self.parts for i in part.ids}  # the part of a parameter, by its `id`
        self.group_bytes = pipeline_bytes(chosen)  # what the step moves in one go
        self.state_bytes = sum(bundle.nbytes for bundle in everything)  # of all states of the source, offloaded or not
        self.planned_bytes = sum(bundle.nbytes for bundle in chosen)
        self.margin_bytes = min(MARGIN_PARTS * target, self.planned_bytes // MARGIN_OF_STATES)
        masters = [slab.block_bytes for slab in self.slabs if slab.written_back]
        self.held_through_step = 0 if source.writes_back_by_part else sum(masters)
        # what the step holds to its end beside these where it is not divided
        self.held_more_if_whole_bytes = sum(slab.block_bytes for slab in self.slabs) - self.held_through_step

    @property
    def is_all_here(self) -> bool:
        """Whether every part stays on the GPU, and is there."""
        return all(part.stays for part in self.parts) and all(slab.state is SlabState.RESIDENT for slab in self.slabs)

    @property
    def coming(self) -> list[Slab]:
        """The slabs that are on their way back."""
        return [slab for slab in self.slabs if slab.state is SlabState.RELOADING]


def pin(buffers: Sequence[HostBuffer], device: torch.device) -> float:
    """Page-lock host buffers near a GPU, and return the seconds that it took; raises as `page_lock`."""
    started = time.perf_counter()
    page_lock(buffers, local_cpus(device))
    return time.perf_counter() - started


class WholeSteps:
    """Knows the sources whose step cannot be divided, so that all of their states are on the GPU in it."""

    def __init__(self, offloaded: Mapping[Source, OffloadedSource], holding: HoldPolicy) -> None:
        self._offloaded = offloaded
        self._holding = holding
        self._counted: set[Source] = set()  # those that the plans count
        self._said: set[str] = set()

    def includes(self, source: Source) -> bool:
        """Return whether a source's step is not divided; say once what keeps it whole."""
        why = source.kept_whole_by()
        if not why or why in self._said:
            return bool(why)
        alike = [offloaded for each, offloaded in self._offloaded.items() if each.kept_whole_by() == why]
        if held := sum(slab.nbytes for offloaded in alike for slab in offloaded.slabs):
            self._said.add(why)
            self._holding.warn(
                f"the optimizer step is not divided, because of {why}: it may need every state, so that all "
                f"{held / 2**30:.2f} GiB that are offloaded are on the GPU in the optimizer step; take it away to save "
                "that memory there too"
            )
        return True

    def count(self) -> None:
        """Have plans count all states of these sources; where they have changed, measure anew."""
        whole = {source for source in self._offloaded if self.includes(source)}
        if whole == self._counted:
            return
        for source in whole ^ self._counted:
            more = self._offloaded[source].held_more_if_whole_bytes
            self._holding.held_through_step += more if source in whole else -more
        self._counted = whole
        self._holding.forget()
