"""A recipe is upstream's configuration and the flag; what has to give way to it is said."""

import dataclasses
import functools
import importlib
import re
import socket

import pytest
import torch
from typer.testing import CliRunner

import bridge_fgo
from bridge_fgo.config import OffloadConfig
from bridge_fgo.recipes import catalog, config, hf_config, train
from bridge_fgo.recipes.tiny import train_on_cpu
from bridge_fgo.wiring.refusals import refuse_config

pytestmark = pytest.mark.usefixtures("cpu_standins")

UPSTREAMS = [name for name, recipe in catalog.RECIPES.items() if recipe.builder]
FLAG_ALONE = {"optimizer.offload_optimizer_states"}
DIFFERENCE = dict.fromkeys(UPSTREAMS, FLAG_ALONE)
DIFFERENCE["dsv4_flash_128gpu"] = DIFFERENCE["deepseek_v3_256gpu_mxfp8"] = {*FLAG_ALONE, "model.cuda_graph_impl"}

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


def upstream(name):
    """Return what Bridge's builder makes, with nothing of this package but the model's numbers."""
    module, function = catalog.find(name).builder.split(":")
    with hf_config.served("kept"):
        return getattr(importlib.import_module(f"megatron.bridge.{module}"), function)()


def flat(value, path=""):
    """Return every leaf of a configuration by its path."""
    if isinstance(value, functools.partial):
        value = {"func": value.func, "args": value.args, "keywords": value.keywords}
    if isinstance(value, dict):
        children = value.items()
    elif isinstance(value, list | tuple):
        children = enumerate(value)
    elif type(value).__module__.startswith("megatron.") and hasattr(value, "__dict__"):
        children = vars(value).items()
    else:
        return {path: value}
    leaves = {path: type(value)}
    for name, child in children:
        leaves.update(flat(child, f"{path}.{name}".lstrip(".")))
    return leaves


def difference(ours, theirs):
    ours, theirs = flat(ours), flat(theirs)
    missing = object()
    return {path for path in ours | theirs if ours.get(path, missing) != theirs.get(path, missing)}


@pytest.mark.parametrize("name", UPSTREAMS)
def test_without_offload_a_recipe_is_upstreams_config(name):
    built = config.build(catalog.find(name), offload=False, hf="kept")
    assert len(flat(built.config)) > 400  # the comparison sees the whole of it
    assert difference(built.config, upstream(name)) == set()


@pytest.mark.parametrize("name", UPSTREAMS)
def test_offload_adds_the_flag_and_turns_off_only_what_is_refused(name):
    built = config.build(catalog.find(name), offload=True, hf="kept")
    assert difference(built.config, upstream(name)) == DIFFERENCE[name]
    assert built.config.optimizer.offload_optimizer_states is True
    for path in DIFFERENCE[name] - FLAG_ALONE:
        assert any(
            f"turned off for the offload: {path} was 'full_iteration', is 'none'" in line for line in built.notes
        )
    refuse_config(built.config)


@pytest.mark.parametrize("name", [name for name in UPSTREAMS if DIFFERENCE[name] != FLAG_ALONE])
def test_what_a_recipe_turns_off_would_be_refused(name):
    theirs = upstream(name)
    theirs.optimizer.offload_optimizer_states = True
    with pytest.raises(ValueError, match="full-iteration CUDA graph"):
        refuse_config(theirs)


def test_optimizer_settings_that_conflict_are_turned_off_with_a_line_each():
    theirs = upstream("llama3_70b_64gpu")
    theirs.optimizer.optimizer_cuda_graph = theirs.optimizer.optimizer_cpu_offload = True
    lines = config.turn_off_conflicts(theirs)
    assert [line.split(" (")[0] for line in lines] == [
        "turned off for the offload: optimizer.optimizer_cuda_graph was True, is False",
        "turned off for the offload: optimizer.optimizer_cpu_offload was True, is False",
    ]
    theirs.optimizer.offload_optimizer_states = True
    refuse_config(theirs)


def test_an_override_comes_last_and_is_refused_where_it_conflicts():
    overrides = ["train.train_iters=7", "model.cuda_graph_impl=full_iteration"]
    built = config.build(catalog.find("llama3_70b_64gpu"), offload=True, hf="kept", overrides=overrides)
    assert built.config.train.train_iters == 7
    with pytest.raises(ValueError, match=r"model\.cuda_graph_impl='full_iteration'"):
        refuse_config(built.config)


