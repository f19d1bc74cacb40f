"""The kept table of recipes and systems is of every recipe, and is what `plan` says today."""

import pytest
import recipe_table
from typer.testing import CliRunner

from bridge_fgo.recipes.catalog import RECIPES
from bridge_fgo.tools.demo import missing_packages
from bridge_fgo.tools.job import answers, table
from bridge_fgo.tools.main import app
from bridge_fgo.tools.plan.systems import SYSTEMS

needs_megatron = pytest.mark.skipif(bool(missing_packages()), reason="Megatron is not installed")
SAMPLE = (
    *(name for name, recipe in RECIPES.items() if recipe.mcore_module is None),
    "qwen3_30b_a3b_pretrain_16gpu_h100_bf16_config",
    "llama3_70b_pretrain_64gpu_b200_bf16_config",
    "llama3_70b_peft_8gpu_h100_bf16_config",
    "nemotron_3_nano_pretrain_8gpu_b300_fp8mx_config",
    "llama3_8b_pretrain_8gpu_h100_bf16_config",
)


@needs_megatron
def test_every_recipe_of_this_project_and_of_bridge_is_in_the_table():
    kept = table.read()
    assert kept["versions"] == answers.installed_versions() and kept["systems"] == list(SYSTEMS)
    assert {name: row.get("as", name) for name, row in kept["rows"].items()} == recipe_table.names()
    assert all(row.keys() & {"as", "why"} or len(row["cells"]) == len(SYSTEMS) for row in kept["rows"].values())


@needs_megatron
@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_a_row_is_what_plan_says_today(name, builder_is_forked):
    assert table.read()["rows"][name] == recipe_table.row_of(name)


def test_the_command_prints_the_recipes_that_have_each_word():
    done = CliRunner().invoke(app, ["recipes", "table", "qwen3", "64gpu", "235b"])
    head, own, *others = done.stdout.splitlines()
    assert head.split() == ["recipe", "GPUs", "resident", "offload", *SYSTEMS]
    assert own.split()[1:] == ["64", "142.4", "100.4", "fits", "fits", "fits", "fits", "no?", "offload", "no"]
    assert all(name in line for line in others[:-2] for name in ("qwen3", "64gpu", "235b"))
    done = CliRunner().invoke(app, ["recipes", "table", "llama3_8b"])
    assert "needs config.json of meta-llama/Meta-Llama-3-8B" in done.stdout
