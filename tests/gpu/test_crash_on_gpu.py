"""After a death on a GPU a training goes on bitwise.

    pytest -m gpu -s tests/gpu/test_crash_on_gpu.py

Printed (`-s`): seconds by part from each death to the first new step, and from a start from checkpoints.
"""

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from crash_child import DROPOUT, End, Job, Kept, run, seen, survivors
from forked import Server
from gpu_lane import NEEDS_CUDA, SMALL, needs_gpus

RAN_ON = "one H200 (40 deaths), two (8)"
DEATHS = 10
KEPT_BYTES = 16 * 2**30
GPU = Server("megatron_on_gpu")
TRAINING = Job(arm=(*SMALL, "--slab-bytes", str(64 * 2**20)), is_on_gpu=True, steps=12, most_after=5)
TRAININGS = {f"one rank, seed {seed}": (1, ()) for seed in range(4)} | {"DP": (2, ()), "TP": (2, ("--tp", "2"))}
"""Ranks and options of trainings, each of which dies `DEATHS` times."""
LARGE = Job(arm=("--layers", "12", "--seq", "1024", "--mbs", "1", "--gbs", "1"), is_on_gpu=True, steps=10)
"""0.89B parameters, 10.6 GB of states."""

pytestmark = NEEDS_CUDA


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_that_dies_at_any_instruction_ends_bitwise_as_one_that_never_does(tmp_path, name) -> None:
    ranks, options = TRAININGS[name]
    needs_gpus(ranks)
    arm = (*TRAINING.arm, *options)
    whole = dataclasses.replace(TRAINING, folder=tmp_path / "whole", ranks=ranks, arm=arm, changes=DROPOUT)
    assert run(whole, GPU.start) == [0] * ranks, seen(whole).logs
    job = dataclasses.replace(whole, folder=tmp_path)
    for training in survivors(job, seen(whole), DEATHS, name, GPU.start, KEPT_BYTES):
        died = None
        for event in training.events[0]:
            if event["event"] == "ended":
                died = event["at"]
            elif event["event"] == "step" and died is not None:
                parts = {name: round(seconds, 3) for name, seconds in event["parts"].items()}
                print(f"from death to the end of step {event['step']}: {event['at'] - died:.2f} s, of it {parts}")
                died = None


def test_a_training_goes_on_from_a_kept_step_and_from_checkpoints_of_bridge_and_nvrx(tmp_path) -> None:
    saved = {way: ("--save", str(tmp_path / way), "--load", str(tmp_path / way)) for way in ("bridge", "local")}
    local = {"ckpt_type": "local", "save_interval": 8, "local_ckpt_dir": str(tmp_path / "fast")}
    ways = {
        "a kept step": (("--survive-crash",), ()),
        "a checkpoint": ((*saved["bridge"], "--save-interval", "8"), ()),
        "NVRx's local checkpoint": (
            (*saved["local"], "--save-interval", "100"),
            tuple((f"checkpoint.non_persistent_{name}", value) for name, value in local.items()),
        ),
    }
    with Kept(str(os.getpid()), limit=3 * KEPT_BYTES) as kept, ThreadPoolExecutor(len(ways)) as pool:
        jobs = [
            dataclasses.replace(
                LARGE, folder=tmp_path / f"log{number}", keeper=kept.name, arm=(*LARGE.arm, *arm), changes=changes
            )
            for number, (arm, changes) in enumerate(ways.values())
        ]
        killed = [dataclasses.replace(job, end=End(0, step=9)) for job in jobs]
        statuses = list(pool.map(lambda job: run(job, GPU.start), killed))
        assert all(map(any, statuses)), [seen(job).logs for job in jobs]
        for way, job in zip(ways, jobs, strict=True):
            assert run(job, GPU.start) == [0], seen(job).logs[0][-3000:]
            found = seen(job)
            assert found.of("begin")[-1]["step"] >= 8, found.logs[0][-3000:]
            begun = found.of("setup")[-1]["at"]
            first = next(event for event in found.of("step") if event["at"] > begun)
            parts = {name: round(seconds, 2) for name, seconds in first["parts"].items()}
            loads = [round(event["seconds"], 2) for event in found.of("load") if event["at"] > begun]
            seconds = first["at"] - begun
            print(f"from {way}: {seconds:.2f} s from setup to the end of the first step, of it {parts or loads}")
