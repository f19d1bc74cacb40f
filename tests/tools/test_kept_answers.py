"""The answers and the table that are kept of recipes are what is said today; what is told of a name at once."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import recipe_table
import setting_names
from cli import invoke

from bridge_fgo.recipes.catalog import RECIPES
from bridge_fgo.recipes.hf_config import kept_configs
from bridge_fgo.tools.job import answers, kept_files, names, table, target
from bridge_fgo.tools.job.answers import ask_builder
from bridge_fgo.tools.job.job import read_job
from bridge_fgo.tools.plan.systems import SYSTEMS

KEPT = sorted(path.name.removesuffix(".json.gz") for path in answers.FOLDER.glob("*.json.gz"))


@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT)
def test_a_kept_answer_is_what_the_builder_says(name):
    built = json.loads(json.dumps(ask_builder(target=name)).replace(str(Path.cwd()), answers.HERE))
    assert answers.kept_answer(name, None, {}, None, ()) == built | {"kept_of": answers.installed_versions()}


def test_every_kept_recipe_with_overrides_of_the_offload_is_read_without_megatron():
    kept, before = {"", *kept_configs(planning=True)}, set(sys.modules)
    of_released = [name for name, recipe in sorted(RECIPES.items()) if recipe.mcore_module is None]
    assert [name for name in of_released if RECIPES[name].hf_model in kept] == KEPT
    job = read_job("qwen3_30b_a3b_8gpu", None, {"fraction": 0.5})
    assert job.parallel.gpus == 8 and "kept with this package" in job.source
    assert not {name for name in set(sys.modules) - before if name.startswith("megatron.")}
    overrides = ("optimizer.offload_optimizer_states=false", "optimizer.offload.gpu_memory_budget_gib=auto")
    job = read_job("qwen3_30b_a3b_8gpu", None, {"slab_bytes": 2**24}, overrides=overrides)
    assert (job.flag, job.offload.gpu_memory_budget_gib, job.offload.slab_bytes) == (False, "auto", 2**24)
    with pytest.raises(ValueError, match="leave out one of them"):
        read_job("tiny", None, {"fraction": 0.5}, overrides=("optimizer.offload.fraction=0.25",))
    assert "training reads the release's own" in read_job("gpt_oss_120b_64gpu", None, {}).source
    assert "public sources" not in read_job("qwen3_30b_a3b_8gpu", None, {}).source


@pytest.mark.parametrize(
    ("gpus", "offload", "vocab_size", "overrides"),
    [(16, {}, None, ()), (None, {"master_remainders": True}, None, ()), (None, {"engine": "mcore"}, None, ()),
     (None, {}, 1000, ()), (None, {}, None, ("train.micro_batch_size=2",)), (None, {}, None, ("fraction=0.5",)),
     (None, {}, None, ("optimizer.offload.engine=mcore",)), (None, {}, None, ("optimizer.offload.fraction=a",))],
)  # fmt: skip
def test_what_differs_from_the_recipe_is_built(gpus, offload, vocab_size, overrides):
    assert answers.kept_answer("qwen3_30b_a3b_8gpu", gpus, offload, vocab_size, overrides) is None
    assert answers.kept_answer("qwen3_30b_a3b_8gpu", 8, {"fraction": 0.5}, None, ()) is not None


def test_an_answer_of_another_megatron_as_of_a_checkout_before_the_wheel_is_not_taken(monkeypatch, tmp_path):
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "__init__.py").touch()
    locations = [str(tmp_path / "megatron"), *find_spec("megatron").submodule_search_locations]
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda _: SimpleNamespace(submodule_search_locations=locations))
        assert answers.installed_versions()["megatron-core"] == "checkout"
    for versions in ({"megatron-core": "0.18.0", "megatron-bridge": "0.6.2"}, {"megatron-core": "checkout"}):
        monkeypatch.setattr(answers, "installed_versions", lambda versions=versions: versions)
        assert answers.kept_answer("tiny", None, {}, None, ()) is None
    monkeypatch.setattr(answers, "installed_versions", dict)
    assert answers.kept_answer("tiny", None, {}, None, ()) is not None


def test_the_same_answer_is_the_same_bytes_wherever_it_was_made(monkeypatch, tmp_path):
    monkeypatch.setattr(answers, "FOLDER", tmp_path)
    written = []
    for name in ("made here", 'and "there"'):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        answers.keep("tiny", {"gpus": 1, "save": str(Path.cwd() / "checkpoints")}, {})
        written.append((tmp_path / "tiny.json.gz").read_bytes())
    assert written[0] == written[1] and written[0][4:8] == bytes(4), "no time in it"


def test_a_name_that_may_be_of_a_config_passes_and_one_that_cannot_be_is_refused(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "my_recipes.py").touch()
    monkeypatch.chdir(tmp_path)
    for name in ("tiny", "llama3_70b_pretrain_64gpu_h100_bf16_config", "json:loads", "my_recipes:f", "my_recipes.py:f"):
        target.refuse_at_once(name)
    target.refuse_at_once("llama3_8b_pretrain_config", ["train.train_iters=3", "hf_config=."])
    with pytest.raises(ValueError, match=r"hf_config=no: there is no no/config\.json"):
        target.refuse_at_once("tiny", ["hf_config=no"])
    for name, why in (
        ("recipes.llama:llama32_1b_pretrain_confg", "no recipe .*; did you mean llama32_1b_pretrain_config"),
        ("recipes.lama:llama32_1b_pretrain_config", "no module .*; write llama32_1b_pretrain_config alone"),
    ):
        with pytest.raises(ValueError, match=why):
            target.refuse_at_once(f"megatron.bridge.{name}")
    monkeypatch.setattr(target, "config_functions", dict)  # without Bridge
    target.refuse_at_once("llama3_70b_pretrain_config")
    with pytest.raises(ValueError, match="there is no recipe 'llama3_70b'; did you mean llama3_70b_64gpu"):
        target.refuse_at_once("llama3_70b")


# --- the names of settings ---


@pytest.mark.slow
def test_the_kept_names_are_those_of_the_installed_bridge():
    program = str(Path(setting_names.__file__))
    done = subprocess.run([sys.executable, program, "--print"], capture_output=True, text=True, check=True)
    kept = kept_files.read(names.FILE)
    assert (kept["names"], kept["versions"]) == (json.loads(done.stdout.splitlines()[-1]), answers.installed_versions())


NO_FIELDS = {"use_precision_aware_optimizer_no_fp8_or_ds_fp8", "moe_a2a_overlap"}
"""Attributes of configs that Bridge's overrides do not reach, as those that begin with an underscore."""


