"""What `nemorun fgo pretrain` and `python -m recipes.launch` render and print, line by line."""

import contextlib
import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import nemo_run as run
import pytest
from nemo_run.config import get_nemorun_home, set_nemorun_home
from torchx.specs import AppState

from bridge_fgo.recipes import catalog
from bridge_fgo.recipes.entrypoint import Job, PretrainContext
from bridge_fgo.tools import options

GOLDEN = Path(__file__).with_name("golden")
ROOT = Path(__file__).parents[2]
DSV4 = [
    *("--factory", "dsv4_flash_64gpu", "account=acct", "partition=gb200", "container_image=/images/nemo.sqsh"),
    *("container_mounts=/data:/data,/lustre:/lustre", "env=HF_TOKEN", "retries=2", "fraction=0.5"),
    "checkpoints=/lustre/ck",
]


@pytest.fixture
def launch(monkeypatch, capsys, tmp_path):
    """Call `python -m recipes.launch` in this process; returns what it printed, without what changes by itself."""
    before = get_nemorun_home()
    set_nemorun_home(str(tmp_path))
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setattr(sys, "executable", "/venv/bin/python")
    monkeypatch.setattr(Job, "check", lambda job: [])  # half a minute; see the tests of the dry run
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["launch.py", *arguments])
        run.cli.main(Job)
        return normalised(capsys.readouterr().out, tmp_path)

    from nemo_run.core.frontend.console.api import CONSOLE

    monkeypatch.setattr(CONSOLE, "width", 1000)
    monkeypatch.setattr("nemo_run.cli.api.NEMORUN_SKIP_CONFIRMATION", None)  # it keeps the answer of another test
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


def words_of_srun(text):
    """Return the words of the one line of shell that starts the processes, after the preflight's."""
    (line,) = [line for line in text.splitlines() if line.startswith("srun --output ")]
    return shlex.split(line)


def check_golden(name, text):
    """Compare with a kept file; BRIDGE_FGO_WRITE_GOLDEN=1 writes it, to be read before it is committed."""
    path = GOLDEN / name
    if os.environ.get("BRIDGE_FGO_WRITE_GOLDEN") == "1":
        path.write_text(text)
    assert text.splitlines() == path.read_text().splitlines()


def test_dry_runs_of_v4_on_gb200_and_of_tiny_here_are_the_kept_ones(launch, monkeypatch, tmp_path):
    check_golden("tiny_local.txt", launch("--factory", "tiny", "overrides=train.train_iters=3", "--dryrun"))
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    text = launch(*DSV4, "overrides=train.train_iters=10 'dataset.path_to_cache=/my cache'", "--dryrun")
    check_golden("dsv4_flash_64gpu.txt", text)
    assert "hf_0123456789" not in text


def test_an_argument_with_a_space_is_one_of_each_process_and_overrides_stand_by_themselves(launch):
    node = ("scheduler=slurm", "account=acct", "gpus_per_node=0")
    text = launch("--factory", "tiny", *node, "overrides=a=1 'b=/my cache'", "--dryrun")
    assert words_of_srun(text)[-4:] == ["tiny", "--offload", "a=1", "b=/my cache"]
    here = Job(recipe="tiny", scheduler="local", overrides="a=1 'b=/my cache'")
    assert here.task().args == ["tiny", "--offload", "a=1", "b=/my cache"]  # torchrun's arguments as they are
    own = ("train.train_iters=3", "optimizer.offload.fraction=0.5", "+model.x=/my cache")
    text = launch("--factory", "tiny", own[0], *node, *own[1:], "overrides=a=1 b=2", "--dryrun")
    assert words_of_srun(text)[-7:] == ["tiny", "--offload", "a=1", "b=2", *own]


