"""slurm/dsv4_flash.sh: what it would run, what a job runs with commands of Slurm's that only write down how they are
called, and what it does in a real Slurm of one node, where that can be had."""

import contextlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked import PATIENCE

from bridge_fgo.recipes import catalog
from bridge_fgo.recipes.executors import checkpoint_overrides

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "slurm" / "dsv4_flash.sh"
GOLDEN = Path(__file__).with_name("golden")


def write_command(path, text):
    path.write_text(f"#!/usr/bin/env bash\n{text}")
    path.chmod(0o755)


# --- dry runs ---


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
    write_command(tmp_path / "srun", 'printf "%s\\n" "$@"\n')
    text = dry_run("x='a b'", "y=$HOME", PREFLIGHT="", NUMA="0")
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", text], env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-2:] == ["x='a b'", "y=$HOME"]


@pytest.mark.parametrize("name", ["dsv4_flash_64gpu", "dsv4_flash_64gpu_bf16"])
def test_environment_is_the_recipes(name):
    exports = [line for line in dry_run(RECIPE=name).splitlines() if line.startswith("export ")]
    assert exports == [f"export {variable}={value}" for variable, value in catalog.find(name).environment.items()]


BARE = {"NUMA": "0", "CHECKPOINTS": ""}
SAVED = " ".join(checkpoint_overrides("/c"))


@pytest.mark.parametrize(
    ("arguments", "environment", "preflight", "training"),
    [
        ("", {"OFFLOAD": "0"}, None, "--no-offload"),
        ("", {"PREFLIGHT": ""}, None, "--offload"),
        ("", {"RECIPE": "tiny", "OFFLOAD": "0", "PREFLIGHT": ""}, None, "--no-offload"),
        ("a=1", {"PREFLIGHT": "nvidia-smi -L", "OFFLOAD": "0"}, "16: nvidia-smi -L", "--no-offload a=1"),
        # The preflight examines the job that is trained, on its GPUs and with its Python.
        ("a=1", {"OFFLOAD_OPTIONS": "--fraction 0.5 --engine native"},
         "16: python -m bridge_fgo doctor dsv4_flash_64gpu --gpus 64 --fraction 0.5 --engine native a=1",
         "--offload --fraction 0.5 --engine native a=1"),
        ("lr=1 \"x='a b'\"", {"CHECKPOINTS": "/c"},
         f"16: python -m bridge_fgo doctor dsv4_flash_64gpu --gpus 64 {SAVED} lr=1 x='a b'",
         f"--offload {SAVED} lr=1 x='a b'"),
        ("", {"SLURM_JOB_NUM_NODES": "8", "SLURM_NTASKS": "32", "PYTHON": "/venv/python"},
         "8: /venv/python -m bridge_fgo doctor dsv4_flash_64gpu --gpus 32", "--offload"),
        # Each task trains tiny by itself, on the CPU without Bridge's config: by default it gets no overrides.
        ("", {"RECIPE": "tiny", "SLURM_NTASKS": "64", "CHECKPOINTS": None}, "16: python -m bridge_fgo doctor tiny",
         "--offload"),
    ],
)  # fmt: skip
def test_a_job_runs_its_preflight_and_its_training(arguments, environment, preflight, training):
    given = {name: value for name, value in (BARE | environment).items() if value is not None}
    lines = dry_run(*shlex.split(arguments), **given).splitlines()
    found = [" ".join(shlex.split(line)) for line in lines if line.startswith("srun ")]
    python, recipe = environment.get("PYTHON", "python"), environment.get("RECIPE", "dsv4_flash_64gpu")
    expected = [f"srun --kill-on-bad-exit=1 {python} -m bridge_fgo.recipes.train {recipe} {training}"]
    if preflight is not None:
        nodes, _, command = preflight.partition(": ")
        expected.insert(0, f"srun --ntasks={nodes} --ntasks-per-node=1 {command}")
    assert found == expected


@pytest.mark.parametrize("folder", ["/a=b/c", "/a,b", "~/x", "my dir (x)", "2024"])
def test_a_folder_of_checkpoints_is_one_value_to_hydra(folder):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    words = shlex.split(dry_run(CHECKPOINTS=folder, PREFLIGHT="", NUMA="0").splitlines()[-1])
    given = [word for word in words if word.startswith("checkpoint.")]
    assert [override.value() for override in OverridesParser.create().parse_overrides(given)] == [folder, folder]


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
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# --- as a job, with commands of Slurm's that write down how they are called ---

SETTINGS = BARE | {"PREFLIGHT": ""}


