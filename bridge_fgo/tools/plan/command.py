"""`bridge-fgo plan`: from a recipe or a saved run config to tables or JSON."""

import json
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from rich.console import Console

from bridge_fgo.config import OffloadConfig, readable
from bridge_fgo.tools.job.job import Job, read_job
from bridge_fgo.tools.options import command_line
from bridge_fgo.tools.plan.estimate import Estimate, StageEstimate, make_estimate, not_counted
from bridge_fgo.tools.plan.log import Log, OutOfMemory
from bridge_fgo.tools.plan.options import Settings
from bridge_fgo.tools.plan.phases import plan_phases, print_phases
from bridge_fgo.tools.plan.recommend import Recommendation, Recommender
from bridge_fgo.tools.plan.report import as_json, print_estimate
from bridge_fgo.tools.plan.systems import SYSTEMS, Link, links
from bridge_fgo.tools.plan.verdict import Outcome, verdicts

REFUSED = 1
OF_A_CHECK = ("system", "gpus", "gpus_per_node", "vocab_size", "link_gbs", "activations_gb", "room_gib")
"""Options that decide whether a job fits."""
HUNDREDTHS = 100
"""Figures of a log are rounded to hundredths, so that the check that is printed has the same."""


def run(settings: Settings, log: Log | None = None) -> int:
    """Print the estimate; return 1 if training, or with phases `Residency`, would refuse the job, else 0.

    Also 1 if settings of the offload are given that training would refuse once the flag is set, if the job does not fit
    and that is checked, or if no way to run a log's job fits.

    Raises:
        ValueError: a setting or the config makes no estimate possible; says which and what to do.
    """
    of_links = links(settings.system, settings.link_gbs, settings.gpus_per_node)
    job = read_job(settings.target, settings.gpus, settings.offload, settings.vocab_size, settings.overrides)
    if job.bridge_refuses is not None:
        raise ValueError(f"Megatron-Bridge refuses this config: {job.bridge_refuses}")
    estimate = _estimate(job, settings, of_links)
    shortage = None if log is None else Shortage(log, estimate)
    if shortage is not None and not estimate.knows_activations:
        # Then the log's are the only ones: what was needed beside the rest.
        counted = math.ceil(HUNDREDTHS * shortage.uncounted / 1e9) / HUNDREDTHS
        settings = replace(settings, activations_gb=max(1 / HUNDREDTHS, counted))
        shortage = replace(shortage, estimate=_estimate(job, settings, of_links))
    if shortage is not None:
        room = min(shortage.room, estimate.room or SYSTEMS[of_links[0].name].room)
        settings = replace(settings, room_gib=math.floor(HUNDREDTHS * room / 2**30) / HUNDREDTHS)
        estimate = _estimate(job, settings, of_links)
    given = settings.forward_seconds, settings.backward_seconds, _activations(settings)
    recommender = Recommender(job, of_links[0], *given, estimate.room) if settings.recommend else None
    recommendation = None if recommender is None else recommender.recommend()
    if recommendation is not None and (way := recommendation.advised or recommendation.fewest) is not None:
        on = settings if way is recommendation.advised else replace(settings, gpus=way.gpus)
        recommendation = replace(recommendation, command=check_of(on, way.overrides))
    phases = plan_phases(estimate, settings.host_memory_limit_gib) if settings.phases else None
    first: list[str] = []
    if shortage is not None and recommendation is not None:
        first = list(shortage.lines(recommendation))
        estimate = replace(estimate, notes=[*shortage.notes(), *estimate.notes])
    if settings.json_output:
        advice = {} if recommendation is None else {"recommendation": asdict(recommendation)}
        moves = {} if phases is None else {"phases": phases.as_json()}
        errors = {} if log is None else {"out_of_memory": [asdict(error) for error in log.errors], "said": first}
        print(json.dumps(as_json(estimate) | advice | moves | errors, allow_nan=False))
    else:
        console = Console()
        print_estimate(console, estimate, recommendation, first)
        if phases is not None:
            print_phases(console, phases)
    if phases is not None and phases.refusals:
        return REFUSED
    if shortage is not None and recommendation is not None and recommendation.advised is None:
        return REFUSED
    if settings.check:
        (verdict,) = verdicts(estimate)
        if verdict.outcome is Outcome.unknown:
            raise ValueError(f"--check: {not_counted(job.config)}; give --activations-gb")
        if not verdict.is_trainable(job.flag):
            return REFUSED
    is_asked_for = job.flag or job.offload != OffloadConfig()
    return REFUSED if is_asked_for and estimate.refusals and log is None else 0


def _activations(settings: Settings) -> int | None:
    return None if settings.activations_gb is None else int(settings.activations_gb * 1e9)