@pytest.mark.parametrize("value", ["lazy", "true", "false"])
def test_gradients_are_a_word_or_true_or_false(launch, value):
    node = ("scheduler=slurm", "account=acct", "gpus_per_node=0")
    words = words_of_srun(launch("--factory", "tiny", *node, f"gradients={value}", "--dryrun"))
    (given,) = (option for option in options.OPTIONS if option.setting == "gradients")
    assert given.read(words[words.index("--gradients") + 1]) == {"true": True, "false": False}.get(value, value)


@pytest.mark.parametrize(
    ("recipe", "settings", "lines"),
    [
        *(
            ("dsv4_flash_64gpu", f"gpus_per_node={gpus} segment=0", {f"#SBATCH --nodes={nodes}"})
            for gpus, nodes in ((2, 32), (4, 16), (8, 8), (48, 2))
        ),
        ("dsv4_flash_64gpu", "time=00:30:00", {"#SBATCH --time=00:30:00"}),
        ("dsv4_flash_64gpu", "segment=8", {"#SBATCH --segment=8"}),
        ("dsv4_flash_64gpu", "nodes=8", {"recipe dsv4_flash_64gpu is laid out for 64 GPUs, this job has 32"}),
        ("tiny", "scheduler=slurm", {"#SBATCH --gpus-per-node=1", "#SBATCH --ntasks-per-node=1"}),
        ("tiny", "scheduler=slurm gpus_per_node=0 offload=false", {"#SBATCH --ntasks-per-node=1"}),
    ],
)
def test_a_job_has_the_nodes_that_its_gpus_need_and_the_settings_of_slurm(launch, recipe, settings, lines):
    printed = launch("--factory", recipe, "account=acct", *settings.split(), "--dryrun").splitlines()
    assert lines <= set(printed)
    assert recipe != "tiny" or not any("is laid out for" in line for line in printed)
    assert any("--gpus-per-node" in line for line in printed) == ("gpus_per_node=0" not in settings)
    assert any(line.endswith("train tiny --no-offload") for line in printed) == ("offload=false" in settings)


@pytest.mark.parametrize("answer", [True, False])
def test_a_job_is_launched_if_the_user_agrees_and_an_export_writes_a_file_alone(launch, monkeypatch, tmp_path, answer):
    asked, launched = [], []
    monkeypatch.setattr(PretrainContext, "launch", lambda self, experiment: launched.append(experiment))
    monkeypatch.setattr(PretrainContext, "_should_continue", lambda self, skip: asked.append(skip) or answer)
    launch("--factory", "tiny", "overrides=train.train_iters=3", "--to-yaml", "job.yaml")
    assert "train.train_iters=3" in (tmp_path / "job.yaml").read_text() and not launched
    asked.clear()
    launch("--factory", "tiny")
    assert asked == [False] and len(launched) == answer


@pytest.mark.parametrize("state", [AppState.SUCCEEDED, AppState.FAILED, AppState.CANCELLED])
def test_a_job_that_was_waited_for_and_did_not_succeed_is_an_error(launch, monkeypatch, state):
    def end(self, experiment):
        experiment.jobs[0].state = state

    monkeypatch.setattr(PretrainContext, "launch", end)
    succeeds = contextlib.nullcontext() if state is AppState.SUCCEEDED else None
    with succeeds or pytest.raises(SystemExit, match="recipe tiny failed; its logs are in "):
        launch("--factory", "tiny", "--yes")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *((f"{argument} --yes", f".*{argument.split('=')[0]}") for argument in ("acount=me", "nonsense")),
        ("fraction=half --yes", "fraction=half: use a number$"),
        ("nodes=ten --yes", "nodes=ten: use a whole number$"),
        ("scheduler=slurm --yes", "account=None: Slurm needs an account"),
        *(
            (f"{option} --yes", f"there is no option {option}: settings are NAME=VALUE")
            for option in ("--dry-run", "--fraction=0.5", "-d")
        ),
    ],
)
def test_a_mistake_is_a_line_that_names_it_and_status_2_and_launches_nothing(launch, monkeypatch, capsys, words, said):
    monkeypatch.setattr(PretrainContext, "launch", lambda *arguments: pytest.fail("launched"))
    with pytest.raises(SystemExit, match=r"^2$"):
        launch("--factory", "tiny", *words.split())
    told = capsys.readouterr().err
    assert re.search(f"^pretrain: {said}", told, re.MULTILINE) and "Traceback" not in told