def job(folder, srun="exit 0", **environment):
    """Run the script as a job whose `srun` ends as given; return its status, and the calls of Slurm's commands."""
    calls = folder / "calls"
    calls.write_text("")
    for name, ends in (("srun", srun), ("scontrol", ""), ("scancel", "")):
        write_command(folder / name, f'echo "{name} $*" >>"$CALLS"\n{ends}\n')
    given = {"PATH": f"{folder}:/usr/bin:/bin", "CALLS": str(calls), "SLURM_JOB_ID": "7", **SETTINGS, **environment}
    done = subprocess.run([SCRIPT], cwd=folder, env=given, capture_output=True, text=True, check=False)
    return done.returncode, calls.read_text().splitlines()


@pytest.mark.parametrize(
    ("restarts", "status", "again"),
    [("0", 3, True), ("2", 3, True), ("3", 3, False), ("0", 0, False), ("0", 126, False), ("0", 127, False)],
)
def test_a_job_that_failed_is_queued_again_up_to_max_restarts_with_its_status(tmp_path, restarts, status, again):
    ended, calls = job(tmp_path, f"exit {status}", SLURM_RESTART_COUNT=restarts, MAX_RESTARTS="3")
    assert ended == status
    assert ("scontrol requeue 7" in calls) == again


@pytest.mark.parametrize(("checkpoints", "again"), [("/ck", True), ("", False)])
def test_a_job_whose_time_is_up_lets_training_end_and_is_queued_again_if_it_has_checkpoints(
    tmp_path, checkpoints, again
):
    _, calls = job(tmp_path, 'kill -USR1 "$PPID"; sleep 0.5; exit 1', CHECKPOINTS=checkpoints)
    assert calls[1:] == ["scancel --signal=URG 7", *["scontrol requeue 7"] * again]


@pytest.mark.parametrize(("node", "check", "calls"), [("0", "true", 2), ("1", "true", 1), ("0", "false", 1)])
def test_a_job_that_the_preflight_refuses_or_numactl_cannot_bind_is_not_trained(tmp_path, node, check, calls):
    write_command(tmp_path / "numactl", f"[[ $1 == --cpunodebind={node} ]] && {check}\n")
    runs = 'while [[ $1 == --* ]]; do shift; done\n[[ $* == *"recipes.train"* ]] || "$@"'
    ended, called = job(tmp_path, runs, NUMA="1", PREFLIGHT="true", SLURM_NTASKS_PER_NODE="2")
    assert (ended, len(called)) == (calls == 1, calls), "and not queued again"


