"""A job's settings: what is refused, also in a dry run as training would, and what executor and ranks get."""

import os
import re
import shlex
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from bridge_fgo.config import OffloadConfig
from bridge_fgo.recipes import catalog, dry_run, executors, train
from bridge_fgo.recipes.entrypoint import Job
from bridge_fgo.tools.job.parallel import parallel_of
from bridge_fgo.tools.main import app


@pytest.mark.parametrize(("gpus", "cpus"), [(1, "0"), (2, "01"), (3, "001"), (4, "0011"), (8, "00001111")])
def test_each_process_is_bound_to_the_cpu_of_its_gpu(tmp_path, gpus, cpus):
    (tmp_path / "numactl").write_text('#!/bin/bash\necho "numactl $*"\n')
    (tmp_path / "numactl").chmod(0o755)
    command, bound = executors.near_cpu(gpus, "python train.py 'a b'"), ""
    for local_rank in range(gpus):
        environment = {"PATH": f"{tmp_path}:/bin:/usr/bin", "SLURM_LOCALID": str(local_rank)}
        done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=True)
        bound += re.fullmatch(r"numactl --cpunodebind=(\d) --membind=\1 python train.py a b\n", done.stdout)[1]
    assert bound == cpus


@pytest.mark.parametrize(("nodes", "segment"), [(1, 1), (2, 2), (16, 16), (18, 18), (32, 16), (64, 16), (19, 1)])
def test_a_segment_fits_a_rack_and_divides_the_nodes(nodes, segment):
    assert executors.segment_of(nodes) == segment


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"account": None}, "account=None: Slurm needs an account"),
        ({"recipe": "llama"}, "recipe='llama': there is no such recipe; use one of dsv4_flash_64gpu, "),
        ({"recipe": ""}, "recipe='': give --factory NAME, one of "),
        ({"scheduler": "pbs"}, "scheduler='pbs': use one of slurm, local"),
        ({"hf_config": "mine"}, "hf_config='mine': use one of auto, hub, kept, or a folder"),
        ({"fraction": 2.0}, "OffloadConfig.fraction=2.0"),
        ({"gpu_memory_budget_gib": 70.0, "offload": False}, "offload=false with gpu_memory_budget_gib"),
        ({"account": ""}, "account='': Slurm needs an account"),
        ({"env": "HF_TOKEN=secret"}, "'HF_TOKEN=secret' is not set here; give names only"),
        ({"nodes": 0}, "nodes=0: use a number of at least 1"),
        ({"gpus_per_node": -1}, "gpus_per_node=-1: use a number of at least 0"),
        ({"segment": 5}, "segment=5: use a divisor of nodes=16, or 0"),
        ({"segment": 16, "gpus_per_node": 8}, "segment=16: use a divisor of nodes=8, or 0"),
        ({"retries": -1}, "retries=-1: use a number of at least 0"),
        *(({"time": limit}, f"time={limit!r}: use HH:MM:SS") for limit in ("4h", "", "1:2:3:4", "1-", "04:00:00 ")),
        *(({"python": name}, f"python={name!r}: use a name or path with") for name in ("", "uv run", "uv run python")),
        ({"checkpoints": "runs"}, "checkpoints='runs': use an absolute path"),
        ({"checkpoints": "/it's"}, "use an absolute path without '"),
        ({"checkpoints": "/data/ck", "container_image": "i", "container_mounts": "/data:/mnt:ro,/b"},
         "checkpoints='/data/ck' with container_mounts='/data:/mnt:ro,/b': mount the folder"),
    ],
)  # fmt: skip
def test_a_mistake_is_an_error_before_anything_is_launched(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Job(**{"recipe": "dsv4_flash_64gpu", "account": "acct"} | settings)


def test_on_this_machine_each_setting_of_slurm_is_an_error_that_names_it():
    given = {
        "account": "acct", "partition": "gb200", "nodes": 1, "segment": 0, "time": "00:10:00", "env": "PATH",
        "container_image": "image", "container_mounts": "/a:/a", "python": "/venv/bin/python", "checkpoints": "/ck",
        "preflight": False, "retries": 1,
    }  # fmt: skip
    for name, value in given.items():
        with pytest.raises(ValueError, match=re.escape(f"scheduler=local with {name}={value!r}, for Slurm only")):
            Job(recipe="tiny", scheduler="local", **{name: value})


@pytest.mark.parametrize(
    ("recipe", "given", "here", "processes"),
    [
        ("tiny", None, 8, 1), ("tiny", 4, 8, 4), ("tiny", 0, 8, 1), ("qwen3_30b_a3b_8gpu", None, 8, 8),
        ("llama3_70b_64gpu", None, 8, 64), ("tiny", 2, 0, 2), ("tiny", 9, 8, 9), ("nemotron_3_nano_8gpu", None, 4, 8),
    ],
)  # fmt: skip
def test_this_machine_runs_a_process_a_gpu_in_the_recipes_environment_or_is_too_small(
    recipe, given, here, processes, monkeypatch
):
    monkeypatch.setattr("torch.cuda.device_count", lambda: here)
    if processes > here:
        expected = f"recipe {recipe} with gpus_per_node={processes} does not fit this machine of {here} GPUs"
        with pytest.raises(ValueError, match=expected):
            Job(recipe=recipe, scheduler="local", gpus_per_node=given)
        return
    executor = Job(recipe=recipe, scheduler="local", gpus_per_node=given).executor()
    assert executor.nproc_per_node() == processes
    assert executor.env_vars.get("CUDA_VISIBLE_DEVICES") == ("" if given == 0 else None), "only what was asked for"
    environment = catalog.find(recipe).environment
    assert bool(environment) == (recipe != "tiny") and environment.items() <= executor.env_vars.items()


@pytest.mark.parametrize(("recipe", "has_gpu"), [("tiny", False), ("llama3_70b_64gpu", True)])
@pytest.mark.parametrize(
    ("given", "settings", "hf", "overrides"),
    [
        ({}, {}, "auto", ()),
        ({"offload": False}, None, "auto", ()),
        ({"offload": False, "measure": True}, {"measure": True}, "auto", ()),
        ({"engine": "native", "fraction": 0.5}, {"engine": "native", "fraction": 0.5}, "auto", ()),
        ({"gradients": True}, {"gradients": True}, "auto", ()),
        ({"gradients": "lazy"}, {"gradients": "lazy"}, "auto", ()),
        ({"gpu_memory_budget_gib": 70.0, "hf_config": "hub"}, {"gpu_memory_budget_gib": 70.0}, "hub", ()),
        ({"hf_config": "kept", "overrides": "a=1 'b=c d'"}, {}, "kept", ["a=1", "b=c d"]),
    ],
)
def test_a_rank_trains_as_the_jobs_settings_say(given, settings, hf, overrides, recipe, has_gpu, monkeypatch):
    """From the job, by the command line of the ranks, to what builds Bridge's config."""
    called, config = [], None if settings is None else OffloadConfig(**settings)
    monkeypatch.setattr(train, "prepare_pretrain", lambda *arguments: lambda: called.append(arguments))
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    monkeypatch.setattr(train.os, "environ", dict(train.os.environ))
    assert CliRunner().invoke(train.app, Job(recipe=recipe, account="acct", **given).arguments()).exit_code == 0
    assert called == [(catalog.find(recipe), config, hf, overrides, given.get("offload", True), not has_gpu)]


def test_a_time_limit_in_any_form_of_slurms_is_read_as_slurm_does():
    read = {"30": 1800, "4:30": 270, "04:00:00": 14400, "1-2": 93600, "1-2:3": 93780, "1-2:3:4": 93784, "0": None}
    assert {limit: executors.seconds_of(limit) for limit in read} == read


def job(recipe="qwen3_30b_a3b_8gpu", **settings):
    return Job(recipe=recipe, account="me", **settings)


def lines_before_training(**settings):
    executor = job("llama3_70b_64gpu", **settings).executor()
    return executor.setup_lines.splitlines(), executor


def test_the_preflight_examines_the_job_that_is_trained_and_binds_on_every_node():
    settings = {"python": "/venv/bin/python", "checkpoints": "/ck", "fraction": 0.5, "nodes": 8}
    settings["overrides"] = "train.train_iters=3 'x=a b'"
    (preflight, *_), executor = lines_before_training(**settings)
    command, words = job("llama3_70b_64gpu", **settings), shlex.split(preflight)
    assert words[:4] == ["srun", "--ntasks=8", "--ntasks-per-node=1", "--export=ALL"]
    examined = words[words.index("/venv/bin/python") : words.index("||")]
    assert examined[1:6] == ["-m", "bridge_fgo", "doctor", "llama3_70b_64gpu", "--gpus=32"]
    assert examined[6:] == [word for word in command.arguments()[1:] if word != "--offload"]
    assert command.task().entrypoint == "/venv/bin/python" and executor.retries == 3
    (tried, *_), _ = lines_before_training(offload=False)
    assert tried.endswith("""true && "$@"' preflight || { echo 'the preflight refuses this job'; exit 1; }""")
    assert not any("srun" in line for line in lines_before_training(preflight=False)[0])


@pytest.mark.parametrize(
    ("settings", "sent", "again_after"),
    [
        ({"checkpoints": "/ck"}, "URG@600", 14400 - 660),
        ({"checkpoints": "/ck", "time": "10"}, "URG@150", 600 - 210),
        ({"checkpoints": "/ck", "time": "UNLIMITED"}, None, None),
        ({}, None, None),
    ],
)
def test_a_job_with_checkpoints_is_told_to_save_before_its_time_ends_and_is_queued_again(settings, sent, again_after):
    lines, executor = lines_before_training(**settings)
    again = [line for line in lines if "scontrol requeue" in line]
    assert executor.signal == sent and [f"SECONDS > {again_after})" in line for line in again] == [True] * bool(sent)


def test_sigurg_ends_a_rank_as_sigterm_does_and_nothing_that_is_forked_from_it():
    ended = []
    before = {each: signal.getsignal(each) for each in (signal.SIGURG, signal.SIGTERM)}
    try:
        signal.signal(signal.SIGTERM, lambda *_: ended.append(os.getpid()))
        train.end_on_sigurg()
        if (child := os.fork()) == 0:
            signal.raise_signal(signal.SIGURG)
            os._exit(len(ended))
        assert os.waitpid(child, 0)[1] == 0
        signal.raise_signal(signal.SIGURG)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert ended == [os.getpid()]


def test_a_rank_without_megatron_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr(train, "source_of", lambda name: None)
    done = CliRunner().invoke(train.app, ["tiny"])
    assert done.exit_code == 2 and "recipe='tiny' needs megatron-bridge: pip install" in done.output


# --- dry runs ---


@pytest.fixture
def asked(monkeypatch):
    """The commands that are run; each answers with `answer`."""
    commands = []
    answer = SimpleNamespace(returncode=0, stdout="{}", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command) or answer)
    return SimpleNamespace(commands=commands, answer=answer)


