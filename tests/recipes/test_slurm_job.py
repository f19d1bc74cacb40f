"""slurm/dsv4_flash.sh as a job, with commands of Slurm's that write down how they are called."""

import shlex
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "slurm" / "dsv4_flash.sh"
SETTINGS = {"NUMA": "0", "PREFLIGHT": "", "CHECKPOINTS": ""}


def job(folder, srun="exit 0", **environment):
    """Run the script as a job whose `srun` ends as given; return its status, and the calls of Slurm's commands."""
    calls = folder / "calls"
    calls.write_text("")
    for name, ends in (("srun", srun), ("scontrol", ""), ("scancel", "")):
        (folder / name).write_text(f'#!/bin/bash\necho "{name} $*" >>"$CALLS"\n{ends}\n')
        (folder / name).chmod(0o755)
    given = {"PATH": f"{folder}:/usr/bin:/bin", "CALLS": str(calls), "SLURM_JOB_ID": "7", **SETTINGS, **environment}
    done = subprocess.run([SCRIPT], cwd=folder, env=given, capture_output=True, text=True, check=False)
    return done.returncode, calls.read_text().splitlines()


@pytest.mark.parametrize(
    ("restarts", "status", "again"), [("0", 3, True), ("2", 3, True), ("3", 3, False), ("0", 0, False)]
)
def test_a_job_that_failed_is_queued_again_up_to_max_restarts_and_ends_with_its_status(
    tmp_path, restarts, status, again
):
    ended, calls = job(tmp_path, f"exit {status}", SLURM_RESTART_COUNT=restarts, MAX_RESTARTS="3")
    assert ended == status
    assert ("scontrol requeue 7" in calls) == again


def test_a_preflight_that_refuses_is_status_1_and_the_job_is_not_queued_again(tmp_path):
    ended, calls = job(tmp_path, "exit 5", PREFLIGHT="check")
    assert ended == 1 and len(calls) == 1


def test_a_job_runs_what_the_dry_run_prints(tmp_path):
    given = {"CONTAINER_IMAGE": "/i.sqsh", "ENV_NAMES": "HF_TOKEN", "CONTAINER_MOUNTS": "/a:/b", "PREFLIGHT": "check"}
    _, calls = job(tmp_path, **given)
    environment = {"PATH": "/usr/bin:/bin", "DRY_RUN": "1", **SETTINGS, **given}
    dry = subprocess.run([SCRIPT], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    printed = [" ".join(shlex.split(line)) for line in dry.stdout.splitlines() if line.startswith("srun ")]
    assert calls == printed and len(printed) == 2


def test_slurm_is_asked_for_time_to_save_and_to_queue_the_job_again():
    options = [line.split()[1] for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH ")]
    assert {"--requeue", "--signal=B:USR1@600", "--open-mode=append"} <= set(options)
