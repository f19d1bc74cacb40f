"""What each rank of a launched recipe does: `python -m bridge_fgo.recipes.train`."""

import dataclasses
import os
import re
import sys
from unittest.mock import Mock

import children
import pytest
import torch
from typer.testing import CliRunner

import bridge_fgo
from bridge_fgo.bridge import installation
from bridge_fgo.config import OffloadConfig
from bridge_fgo.recipes import catalog, hf_config, process, train

pytestmark = pytest.mark.usefixtures("cpu_standins")


@pytest.mark.parametrize("name", [recipe.name for recipe in catalog.RECIPES.values() if recipe.mcore_module])
def test_no_recipe_of_v4_goes_on_with_a_released_mcore_or_an_older_one(launched, name):
    with pytest.raises(ValueError, match=f"recipe='{name}' needs Megatron-LM's dev branch"):
        train.prepare_pretrain(catalog.find(name), OffloadConfig(), "kept", [])
    assert bridge_fgo.stats() is None and not launched
    recipe = dataclasses.replace(catalog.find(name), mcore_module="megatron.core.no_package.module")
    with pytest.raises(ValueError, match=r"the installed megatron-core has no megatron\.core\.no_package\.module"):
        train.require_mcore(recipe)


@pytest.mark.slow
def test_tiny_on_the_cpu_takes_settings_and_overrides_and_has_the_same_losses():
    words = ["--no-offload"], ["--fraction", "0.5", "optimizer.offload.moments=false"]
    runs = []
    command = [sys.executable, "-m", "bridge_fgo.recipes.train", "tiny", "train.train_iters=3", "dataset.num_workers=0"]
    for given in words:
        done = children.run_python([*command, *given])
        assert done.returncode == 0, done.stderr
        runs.append(done.stdout)
    losses = [re.findall(r"lm loss: \S+", printed) for printed in runs]
    assert len(losses[0]) == 3 and losses[0] == losses[1]
    assert ["bridge_fgo: optimizer-state offload on" in printed for printed in runs] == [False, True]


def test_a_rank_has_the_recipes_environment_but_where_the_user_has_set_it(monkeypatch):
    given = {"NCCL_NVLS_ENABLE": "1"}
    monkeypatch.setattr(train.os, "environ", given)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(train, "prepare_pretrain", lambda *arguments: None)
    train.prepare("llama3_70b_64gpu", True, {}, "kept", [])
    assert given == catalog.find("llama3_70b_64gpu").environment | {
        "NCCL_NVLS_ENABLE": "1",
        "CUDA_DEVICE_MAX_COPY_CONNECTIONS": "32",  # before the first question to CUDA
    }


def test_what_training_raises_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(train, "prepare", lambda *args: Mock(side_effect=ValueError("of the training")))
    with pytest.raises(ValueError, match="of the training"):
        CliRunner().invoke(train.app, ["tiny"], catch_exceptions=False)


OF_THE_HUB = {"qwen3_30b_a3b_8gpu", "qwen3_235b_a22b_64gpu", "nemotron_3_nano_8gpu", "nemotron_3_super_64gpu"}
"""Recipes whose tokenizer upstream takes from Hugging Face."""
RELEASED = [recipe for recipe in catalog.RECIPES.values() if not recipe.mcore_module]
FOR_TRAINING = [recipe.name for recipe in RELEASED if recipe.hf_model in hf_config.kept_configs()]


@pytest.mark.parametrize("name", FOR_TRAINING)
def test_a_launch_without_network_takes_upstreams_tokenizer_or_says_how_before_bridge_begins(
    no_network, launched, name
):
    from megatron.bridge.training.setup import _validate_and_set_vocab_size
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    recipe, overrides = catalog.find(name), []
    if name in OF_THE_HUB:
        with pytest.raises(ValueError, match=f"--hf-config kept: recipe {name} takes the tokenizer of") as refused:
            train.prepare_pretrain(recipe, OffloadConfig(), "kept", overrides)()
        assert not launched
        overrides = re.findall(r"tokenizer\.(?:tokenizer_type=Null|vocab_size=)\w+", str(refused.value))
    train.prepare_pretrain(recipe, OffloadConfig(), "kept", overrides)()
    (config,) = launched
    size = build_tokenizer(config.tokenizer).vocab_size
    kept = hf_config.kept_configs()[recipe.hf_model]["config"]["vocab_size"]
    assert _validate_and_set_vocab_size(config.model.vocab_size, size)[0] == kept


@pytest.mark.parametrize("offload", [None, OffloadConfig(fraction=0.5)])
def test_a_rank_trains_with_the_package_installed_as_the_settings_say_or_not_at_all(launched, offload):
    train.prepare_pretrain(catalog.find("tiny"), offload, "kept", [])()
    assert getattr(launched[0].optimizer, "offload_optimizer_states", False) is (offload is not None)
    handle = installation._installation
    assert (handle and handle.config) == offload


@pytest.mark.parametrize(("slurm", "rank"), [({"SLURM_NTASKS": "8"}, None), ({}, "0")])
def test_a_rank_of_slurm_is_left_to_bridge_to_find(launched, monkeypatch, slurm, rank):
    """RANK=0 in each of them would be as many jobs of one process; a process by itself needs it."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "SLURM_NTASKS")} | slurm
    monkeypatch.setattr(train.os, "environ", environment)
    train.prepare_pretrain(catalog.find("tiny"), None, "kept", [])
    assert environment.get("RANK") == rank


def test_a_rank_does_not_have_bridge_build_what_the_wheel_brings(launched, monkeypatch):
    """`make` in mcore's datasets, without a Makefile there, would end the process."""
    kept = []
    monkeypatch.setattr(process, "skip_building_what_is_built", lambda: kept.append(len(launched)))
    train.prepare_pretrain(catalog.find("tiny"), None, "kept", [])()
    assert kept == [0] and len(launched) == 1


@pytest.mark.parametrize("cached", ["tokenizer.json", "tokenizer_config.json", None])
def test_a_tokenizer_that_is_on_this_machine_is_not_refused(launched, monkeypatch, tmp_path, cached):
    """One file of its kind is enough, or a folder."""
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda m, file: file if file == cached else None)
    given = [] if cached else [f"tokenizer.tokenizer_model={tmp_path}"]
    train.prepare_pretrain(catalog.find("qwen3_30b_a3b_8gpu"), OffloadConfig(), "kept", given)()
    assert len(launched) == 1


@pytest.mark.parametrize("name", sorted(OF_THE_HUB))
def test_auto_trains_on_kept_numbers_and_says_what_to_give_without_the_tokenizer(no_network, launched, capsys, name):
    train.prepare_pretrain(catalog.find(name), OffloadConfig(), "auto", [])()
    printed = capsys.readouterr().out
    assert len(launched) == 1 and "as kept in this project" in printed
    assert f"tokenizer: of {launched[0].tokenizer.tokenizer_model}, which is not in Hugging Face's cache" in printed
    assert hf_config.without_tokenizer(launched[0], catalog.find(name).hf_model) in printed
