"""A job's estimate as tables and as one JSON object."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from rich.console import Console

from bridge_fgo.tools.plan.estimate import Estimate, StageEstimate
from bridge_fgo.tools.plan.recommend import Recommendation
from bridge_fgo.tools.plan.verdict import lines, verdicts
from bridge_fgo.tools.show import table, tell

GRID = 10**7
"""Bytes that printed figures are rounded to, before they are added up: so rows add up as printed."""


def gigabytes(count: float | None) -> str:
    """Return bytes in GB (10^9) with two digits, or "-"."""
    return "-" if count is None else f"{count / 1e9:.2f}"


def seconds(count: float | None) -> str:
    """Return seconds with three digits, or "-"."""
    return "-" if count is None else f"{count:.3f}"


def as_json(estimate: Estimate) -> dict[str, Any]:
    """Return an estimate as JSON takes it: bytes and seconds."""
    job = estimate.job
    return {
        "source": job.source,
        "parallel": asdict(job.parallel) | {"data": job.parallel.data},
        "microbatches": job.microbatches,
        "offload": asdict(estimate.offload),
        "stages": [
            {
                "stage": stage.stage,
                "parameter_count": stage.count,
                **stage.components,
                "state_bytes": stage.states.total,
                "least_state_bytes": stage.least_state,
                "offloaded": stage.away,
                "activations_pinned": stage.copies,
                "peak_resident": stage.peak(0),
                "gradients_spared": stage.spared,
                "gradients_moving": stage.moving,
                "peak_offloaded": stage.offloaded_peak,
                "least_budget": stage.least_budget,
            }
            for stage in estimate.stages
        ],
        "links": [asdict(link) for link in estimate.links],
        "verdicts": [asdict(verdict) for verdict in verdicts(estimate)],
        "flag": job.flag,
        "refusals": estimate.refusals,
        "notes": estimate.notes,
    }


def print_recommendation(console: Console, found: Recommendation) -> None:
    """Print what is advised, the other ways beside it, and what their times are made of."""
    tell(console, found.sentence, "bold")
    if found.advised is not None and found.advised.close:
        tell(console, found.advised.close, "bold")
    if found.command:
        tell(console, found.command)
        tell(console, "doctor, recipes.launch, a script under run, and Slurm take the settings after --check too.")
    ways = table(
        f"Ways to run it; room {gigabytes(found.room)} GB (?: a close call)",
        ("way", "peak GB", "fits", "offloaded", "step s", "change", "tokens/s/GPU"),
        (
            (
                choice.name,
                gigabytes(choice.peak),
                ("yes" if choice.fits else "no") + ("?" if choice.close else ""),
                gigabytes(choice.offloaded),
                f"{choice.step:.2f}",
                f"{found.change(choice):+.0%}",
                f"{choice.rate:.0f}",
            )
            for choice in found.choices
        ),
        padding=0,
    )
    for row, choice in zip(ways.rows, found.choices, strict=True):
        row.style = "bold" if choice is found.advised else None
    console.print(ways)
    if found.fewest is not None:
        fewest = f"{found.fewest.gpus} ({found.fewest.name})"
        tell(console, f"The fewest GPUs that fit, with this layout and global batch: {fewest}")
    print_lines(console, found.terms)


def print_lines(console: Console, texts: Iterable[str]) -> None:
    """Print lines of a list."""
    for text in texts:
        tell(console, f"- {text}")


def print_estimate(
    console: Console, estimate: Estimate, recommendation: Recommendation | None = None, first: Iterable[str] = ()
) -> None:
    """Print the first lines or the verdict, what is advised where that was asked, and the tables."""
    for line in first or lines(estimate, verdicts(estimate)):
        tell(console, line, "bold")
    word = "refused" if estimate.job.flag else "refused, once the flag is set"
    for refusal in estimate.refusals:
        tell(console, f"{word}: {refusal}", "red")
    if recommendation is not None:
        print_recommendation(console, recommendation)
    job, parallel = estimate.job, estimate.job.parallel
    has_experts = any(tensor.expert for stage in range(parallel.pipeline) for tensor in job.tensors(stage))
    experts = f"expert states over {parallel.shards(True)}; " if has_experts else ""
    tell(
        console,
        f"{parallel.gpus} GPU{'' if parallel.gpus == 1 else 's'}: tensor {parallel.tensor}, pipeline "
        f"{parallel.pipeline}, context {parallel.context}, expert {parallel.expert}; dense states over "
        f"{parallel.shards(False)} ranks, {experts}{job.microbatches} microbatches a step",
    )
    parts = ("params", "grads", "masters", "moments", "activ.", "other")
    console.print(
        table(
            "GB on the fullest rank of each pipeline stage",
            ("stage", *parts, "peak", "offloaded", "on host"),
            map(_row, estimate.stages),
            bold="offloaded",
            padding=0,  # so that its headings fit into 80 columns, as a log has
        )
    )
    _print_links(console, estimate)
    print_lines(console, estimate.notes)


def _row(stage: StageEstimate) -> list[str]:
    """Return the figures of a stage: components, their sum, the peak with the offload, and what is on the host.

    A peak without activations that are not known is a lower bound.
    """
    parts = [None if part is None else round(part / GRID) * GRID for part in stage.components.values()]
    away, spared = (round(nbytes / GRID) * GRID for nbytes in (stage.away, stage.spared))
    on_host = sum(round(nbytes / GRID) * GRID for nbytes in (stage.away, stage.moving, stage.copies))
    peak = sum(part or 0 for part in parts)
    bound = ">" if stage.activations is None else ""
    peaks = (bound + gigabytes(peak), bound + gigabytes(peak - away - spared))
    return [str(stage.stage), *map(gigabytes, parts), *peaks, gigabytes(on_host)]


def _print_links(console: Console, estimate: Estimate) -> None:
    rows = []
    for row in estimate.links:
        times = (row.link_seconds, row.most_floor, row.floor, row.hidden_from)
        rows.append((row.link.title, str(row.link.gpus), gigabytes(row.pinned), row.link.figures, *map(seconds, times)))
    title = "A node's pinned memory, and the copies of the fullest rank in seconds"
    heads = ("system", "GPUs", "pinned GB", "GB/s", "one way", "bare floor", "floor", "hidden from")
    console.print(table(title, heads, rows, bold="floor", padding=0))  # fits into 80 columns, as the other
    tell(
        console,
        "GB/s: D2H/H2D/each way with both busy (*: not measured here). Floor: the least that a step gets longer by; "
        "bare: with nothing to hide behind. Hidden from: the shortest forward of a microbatch, in seconds, that hides "
        "all copies.",
    )
    moving, times = max(stage.moving for stage in estimate.stages), estimate.job.microbatches - 1
    if moving and times:
        enough = [f"{seconds(row.gradient_seconds)} ({row.link.title})" for row in estimate.links]
        tell(
            console,
            f"Gradients: up to {gigabytes(moving)} GB of a rank leave after each microbatch but the last and return "
            f"before the next, {gigabytes(2 * times * moving)} GB over the link a step. They hide where forward and "
            f"backward of a microbatch take this many seconds: {', '.join(enough)}.",
        )
    sources = (f"{row.link.title}, {row.link.figures} GB/s: {row.link.source}" for row in estimate.links)
    print_lines(console, sources)
