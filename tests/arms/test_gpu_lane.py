"""The GPU lane and the bench of sleeps on a machine without a GPU."""

import json
import os
import sys
from pathlib import Path

import pytest
from children import run_python

from harness import sleeps
from harness.arms.runner import ArmRun, EventTail, environment_of

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_no_arm_of_the_gpu_lane_is_refused():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    lane = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu", "-q", "-rs", "-p", "no:cacheprovider"]
    done = run_python(lane, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout
    assert "no CUDA device; its arms would not be refused" in done.stdout
    assert not set(done.stdout.splitlines()[-1].split()) & {"failed", "passed", "error", "errors"}


@pytest.mark.slow
def test_an_arm_that_uses_what_is_away_runs_without_a_gpu_and_each_use_is_refused_by_name():
    touched = [sys.executable, "tests/gpu/phases_arm.py", "--sleep", "touched"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = run_python(touched, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["others"] and len(found["refused"]) > 15


@pytest.mark.slow
def test_the_bench_of_sleeps_is_bitwise_without_a_gpu(tmp_path, capsys):
    arms = {}
    for by in ("never", "ours", "mcore"):
        options = ["--by", by, "--cpu", "--steps", "2", "--no-dp-overlap", "--events", str(tmp_path / by)]
        done = run_python([sys.executable, "-m", sleeps.ARM, *options], env=environment_of(os.environ), cwd=ROOT)
        assert done.returncode == 0, done.stderr[-3000:]
        arms[by] = ArmRun(by)
        for event in EventTail(tmp_path / by).new_events():
            arms[by].add(event)
    assert sleeps.tell(arms, is_on_gpu=False)
    assert [line.count("equal") for line in capsys.readouterr().out.splitlines()[-2:]] == [1, 1]
