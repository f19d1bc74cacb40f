"""`bridge-fgo plan`: from a recipe or a saved run config to tables, JSON and a picture."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console

from bridge_fgo.tools.iteration_picture import draw_iteration
from bridge_fgo.tools.job.job import read_job
from bridge_fgo.tools.plan.estimate import make_estimate
from bridge_fgo.tools.plan.options import Settings
from bridge_fgo.tools.plan.phases import plan_phases, print_phases, states_of_plan
from bridge_fgo.tools.plan.picture import draw
from bridge_fgo.tools.plan.recommend import Recommender
from bridge_fgo.tools.plan.report import as_json, print_estimate
from bridge_fgo.tools.plan.systems import links
from bridge_fgo.tools.plan.verdict import Outcome, verdicts

REFUSED = 1


def run(settings: Settings) -> int:
    """Print the estimate; return 1 where training, or with phases `Residency`, would refuse the job, else 0.

    Or where it does not fit and that is checked.

    Raises:
        ValueError: a setting or the config makes no estimate possible; says which and what to do.
    """
    of_links = links(settings.system, settings.link_gbs, settings.gpus_per_node)
    job = read_job(settings.target, settings.gpus, settings.offload, settings.vocab_size, settings.overrides)
    if job.bridge_refuses is not None:
        raise ValueError(f"Megatron-Bridge refuses this config: {job.bridge_refuses}")
    activations = None if settings.activations_gb is None else int(settings.activations_gb * 1e9)
    given = settings.forward_seconds, settings.backward_seconds, activations
    estimate = make_estimate(job, job.offload, of_links, *given)
    recommendation = Recommender(job, of_links[0], *given).recommend() if settings.recommend else None
    phases = plan_phases(estimate) if settings.phases else None
    if settings.picture is not None and phases is not None:
        title = f"An iteration of reinforcement learning on stage {phases.fullest.stage}, as planned"
        draw_iteration(states_of_plan(phases, estimate), settings.picture, title)
    elif settings.picture is not None:
        draw(estimate, settings.picture)
    if settings.json_output:
        advice = {} if recommendation is None else {"recommendation": asdict(recommendation)}
        moves = {} if phases is None else {"phases": phases.as_json()}
        print(json.dumps(as_json(estimate) | advice | moves, allow_nan=False))
    else:
        console = Console()
        print_estimate(console, estimate, recommendation)
        if phases is not None:
            print_phases(console, phases)
    if phases is not None and phases.refusals:
        return REFUSED
    if settings.check:
        (verdict,) = verdicts(estimate)
        if verdict.outcome is Outcome.unknown:
            raise ValueError("--check: activations of this kind of model are not counted; give --activations-gb")
        if not verdict.is_trainable(job.flag):
            return REFUSED
    return REFUSED if job.flag and estimate.refusals else 0
