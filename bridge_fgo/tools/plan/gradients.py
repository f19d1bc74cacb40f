"""Count DDP's gradients under `OffloadConfig.gradients`: on the GPU while activations peak, and copied over the link.

By the rules of `bridge_fgo.engines.gradients`, on mcore's own buckets.
"""

from __future__ import annotations

from bridge_fgo.config import OffloadConfig
from bridge_fgo.engines.gradients import AHEAD, LARGEST_SHARE, MOST_LEAVING
from bridge_fgo.tools.job.held import Held
from bridge_fgo.tools.job.job import Job
from bridge_fgo.tools.plan.activations import NO_GRADIENT, Backward, Course, backward_of


def moves(held: Held, nbytes: int) -> bool:
    """Return whether a bucket of so many bytes is small enough to leave between microbatches."""
    return LARGEST_SHARE * nbytes <= held.gradients


def moving_bytes(held: Held, offload: OffloadConfig) -> int:
    """Return the bytes of a rank's gradients that may leave between microbatches, for which host memory is pinned."""
    if offload.gradients is not True:
        return 0
    return sum(nbytes for _, nbytes in held.buckets if moves(held, nbytes))


def spared_bytes(job: Job, stage: int, held: Held, offload: OffloadConfig, activations: int | None) -> int:
    """Return by how much less gradients and activations of a stage have together than the sum of their peaks."""
    if not offload.gradients or activations is None:
        return 0
    is_several = job.microbatches > 1
    if is_several and offload.gradients == "lazy":
        return 0
    backward = backward_of(job, stage)
    if backward is None or backward.peak != activations:
        backward = _in_proportion(activations, len(job.tensors(stage)))
    buckets = sorted(held.buckets, reverse=True)  # as a backward needs them
    changing = [(last, nbytes) for last, nbytes in buckets if not is_several or moves(held, nbytes)]
    staying = held.gradients - sum(nbytes for _, nbytes in changing)
    # In a step's last backward buckets come and stay; in the others they leave again, some at a time.
    most = _together(backward.last, changing, AHEAD if is_several else 0, len(changing))
    if is_several:
        most = max(most, _together(backward.most, changing, AHEAD, MOST_LEAVING))
    return max(0, activations + held.gradients - staying - most)


def _together(course: Course, buckets: list[tuple[int, int]], ahead: int, leaving: int) -> int:
    """Return the most bytes of activations and buckets.

    Of the buckets those are there that a backward has reached, but of these at most the newest and so many `leaving`,
    and so many `ahead`.
    """
    found = []
    for activations, reached in course:
        come = sum(last >= reached for last, _ in buckets)
        there = buckets[max(0, come - 1 - leaving) : come + ahead]
        found.append(activations + sum(nbytes for _, nbytes in there))
    return max(found)


def _in_proportion(activations: int, tensors: int) -> Backward:
    """Return a backward whose activations go with each of the tensors alike, where nothing else is known of them."""
    course = [(activations * (number + 1) // tensors, number) for number in reversed(range(tensors))]
    return Backward([(activations, NO_GRADIENT), *course], [(activations, NO_GRADIENT), *course])
