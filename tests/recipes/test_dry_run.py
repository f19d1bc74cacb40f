"""A dry run refuses what training would refuse, and says what it cannot check."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from bridge_fgo.recipes import catalog, dry_run
from bridge_fgo.recipes.entrypoint import Job
from bridge_fgo.tools.main import app


def job(**settings):
    return Job(recipe="qwen3_30b_a3b_8gpu", account="me", **settings)


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
@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"nodes": 3, "gpus_per_node": 2}, "--gpus 6: a pipeline stage has 6 ranks, not divisible by expert 8"),
        ({"overrides": "train.train_iterz=3"}, "there is no setting train.train_iterz; did you mean train.train_iters"),
        ({"overrides": "optimizer.optimizer_cpu_offload=true"}, "optimizer_cpu_offload"),
        (
            {"gradients": "lazy", "overrides": "ddp.nccl_ub=true"},
            "OffloadConfig.gradients='lazy' with ddp.nccl_ub=True",
        ),
    ],
)
def test_a_dry_run_refuses_what_training_would_refuse(settings, why):
    with pytest.raises(ValueError, match=f"^recipe qwen3_30b_a3b_8gpu: .*{why}"):
        job(**settings).check()


@pytest.mark.slow
def test_a_recipe_as_it_is_passes():
    assert job().check() == []


def test_training_is_asked_about_with_every_setting_of_the_job(asked):
    assert job(nodes=4, fraction=0.5, overrides="train.train_iters=3 'checkpoint.save=/my runs'").check() == []
    (command,) = asked.commands
    assert command[0] == sys.executable and "--gpus=16" in command
    assert "--fraction=0.5" in command or command[command.index("--fraction") + 1] == "0.5"
    assert command[-2:] == ["train.train_iters=3", "checkpoint.save=/my runs"]
    job(offload=False).check()
    assert asked.commands[-1][-1] == "optimizer.offload_optimizer_states=false"


def test_every_refusal_of_training_is_shown(asked):
    asked.answer.returncode, asked.answer.stdout = 1, '{"refusals": ["this", "and that"]}'
    with pytest.raises(ValueError, match=r"^recipe qwen3_30b_a3b_8gpu: this; and that$"):
        job().check()


def test_without_megatron_the_dry_run_says_what_it_did_not_check(monkeypatch, asked):
    monkeypatch.setattr(dry_run, "source_of", lambda name: None)
    (line,) = job(overrides="a=1").check()
    assert line == "layout and overrides are not checked: this machine lacks megatron.bridge"
    dsv4 = next(recipe for recipe in catalog.RECIPES.values() if recipe.mcore_module)
    assert f"megatron.bridge and {dsv4.mcore_module}" in dry_run.check(dsv4, dsv4.gpus, (), ())
    assert not asked.commands
