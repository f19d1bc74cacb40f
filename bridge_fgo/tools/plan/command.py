"""`bridge-fgo plan`: from a recipe or a saved run config to tables, JSON and a picture."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from bridge_fgo.config import OffloadConfig
from bridge_fgo.tools.iteration_picture import draw_iteration
from bridge_fgo.tools.job.job import read_job
from bridge_fgo.tools.plan.estimate import make_estimate
from bridge_fgo.tools.plan.links import LINKS, links
from bridge_fgo.tools.plan.phases import plan_phases
from bridge_fgo.tools.plan.phases_report import phases_json, print_phases, states_of_plan
from bridge_fgo.tools.plan.picture import draw
from bridge_fgo.tools.plan.recommend import Recommender
from bridge_fgo.tools.plan.report import as_json, print_estimate
from bridge_fgo.tools.plan.verdict import Outcome, verdicts

REFUSED = 1


@dataclass(frozen=True)
class Settings:
    """Settings of one estimate. Seconds are of one microbatch on a rank; offload holds OffloadConfig's arguments.

    check: end with status 1 also where the job does not fit the system. recommend: say how to run it best there.
    phases: say what a sleep and a wake of `Residency` take, and draw these.
    """

    target: str
    overrides: tuple[str, ...] = ()
    gpus: int | None = None
    gpus_per_node: int | None = None
    vocab_size: int | None = None
    system: str | None = None
    link_gbs: float | None = None
    forward_seconds: float | None = None
    backward_seconds: float | None = None
    activations_gb: float | None = None
    check: bool = False
    recommend: bool = False
    phases: bool = False
    offload: dict[str, Any] = field(default_factory=dict)
    json_output: bool = False
    picture: Path | None = None


def run(settings: Settings) -> int:
    """Print the estimate; return 1 where training, or with phases `Residency`, would refuse the job, else 0.

    Or where it does not fit and that is checked.

    Raises:
        ValueError: a setting or the config makes no estimate possible; says which and what to do.
        RuntimeError: the model could not be built.
    """
    for name, unit in (("forward_seconds", "seconds"), ("backward_seconds", "seconds"), ("activations_gb", "GB")):
        value = getattr(settings, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} {value}: use a number of {unit} above 0")
    for name in ("check", "recommend"):
        if getattr(settings, name) and settings.system is None:
            raise ValueError(f"--{name} needs --system, one of {', '.join(LINKS)}")
    if settings.backward_seconds is not None and settings.forward_seconds is None:
        raise ValueError("--backward-seconds needs --forward-seconds")
    OffloadConfig(**settings.offload)  # refused before the half minute that a config may take
    of_links = links(settings.system, settings.link_gbs, settings.gpus_per_node)
    job = read_job(settings.target, settings.gpus, settings.offload, settings.vocab_size, settings.overrides)
    if job.bridge_refuses is not None:
        raise ValueError(f"Megatron-Bridge refuses this config: {job.bridge_refuses}")
    activations = None if settings.activations_gb is None else int(settings.activations_gb * 1e9)
    estimate = make_estimate(
        job, job.offload, of_links, settings.forward_seconds, settings.backward_seconds, activations
    )
    recommendation = None
    if settings.recommend:
        (link,) = of_links
        forward, backward = settings.forward_seconds, settings.backward_seconds
        recommendation = Recommender(job, link, forward, backward, activations).recommend()
    phases = plan_phases(estimate) if settings.phases else None
    if settings.picture is not None and phases is not None:
        title = f"An iteration of reinforcement learning on stage {phases.fullest.stage}, as planned"
        draw_iteration(states_of_plan(phases, estimate), settings.picture, title)
    elif settings.picture is not None:
        draw(estimate, settings.picture)
    if settings.json_output:
        advice = {} if recommendation is None else {"recommendation": asdict(recommendation)}
        moves = {} if phases is None else {"phases": phases_json(phases)}
        print(json.dumps(as_json(estimate) | advice | moves, allow_nan=False))
    else:
        print_estimate(Console(), estimate, recommendation)
        if phases is not None:
            print_phases(Console(), phases)
    if phases is not None and phases.refusals:
        return REFUSED
    if settings.check:
        (verdict,) = verdicts(estimate)
        if verdict.outcome is Outcome.unknown:
            raise ValueError("--check: activations of this kind of model are not counted; give --activations-gb")
        if not verdict.is_trainable(job.flag):
            return REFUSED
    return REFUSED if job.flag and estimate.refusals else 0