def _estimate(job: Job, settings: Settings, of_links: list[Link]) -> Estimate:
    times = settings.forward_seconds, settings.backward_seconds
    room = None if settings.room_gib is None else int(settings.room_gib * 2**30)
    return make_estimate(job, job.offload, of_links, *times, _activations(settings), room=room)


def check_of(settings: Settings, advice: Sequence[str]) -> str:
    """Return the command that checks the job with what is advised, in the place of what was given for the same."""
    # Bridge takes a config with activation offload with this variable alone.
    asked = any("fine_grained_activation_offloading=True" in override for override in advice)
    words = [*["NVTE_CPU_OFFLOAD_V1=1"] * asked, "bridge-fgo", "plan", settings.target]
    for name in OF_A_CHECK:
        if (value := getattr(settings, name)) is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    # Advice says by itself how much to offload.
    kept = settings.offload | {"fraction": None, "gpu_memory_budget_gib": None}
    set_anew = {override.partition("=")[0] for override in advice}
    others = [override for override in settings.overrides or () if override.partition("=")[0] not in set_anew]
    return shlex.join([*words, *command_line(kept), "--check", *others, *advice])


@dataclass(frozen=True)
class Shortage:
    """The errors of a log, and the estimate of its job as it ran.

    Raises:
        ValueError: the log names a rank that the job does not have.
    """

    log: Log
    estimate: Estimate

    def __post_init__(self) -> None:
        gpus = self.estimate.job.parallel.gpus
        beyond = [error.rank for error in self.log.errors if error.rank is not None and error.rank >= gpus]
        if beyond:
            raise ValueError(
                f"the log names rank {beyond[0]}, and the job has {gpus} rank{'' if gpus == 1 else 's'}: give --gpus "
                "or another --job"
            )

    @property
    def uncounted(self) -> int:
        """Bytes that a rank needed and the estimate does not count, at least."""
        flag = self.estimate.job.flag
        return max(0, *(error.needed - self._stage(error).most(flag) for error in self.log.errors))

    @property
    def room(self) -> int:
        """Bytes that a peak may have by the estimate: what the rank could have had, less what is not counted."""
        return min(error.usable for error in self.log.errors) - self.uncounted

    def _stage(self, error: OutOfMemory) -> StageEstimate:
        """Return the stage of an error; the fullest if that is not known."""
        stages, job = self.estimate.stages, self.estimate.job
        if error.rank is None or not job.gpus_given:
            return max(stages, key=lambda stage: stage.most(job.flag))
        return stages[stage_of(job, error.rank)]

    def lines(self, found: Recommendation) -> Iterator[str]:
        """Yield what was short by how much, and what the advice costs."""
        job, stages = self.estimate.job, len(self.estimate.stages)
        for error in self.log.errors[: None if stages > 1 else 1]:
            stage = self._stage(error)
            known = stages > 1 and error.rank is not None and job.gpus_given
            yield f"Out of memory{f' on pipeline stage {stage.stage} of {stages}' if known else ''}: {error.told}"
        first = self.log.errors[0]
        if first.hint:
            yield first.hint
        how = "with the offload as it is set" if job.flag else "resident"
        yield f"The plan's peak there: {readable(self._stage(first).most(job.flag))} {how}"
        if self.log.lacks_offload:
            yield "The recipe asks for the offload, which did not run: the log lacks bridge_fgo's line"
        if self.uncounted:
            yield f"The log shows {readable(self.uncounted)} that the plan does not count"
        room = f"By the log a peak may have {readable(self.room)}"
        is_rounded = found.room > self.room - 2**30 / HUNDREDTHS
        yield room if is_rounded else f"{room}, with the plan's margin {readable(found.room)}"
        if found.advised is not None:
            added, step = found.advised.step - found.choices[0].step, found.choices[0].step
            yield f"What is advised adds {added:.2f} s to a step of {step:.2f} s, by the plan"

    def notes(self) -> Iterator[str]:
        """Yield what the log does not say, and how to give it."""
        yield from self.log.notes
        if not self.log.has_steps and self.log.errors[0].phase in ("in forward", "in backward"):
            moments = max(stage.states.moments for stage in self.estimate.stages)
            yield (
                f"the log has no step that was over: if this was the first, Adam's moments ({readable(moments)}) were "
                "not there yet, and up to as much is not counted"
            )
        if not self.estimate.job.gpus_given:
            yield "the log does not say on how many GPUs: add --gpus"


def stage_of(job: Job, rank: int) -> int:
    """Return the pipeline stage of a rank, in mcore's order of ranks."""
    parallel = job.parallel
    if job.config.dist.use_tp_pp_dp_mapping:
        return rank // (parallel.tensor * parallel.context) % parallel.pipeline
    return rank // parallel.stage_ranks
