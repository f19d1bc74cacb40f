"""The names that `plan` and `doctor` take for a job."""

from __future__ import annotations

import importlib.util
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


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("nonsense", ".*nonsense"),
        # what may be meant, and nothing where no name is near
        ("optimizer.offload_optimizer_state=true", r".*; did you mean optimizer\.offload_optimizer_states\?$"),
        ("train.train_itersx=3", r".*; did you mean train\.train_iters\?$"),
        ("modl.recompute_granularity=full", r".*there is no setting modl\..*; did you mean model\?$"),
        ("train.qqqqqqqqqq=3", r".*there is no setting train\.qqqqqqqqqq$"),
        # of a section that is not set, of a value, and of a function
        ("peft.rank=3", r"overrides peft.rank=3: there is no setting peft\.rank$"),
        ("train.train_iters.x=3", r"overrides train.train_iters.x=3: there is no setting train\.train_iters\.x$"),
        ("model.transformer_layer_spec=3", r"overrides .*=3: model\.transformer_layer_spec cannot be overridden$"),
        # of another type
        ("train.micro_batch_size=abc", "override train.micro_batch_size=abc: use a whole number$"),
        ("train.global_batch_size=1.5", "override train.global_batch_size=1.5: use a whole number$"),
        ("optimizer.lr=fast", "override optimizer.lr=fast: use a number$"),
        ("ddp.overlap_grad_reduce=maybe", "override ddp.overlap_grad_reduce=maybe: use true or false$"),
    ],
)
def test_an_override_that_does_not_fit_is_named_with_what_would(override, answer):
    with bridge_fgo.install(), pytest.raises(ValueError, match=f"^{answer}") as refused:
        recipes.load_config("tiny", [override])
    assert "did you mean" not in answer or f"there is no setting {override.partition('=')[0]};" in str(refused.value)


@pytest.mark.parametrize(
    "override", ["optimizer.lr=1", "train.exit_interval=null", "checkpoint.save=null", "logger.wandb_project=7"]
)
def test_an_override_that_fits_its_setting_is_taken(override):
    recipes.load_config("tiny", [override])


@pytest.mark.parametrize("name", RECIPES)
def test_the_vocabulary_of_every_recipe_is_known(name):
    module = RECIPES[name].mcore_module
    if module is not None and importlib.util.find_spec(module) is None:
        pytest.skip(f"this mcore has no {module}")
    config, _ = recipes.load_config(name)
    builder.set_vocabulary(config, None)
    if RECIPES[name].hf_model:
        assert config.model.vocab_size == kept_configs()[RECIPES[name].hf_model]["config"]["vocab_size"]


def adapters():
    return types.SimpleNamespace(peft=object())


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("lama", "no recipe 'lama'.*llama3_70b_64gpu"),
        ("dsv4_flash_64gpu", "needs Megatron-LM's dev branch"),
        ("test_job_recipes:adapters", "peft is set"),  # the whole model would be counted
        ("os:getcwd", "os:getcwd is a str, and no ConfigContainer"),
    ],
)
def test_a_name_that_stands_for_no_config_to_plan_is_answered_with_why(name, answer):
    with pytest.raises(ValueError, match=answer):
        recipes.load_config(name)


def test_a_file_that_is_no_run_config_is_refused_by_name(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("_target_: nowhere.ConfigContainer\n")
    with pytest.raises(ValueError, match=r"config\.yaml: no run config as Megatron-Bridge saves it") as refused:
        recipes.load_config(str(path))
    assert not str(refused.value).endswith(": ")  # Bridge's assertion has no text
