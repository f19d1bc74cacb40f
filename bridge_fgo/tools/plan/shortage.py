"""A job that ran out of memory: what its log says, held against its estimate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bridge_fgo.config import readable
from bridge_fgo.tools.job.job import Job
from bridge_fgo.tools.plan.estimate import Estimate, StageEstimate
from bridge_fgo.tools.plan.log import Log, OutOfMemory
from bridge_fgo.tools.plan.recommend import Recommendation


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
                f"the log names rank {beyond[0]}, and the job has {gpus} GPUs: give --gpus or another --job"
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
        """Return the stage of an error; the fullest where that is not known."""
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
        yield f"{room}, with the plan's margin {readable(found.room)}" if found.room < self.room else room
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
