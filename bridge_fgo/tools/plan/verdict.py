"""Whether a job fits: peaks against the memory of the systems that people train on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from bridge_fgo.tools.plan.estimate import Estimate
from bridge_fgo.tools.plan.systems import SYSTEMS


class Outcome(StrEnum):
    """What becomes of a job on a system."""

    fits = "fits"
    with_offload = "fits only with the offload"
    does_not = "does not fit"
    unknown = "may fit (activations are not counted)"


@dataclass(frozen=True)
class Verdict:
    """The outcome on a system, and the bytes that it comes from.

    resident, offloaded: peaks of the fullest rank, lower bounds where activations are not known. room: of a GPU, less
    a 16th. why: what stands in the way beside the GPU's memory, or "".
    """

    system: str
    outcome: Outcome
    resident: int
    offloaded: int
    room: int
    why: str = ""

    def is_trainable(self, flag: bool) -> bool:
        """Return whether the job fits with the offload flag as it is."""
        return self.outcome is Outcome.fits or (flag and self.outcome is Outcome.with_offload)


def verdicts(estimate: Estimate) -> list[Verdict]:
    """Return the verdict on each of the estimate's systems; on all where it has a speed alone."""
    asked = {row.link.name: row.link.gpus for row in estimate.links}
    if not asked.keys() <= SYSTEMS.keys():
        asked = {name: system.link.gpus for name, system in SYSTEMS.items()}
    return [_verdict(estimate, name, gpus) for name, gpus in asked.items()]


def _verdict(estimate: Estimate, system: str, gpus: int) -> Verdict:
    of_host, room = SYSTEMS[system].host_bytes, SYSTEMS[system].room
    pinned = sum(estimate.fullest_node(gpus))
    resident, offloaded = estimate.resident_peak, estimate.least_budget
    why = ""
    if offloaded > room:
        outcome = Outcome.does_not
    elif not estimate.knows_activations:
        outcome = Outcome.unknown
    elif resident <= room:
        outcome = Outcome.fits
    elif estimate.refusals:
        outcome, why = Outcome.does_not, "the offload, with which it would, is refused (below)"
    elif pinned > of_host:
        outcome = Outcome.does_not
        why = f"the offload pins {pinned / 1e9:.0f} GB on a node that has {of_host / 1e9:.0f} GB"
    else:
        outcome = Outcome.with_offload
    return Verdict(system, outcome, resident, offloaded, room, why)


def lines(estimate: Estimate, found: list[Verdict]) -> Iterator[str]:
    """Yield the verdict's lines: of one system with its figures, of several grouped by outcome."""
    gpus, first = estimate.job.parallel.gpus, found[0]
    where = f"{gpus} GPU" if gpus == 1 else f"{gpus} GPUs"
    least = "" if estimate.knows_activations else "at least "
    peaks = f"peak {least}{first.resident / 1e9:.1f} GB resident, {first.offloaded / 1e9:.1f} GB with the offload"
    if len(found) == 1:
        yield f"{first.outcome.capitalize()} on {where} of {first.system}: {peaks}; room {first.room / 1e9:.1f} GB"
        if first.why:
            yield first.why
        return
    systems = {outcome: [one.system for one in found if one.outcome is outcome] for outcome in Outcome}
    text = "; ".join(f"{outcome} on {', '.join(names)}" for outcome, names in systems.items() if names)
    yield f"{text[0].upper()}{text[1:]}: {peaks} ({where})"
    yield from (f"{verdict.system}: {verdict.why}" for verdict in found if verdict.why)
