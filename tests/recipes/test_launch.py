"""What `nemorun fgo pretrain` and `python -m recipes.launch` render and print, line by line."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

run = pytest.importorskip("nemo_run")

from nemo_run.config import get_nemorun_home, set_nemorun_home  # noqa: E402

from bridge_fgo.recipes import catalog, executors  # noqa: E402
from bridge_fgo.recipes.entrypoint import Job  # noqa: E402

GOLDEN = Path(__file__).with_name("golden")
ROOT = Path(__file__).parents[2]
DSV4 = [
    *("--factory", "dsv4_flash_64gpu", "account=acct", "partition=gb200", "container_image=/images/nemo.sqsh"),
    *("container_mounts=/data:/data,/lustre:/lustre", "env=HF_TOKEN", "retries=2", "fraction=0.5"),
]


@pytest.fixture
def launch(monkeypatch, capsys, tmp_path):
    """Call `python -m recipes.launch` in this process; returns what it printed, without what changes by itself."""
    before = get_nemorun_home()
    set_nemorun_home(str(tmp_path))
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setattr(sys, "executable", "/venv/bin/python")
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["launch.py", *arguments])
        run.cli.main(Job)
        return normalised(capsys.readouterr().out, tmp_path)

    from nemo_run.core.frontend.console.api import CONSOLE

    monkeypatch.setattr(CONSOLE, "width", 1000)
    with open(os.devnull) as nothing:  # NeMo-Run's shell commands read the standard input
        monkeypatch.setattr(sys, "stdin", nothing)
        yield call
    set_nemorun_home(before)


def normalised(text, home):
    """Take rich's time and source columns and rules away, and name the folder and what is random."""
    lines = []
    for line in text.replace(str(home), "HOME").splitlines():
        line = re.sub(r"\s+\w+\.py:\d+$", "", line.rstrip())
        line = re.sub(r"^(\[\d\d:\d\d:\d\d\]| {10}) ?", "", line).strip("─ " if "─" in line else "\n")
        line = re.sub(r"_\d{19}", "_ID", line)
        lines.append(re.sub(r"train-\w{12,}", "train-ID", line).rstrip())
    return re.sub(r"(?<='--rdzv-id',\n)( *)'\d+'", r"\1'NUMBER'", "\n".join(lines).strip()) + "\n"


def check_golden(name, text):
    """Compare with a kept file; BRIDGE_FGO_WRITE_GOLDEN=1 writes it, to be read before it is committed."""
    path = GOLDEN / name
    if os.environ.get("BRIDGE_FGO_WRITE_GOLDEN") == "1":
        path.write_text(text)
    assert text.splitlines() == path.read_text().splitlines()


def test_dry_run_of_v4_on_gb200_is_the_kept_one(launch, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    text = launch(*DSV4, "overrides=train.train_iters=10 'dataset.path_to_cache=/my cache'", "--dryrun")
    check_golden("dsv4_flash_64gpu.txt", text)
    assert "hf_0123456789" not in text


@pytest.mark.parametrize(("gpus_per_node", "nodes"), [(2, 32), (4, 16), (8, 8), (48, 2)])
def test_nodes_are_as_many_as_the_recipe_s_gpus_need(launch, monkeypatch, gpus_per_node, nodes):
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    lines = launch(*DSV4, f"gpus_per_node={gpus_per_node}", "segment=0", "--dryrun").splitlines()
    assert f"#SBATCH --nodes={nodes}" in lines


def test_dry_run_of_tiny_on_a_node_without_gpus_is_the_kept_one(launch):
    node = ("scheduler=slurm", "account=acct", "gpus_per_node=0", "segment=0")
    check_golden("tiny_slurm.txt", launch("--factory", "tiny", *node, "offload=false", "--dryrun"))


def test_dry_run_of_tiny_on_this_machine_is_the_kept_one(launch):
    check_golden("tiny_local.txt", launch("--factory", "tiny", "overrides=train.train_iters=3", "--dryrun"))


def test_no_file_of_a_submission_holds_a_secret(launch, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    job = Job(recipe="tiny", account="acct", env="HF_TOKEN")
    with run.Experiment("kept") as experiment:
        experiment.add(job.task(), executor=job.executor(), name="train")
        experiment.dryrun(delete_exp_dir=False, log=False)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.name == "train.sh" for path in written)
    assert any(b"HF_TOKEN" in path.read_bytes() for path in written)
    assert not any(b"hf_0123456789" in path.read_bytes() for path in written)


def test_each_process_is_bound_to_the_cpu_of_its_gpu(tmp_path):
    """The rendered script, run by bash with a numactl and a python that print their arguments."""
    for tool in ("numactl", "python"):
        (tmp_path / tool).write_text(f'#!/bin/bash\necho {tool} "$@"\n')
        (tmp_path / tool).chmod(0o755)
    command = executors.near_cpu(4, "python train.py 'a b'")
    nodes = []
    for local_rank in range(4):
        environment = {"PATH": f"{tmp_path}:/bin:/usr/bin", "SLURM_LOCALID": str(local_rank)}
        done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=True)
        nodes.append(re.fullmatch(r"numactl --cpunodebind=(\d) --membind=\1 python train.py a b\n", done.stdout)[1])
    assert nodes == ["0", "0", "1", "1"]


