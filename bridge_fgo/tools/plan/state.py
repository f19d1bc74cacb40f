"""The bytes of one rank's optimizer states, by the engine's own arithmetic on tensors without memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from bridge_fgo.config import OffloadConfig
from bridge_fgo.memory.host_memory import power_of_two_at_least
from bridge_fgo.memory.layout import PartLayout, copied_whole, lay_out, offloaded_bundles, part_bytes
from bridge_fgo.memory.remainders import Remainders
from bridge_fgo.memory.state import Bundle
from bridge_fgo.offload.policy import PartBytes

META = torch.device("meta")


@dataclass(frozen=True)
class StateBytes:
    """Bytes of a rank: master weights, moments, and what of both is offloaded.

    masters, offloaded: with the padding of storages that must not be rebound, Megatron-FSDP's.
    pinned_upstream: what mcore's offloader would pin for it, a buffer a tensor, each in a block of a power of two.
    saved: of each copy that the native engine makes for a checkpoint (its `copied_for_a_save`).
    parts: of each part that the native engine updates in one go, in its order; transits: the most GPU memory that
    each holds on its way; copied: of all parts, what a copy takes over the link.
    masters_held: what of them the optimizer step holds to its end (`HoldPolicy.held_through_step`).
    """

    masters: int
    moments: int
    offloaded: int
    pinned_upstream: int
    saved: tuple[int, ...]
    parts: tuple[int, ...]
    transits: tuple[int, ...]
    copied: int
    masters_held: int

    @property
    def total(self) -> int:
        """All optimizer state: the engine's `state_bytes`."""
        return self.masters + self.moments


def sum_of(of_optimizers: Iterable[tuple[list[Bundle], bool]], config: OffloadConfig) -> StateBytes:
    """Return the states of a rank.

    Args:
        of_optimizers: of each of mcore's, the states, and whether masters are copied to weights part by part.
        config: what is offloaded.
    """
    by_kind = {"master": 0, "moment": 0}
    offloaded, parts, masters_held, padding = [], [], 0, 0
    codec_of = copied_whole if config.master_remainders is False else Remainders(META).codec_of
    for everything, divides in of_optimizers:
        for bundle in everything:
            for state in bundle.states:
                by_kind[state.kind] += state.nbytes
        chosen = offloaded_bundles(everything, config)
        layouts = lay_out(chosen, part_bytes(chosen, config), codec_of)
        offloaded += [state for bundle in chosen for state in bundle.states]
        parts += layouts
        padding += sum(map(padding_bytes, layouts))
        if not divides:
            masters_held += sum(written_back_bytes(layout) for layout in layouts)
    sizes = [size_of(layout) for layout in parts]
    return StateBytes(
        by_kind["master"] + padding,
        by_kind["moment"],
        sum(state.nbytes for state in offloaded) + padding,
        sum(power_of_two_at_least(state.nbytes) for state in offloaded),
        tuple(state.saved_nbytes for state in offloaded),
        tuple(size.nbytes for size in sizes),
        tuple(size.transit_bytes for size in sizes),
        sum(copied_bytes(layout) for layout in parts),
        masters_held,
    )


def size_of(part: PartLayout) -> PartBytes:
    """Return the bytes of the slabs of a part, and the most GPU memory that they hold, which is on their way."""
    nbytes = sum(slab.layout.nbytes for slab in part.slabs)
    return PartBytes(nbytes, nbytes + sum(slab.codec.staging_bytes for slab in part.slabs))


def copied_bytes(part: PartLayout) -> int:
    """Return the bytes that a copy of a part's slabs takes over the link."""
    return sum(slab.codec.link_bytes for slab in part.slabs)


def padding_bytes(part: PartLayout) -> int:
    """Return the bytes that no state has of the storages of a part that others hold views of: they leave too."""
    whole = [slab for slab in part.slabs if any(state.home is not None for state in slab.states)]
    return sum(slab.layout.nbytes - sum(state.nbytes for state in slab.states) for slab in whole)


def written_back_bytes(part: PartLayout) -> int:
    """Return the bytes of a part's slabs whose states are copied to the model's weights after the update."""
    return sum(slab.layout.nbytes for slab in part.slabs if slab.written_back)