@pytest.mark.parametrize("name", UPSTREAMS)
def test_the_kept_environment_is_what_bridges_builder_asks_for(name):
    asked = {variable: str(value) for variable, value in upstream(name).env_vars.items()}
    assert catalog.find(name).environment == asked, "python -m recipes.config > recipes/environment.json"


@pytest.fixture
def no_network(monkeypatch):
    """No network, and nothing in Hugging Face's cache."""

    def refuse(*args):
        raise AssertionError("asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *args: None)


def test_recipes_build_without_network(no_network):
    for name in UPSTREAMS:
        notes = config.build(catalog.find(name), offload=True).notes
        assert any("as kept in this project (" in note and "https://huggingface.co/" in note for note in notes)


def test_auto_prefers_the_hugging_face_cache_and_says_so(monkeypatch):
    recipe = catalog.find("llama3_70b_64gpu")
    numbers = hf_config.kept_configs()[recipe.hf_model]["config"]
    from megatron.bridge.models.conversion import auto_bridge
    from transformers import LlamaConfig

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda model, file: f"/cache/{model}/{file}")
    cached = LlamaConfig.from_dict(numbers | {"num_hidden_layers": 40})
    monkeypatch.setattr(auto_bridge, "safe_load_config_with_retry", lambda *args, **kwargs: cached)
    built = config.build(recipe, offload=False)
    assert built.config.model.num_layers == 40
    assert f"model: config.json of {recipe.hf_model} from Hugging Face" in built.notes


def test_a_model_that_is_not_kept_is_an_error():
    with pytest.raises(ValueError, match=r"hf_config='kept': the numbers of gpt2 are not kept"):
        hf_config.origin("gpt2", "kept")


@pytest.mark.parametrize("model", sorted(PUBLISHED_PARAMETERS))
def test_kept_numbers_give_the_published_number_of_parameters(model):
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    numbers = hf_config.kept_configs()[model]["config"]
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(CONFIG_MAPPING[numbers["model_type"]].from_dict(dict(numbers)))
    count = sum(parameter.numel() for parameter in built.parameters())
    assert round(count / 1e9, 1) == PUBLISHED_PARAMETERS[model]


def test_every_model_of_a_recipe_is_kept():
    assert set(PUBLISHED_PARAMETERS) == set(hf_config.kept_configs())
    assert {catalog.find(name).hf_model for name in UPSTREAMS} == set(PUBLISHED_PARAMETERS)


def test_v4_on_a_released_mcore_is_an_error_that_names_the_branch():
    with pytest.raises(ValueError, match="needs Megatron-LM's dev branch"):
        train.require_mcore(catalog.find("dsv4_flash_64gpu"))
    train.require_mcore(catalog.find("llama3_70b_64gpu"))


def test_a_recipe_that_is_not_there_is_an_error_that_names_the_others():
    with pytest.raises(ValueError, match=r"recipe='llama': there is no such recipe; use one of dsv4_flash_64gpu, "):
        catalog.find("llama")


def test_tiny_for_a_gpu_is_a_config_that_the_package_accepts():
    built = config.build(catalog.find("tiny"), offload=True, overrides=["train.train_iters=3"])
    assert built.config.train.train_iters == 3
    refuse_config(built.config)


