"""A job's estimate as tables and as one JSON object."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from bridge_fgo.bridge.refusals import uses_fsdp
from bridge_fgo.tools.plan.activations import WORKSPACES
from bridge_fgo.tools.plan.estimate import Estimate, StageEstimate, components, offloaded_bytes
from bridge_fgo.tools.plan.recommend import Recommendation
from bridge_fgo.tools.plan.verdict import lines, verdicts

GRID = 10**7
"""Bytes that printed figures are rounded to, before they are added up: so rows add up as printed."""


def gigabytes(count: float | None) -> str:
    """Return bytes in GB (10^9) with two digits, or "-"."""
    return "-" if count is None else f"{count / 1e9:.2f}"


def _row(estimate: Estimate, stage: StageEstimate) -> list[str]:
    """Return the figures of a stage: components, what they add up to, what is offloaded of it, and the difference.

    A peak without activations that are not known is a lower bound.
    """
    parts = [None if part is None else round(part / GRID) * GRID for part in components(stage).values()]
    peak = sum(part or 0 for part in parts)
    away = round(offloaded_bytes(stage, stage.states, estimate.offload) / GRID) * GRID
    bound = ">" if stage.activations is None else ""
    return [*map(gigabytes, parts), bound + gigabytes(peak), bound + gigabytes(peak - away), gigabytes(away)]


def as_json(estimate: Estimate) -> dict[str, Any]:
    """Return an estimate as JSON takes it: bytes and seconds."""
    return {
        "source": estimate.job.source,
        "parallel": asdict(estimate.job.parallel) | {"data": estimate.job.parallel.data},
        "microbatches": estimate.job.microbatches,
        "offload": asdict(estimate.offload),
        "stages": [_stage_json(estimate, stage) for stage in estimate.stages],
        "links": [asdict(link) for link in estimate.links],
        "bridge_estimate": estimate.job.bridge_estimate,
        "verdicts": [asdict(verdict) for verdict in verdicts(estimate)],
        "flag": estimate.job.flag,
        "refusals": estimate.refusals,
        "notes": estimate.notes,
    }


def _stage_json(estimate: Estimate, stage: StageEstimate) -> dict[str, Any]:
    away = offloaded_bytes(stage, stage.states, estimate.offload)
    return {
        "stage": stage.stage,
        "parameter_count": stage.count,
        **components(stage),
        "state_bytes": stage.states.total,
        "least_state_bytes": stage.least_state,
        "offloaded": away,
        "peak_resident": stage.peak(0),
        "peak_offloaded": stage.peak(away),
        "least_budget": stage.least_budget,
    }


def print_recommendation(console: Console, found: Recommendation) -> None:
    """Print what is advised, the other ways beside it, and what their times are made of."""
    console.print(found.sentence, markup=False, style="bold")
    table = Table(title=f"Ways to run it; room {gigabytes(found.room)} GB", title_justify="left")
    table.add_column("way")
    for name in ("peak GB", "fits", "offloaded", "step s", "change"):
        table.add_column(name, justify="right")
    for choice in found.choices:
        table.add_row(
            choice.name,
            gigabytes(choice.peak),
            "yes" if choice.fits else "no",
            gigabytes(choice.offloaded),
            f"{choice.step:.2f}",
            f"{found.change(choice):+.0%}",
            style="bold" if choice is found.advised else None,
        )
    console.print(table)
    for term in found.terms:
        console.print(f"- {term}", markup=False)


def print_estimate(console: Console, estimate: Estimate, recommendation: Recommendation | None = None) -> None:
    """Print the verdict, what is advised where that was asked, and the tables."""
    for line in lines(estimate, verdicts(estimate)):
        console.print(line, markup=False, style="bold")
    if recommendation is not None:
        print_recommendation(console, recommendation)
    parallel = estimate.job.parallel
    has_experts = any(tensor.expert for stage in estimate.job.stages for chunk in stage for tensor in chunk)
    experts = f"expert states over {parallel.shards(True)}; " if has_experts else ""
    console.print(
        f"{parallel.gpus} GPUs: tensor {parallel.tensor}, pipeline {parallel.pipeline}, context {parallel.context}, "
        f"expert {parallel.expert}; dense states over {parallel.shards(False)} ranks, {experts}"
        f"{estimate.job.microbatches} microbatches a step"
    )
    table = Table(
        title="GB on the fullest rank of each pipeline stage",
        title_justify="left",
        padding=0,  # so that its headings fit into 80 columns, as a log has
    )
    for name in ("stage", "params", "grads", "masters", "moments", "activ.", "other", "peak"):
        table.add_column(name, justify="right")
    table.add_column("offloaded", justify="right", style="bold")
    table.add_column("on host", justify="right")
    for stage in estimate.stages:
        table.add_row(str(stage.stage), *_row(estimate, stage))
    console.print(table)
    _print_bridges_estimate(console, estimate)
    _print_links(console, estimate)
    for note in estimate.notes:
        console.print(f"- {note}", markup=False)
    for refusal in estimate.refusals:
        word = "refused" if estimate.job.flag else "refused, once the flag is set"
        console.print(f"{word}: {refusal}", markup=False, style="red")


def _print_bridges_estimate(console: Console, estimate: Estimate) -> None:
    theirs = estimate.job.bridge_estimate
    if theirs is None:
        return
    away = {stage.stage: offloaded_bytes(stage, stage.states, estimate.offload) for stage in estimate.stages}
    has_budget = estimate.offload.gpu_memory_budget_gib is not None
    # With a budget the stage that offloads the most is the one whose figures differ.
    stage = max(estimate.stages, key=lambda stage: (away[stage.stage] if has_budget else 0, stage.fixed))
    ours = stage.fixed - WORKSPACES
    unsharded = ", weights and gradients as without Megatron-FSDP" if uses_fsdp(estimate.job.config) else ""
    console.print(
        f"Weights, gradients and states of stage {stage.stage}: {gigabytes(ours)} GB, "
        f"{gigabytes(ours - away[stage.stage])} GB with the offload; Bridge's own estimator: "
        f"{gigabytes(theirs['weights_gradients_states'])} GB (18 bytes a parameter, whatever the dtypes{unsharded})"
    )


def _print_links(console: Console, estimate: Estimate) -> None:
    table = Table(title="A node's pinned memory, and the copies of the fullest rank in seconds", title_justify="left")
    for name in ("system", "GPUs", "pinned GB", "GB/s", "one way", "bare floor"):
        table.add_column(name, justify="right")
    table.add_column("floor", justify="right", style="bold")
    table.add_column("hidden from", justify="right")
    for row in estimate.links:
        link = row.link
        table.add_row(
            link.title,
            str(link.gpus),
            gigabytes(row.pinned),
            link.figures,
            f"{row.link_seconds:.3f}",
            f"{row.most_floor:.3f}",
            "-" if row.floor is None else f"{row.floor:.3f}",
            "-" if row.hidden_from is None else f"{row.hidden_from:.3f}",
        )
    console.print(table)
    console.print(
        "GB/s: one way / each way with both busy (*: not measured). Floor: the least that a step gets longer by; bare: "
        "with nothing to hide behind. Hidden from: a microbatch's forward in seconds from which nothing is added."
    )
    for row in estimate.links:
        console.print(f"- {row.link.title}, {row.link.figures} GB/s: {row.link.source}", markup=False)