@pytest.fixture
def plans_here(monkeypatch):
    """The plan that is asked for is made in this process, with models of the one that has Megatron imported."""

    def run(command, **_):
        assert command[:3] == [sys.executable, "-m", "bridge_fgo"]
        done = CliRunner().invoke(app, command[3:])
        return SimpleNamespace(returncode=done.exit_code, stdout=done.stdout, stderr=done.stderr)

    monkeypatch.setattr(dry_run, "subprocess", SimpleNamespace(run=run))


@pytest.mark.slow
@pytest.mark.usefixtures("plans_here")
def test_a_dry_run_refuses_what_training_would_refuse_and_not_the_recipe_as_it_is():
    assert job().check() == []
    for settings, why in (
        ({"nodes": 3, "gpus_per_node": 2}, "6 GPUs: a pipeline stage has 6 ranks, not divisible by expert 8"),
        ({"overrides": "train.train_iterz=3"}, "there is no setting train.train_iterz; did you mean train.train_iters"),
        ({"overrides": "optimizer.optimizer_cpu_offload=true"}, "optimizer_cpu_offload"),
    ):
        with pytest.raises(ValueError, match=f"^recipe qwen3_30b_a3b_8gpu: .*{why}"):
            job(**settings).check()


def test_training_is_asked_about_with_every_setting_of_the_job_and_all_its_refusals_are_shown(asked):
    assert job(nodes=4, fraction=0.5, overrides="train.train_iters=3 'checkpoint.save=/my runs'").check() == []
    (command,) = asked.commands
    assert command[0] == sys.executable and "--gpus=16" in command
    assert "--fraction=0.5" in command or command[command.index("--fraction") + 1] == "0.5"
    assert command[-2:] == ["train.train_iters=3", "checkpoint.save=/my runs"]
    job(offload=False).check()
    assert asked.commands[-1][-1] == "optimizer.offload_optimizer_states=false"
    asked.answer.returncode, asked.answer.stdout = 1, '{"refusals": ["this", "and that"]}'
    with pytest.raises(ValueError, match=r"^recipe qwen3_30b_a3b_8gpu: this; and that$"):
        job().check()