def test_a_job_runs_what_the_dry_run_prints_and_slurm_is_asked_for_time_to_save(tmp_path):
    given = {"CONTAINER_IMAGE": "/i.sqsh", "ENV_NAMES": "HF_TOKEN", "CONTAINER_MOUNTS": "/a:/b", "PREFLIGHT": "check"}
    _, calls = job(tmp_path, **given)
    lines = dry_run(**SETTINGS | given).splitlines()
    printed = [" ".join(shlex.split(line)) for line in lines if line.startswith("srun ")]
    assert calls == printed and len(printed) == 2
    options = [line.split()[1] for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH ")]
    assert {"--requeue", "--signal=B:USR1@600", "--open-mode=append"} <= set(options)


# --- in a real Slurm ---

CONFIG = """\
ClusterName=test
SlurmctldHost={host}
SlurmUser=root
AuthType=auth/none
CredType=cred/none
SlurmctldPort={ctld_port}
SlurmdPort={slurmd_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
KillWait=2
NodeName={host} CPUs={cpus} RealMemory=1000 State=UNKNOWN
PartitionName=cpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not():
    """Return why no Slurm of one node (Debian's, without authentication) can be started here, or None."""
    missing = [tool for tool in ("slurmctld", "slurmd", "sbatch") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: slurmctld, slurmd, slurm-client)"
    return None if os.geteuid() == 0 else "slurmd needs root"


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def cluster(folder):
    """Start the daemons in a folder; yields the environment for Slurm's commands, and ends the daemons."""
    host = socket.gethostname().split(".")[0]
    ctld_port, slurmd_port = free_ports(2)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    settings = dict(host=host, folder=folder, ctld_port=ctld_port, slurmd_port=slurmd_port, cpus=os.cpu_count())
    (folder / "slurm.conf").write_text(CONFIG.format(**settings))
    # Tests before this one have had mcore choose an attention for other models, which it notes in the environment.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NVTE_")}
    environment["SLURM_CONF"] = str(folder / "slurm.conf")
    with contextlib.ExitStack() as stack:
        for daemon in ("slurmctld", "slurmd"):
            log = stack.enter_context(open(folder / f"{daemon}.log", "w"))
            process = subprocess.Popen([daemon, "-D"], env=environment, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)
        wait_until(lambda: output(["sinfo", "-h", "-o", "%T"], environment) == "idle")
        yield environment
        output(["scancel", "--user=root"], environment)


def output(command, environment):
    """Return what a command of Slurm printed, stripped; whether it failed is the caller's to see."""
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout.strip()


def wait_until(condition, describe=lambda: ""):
    """Wait for a condition to hold; raises AssertionError with what is described after PATIENCE."""
    ends = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < ends, f"not within {PATIENCE} s\n{describe()}"
        time.sleep(0.2)


def wait_for_job(job, environment):
    """Wait until a job has left the queue."""
    wait_until(
        lambda: output(["squeue", "-h", "-j", job], environment) == "",
        lambda: output(["scontrol", "show", "job", job], environment),
    )


def needs_slurm(test):
    """Mark a test that has a Slurm of one node of its own: daemons of minutes, for the slow lane."""
    return pytest.mark.slow(pytest.mark.skipif(why_not() is not None, reason=str(why_not()))(test))


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

    def call(*arguments, **environment):
        one_node = ["--nodes=1", "--ntasks-per-node=1", f"--output={tmp_path}/%j.out"]
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
def test_tiny_trains_by_sbatch(submit, slurm):
    job, printed = submit("train.train_iters=3", "train.global_batch_size=2", CHECKPOINTS="", PREFLIGHT=None)
    wait_for_job(job, slurm)
    text = printed.read_text()
    before, trained, _ = text.partition("iteration        1/       3")
    assert trained and "Nothing is refused by the offload." in before, "by the preflight"
    assert "iteration        3/       3 |" in text
    assert re.search(r"optimizer-state offload on, engine native.*: (\S+ MiB) of \1 a rank offloaded", text)


@pytest.fixture
def launch(slurm, tmp_path):
    """Submit a recipe by NeMo-Run to the one node; returns the job."""

    def call(recipe, *arguments):
        node = ["scheduler=slurm", "account=acct", "nodes=1", "gpus_per_node=0", "segment=0", "env=PYTHONPATH"]
        done = subprocess.run(
            [sys.executable, "-m", "recipes.launch", "--factory", recipe, "--yes", "--detach", *node, *arguments],
            cwd=ROOT,
            env=slurm,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return re.search(r"Job id: (\d+)", done.stdout)[1]

    return call


def printed_by(job, slurm):
    """Return what a job of NeMo-Run has printed, before training and in it."""
    return "".join(path.read_text() for path in sorted(Path(slurm["NEMORUN_HOME"]).rglob(f"*_{job}*.out")))


@needs_slurm
def test_tiny_trains_by_nemo_run_with_the_python_that_is_named(launch, slurm, tmp_path):
    write_command(tmp_path / "my_python", f'echo "mine $*"\nexec {sys.executable} "$@"\n')
    job = launch("tiny", f"python={tmp_path}/my_python", "overrides=train.train_iters=3 train.global_batch_size=2")
    wait_for_job(job, slurm)
    text = printed_by(job, slurm)
    assert "iteration        3/       3 |" in text and "Nothing is refused by the offload." in text
    assert "mine -m bridge_fgo doctor tiny" in text and "mine -m bridge_fgo.recipes.train tiny" in text


@needs_slurm
def test_a_job_of_nemo_run_saves_as_its_time_ends_and_is_queued_again(launch, slurm, tmp_path):
    trainer, started = tmp_path / "trainer_python", tmp_path / "started"
    write_command(trainer, f"STARTED={started}\n{TRAINER}")
    job = launch("tiny", f"python={trainer}", "preflight=false", "checkpoints=/ck", "time=00:01:00")
    queued = {"JobState=PENDING", "Restarts=1"}  # after about half of its minute
    wait_until(lambda: queued <= set(output(["scontrol", "show", "job", job], slurm).split()))
    output(["scancel", job], slurm)
    assert "saved" in printed_by(job, slurm).splitlines()


TRAINER = """\
echo "restart ${SLURM_RESTART_COUNT:-0}: $*"
case ${SLURM_RESTART_COUNT:-0} in
0) trap 'sleep 4; echo "saved"; exit 0' URG; touch "$STARTED"; for i in {1..600}; do sleep 0.1; done ;;
1) exit 3 ;;
esac
"""


@needs_slurm
def test_a_job_saves_as_its_time_ends_and_is_queued_again_also_after_a_failure(submit, slurm, tmp_path):
    """Saving takes longer than the KillWait after which Slurm kills what it has asked to end."""
    trainer, started = tmp_path / "trainer", tmp_path / "started"
    write_command(trainer, TRAINER)
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
    arguments = " ".join(checkpoint_overrides("/ck"))
    expected = [f"restart {n}: -m bridge_fgo.recipes.train tiny --offload {arguments}" for n in range(3)]
    assert [line for line in lines if line.startswith("restart ")] == expected
    assert "saved" in lines
    assert any("status 3, time is up: 0, queued again: 1" in line for line in lines)