@pytest.mark.parametrize("name", KEPT)
def test_every_setting_of_a_recipe_is_among_the_kept_names(name):
    sections = answers.kept_answer(name, None, {}, None, ())["config"].items()
    fields = ((section, field) for section, settings in sections for field in settings if field not in NO_FIELDS)
    names.refuse_overrides_at_once(name, [f"{section}.{field}=1" for section, field in fields if field[0] != "_"])


def test_names_are_not_judged_of_another_megatron_or_a_class_of_the_users(monkeypatch, tmp_path):
    saved = tmp_path / "run_config.yaml"
    saved.write_text(
        "_target_: megatron.bridge.training.config.ConfigContainer\nddp: null\nmodel: {_target_: my.Model}\n"
        "train: {_target_: megatron.bridge.training.config.TrainingConfig, of_another_version: 1}\n"
    )
    unknown = ["train.train_itres=3"]
    for known in ("llama3_70b_64gpu", str(saved)):
        with pytest.raises(ValueError, match=r"train\.train_itres; did you mean train\.train_iters"):
            names.refuse_overrides_at_once(known, unknown)
    names.refuse_overrides_at_once(
        str(saved), ["model.mine=1", "train.of_another_version=2", "env_vars.NAME=1", "+x.y=1"]
    )
    names.refuse_overrides_at_once("mine:config", unknown)
    monkeypatch.setattr(names, "installed_versions", lambda: {"megatron-core": "checkout"})
    names.refuse_overrides_at_once("llama3_70b_64gpu", unknown)
    with pytest.raises(ValueError, match=r"did you mean optimizer\.offload\.fraction"):
        names.refuse_overrides_at_once("llama3_70b_64gpu", ["optimizer.offload.fractoin=0.5"])


# --- the table of recipes and systems ---

SAMPLE = (
    *(name for name, recipe in RECIPES.items() if recipe.mcore_module is None),
    "qwen3_30b_a3b_pretrain_16gpu_h100_bf16_config",
    "llama3_70b_pretrain_64gpu_b200_bf16_config",
    "llama3_70b_peft_8gpu_h100_bf16_config",
    "nemotron_3_nano_pretrain_8gpu_b300_fp8mx_config",
    "llama3_8b_pretrain_8gpu_h100_bf16_config",
)


def test_every_recipe_of_this_project_and_of_bridge_is_in_the_table():
    kept = kept_files.read(table.FILE)
    assert kept["versions"] == answers.installed_versions() and kept["systems"] == list(SYSTEMS)
    assert {name: row.get("as", name) for name, row in kept["rows"].items()} == recipe_table.names()
    assert all(row.keys() & {"as", "why"} or len(row["cells"]) == len(SYSTEMS) for row in kept["rows"].values())
    assert not any(re.search(r"\binstalled|\bhere\b", row.get("why", "")) for row in kept["rows"].values())


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_a_row_is_what_plan_says_today(name, builder_is_forked):
    assert kept_files.read(table.FILE)["rows"][name] == recipe_table.row_of(name)


def test_the_command_prints_the_recipes_that_have_each_word():
    versions, head, own, *others = invoke("recipes", "table", "qwen3", "64gpu", "235b").stdout.splitlines()
    assert versions.startswith("What `bridge-fgo plan` said with megatron-bridge 0.6.2, megatron-core 0.19.2, as ")
    assert head.split() == ["recipe", "GPUs", "resident", "offload", *SYSTEMS]
    assert own.split()[1:] == ["64", "142.4", "100.4", "fits", "fits", "fits", "fits", "no?", "offload", "no"]
    assert all(name in line for line in others[:-2] for name in ("qwen3", "64gpu", "235b"))
    assert "needs config.json of meta-llama/Meta-Llama-3-8B" in invoke("recipes", "table", "llama3_8b").stdout
