"""After a death on a GPU a training goes on bitwise.

    pytest -m gpu -s tests/gpu/test_crash_on_gpu.py

Printed (`-s`): seconds by part from each death to the first new step, and step times with and without `survive_crash`.
"""

import dataclasses
import os
import random
import statistics

from crash_child import DROPOUT, Job, Kept, random_end, require_same, run, seen
from forked import Server
from gpu_lane import NEEDS_CUDA, SMALL

RAN_ON = "nowhere yet"
DEATHS = 10
GPU = Server("megatron_on_gpu")
TRAINING = Job(arm=(*SMALL, "--slab-bytes", str(64 * 2**20)), is_on_gpu=True, steps=12)
WARM = 7
"""Steps of a process until each is like the next."""
MOST_SLOWER = 1.005

pytestmark = NEEDS_CUDA


def test_a_training_that_dies_ten_times_ends_bitwise_as_one_that_never_does(tmp_path) -> None:
    generator, left = random.Random(0), DEATHS
    plain = dataclasses.replace(TRAINING, changes=DROPOUT)
    whole = dataclasses.replace(plain, folder=tmp_path / "whole")
    assert run(whole, start=GPU.start) == [0], seen(whole).logs
    number = 0
    while left:
        number += 1
        with Kept(f"{os.getpid()}.{number}", limit=16 * 2**30) as kept:
            arm = (*plain.arm, "--survive-crash")
            job = dataclasses.replace(plain, folder=tmp_path / str(number), keeper=kept.name, arm=arm)
            while any(run(dataclasses.replace(job, end=random_end(generator, 1) if left else None), start=GPU.start)):
                assert left, seen(job).logs
                left -= 1
                if seen(job).of("end"):
                    break  # it died as it ended
        require_same(seen(job), seen(whole))
        died = None
        for event in seen(job).events[0]:
            if event["event"] == "ended":
                died = event["at"]
            elif event["event"] == "step" and died is not None:
                parts = {name: round(seconds, 3) for name, seconds in event["parts"].items()}
                print(f"from death to the end of step {event['step']}: {event['at'] - died:.2f} s, of it {parts}")
                died = None


def test_steps_take_as_long_with_survive_crash_as_without(tmp_path) -> None:
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(3):
        for survives in seconds:
            with Kept(f"{os.getpid()}.{turn}.{survives}", limit=16 * 2**30) as kept:
                arm = (*TRAINING.arm, *(["--survive-crash"] if survives else []))
                folder = tmp_path / f"{turn}.{survives}"
                job = dataclasses.replace(TRAINING, folder=folder, keeper=kept.name, arm=arm, steps=30)
                assert run(job, start=GPU.start) == [0], seen(job).logs
            seconds[survives] += [event["seconds"] for event in seen(job).of("step")[WARM:]]
    without, with_it = (statistics.median(each) for each in seconds.values())
    print(f"median step: {without:.4f} s without, {with_it:.4f} s with survive_crash")
    assert with_it <= MOST_SLOWER * without
