"""The names that `plan` and `doctor` take for a job."""

from __future__ import annotations

import importlib.util
import sys
import types

import pytest

import bridge_fgo
from bridge_fgo.recipes.catalog import RECIPES
from bridge_fgo.recipes.hf_config import kept_configs
from bridge_fgo.tools.job import builder, recipes

pytestmark = pytest.mark.usefixtures("cpu_standins")


def test_a_recipe_of_this_project_comes_with_the_offload_on_and_its_gpus():
    config, gpus = recipes.load_config("llama3_70b_64gpu")
    assert config.optimizer.offload_optimizer_states is True
    assert gpus == 64


def test_overrides_come_last_as_in_training():
    with bridge_fgo.install():
        config, _ = recipes.load_config(
            "tiny", ["train.micro_batch_size=3", "optimizer.offload_optimizer_states=false"]
        )
    assert config.train.micro_batch_size == 3 and config.optimizer.offload_optimizer_states is False


@pytest.mark.parametrize("override", ["train.no_such_field=1", "nonsense"])
def test_an_override_that_does_not_fit_is_named(override):
    with pytest.raises(ValueError, match=override):
        recipes.load_config("tiny", [override])


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("optimizer.offload_optimizer_state=true", "optimizer.offload_optimizer_states"),
        ("train.train_itersx=3", "train.train_iters"),
        ("modl.recompute_granularity=full", "model"),
    ],
)
def test_a_misspelt_override_is_answered_by_what_it_may_mean(override, meant):
    with bridge_fgo.install(), pytest.raises(ValueError, match=f"did you mean {meant}\\?$") as refused:
        recipes.load_config("tiny", [override])
    assert f"there is no setting {override.partition('=')[0]};" in str(refused.value)
    with bridge_fgo.install(), pytest.raises(ValueError, match=r"there is no setting train\.qqqqqqqqqq$"):
        recipes.load_config("tiny", ["train.qqqqqqqqqq=3"])


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("peft.rank=3", "there is no setting peft.rank"),  # of a section that is not set
        ("train.train_iters.x=3", "there is no setting train.train_iters.x"),  # of a value
        ("model.transformer_layer_spec=3", "model.transformer_layer_spec cannot be overridden"),  # a function
    ],
)
def test_an_override_of_what_is_no_setting_is_answered_without_a_guess(override, answer):
    with bridge_fgo.install(), pytest.raises(ValueError, match=f"overrides {override}: {answer}$"):
        recipes.load_config("tiny", [override])


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("train.micro_batch_size=abc", "a whole number"),
        ("train.global_batch_size=1.5", "a whole number"),
        ("optimizer.lr=fast", "a number"),
        ("ddp.overlap_grad_reduce=maybe", "true or false"),
    ],
)
def test_an_override_of_another_type_names_the_setting_and_what_it_takes(override, wanted):
    with bridge_fgo.install(), pytest.raises(ValueError, match=f"^override {override}: use {wanted}$"):
        recipes.load_config("tiny", [override])


@pytest.mark.parametrize(
    "override", ["optimizer.lr=1", "train.exit_interval=null", "checkpoint.save=null", "logger.wandb_project=7"]
)
def test_an_override_that_fits_its_setting_is_taken(override):
    recipes.load_config("tiny", [override])


def test_a_recipe_that_the_installed_mcore_cannot_build_says_what_it_needs():
    with pytest.raises(ValueError, match="needs Megatron-LM's dev branch"):
        recipes.load_config("dsv4_flash_64gpu")


@pytest.mark.parametrize("name", RECIPES)
def test_the_vocabulary_of_every_recipe_is_known(name):
    module = RECIPES[name].mcore_module
    if module is not None and importlib.util.find_spec(module) is None:
        pytest.skip(f"this mcore has no {module}")
    config, _ = recipes.load_config(name)
    builder.set_vocabulary(config, None)
    if RECIPES[name].hf_model:
        assert config.model.vocab_size == kept_configs()[RECIPES[name].hf_model]["config"]["vocab_size"]


def test_an_unknown_name_is_answered_with_those_that_there_are():
    with pytest.raises(ValueError, match=r"no recipe 'lama'.*llama3_70b_64gpu"):
        recipes.load_config("lama")


def test_adapters_are_refused_instead_of_counting_the_whole_model(monkeypatch):
    module = types.ModuleType("with_adapters")
    module.recipe = lambda: types.SimpleNamespace(peft=object())
    monkeypatch.setitem(sys.modules, "with_adapters", module)
    with pytest.raises(ValueError, match="peft is set"):
        recipes.load_config("with_adapters:recipe")


def test_a_function_that_returns_no_config_is_refused_by_name():
    with pytest.raises(ValueError, match="os:getcwd is a str, and no ConfigContainer"):
        recipes.load_config("os:getcwd")


def test_a_file_that_is_no_run_config_is_refused_by_name(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("_target_: nowhere.ConfigContainer\n")
    with pytest.raises(ValueError, match=r"config\.yaml: no run config as Megatron-Bridge saves it") as refused:
        recipes.load_config(str(path))
    assert not str(refused.value).endswith(": ")  # Bridge's assertion has no text
