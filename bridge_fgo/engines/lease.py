"""The lease of an engine: who owns it, and what it is used for now.

An optimizer has at most one lease, as its attribute `LEASE`. The owner makes the engine and closes it: the session of
`optimizer.offload_optimizer_states` ("step"), or a `Residency` ("sleep"). Either may also use the other's engine:

- Step: training steps drive the engine. States may stay offloaded between steps.
- Sleep: a `Residency` offloads and reloads all states between steps.
- Serve: patches give code that reads, saves, loads or steps the optimizer its states, from the host if they are there.

Patches know of the engine only while they are to use it (`attachment_of`). States of a `Residency` that are on the GPU
are read and stepped as without this package.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from bridge_fgo.config import OffloadConfig
from bridge_fgo.engines.engine import Engine
from bridge_fgo.memory.meters import PeakMeter
from bridge_fgo.states.distributed import McoreSource
from bridge_fgo.states.source import Source

LEASE = "_bridge_fgo_lease"

ASLEEP = "call Residency.reload('optimizer') first, or save and load checkpoints in Residency.checkpointing()"
"""Advice in the error that code gets if it uses states that a `Residency` has offloaded and no patch serves."""


class Attachment(NamedTuple):
    """The engine that a patch calls for an optimizer, and the source by which the engine knows that optimizer."""

    engine: Engine
    source: Source


class EngineLease:
    """The engine of some optimizers, with its owner, its uses, its settings, and the meter that measures peaks for it.

    `sources` are the optimizers; a rank whose optimizers are all stubs has none.
    """

    def __init__(
        self,
        owner: Literal["step", "sleep"],
        sources: Sequence[McoreSource],
        engine: Engine,
        settings: OffloadConfig,
        meter: PeakMeter,
    ) -> None:
        self.owner, self.sources, self.engine = owner, list(sources), engine
        self.settings, self.meter = settings, meter
        self.is_stepped = False  # whether training steps drive the engine
        self.has_residency = owner == "sleep"  # whether a `Residency` moves the states between steps
        self.is_asleep = False  # whether the `Residency` has offloaded the states, and not reloaded them since
        self.serves_sleep = False  # whether patches serve states that are asleep: a framework saves without a reload
        self.serving = 0  # running blocks of `serve`
        myself = weakref.ref(self)
        engine.traffic.touches.refusals.append(lambda: "" if (it := myself()) is None or it.is_served else ASLEEP)
        for source in sources:
            setattr(source.optimizer, LEASE, self)

    @property
    def is_served(self) -> bool:
        """Whether states that are offloaded are reloaded for any code that uses them."""
        return self.is_stepped or self.serves_sleep or self.serving > 0

    @contextmanager
    def serve(self) -> Iterator[None]:
        """Context in which patches serve code that reads or loads states."""
        self.serving += 1
        try:
            yield
        finally:
            self.serving -= 1

    def end_steps(self, reloads: bool = True) -> None:
        """End the use by training steps: close the engine if they own it, else make the states resident.

        Args:
            reloads: whether the states of a `Residency` are reloaded; else they stay offloaded.

        Raises:
            torch.OutOfMemoryError, RuntimeError: states cannot be reloaded. Nothing has changed.
        """
        if self.owner == "step":
            self._close()
        elif reloads:
            self.engine.require_writable()
            self.is_asleep = False
        self.is_stepped = False

    def end_sleeps(self) -> None:
        """End the use by a `Residency`, and close the engine if it owns it; raise as `end_steps`."""
        if self.owner == "sleep":
            self._close()
        self.has_residency = self.serves_sleep = False

    def _close(self) -> None:
        self.engine.close()
        for source in self.sources:
            vars(source.optimizer).pop(LEASE, None)


def lease_of(optimizer: Any) -> EngineLease | None:
    """Return the lease of an optimizer, or None."""
    return vars(optimizer).get(LEASE)


def attachment_of(optimizer: Any) -> Attachment | None:
    """Return what patches use for an optimizer; None while they are to do nothing."""
    lease = lease_of(optimizer)
    if lease is None or not (lease.is_stepped or lease.serving or (lease.serves_sleep and lease.is_asleep)):
        return None
    return next(Attachment(lease.engine, source) for source in lease.sources if source.optimizer is optimizer)


def shareable_leases(optimizers: Iterable[Any], asker: str) -> list[EngineLease]:
    """Return the leases of some optimizers, each once.

    Raises:
        ValueError: one of them has a `Residency` already, so that `asker` would be a second one, or a second owner.
    """
    leases = {id(lease): lease for each in optimizers if (lease := lease_of(each)) is not None}
    if any(lease.has_residency for lease in leases.values()):
        raise ValueError(
            f"{asker}: the optimizer has a Residency already, which moves its states: close() that one "
            "first, and make one Residency once training is set up, before the first sleep"
        )
    return list(leases.values())