def test_a_question_at_the_end_of_the_standard_input_launches_nothing(launch, monkeypatch):
    monkeypatch.setattr(PretrainContext, "launch", lambda *arguments: pytest.fail("launched"))
    with pytest.raises(SystemExit, match=r"^pretrain: nothing is launched; --yes"):
        launch("--factory", "tiny")


def test_what_nobody_expects_ends_with_its_traceback_and_status_1(launch, monkeypatch, capsys):
    monkeypatch.setattr(Job, "executor", Mock(side_effect=RuntimeError("of the executor")))
    with pytest.raises(SystemExit, match="1"):
        launch("--factory", "tiny", "--dryrun")
    printed = capsys.readouterr().err
    assert "Traceback (most recent call last)" in printed and "RuntimeError: of the executor" in printed


def test_the_users_executor_goes_before_the_recipes(launch, monkeypatch):
    taken, given = [], run.Config(run.LocalExecutor, ntasks_per_node=3)
    monkeypatch.setattr(PretrainContext, "parse_executor", lambda *arguments: given)
    monkeypatch.setattr(PretrainContext, "launch", lambda self, experiment: taken.append(self.executor))
    launch("--factory", "tiny", "run.executor=mine", "--yes")
    assert [executor.ntasks_per_node for executor in taken] == [3]


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


@pytest.mark.parametrize("name", catalog.RECIPES)
def test_every_recipe_is_a_factory(launch, name):
    lines = launch("--factory", name, "scheduler=slurm", "account=acct", "--dryrun").splitlines()
    assert any(line.endswith(f"python -m bridge_fgo.recipes.train {name} --offload") for line in lines)
    assert f"#SBATCH --nodes={max(1, catalog.find(name).gpus // catalog.find(name).gpus_a_node)}" in lines
    assert any(line.startswith("#SBATCH --segment=") for line in lines) == ("b300" not in name or "gb300" in name)
    for variable, value in catalog.find(name).environment.items():
        assert f"export {variable}={value}" in lines


@pytest.mark.slow
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
    near = "--cpunodebind=$((SLURM_LOCALID / 2)) --membind=$((SLURM_LOCALID / 2))"
    assert f"exec numactl {near} python -m bridge_fgo.recipes.train dsv4_flash_64gpu --offload" in lines


def train_here(home, recipe, *settings):
    """Launch a recipe on this machine, on the CPU, from a checkout and without an activated environment."""
    arguments = ["--factory", recipe, "scheduler=local", "gpus_per_node=0", *settings, "--yes"]
    return subprocess.run(
        [sys.executable, "-m", "recipes.launch", *arguments], cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "HOME": str(home), "NEMORUN_HOME": str(home), "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.slow
def test_tiny_trains_on_this_machine_without_an_activated_venv(tmp_path):
    done = train_here(tmp_path, "tiny", "overrides=train.train_iters=2 train.global_batch_size=2")
    assert done.returncode == 0, done.stderr
    (log,) = tmp_path.rglob("train/0/stdout.log")
    assert "iteration        2/       2 |" in log.read_text()


@pytest.mark.slow
def test_a_training_that_fails_on_this_machine_ends_the_launch_with_status_1_and_its_logs(tmp_path):
    done = train_here(tmp_path, "llama3_70b_64gpu")  # which fails before it imports Megatron
    assert done.returncode == 1
    *_, last = done.stderr.splitlines()
    folder = Path(last.partition("recipe llama3_70b_64gpu failed; its logs are in ")[2])
    assert any("recipe='llama3_70b_64gpu' needs GPUs" in log.read_text() for log in folder.rglob("*.log"))
