"""A training that dies at any instruction goes on from its newest finished step, bitwise"""

import dataclasses
import itertools
import os
import random

import pytest
from crash_child import DROPOUT, Job, Kept, random_end, require_same, run, seen

pytestmark = [pytest.mark.usefixtures("cpu_standins"), pytest.mark.slow]

KILLS = int(os.environ.get("CRASH_KILLS", "12"))
"""Deaths of all trainings together: in CI so many."""
SEED = int(os.environ.get("CRASH_SEED", "0"))
EXPERTS = ("--experts", "4", "--no-grouped-experts")
EXPERT_BIAS = (("model.moe_router_enable_expert_bias", True), ("model.moe_router_score_function", "sigmoid"))
JOBS = {
    "one rank": Job(),
    "dropout, late copies": Job(changes=DROPOUT, is_late=7),
    "experts": Job(arm=EXPERTS, changes=EXPERT_BIAS),
    "DP": Job(ranks=2),
    "TP, dropout": Job(ranks=2, arm=("--tp", "2"), changes=DROPOUT),
    "PP": Job(ranks=2, arm=("--pp", "2")),
    "EP": Job(ranks=2, arm=("--ep", "2", *EXPERTS)),
    "DP, whole parameters": Job(ranks=2, arm=("--no-distributed",)),
}


def survives(job, folder, keeper):
    return dataclasses.replace(job, folder=folder, keeper=keeper, arm=(*job.arm, "--survive-crash"))


@pytest.mark.parametrize("name", JOBS)
def test_a_training_that_dies_at_any_instruction_ends_bitwise_as_one_that_never_does(tmp_path, name):
    generator = random.Random(f"{name} {SEED}")
    whole = dataclasses.replace(JOBS[name], folder=tmp_path / "whole")
    assert run(whole) == [0] * whole.ranks, seen(whole).logs
    left = KILLS // len(JOBS) + (list(JOBS).index(name) < KILLS % len(JOBS))
    for number in itertools.count():
        with Kept(f"{os.getpid()}.{number}") as kept:
            job = survives(JOBS[name], tmp_path / str(number), kept.name)
            while any(run(dataclasses.replace(job, end=random_end(generator, job.ranks) if left else None))):
                assert left, seen(job).logs
                left -= 1
        require_same(seen(job), seen(whole))
        if not left:
            return