def test_tiny_on_the_cpu_has_the_same_losses_with_and_without_offload(capsys):
    printed = []
    for offload in (None, OffloadConfig()):
        train_on_cpu(offload, 3)
        printed.append([line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")])
    resident, offloaded = printed
    assert [line.split(",")[0] for line in resident] == [line.split(",")[0] for line in offloaded]
    assert resident[-1].endswith(", 0 bytes released")
    assert offloaded[-1].startswith("step 3/3: loss ") and not offloaded[-1].endswith(", 0 bytes released")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama"], "recipe='llama': there is no such recipe"),
        (["tiny", "--no-offload", "--fraction", "0.5"], "--no-offload with fraction: leave out one or the other"),
        (["tiny", "--fraction", "2"], "OffloadConfig.fraction=2.0"),
        (["tiny", "--hf-config", "mine"], "--hf-config mine: use auto, hub or kept"),
        (["tiny", "optimizer.lr=1"], "optimizer.lr=1: on the CPU tiny takes no override but train.train_iters"),
        (["llama3_70b_64gpu"], "recipe='llama3_70b_64gpu' needs GPUs and torch sees none"),
    ],
)
def test_a_mistake_on_a_ranks_command_line_is_one_line_and_status_2(arguments, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(train.os, "environ", dict(train.os.environ))
    result = CliRunner().invoke(train.app, arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"bridge_fgo.recipes.train: {message}") and result.stderr.count("\n") == 1


def test_what_training_raises_keeps_its_traceback(monkeypatch):
    def fail():
        raise ValueError("of the training")

    monkeypatch.setattr(train, "prepare", lambda *args: fail)
    with pytest.raises(ValueError, match="of the training"):
        CliRunner().invoke(train.app, ["tiny"], catch_exceptions=False)


@pytest.fixture
def launched(monkeypatch):
    """The configs that `train` hands to Bridge."""
    from megatron.bridge.training import pretrain as bridge_pretrain

    from bridge_fgo.cli.arms import gpu

    configs = []
    monkeypatch.setattr(bridge_pretrain, "pretrain", lambda config, forward_step: configs.append(config))
    monkeypatch.setattr(gpu, "skip_building_what_is_built", lambda: None)
    monkeypatch.setattr(train.os, "environ", dict(train.os.environ) | {"RANK": "0"})
    yield configs
    bridge_fgo.uninstall()


OF_THE_HUB = {"qwen3_30b_a3b_8gpu", "qwen3_235b_a22b_64gpu", "nemotron_3_nano_8gpu", "nemotron_3_super_64gpu"}
"""Recipes whose tokenizer upstream takes from Hugging Face."""


@pytest.mark.parametrize("name", [name for name in UPSTREAMS if not catalog.find(name).mcore_module])
def test_a_launch_without_network_goes_through_upstreams_tokenizer_or_says_how_before_bridge_begins(
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


def test_a_tokenizer_that_is_on_this_machine_is_not_refused(launched, monkeypatch, tmp_path):
    recipe = catalog.find("qwen3_30b_a3b_8gpu")
    files = {"tokenizer.json"}
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda m, file: file if file in files else None)
    train.prepare_pretrain(recipe, OffloadConfig(), "kept", [])()
    files.clear()
    train.prepare_pretrain(recipe, OffloadConfig(), "kept", [f"tokenizer.tokenizer_model={tmp_path}"])()
    assert len(launched) == 2


@pytest.mark.parametrize("name", sorted(OF_THE_HUB))
def test_auto_trains_on_kept_numbers_and_says_what_to_give_where_the_tokenizer_cannot_be_had(
    no_network, launched, capsys, name
):
    train.prepare_pretrain(catalog.find(name), OffloadConfig(), "auto", [])()
    printed = capsys.readouterr().out
    assert len(launched) == 1 and "as kept in this project" in printed
    assert f"tokenizer: of {launched[0].tokenizer.tokenizer_model}, which is not in Hugging Face's cache" in printed
    overrides = re.findall(r"tokenizer\.(?:tokenizer_type=Null|vocab_size=)\w+", printed)
    train.prepare_pretrain(catalog.find(name), OffloadConfig(), "kept", overrides)()  # is not refused
    assert "tokenizer: of" not in capsys.readouterr().out


def test_a_rank_hands_bridge_the_config_and_says_what_was_turned_off(launched, capsys):
    recipe = catalog.find("deepseek_v3_256gpu_mxfp8")
    train.prepare_pretrain(recipe, OffloadConfig(fraction=0.5), "kept", ["train.train_iters=5"])()
    assert launched[0].optimizer.offload_optimizer_states is True
    assert launched[0].train.train_iters == 5
    # The flag is a field now, as saved run configs and overrides need it.
    assert "offload_optimizer_states" in {field.name for field in dataclasses.fields(launched[0].optimizer)}
    printed = capsys.readouterr().out
    assert "turned off for the offload: model.cuda_graph_impl was 'full_iteration', is 'none'" in printed
    assert "model: numbers of deepseek-ai/DeepSeek-V3 as kept in this project" in printed
    assert "upstream's benchmark recipe" in printed