def test_without_megatron_the_dry_run_says_what_it_did_not_check(monkeypatch, asked):
    monkeypatch.setattr(dry_run, "source_of", lambda name: None)
    dsv4 = next(recipe for recipe in catalog.RECIPES.values() if recipe.mcore_module)
    assert f"megatron.bridge and {dsv4.mcore_module}" in dry_run.check(dsv4, dsv4.gpus, (), ())
    assert not asked.commands
    asked.answer.returncode, asked.answer.stderr = 2, "bridge-fgo plan: megatron-bridge is not installed"
    (line,) = job(overrides="a=1").check()
    assert line == "layout and overrides are not checked: this machine lacks megatron.bridge"


@pytest.mark.usefixtures("plans_here")
@pytest.mark.parametrize("is_installed", [True, False])
def test_nodes_on_which_a_layout_does_not_divide_are_refused_also_without_megatron(monkeypatch, is_installed):
    if not is_installed:
        monkeypatch.setattr(dry_run, "source_of", lambda name: None)
    said = "nodes=10 with gpus_per_node=4, 40 GPUs: train.global_batch_size=256 is not divisible by 5 replicas"
    with pytest.raises(ValueError, match=rf"^recipe llama3_70b_64gpu: {said} .*; 32 or 64 GPUs would do$"):
        job("llama3_70b_64gpu", nodes=10).check()


def test_no_number_of_gpus_is_advised_if_tensor_parallel_ranks_cannot_share_the_heads():
    model = SimpleNamespace(tensor_model_parallel_size=3, num_attention_heads=64)
    model.context_parallel_size = model.pipeline_model_parallel_size = 1
    said = "tensor_model_parallel_size=3: model.num_attention_heads=64 is not divisible by it; use a divisor of 64"
    with pytest.raises(ValueError, match=rf"^model\.{said}$"):
        parallel_of(SimpleNamespace(model=model), 64)
