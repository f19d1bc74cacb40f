"""The names that `plan` and `doctor` take for a job."""

import importlib.util
import json
from unittest.mock import Mock

import pytest
from cpu_model import CpuOptions, make_config

import bridge_fgo
from bridge_fgo.recipes.catalog import RECIPES
from bridge_fgo.recipes.hf_config import kept_configs
from bridge_fgo.tools.job import builder, recipes

pytestmark = pytest.mark.usefixtures("cpu_standins")


FITTING = [
    *("optimizer.lr=1", "train.exit_interval=null", "checkpoint.save=null", "logger.wandb_project=7"),
    *("+env_vars.MINE=1", "++model.num_layers=3", "profiling=null", "mixed_precision=bf16_mixed"),
]
"""Overrides that fit their settings."""


def test_a_recipe_comes_with_the_offload_on_and_its_gpus_and_overrides_come_last_as_in_training():
    config, gpus = recipes.load_config("llama3_70b_64gpu")
    assert config.optimizer.offload_optimizer_states is True
    assert gpus == 64
    with bridge_fgo.install():
        config, _ = recipes.load_config(
            "tiny", ["train.micro_batch_size=3", "optimizer.offload_optimizer_states=false"]
        )
    assert config.train.micro_batch_size == 3 and config.optimizer.offload_optimizer_states is False
    recipes.load_config("tiny", FITTING)
    with pytest.raises(ValueError, match="os:getcwd: returned str, not Bridge's ConfigContainer"):
        recipes.load_config("os:getcwd")


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("nonsense", ".*nonsense"),
        # what may be meant, and nothing where no name is near
        ("optimizer.offload_optimizer_state=true", r".*; did you mean optimizer\.offload_optimizer_states\?$"),
        ("optimizer.offload.fractoin=0.5", r".*; did you mean optimizer\.offload\.fraction\?$"),
        ("modl.recompute_granularity=full", r".*there is no setting modl\..*; did you mean model\?$"),
        ("train.qqqqqqqqqq=3", r".*there is no setting train\.qqqqqqqqqq$"),
        # of a section that is not set, of a value, and of a function
        ("peft.rank=3", r"overrides peft.rank=3: there is no setting peft\.rank$"),
        ("train.train_iters.x=3", r"overrides train.train_iters.x=3: there is no setting train\.train_iters\.x$"),
        ("model.transformer_layer_spec=3", r"overrides .*=3: model\.transformer_layer_spec cannot be overridden$"),
        # of another type
        ("train.micro_batch_size=abc", "override train.micro_batch_size=abc: use a whole number$"),
        ("optimizer.lr=fast", "override optimizer.lr=fast: use a number$"),
        ("ddp.overlap_grad_reduce=maybe", "override ddp.overlap_grad_reduce=maybe: use true or false$"),
        # what would change nothing, or take a section's settings away
        ("+model.mine=3", r"override \+model\.mine=3: model has no field mine, and nothing would read one$"),
        ("~model.num_layers", r"override ~model\.num_layers: a field cannot be deleted; set model\.num_layers=null, "),
        ("model=3", r"override model=3: model is a section: write model\.FIELD=VALUE$"),
        ("env_vars.MINE=1", r"overrides .*; \+env_vars\.MINE=VALUE adds it$"),
    ],
)
def test_an_override_that_does_not_fit_is_named_with_what_would(override, answer):
    with bridge_fgo.install(), pytest.raises(ValueError, match=f"^{answer}") as refused:
        recipes.load_config("tiny", [override])
    assert "did you mean" not in answer or f"there is no setting {override.partition('=')[0]};" in str(refused.value)


