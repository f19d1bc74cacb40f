"""Which states are offloaded, updated in one go, and lie in which slabs: the engine's parts before they have memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bridge_fgo.config import MIB, OffloadConfig
from bridge_fgo.engine.plan import SlabLayout, pack, select
from bridge_fgo.engine.remainders import MasterRemainders, SlabRemainders
from bridge_fgo.engine.states import Bundle, StateRef

BYTES_WHILE_ENQUEUING = 8 * MIB
"""What the link moves while the host enqueues one part's moves and update: some 150 microseconds on an H200, whose link
has 55 GB/s. The pipeline fills and drains in the time that one part takes on the link, so what parts cost in all is
least where a part is the geometric mean of this and of the states."""

LEAST_PARTS = 16
"""Parts that the states of an optimizer make at least, where its tensors are small enough: two parts are what the
optimizer step holds at least, and the pipeline should not fill and drain for a larger share of it (states below 2 GiB).
"""

LEAST_PART_BYTES = MIB
"""Parts are no smaller than this for the sake of the pipeline."""

TOGETHER_BYTES = 128 * MIB
"""Up to this size the states of one kind of a part are one slab, also where its only tensor is larger than a part
should be: they come and go together, and each slab costs the host some 40 microseconds a step. It is 2.4 ms of an
H200's link."""


@dataclass(frozen=True)
class SlabOfPart:
    """A slab: its layout, and the states at the layout's offsets.

    is_copied_to_model: whether they are masters that mcore copies to the model's weights after the update.
    remainders: how to copy less than the slab; None copies it as it is.
    """

    layout: SlabLayout
    refs: list[StateRef]
    is_copied_to_model: bool
    remainders: SlabRemainders | None


@dataclass(frozen=True)
class PartLayout:
    """Parameters that are updated in one go, and the slabs of their states."""

    bundles: list[Bundle]
    slabs: list[SlabOfPart]

    @property
    def nbytes(self) -> int:
        """Size of the slabs in bytes."""
        return sum(slab.layout.nbytes for slab in self.slabs)

    @property
    def transit_bytes(self) -> int:
        """Most bytes of GPU memory that the slabs hold while they are on their way."""
        return self.nbytes + sum(slab.remainders.nbytes for slab in self.slabs if slab.remainders is not None)

    @property
    def copied_bytes(self) -> int:
        """Bytes that a copy of the slabs takes over the link."""
        return sum(s.layout.nbytes if s.remainders is None else s.remainders.nbytes for s in self.slabs)

    @property
    def copied_to_model(self) -> int:
        """Bytes of the slabs that mcore copies to the model's weights."""
        return sum(slab.layout.nbytes for slab in self.slabs if slab.is_copied_to_model)


def offloaded_bundles(everything: Sequence[Bundle], config: OffloadConfig) -> list[Bundle]:
    """Return what the config asks to offload of the states of one optimizer, as bundles of their own."""
    wanted = {"moment": config.moments, "master": config.master_weights}
    asked = [Bundle(bundle.param, [ref for ref in bundle.refs if wanted[ref.kind]]) for bundle in everything]
    return [asked[i] for i in select([bundle.nbytes for bundle in asked], config.fraction)]


def pipeline_bytes(chosen: Sequence[Bundle]) -> int:
    """Return the bytes of one optimizer's states that are best waited for, and sent off, in one go."""
    states = sum(bundle.nbytes for bundle in chosen)
    return max(LEAST_PART_BYTES, min(states // LEAST_PARTS, math.isqrt(states * BYTES_WHILE_ENQUEUING)))


def part_bytes(chosen: Sequence[Bundle], config: OffloadConfig) -> int:
    """Return the bytes that a part of one optimizer aims for at most."""
    return min(config.slab_bytes, pipeline_bytes(chosen))


def lay_out(chosen: Sequence[Bundle], target: int, remainders: MasterRemainders) -> list[PartLayout]:
    """Return the parts of one optimizer's offloaded states, in the order in which they step.

    Masters and tensors of `optimizer.state` lie in slabs of their own, because the latter do not exist before the
    first step.

    Args:
        chosen: see `offloaded_bundles`.
        target: see `part_bytes`.
        remainders: of the optimizer's masters.
    """
    parts = []
    for together in pack([bundle.nbytes for bundle in chosen], target):
        of_part = [chosen[i] for i in together.members]
        slabs = []
        for of_adam in (False, True):
            refs = [ref for bundle in of_part for ref in bundle.refs if (ref.key is not None) is of_adam]
            for layout in pack([ref.nbytes for ref in refs], max(target, TOGETHER_BYTES)):
                members = [refs[i] for i in layout.members]
                less = remainders.of_slab(members, layout.offsets, layout.nbytes)
                slabs.append(SlabOfPart(layout, members, not of_adam, less))
        parts.append(PartLayout(of_part, slabs))
    return parts
