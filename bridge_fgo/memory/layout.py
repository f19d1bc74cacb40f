"""Which states go, which are updated in one go, and how they lie in slabs: arithmetic on sizes in bytes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any

from bridge_fgo.config import MIB, OffloadConfig
from bridge_fgo.memory.state_tensor import Bundle, Home, State

ALIGNMENT = 256
"""Every tensor of a slab starts at a multiple of this many bytes: what cudaMalloc guarantees, so kernels
take the same vectorised paths as on a tensor with an allocation of its own."""

BYTES_WHILE_ENQUEUING = 8 * MIB
"""Bytes that the link moves while the host enqueues one part's moves and update: some 150 microseconds on an H200,
whose link has 55 GB/s. The pipeline fills and drains in the time that one part takes on the link, so what parts cost in
all is least if a part is the geometric mean of this and of the states."""

LEAST_PARTS = 16
"""Parts that an optimizer's states make at least, if its tensors are small enough: the optimizer step holds two at
least, and the pipeline should not fill and drain for a larger share of it (states below 2 GiB)."""

LEAST_PART_BYTES = MIB  # parts are no smaller than this for the sake of the pipeline

MERGED_SLAB_BYTES = 128 * MIB
"""Up to this size the states of one kind of a part are one slab, even if its only tensor is larger than a part
should be: they come and go together, and each slab costs the host some 40 microseconds a step. It is 2.4 ms of an
H200's link."""


@dataclass
class SlabLayout:
    """Layout of one slab, the same in GPU memory and on the host: `nbytes` in all."""

    members: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    nbytes: int = 0


class Codec:
    """How one slab is copied, by `link_bytes` over the link: as it is, unless a subclass encodes it."""

    family: Any = None  # the `Remainders` that encode and decode the slab; None if it is copied as it is
    staging_bytes = 0  # size of the encoded form, which needs GPU memory beside the slab while it is on its way
    encodes = False  # whether a slab that is offloaded now is to be encoded
    just_rounded = False  # whether its weights were rounded from it just now, so that the next encoding needs no check

    def __init__(self, link_bytes: int) -> None:
        self.link_bytes = link_bytes


def select(bundle_bytes: Sequence[int], fraction: float) -> list[int]:
    """Return the positions of the bundles to offload: in order, until they have at least `fraction` of all bytes."""
    wanted = fraction * sum(bundle_bytes)
    before = accumulate(bundle_bytes, initial=0)
    each = enumerate(zip(bundle_bytes, before, strict=False))
    return [position for position, (nbytes, so_far) in each if nbytes and so_far < wanted]


def pack(sizes: Sequence[int], slab_bytes: int) -> list[SlabLayout]:
    """Pack tensors of these sizes (bytes, positive) in order into slabs of `slab_bytes`, or of one larger tensor."""
    layouts: list[SlabLayout] = []
    start = 0
    for position, nbytes in enumerate(sizes):
        assert nbytes > 0, f"tensor {position} has no bytes"
        if not layouts or start + nbytes > slab_bytes:
            layouts.append(SlabLayout())
            start = 0
        slab = layouts[-1]
        slab.members.append(position)
        slab.offsets.append(start)
        slab.nbytes = start + nbytes
        start = aligned(slab.nbytes)
    return layouts


def aligned(nbytes: int) -> int:
    """Return the bytes after which the next tensor starts."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@lru_cache(maxsize=1024)  # slabs have few sizes, and each is asked for twice a step
def pieces(nbytes: int, piece_bytes: int) -> tuple[tuple[int, int], ...]:
    """Return the (start, end) byte ranges of the copies that move `nbytes`, none above `piece_bytes`."""
    return tuple((start, min(start + piece_bytes, nbytes)) for start in range(0, nbytes, piece_bytes))


@dataclass(frozen=True)
class SlabPlace:
    """A slab before it has memory: its layout, the states at the layout's offsets, and its codec."""

    layout: SlabLayout
    states: list[State]
    codec: Codec

    @property
    def written_back(self) -> bool:
        """Whether a source copies its states to the model's weights after the update."""
        return any(state.written_back for state in self.states)


