"""Making the engine of a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from bridge_fgo.config import OffloadConfig
from bridge_fgo.engines.engine import Engine
from bridge_fgo.engines.mcore import McoreEngine
from bridge_fgo.engines.native import NativeEngine
from bridge_fgo.engines.ranks import gather
from bridge_fgo.memory.meters import PeakMeter
from bridge_fgo.states.source import Source


def make_engine(
    name: str,
    sources: Sequence[Source],
    config: OffloadConfig,
    meter: PeakMeter,
    stage: int | None = None,
    announce: Callable[[str], None] = lambda text: None,
    warn: Callable[[str], None] = lambda text: None,
) -> Engine:
    """Return the engine of that name for the sources of a rank, of which there may be none; nothing is pinned yet.

    Args:
        name: "native", or that of one of `bridge_fgo.engines.mcore.MEMBERS`.
        sources: in the order in which they step.
        config: what to offload.
        meter: the allocator's peaks.
        stage: this rank's place in the pipeline; None where nothing says it.
        announce: gets a line about what all ranks do alike.
        warn: gets a line that concerns this rank.
    """
    if name != "native":
        return McoreEngine(name, sources)
    engine = NativeEngine(sources, config, meter)
    holding = engine.schedule.holding
    holding.agree, holding.announce, holding.warn = partial(agree, stage), announce, warn
    holding.all_can = lambda own: all(gather(own))
    return engine


def agree(stage: int | None, room: int, least: int) -> tuple[int, int]:
    """Return the bytes that may stay on every rank of this pipeline stage, and the least budget of the fullest rank.

    Ranks of one stage hold equal shards, so that one that kept less would make the others wait for its copies.
    Stages differ in what they hold, and each chooses for itself. `room` and `least` (bytes) are those of this rank.
    """
    answers = gather((stage, room, least))
    return min(r for s, r, _ in answers if s == stage), max(bytes_ for _, _, bytes_ in answers)
