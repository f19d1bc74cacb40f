"""The states of one source: those that are offloaded, in parts and slabs, and those that stay on the GPU."""

from collections.abc import Callable

from bridge_fgo.config import OffloadConfig
from bridge_fgo.memory.guard import touch_all
from bridge_fgo.memory.layout import ChooseCodec, SlabPlace, lay_out, offloaded_bundles, part_bytes, pipeline_bytes
from bridge_fgo.memory.slab import Part, Slab, SlabState
from bridge_fgo.states.source import Source

MARGIN_PARTS = 4  # the least margin of the schedule, in parts (`HoldPolicy.margin_bytes`)
MARGIN_OF_STATES = 16  # it is no more than a 16th of the states: of few bytes a part is a large share


class OffloadedSource:
    """Offloads the states of one source in slabs: `codec_of` chooses how each is copied, `make_slab` allocates it.

    It takes at most `host_bytes` of host memory.
    """

    def __init__(
        self,
        source: Source,
        config: OffloadConfig,
        codec_of: ChooseCodec,
        make_slab: Callable[[SlabPlace], Slab],
        host_bytes: float,
    ) -> None:
        everything = source.states()
        touch_all([state.read() for bundle in everything for state in bundle.states])  # reload what others offloaded
        chosen = offloaded_bundles(everything, config, host_bytes)
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
        asked = offloaded_bundles(everything, config)
        self.unhosted_bytes = sum(bundle.nbytes for bundle in asked) - self.planned_bytes  # that `host_bytes` keep here
        self.margin_bytes = min(MARGIN_PARTS * target, self.planned_bytes // MARGIN_OF_STATES)
        masters = [slab.block_bytes for slab in self.slabs if slab.written_back]
        self.held_through_step = 0 if source.writes_back_by_part else sum(masters)
        # what an undivided step holds to its end beside these
        self.extra_bytes_if_undivided = sum(slab.block_bytes for slab in self.slabs) - self.held_through_step

    def forget(self, slabs: set[Slab]) -> None:
        """Drop some slabs for good."""
        for each in (self, *self.parts):
            each.slabs = [slab for slab in each.slabs if slab not in slabs]

    @property
    def moving(self) -> list[Slab]:
        """The slabs that do not stay on the GPU."""
        return [slab for part in self.parts if not part.stays for slab in part.slabs]

    @property
    def reloading(self) -> list[Slab]:
        """The slabs whose copies to the GPU are under way."""
        return [slab for slab in self.slabs if slab.state is SlabState.RELOADING]
