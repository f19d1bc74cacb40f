"""A recipe is upstream's configuration and the flag."""

import functools
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bridge_fgo.bridge.refusals import captures_full_iteration, refuse_config
from bridge_fgo.config import OffloadConfig
from bridge_fgo.recipes import catalog, config, hf_config

pytestmark = pytest.mark.usefixtures("cpu_standins")

KEPT = hf_config.kept_configs(planning=True)
UPSTREAMS = [name for name, recipe in catalog.RECIPES.items() if recipe.hf_model in KEPT]
WITH_VARIANTS = [
    pytest.param(name, marks=[pytest.mark.slow] * name.endswith(("b300", "_mxfp8", "_bf16", "_128gpu")))
    for name in UPSTREAMS
]
"""All of them; the slow lane has the further ones of a model."""


def upstream(name):
    """Return what Bridge's builder makes, with nothing of this package but the model's numbers."""
    module, function = catalog.find(name).builder.split(":")
    with hf_config.served("kept", planning=True):
        return getattr(importlib.import_module(f"megatron.bridge.{module}"), function)()


def built(name, offload):
    """Return the recipe's config, of the same numbers."""
    with hf_config.served("kept", planning=True):
        return config.build(catalog.find(name), offload=offload, hf="hub").config  # "hub" is what is served


FULL_ITERATION_GRAPHS = {"dsv4_flash_128gpu", "deepseek_v3_256gpu_mxfp8"}
"""Recipes whose passes are captured whole."""


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


MXFP8 = {"dsv4_flash_64gpu", "dsv4_flash_128gpu", "deepseek_v3_256gpu_mxfp8", "qwen3_30b_a3b_8gpu", "llama3_70b_64gpu"}
"""Recipes that train in mxfp8; the others are in bf16."""


@pytest.mark.parametrize("name", WITH_VARIANTS)
def test_a_recipe_has_the_gpus_precision_and_environment_that_it_stands_for_and_saves_as_said(name):
    """The other tests compare with the builder that the catalog names: a wrong one there would be equal to itself."""
    recipe, theirs = catalog.find(name), upstream(name)
    gpus = int(re.search(r"_(\d+)gpu", name)[1])
    assert recipe.gpus == gpus and f"_{gpus}gpu_{recipe.system.lower()}_" in recipe.builder
    assert (getattr(theirs.mixed_precision, "fp8", None) is not None) == (name in MXFP8)
    assert recipe.benchmark == (theirs.checkpoint.save is None and theirs.train.train_iters == 50)
    asked = {variable: str(value) for variable, value in theirs.env_vars.items()}
    assert recipe.environment == asked, "python -m recipes.config > recipes/environment.json"


@pytest.mark.parametrize("name", WITH_VARIANTS)
def test_a_recipe_is_upstreams_config_and_with_offload_the_flag_and_nothing_else_and_is_not_refused(name):
    ours = built(name, offload=False)
    assert len(flat(ours)) > 400  # the comparison sees the whole of it
    assert difference(ours, upstream(name)) == set()
    ours = built(name, offload=True)
    assert difference(ours, upstream(name)) == {"optimizer.offload_optimizer_states"}
    assert ours.optimizer.offload_optimizer_states is True
    assert captures_full_iteration(ours.model) == (name in FULL_ITERATION_GRAPHS)
    refuse_config(ours, OffloadConfig())


def test_an_override_comes_last_and_is_refused_if_it_conflicts():
    tiny = config.build(catalog.find("tiny"), offload=True)
    assert tiny.config.train.train_iters == 10
    refuse_config(tiny.config, OffloadConfig())
    overrides = ["train.train_iters=7", "optimizer.optimizer_cuda_graph=true"]
    ours = config.build(catalog.find("llama3_70b_64gpu"), offload=True, hf="kept", overrides=overrides)
    assert ours.config.train.train_iters == 7
    with pytest.raises(ValueError, match=r"optimizer\.optimizer_cuda_graph=True"):
        refuse_config(ours.config, OffloadConfig())


def test_a_recipe_is_found_by_the_name_that_bridge_0_7_gives_it(monkeypatch):
    recipe = catalog.find("qwen3_30b_a3b_8gpu")
    module, old = recipe.builder.split(":")
    functions = importlib.import_module(f"megatron.bridge.{module}")
    new = old.replace("_functional", "")
    monkeypatch.setattr(functions, new, getattr(functions, old), raising=False)
    monkeypatch.delattr(functions, old)
    assert any(new in note for note in config.build(recipe, offload=False, hf="kept").notes)


@pytest.mark.slow
def test_recipes_config_prints_the_kept_environments_and_nothing_else():
    """In a process of its own, which has yet to import Bridge: that logs to stdout, and wants Transformer Engine."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-W", "ignore", "-m", "recipes.config"]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == catalog.ENVIRONMENT_FILE.read_text()


@pytest.mark.parametrize("missing", ["megatron", "megatron.bridge"])
def test_without_bridge_the_error_of_a_recipe_says_what_to_install(missing, monkeypatch):
    def find_spec(name):
        if name.startswith(f"{missing}."):  # as importlib, which imports the parent first
            raise ModuleNotFoundError(f"No module named {missing!r}")
        return None if name == missing else object()

    monkeypatch.setattr(config.importlib.util, "find_spec", find_spec)
    with pytest.raises(ValueError, match="needs megatron-bridge: pip install 'megatron-bridge"):
        config.build(catalog.find("tiny"), offload=True)