@dataclass(eq=False)
class PartBytes:
    """Size of one part: GPU memory of its slabs, and the most that they hold, which is while they are on their way."""

    nbytes: int
    transit_bytes: int
    stays: bool = False
    in_file: bool = False  # whether a disk has it while it is away


@dataclass(frozen=True)
class PartLayout:
    """Parameters that are updated in one go, and the slabs of their states."""

    bundles: list[Bundle]
    slabs: list[SlabPlace]


ChooseCodec = Callable[[Sequence[State], SlabLayout], Codec]  # returns the codec of a slab with these states


def copied_whole(states: Sequence[State], layout: SlabLayout) -> Codec:
    """Return the codec that copies any slab as it is."""
    return Codec(layout.nbytes)


def runs_of(bundles: Sequence[Bundle]) -> list[list[Bundle]]:
    """Return the bundles in order, those together that share a home (`State.home`): they go and are updated in one."""
    runs: list[list[Bundle]] = []
    homes: set[Home] = set()
    before: set[Home] = set()
    for bundle in bundles:
        if not homes & bundle.homes:
            runs.append([])
            before |= homes
            homes = set()
        runs[-1].append(bundle)
        homes |= bundle.homes
        assert not before & homes, "bundles that share a home do not follow one another"
    return runs


def offloaded_bundles(
    everything: Sequence[Bundle], config: OffloadConfig, host_bytes: float = math.inf
) -> list[Bundle]:
    """Return what the config asks to offload of the states of one source, as bundles of their own.

    What `host_bytes` of host memory do not hold is left out.
    """
    unwanted = {kind for kind, wanted in (("moment", config.moments), ("master", config.master_weights)) if not wanted}
    asked = [Bundle(b.param, [state for state in b.states if state.kind not in unwanted]) for b in everything]
    runs = runs_of(asked)
    chosen: list[Bundle] = []
    for i in select([sum(bundle.nbytes for bundle in run) for run in runs], config.fraction):
        states = [state for bundle in runs[i] for state in bundle.states]
        needed = sum(aligned(state.nbytes) for state in states if state.home is None)
        needed += sum(home.nbytes for home in {state.home for state in states} if home is not None)
        if needed <= host_bytes:
            host_bytes -= needed
            chosen += [bundle for bundle in runs[i] if bundle.nbytes]
    return chosen


def pipeline_bytes(chosen: Sequence[Bundle]) -> int:
    """Return the bytes of one source's states that are best waited for, and sent off, in one go."""
    states = sum(bundle.nbytes for bundle in chosen)
    return max(LEAST_PART_BYTES, min(states // LEAST_PARTS, math.isqrt(states * BYTES_WHILE_ENQUEUING)))


def part_bytes(chosen: Sequence[Bundle], config: OffloadConfig) -> int:
    """Return the bytes that a part of one source aims for at most."""
    return min(config.slab_bytes, pipeline_bytes(chosen))


def lay_out(chosen: Sequence[Bundle], target: int, codec_of: ChooseCodec = copied_whole) -> list[PartLayout]:
    """Return the parts of one source's offloaded states (`offloaded_bundles`), in the order in which they step.

    States that the first step makes lie in slabs of their own, because they do not exist before it; so do states that
    are written back to the model's weights. A storage that must not be rebound is a slab as it is. A part aims for
    `target` (`part_bytes`).
    """
    parts = []
    runs = runs_of(chosen)
    for together in pack([sum(bundle.nbytes for bundle in run) for run in runs], target):
        of_part = [bundle for i in together.members for bundle in runs[i]]
        kinds: dict[tuple[bool, bool, Home | None], list[State]] = {}
        for state in (state for bundle in of_part for state in bundle.states):
            kinds.setdefault((state.late, not state.written_back, state.home), []).append(state)
        slabs = []
        for (*_, home), states in sorted(kinds.items(), key=lambda item: item[0][:2]):
            if home is None:
                layouts = pack([state.nbytes for state in states], max(target, MERGED_SLAB_BYTES))
            else:
                layouts = [SlabLayout(list(range(len(states))), [state.offset for state in states], home.nbytes)]
            for layout in layouts:
                members = [states[i] for i in layout.members]
                slabs.append(SlabPlace(layout, members, codec_of(members, layout)))
        parts.append(PartLayout(of_part, slabs))
    return parts
