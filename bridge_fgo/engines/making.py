"""Making the engine of a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from bridge_fgo.config import OffloadConfig
from bridge_fgo.engines.engine import Engine
from bridge_fgo.engines.mcore import McoreEngine, Member
from bridge_fgo.engines.mcore1 import Generation1
from bridge_fgo.engines.mcore1_chunks import Generation1InChunks
from bridge_fgo.engines.mcore2 import Generation2
from bridge_fgo.engines.native import NativeEngine
from bridge_fgo.engines.ranks import gather
from bridge_fgo.memory.meters import PeakMeter
from bridge_fgo.states.megatron import McoreSource, MegatronSource

MEMBERS: tuple[type[Member], ...] = (Generation1, Generation1InChunks, Generation2)


def make_engine(
    name: str,
    sources: Sequence[McoreSource],
    config: OffloadConfig,
    meter: PeakMeter,
    stage: int | None = None,
    announce: Callable[[str], None] = lambda text: None,
    warn: Callable[[str], None] = lambda text: None,
) -> Engine:
    """Return the engine of that name for the sources of a rank, of which there may be none; nothing is pinned yet.

    Args:
        name: "native", or that of a member: "mcore generation 1", "mcore generation 1 in chunks" or
            "mcore generation 2".
        sources: in the order in which they step.
        config: what to offload.
        meter: the allocator's peaks.
        stage: this rank's place in the pipeline; None where nothing says it.
        announce: gets a line about what all ranks do alike.
        warn: gets a line that concerns this rank.

    Raises:
        ValueError: mcore built no offloader, because the flag was set after the optimizer was made; or an optimizer is
            of a kind for which mcore's offloader is not driven.
        ValueError, RuntimeError: as `NativeEngine`.
    """
    if name != "native":
        distributed = [source for source in sources if isinstance(source, MegatronSource)]
        if len(distributed) < len(sources):
            raise ValueError(
                "OffloadConfig.engine='mcore' with a Float16OptimizerWithFloat16Params: mcore's offloader is driven "
                "under its DistributedOptimizer alone; use OffloadConfig(engine='native')"
            )
        if any(source.upstream_offloader() is None for source in distributed):
            raise ValueError(
                "optimizer.offload_optimizer_states=True was set after the optimizer was built, so mcore gave it no "
                "offloader: set it before, or use OffloadConfig(engine='native')"
            )
        return McoreEngine(distributed, next(member for member in MEMBERS if member.name == name))
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