@pytest.mark.parametrize(("nodes", "segment"), [(1, 1), (2, 2), (16, 16), (18, 18), (32, 16), (64, 16), (19, 1)])
def test_a_segment_fits_a_rack_and_divides_the_nodes(nodes, segment):
    assert executors.segment_of(nodes) == segment


@pytest.mark.parametrize("name", catalog.RECIPES)
def test_every_recipe_is_a_factory(launch, name):
    lines = launch("--factory", name, "scheduler=slurm", "account=acct", "--dryrun").splitlines()
    assert any(line.endswith(f"python -m bridge_fgo.recipes.train {name} --offload") for line in lines)
    assert f"#SBATCH --nodes={max(1, catalog.find(name).gpus // catalog.GPUS_A_NODE)}" in lines
    for variable, value in catalog.find(name).environment.items():
        assert f"export {variable}={value}" in lines


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"account": None}, "account=None: Slurm needs an account"),
        ({"recipe": "llama"}, "recipe='llama': there is no such recipe"),
        ({"recipe": ""}, "recipe='': give --factory NAME, one of "),
        ({"scheduler": "pbs"}, "scheduler='pbs': use one of slurm, local"),
        ({"hf_config": "mine"}, "hf_config='mine': use one of auto, hub, kept"),
        ({"fraction": 2.0}, "OffloadConfig.fraction=2.0"),
        ({"fraction": 0.5, "offload": False}, "offload=false with fraction"),
        ({"env": "NOT_SET_HERE"}, "'NOT_SET_HERE' is not set here"),
        ({"env": "HF_TOKEN=secret"}, "'HF_TOKEN=secret' is not set here; give names only"),
        ({"nodes": 0}, "nodes=0: use a number of at least 1"),
        ({"gpus_per_node": -1}, "gpus_per_node=-1: use a number of at least 0"),
        ({"segment": -4}, "segment=-4: use a divisor of nodes=16, or 0"),
        ({"segment": 5}, "segment=5: use a divisor of nodes=16, or 0"),
        ({"segment": 16, "nodes": 8}, "segment=16: use a divisor of nodes=8, or 0"),
        ({"retries": -1}, "retries=-1: use a number of at least 0"),
    ],
)
def test_a_mistake_is_an_error_before_anything_is_launched(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Job(**{"recipe": "dsv4_flash_64gpu", "account": "acct"} | settings)


@pytest.mark.parametrize(
    "setting",
    [
        *({"account": "acct"}, {"partition": "gb200"}, {"nodes": 1}, {"segment": 0}, {"time": "00:10:00"}),
        *({"container_image": "image"}, {"container_mounts": "/a:/a"}, {"env": "PATH"}, {"retries": 1}),
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_on_this_machine_a_setting_of_slurm_is_an_error_that_names_it(setting):
    ((name, value),) = setting.items()
    with pytest.raises(ValueError, match=re.escape(f"scheduler=local with {name}={value!r}, for Slurm only")):
        Job(recipe="tiny", scheduler="local", **setting)


@pytest.mark.parametrize(
    ("recipe", "gpus_per_node", "here", "wanted"),
    [("llama3_70b_64gpu", None, 8, 64), ("tiny", 2, 0, 2), ("tiny", 9, 8, 9), ("nemotron_3_nano_8gpu", None, 4, 8)],
)
def test_a_job_that_does_not_fit_this_machine_is_an_error(recipe, gpus_per_node, here, wanted, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: here)
    expected = f"recipe {recipe} with gpus_per_node={wanted} does not fit this machine of {here} GPUs"
    with pytest.raises(ValueError, match=expected):
        Job(recipe=recipe, scheduler="local", gpus_per_node=gpus_per_node)


@pytest.mark.parametrize(
    ("recipe", "given", "processes"), [("tiny", None, 1), ("tiny", 4, 4), ("qwen3_30b_a3b_8gpu", None, 8)]
)
def test_this_machine_runs_a_process_a_gpu(recipe, given, processes, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    executor = Job(recipe=recipe, scheduler="local", gpus_per_node=given).executor()
    assert executor.nproc_per_node() == processes
    assert "CUDA_VISIBLE_DEVICES" not in executor.env_vars


def test_without_gpus_asked_for_the_one_process_sees_none():
    executor = Job(recipe="tiny", scheduler="local", gpus_per_node=0).executor()
    assert (executor.nproc_per_node(), executor.env_vars["CUDA_VISIBLE_DEVICES"]) == (1, "")


def test_nemorun_finds_the_command_by_its_entry_point_also_without_megatron(tmp_path):
    """In a process of its own, as the installed console script would start it on a login node."""
    (tmp_path / "megatron.py").write_text("raise ModuleNotFoundError('hidden by the test')")
    (entry,) = importlib.metadata.entry_points(group="nemo_run.cli", name="fgo")
    assert entry.value == "bridge_fgo.recipes.entrypoint"
    program = "import sys; sys.argv[0] = 'nemorun'; from nemo_run.__main__ import app; app()"
    arguments = ["fgo", "pretrain", "--factory", "dsv4_flash_64gpu", "account=acct", "--dryrun"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *arguments],
        env=os.environ | {"NEMORUN_HOME": str(tmp_path), "COLUMNS": "1000", "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert "#SBATCH --nodes=16" in lines
    assert (
        "exec numactl --cpunodebind=$((SLURM_LOCALID / 2)) --membind=$((SLURM_LOCALID / 2)) "
        + ("python -m bridge_fgo.recipes.train dsv4_flash_64gpu --offload")
        in lines
    )


def train_tiny_here(home, *settings):
    """Launch `tiny` on this machine, on the CPU, from a checkout and without an activated environment."""
    arguments = ["--factory", "tiny", "scheduler=local", "gpus_per_node=0", *settings, "--yes"]
    return subprocess.run(
        [sys.executable, "-m", "recipes.launch", *arguments],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "HOME": str(home), "NEMORUN_HOME": str(home), "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_tiny_trains_on_this_machine_without_an_activated_venv(tmp_path):
    done = train_tiny_here(tmp_path, "overrides=train.train_iters=2")
    assert done.returncode == 0, done.stderr
    (log,) = tmp_path.rglob("train/0/stdout.log")
    assert "step 2/2: loss " in log.read_text()


def test_a_training_that_fails_on_this_machine_ends_the_launch_with_status_1_and_says_where_its_logs_are(tmp_path):
    done = train_tiny_here(tmp_path, "budget_gib=10")
    assert done.returncode == 1
    *_, last = done.stderr.splitlines()
    folder = Path(last.partition("recipe tiny failed; its logs are in ")[2])
    assert any("gpu_memory_budget_gib=10.0 needs a GPU" in log.read_text() for log in folder.rglob("*.log"))


def test_recipes_launch_is_a_module_of_a_checkout(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "recipes.launch", "--factory", "dsv4_flash_64gpu", "--dryrun"],
        cwd=ROOT,
        env=os.environ | {"NEMORUN_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, "an error must not look like a submission"
    assert "account=None: Slurm needs an account; give account=NAME, or scheduler=local" in done.stderr