@pytest.mark.parametrize("name", RECIPES)
def test_the_vocabulary_of_every_recipe_is_known_or_its_config_asked_for(name, monkeypatch):
    module = RECIPES[name].mcore_module
    if module is not None and importlib.util.find_spec(module) is None:
        pytest.skip(f"this mcore has no {module}")
    kept = kept_configs(planning=True)
    if RECIPES[name].hf_model and RECIPES[name].hf_model not in kept:
        monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=OSError("offline")))
        with pytest.raises(ValueError, match="give hf_config=DIR"):
            recipes.load_config(name)
        return
    config, _ = recipes.load_config(name)
    builder.set_vocabulary(config, None)
    if RECIPES[name].hf_model:
        assert config.model.vocab_size == kept[RECIPES[name].hf_model]["config"]["vocab_size"]


def test_a_saved_run_config_is_the_config_that_was_saved_and_another_file_is_refused_by_name(tmp_path):
    from megatron.bridge.training.tokenizers.tokenizer import build_tokenizer
    from megatron.core.timers import Timers

    path = str(tmp_path / "run_config.yaml")
    with bridge_fgo.install():
        saved = make_config(CpuOptions(offload=True))
        # As `setup()` does before a checkpoint saves the config.
        saved.dataset.tokenizer = build_tokenizer(saved.tokenizer)
        saved.model.timers = saved.optimizer.timers = Timers(0, "minmax")
        saved.to_yaml(path)
        config, gpus = recipes.load_config(path)
    assert (config.optimizer.offload_optimizer_states, gpus) == (True, None)
    assert config.model.hidden_size == saved.model.hidden_size

    path = tmp_path / "config.yaml"
    path.write_text("_target_: nowhere.ConfigContainer\n")
    with pytest.raises(ValueError, match=r"config\.yaml: no run config as Megatron-Bridge saves it") as refused:
        recipes.load_config(str(path))
    assert not str(refused.value).endswith(": ")  # Bridge's assertion has no text


@pytest.mark.parametrize(
    ("name", "gpus", "pipeline"),
    [("llama3_70b_pretrain_64gpu_h100_bf16_config", 64, 4), ("llama3_70b_pretrain_config", 32, 4)],
)
def test_a_function_of_bridges_is_built_from_the_kept_config_for_the_gpus_of_its_name(name, gpus, pipeline):
    config, found = recipes.load_config(name)
    assert (found, config.model.num_layers, config.model.pipeline_model_parallel_size) == (gpus, 80, pipeline)


OF_A_USER = """\
from megatron.bridge import AutoBridge
from megatron.bridge.recipes.llama import llama3_70b_pretrain_config
import helper

def fails():
    return helper.fail()

def ok():
    config = llama3_70b_pretrain_config()
    config.model = AutoBridge.from_hf_pretrained("some/model").to_megatron_provider(load_weights=False)
    return config
"""


def test_a_users_own_file_is_built_and_its_mistakes_are_placed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=OSError("offline")))
    (tmp_path / "of_a_user.py").write_text(OF_A_USER)
    (tmp_path / "helper.py").write_text("def fail():\n    return {}['a key']\n")
    numbers = kept_configs()["meta-llama/Meta-Llama-3-70B"]["config"] | {"num_hidden_layers": 8}
    (tmp_path / "config.json").write_text(json.dumps(numbers))
    for target in ("of_a_user:", "of_a_user.py:"):
        with pytest.raises(ValueError, match=r"KeyError: 'a key' \(helper\.py:2, in fail\)$"):
            recipes.load_config(f"{target}fails")
        with pytest.raises(ValueError, match=r"^recipe .*: config\.json of some/model .*\(offline\).*hf_config=DIR$"):
            recipes.load_config(f"{target}ok")
        config, _ = recipes.load_config(f"{target}ok", ["hf_config=.", "train.train_iters=3"])
        assert (config.model.num_layers, config.train.train_iters) == (8, 3)
    # This function asks transformers, and not Bridge.
    with pytest.raises(ValueError, match=r"'LlamaConfig' .* no attribute 'text_config' \(.*qwen35\.py:\d+, in "):
        recipes.load_config("qwen35_text_9b_pretrain_config", ["hf_config=."])
    with pytest.raises(ValueError, match=r"hf_config=\.: recipe 'tiny' reads no Hugging Face config"):
        recipes.load_config("tiny", ["hf_config=."])
