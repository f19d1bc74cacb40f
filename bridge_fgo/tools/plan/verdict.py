"""Whether a job fits: peaks against the memory of the systems that people train on."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from bridge_fgo.tools.plan.estimate import UNTRIED, Estimate, fullest_node
from bridge_fgo.tools.plan.systems import SYSTEMS

HOPPER = ("GH200", "H200", "H100")
CLOSE, CLOSE_UNTRIED = 0.02, 0.05
"""Shares of a room: so near to it an estimate does not decide. Counted peaks were within 0.01 of those of runs."""


class Outcome(StrEnum):
    """What becomes of a job on a system."""

    fits = "fits"
    with_offload = "fits only with the offload"
    does_not = "does not fit"
    refused = "refused"
    unknown = "may fit (activations are not counted)"


@dataclass(frozen=True)
class Verdict:
    """The outcome on a system, and the bytes that it comes from.

    resident, offloaded: peaks of the fullest rank, as configured and with the offload as its settings say; lower bounds
    where activations are not known. room: that was given, or of a GPU, less a 16th. why: what stands in the way beside
    the GPU's memory, or "". close: see `close_call`.
    """

    system: str
    outcome: Outcome
    resident: int
    offloaded: int
    room: int
    why: str = ""
    close: str = ""

    def is_trainable(self, flag: bool) -> bool:
        """Return whether the job fits with the offload flag as it is."""
        return self.outcome is Outcome.fits or (flag and self.outcome is Outcome.with_offload)


def verdicts(estimate: Estimate) -> list[Verdict]:
    """Return the verdict on each of the estimate's systems; on all if it has a speed alone."""
    asked = {row.link.name: row.link.gpus for row in estimate.links}
    if not asked.keys() <= SYSTEMS.keys():
        asked = {name: system.link.gpus for name, system in SYSTEMS.items()}
    return [_verdict(estimate, name, gpus) for name, gpus in asked.items()]


def _verdict(estimate: Estimate, system: str, gpus: int) -> Verdict:
    of_host, room = SYSTEMS[system].host_bytes, estimate.room or SYSTEMS[system].room
    flag, pinned = estimate.job.flag, sum(fullest_node(estimate.pinned, gpus))
    resident, offloaded = estimate.resident_peak, estimate.offloaded_peak
    why = ""
    if flag and estimate.refusals:
        outcome = Outcome.refused
    elif offloaded > room:
        outcome = Outcome.does_not
    elif not estimate.knows_activations:
        outcome = Outcome.unknown
    elif pinned > of_host and (flag or resident > room):
        outcome = Outcome.does_not
        why = f"the offload pins {pinned / 1e9:.0f} GB on a node that has {of_host / 1e9:.0f} GB"
    elif resident <= room:
        outcome = Outcome.fits
    elif estimate.refusals:
        outcome, why = Outcome.does_not, "with the offload it would fit, but that is refused (below)"
    else:
        outcome = Outcome.with_offload
    # A budget has the engine offload more where a peak is above what was counted.
    least = offloaded if estimate.offload.gpu_memory_budget_gib is None else estimate.least_budget
    close = close_call(estimate, room, least) or ("" if flag else close_call(estimate, room, resident))
    model = estimate.job.config.model
    mxfp8 = getattr(model, "fp8", None) and model.fp8_recipe == "mxfp8"
    name = "model.fp8_recipe='mxfp8'" if mxfp8 else "model.fp4" if getattr(model, "fp4", None) else ""
    if name and system in HOPPER and not why:
        why = f"But {name} needs Blackwell, which {system} is not"
    return Verdict(system, outcome, resident, offloaded, room, why, close)


def close_call(estimate: Estimate, room: int, peak: int) -> str:
    """Return a line where a peak is so near to the room that the estimate does not decide; else ""."""
    is_tried = not any(UNTRIED in note for note in estimate.notes)
    if not estimate.knows_activations or abs(peak - room) > (CLOSE if is_tried else CLOSE_UNTRIED) * room:
        return ""
    return f"Close call: {peak / 1e9:.2f} of {room / 1e9:.2f} GB{'' if is_tried else f', with activations {UNTRIED}'}"


def lines(estimate: Estimate, found: list[Verdict]) -> Iterator[str]:
    """Yield the verdict's lines: of one system with its figures, of several grouped by outcome."""
    gpus, first = estimate.job.parallel.gpus, found[0]
    where = f"{gpus} GPU" if gpus == 1 else f"{gpus} GPUs"
    least = "" if estimate.knows_activations else "at least "
    peaks = f"peak {least}{first.resident / 1e9:.1f} GB resident, {first.offloaded / 1e9:.1f} GB with the offload"
    if len(found) == 1:
        yield f"{first.outcome.capitalize()} on {where} of {first.system}: {peaks}; room {first.room / 1e9:.1f} GB"
        yield from filter(None, (first.why, first.close))
        return
    systems = {outcome: [one.system for one in found if one.outcome is outcome] for outcome in Outcome}
    text = "; ".join(f"{outcome} on {', '.join(names)}" for outcome, names in systems.items() if names)
    yield f"{text[0].upper()}{text[1:]}: {peaks} ({where})"
    yield from (f"{one.system}: {text}" for one in found for text in (one.why, one.close) if text)
