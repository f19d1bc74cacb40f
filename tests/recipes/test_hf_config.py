"""Where a recipe's model gets its numbers, and its tokenizer: Hugging Face, its cache, or what is kept here."""

import json
from unittest.mock import Mock

import pytest
import torch
from test_recipes import UPSTREAMS, upstream

from bridge_fgo.recipes import catalog, config, hf_config

pytestmark = pytest.mark.usefixtures("cpu_standins")


PUBLISHED_PARAMETERS = {
    "Qwen/Qwen3-235B-A22B": 235.1,
    "Qwen/Qwen3-30B-A3B": 30.5,
    "deepseek-ai/DeepSeek-V3": 671.0,
    "deepseek-ai/DeepSeek-V4-Flash": 284.3,
    "meta-llama/Meta-Llama-3-70B": 70.6,
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31.6,
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": 120.7,
}
"""In 1e9, without multi-token prediction, which transformers does not build: the models' cards and reports."""
ABOUT = {"moonshotai/Kimi-K2-Instruct": 1000, "openai/gpt-oss-120b": 117, "zai-org/GLM-5.2": 744}
"""The same as the cards round it, of those whose numbers are kept for plan alone."""


@pytest.fixture
def hub(monkeypatch):
    """Hugging Face has each kept model with 40 layers; returns what it is asked for."""
    from megatron.bridge.models.conversion import auto_bridge
    from transformers import CONFIG_MAPPING

    def load(path, **given):
        asked.append((path, given))
        numbers = hf_config.kept_configs()[path]["config"] | {"num_hidden_layers": 40}
        return CONFIG_MAPPING[numbers["model_type"]].from_dict(numbers)

    asked = []
    monkeypatch.setattr(auto_bridge, hf_config.LOADER, load)
    return asked


def test_auto_prefers_the_hugging_face_cache_and_says_so(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda model, file: f"/cache/{model}/{file}")
    built = config.build(catalog.find("llama3_70b_64gpu"), offload=False)
    assert built.config.model.num_layers == 40
    assert "model: config.json of meta-llama/Meta-Llama-3-70B from Hugging Face" in built.notes


def test_hub_asks_hugging_face_for_what_bridge_asks_it_also_if_it_is_kept(no_network, hub):
    from megatron.bridge.models.conversion import auto_bridge

    recipe = catalog.find("qwen3_30b_a3b_8gpu")
    built = config.build(recipe, offload=False, hf="hub")
    assert built.config.model.num_layers == 40 and {path for path, _ in hub} == {recipe.hf_model}
    # Nothing about the tokenizer: a user who says hub has the network for it.
    builder = "megatron.bridge." + recipe.builder.replace(":", ".")
    assert built.notes == [f"config: {builder}", f"model: config.json of {recipe.hf_model} from Hugging Face"]
    for trust in (False, True):
        with hf_config.served("hub"):
            auto_bridge.safe_load_config_with_retry(recipe.hf_model, trust_remote_code=trust, revision="main")
        assert hub[-1] == (recipe.hf_model, {"trust_remote_code": trust, "revision": "main"})


def test_a_model_that_is_not_kept_comes_from_hugging_face_or_is_an_error(no_network, monkeypatch):
    assert hf_config.origin("gpt2", "auto") == "hub"
    with pytest.raises(ValueError, match=r"hf_config='kept': the numbers of gpt2 are not kept"):
        hf_config.origin("gpt2", "kept")
    from huggingface_hub import _CACHED_NO_EXIST

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *args: _CACHED_NO_EXIST)
    assert not hf_config.in_cache("gpt2", "config.json")


@pytest.mark.parametrize("model", sorted(PUBLISHED_PARAMETERS | ABOUT))
def test_kept_numbers_give_the_published_number_of_parameters(model):
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    numbers = hf_config.kept_configs(planning=True)[model]["config"]
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(CONFIG_MAPPING[numbers["model_type"]].from_dict(dict(numbers)))
    count = sum(parameter.numel() for parameter in built.parameters())
    if model in ABOUT:
        assert count / 1e9 == pytest.approx(ABOUT[model], rel=0.03)
    else:
        assert round(count / 1e9, 1) == PUBLISHED_PARAMETERS[model]


def test_what_is_kept_is_of_recipes_and_some_of_it_for_plan_alone():
    assert set(PUBLISHED_PARAMETERS) == set(hf_config.kept_configs())
    assert {catalog.find(name).hf_model for name in UPSTREAMS} == set(PUBLISHED_PARAMETERS | ABOUT)


def test_training_asks_for_the_releases_config_if_the_kept_one_was_put_together(monkeypatch, no_network, tmp_path):
    monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=OSError("offline")))
    recipe = catalog.find("gpt_oss_120b_64gpu")
    for hf, why in (("kept", "for training, but for plan alone"), ("auto", "give hf_config=DIR")):
        with pytest.raises(ValueError, match=why):
            config.build(recipe, offload=True, hf=hf)
    numbers = hf_config.kept_configs(planning=True)[recipe.hf_model]["config"] | {"num_hidden_layers": 12}
    (tmp_path / "config.json").write_text(json.dumps(numbers))
    built = config.build(recipe, offload=True, hf=tmp_path)
    assert built.config.model.num_layers == 12 and f"model: {tmp_path / 'config.json'}" in built.notes


def test_the_vocabulary_to_train_with_is_the_users_before_the_kept_models():
    theirs = upstream("qwen3_30b_a3b_8gpu")
    theirs.model.vocab_size = 200_000
    overrides = hf_config.without_tokenizer(theirs, "Qwen/Qwen3-30B-A3B")
    assert overrides == "tokenizer.tokenizer_type=NullTokenizer tokenizer.vocab_size=200000"
