"""What the offload accepts of the configs that Bridge ships: the listing, one config of each class, all of them."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from reach import Verdict, by_class, config_functions, setting_of, table, verdict_of, without_hugging_face

ROOT = Path(__file__).parents[2]
FOLDERS = ("recipes", "perf_recipes", "diffusion/recipes")

ACCEPTED = [
    ("recipes.llama.h100.llama3", "llama32_1b_pretrain_1gpu_h100_bf16_config"),
    ("perf_recipes.deepseek.b300.deepseek_v3", "deepseek_v3_pretrain_256gpu_b300_fp8mx_config"),
    ("perf_recipes.gpt_oss.b300.gpt_oss", "gpt_oss_20b_pretrain_64gpu_b300_fp8mx_config"),
    ("perf_recipes.deepseek.gb300.deepseek_v3", "deepseek_v3_pretrain_64gpu_gb300_bf16_fsdp_config"),
    ("perf_recipes.deepseek.gb300.deepseek_v3", "deepseek_v3_pretrain_128gpu_gb300_fp8mx_hsdp_config"),
    ("perf_recipes.kimi.b200.kimi_k2", "kimi_k2_pretrain_256gpu_b200_bf16_config"),
    ("recipes.deepseek.gb200.deepseek_v4", "deepseek_v4_flash_pretrain_64gpu_gb200_bf16_muon_config"),
    ("recipes.gemma.h100.gemma2", "gemma2_27b_peft_4gpu_h100_bf16_config"),
]
OTHERS = [
    (
        "recipes.qwen_vl.h100.qwen35_vl",
        "qwen35_vl_35b_a3b_sft_2gpu_h100_bf16_fsdp_config",
        "Bridge refuses",
        "AssertionError",
    ),
    (
        "perf_recipes.nemotronh.b200.nemotronh",
        "nemotron_3_super_pretrain_64gpu_b200_nvfp4_config",
        "not built",
        "FileNotFoundError",
    ),
    (
        "recipes.qwen.h100.qwen3_next",
        "qwen3_next_80b_a3b_peft_1gpu_h100_bf16_config",
        "not built",
        "NotImplementedError",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name", "outcome", "reason"), [*((*case, "accepted", "") for case in ACCEPTED), *OTHERS]
)
def test_a_config_of_each_class_has_its_verdict_and_reason(cpu_standins, module, name, outcome, reason):
    function = getattr(importlib.import_module(f"megatron.bridge.{module}"), name)
    with without_hugging_face():
        verdict = verdict_of(function)
    assert (verdict.outcome, verdict.reason) == (outcome, reason)


@pytest.mark.slow
def test_the_listing_finds_every_config_function_that_the_sources_define(cpu_standins):
    found = {(function.__module__, function.__name__) for function in config_functions()}
    assert found == set(functions_in_sources())


def functions_in_sources():
    """Yield module and name of each public function that needs no argument and returns a ConfigContainer, as read."""
    import megatron.bridge

    package = Path(megatron.bridge.__file__).parent
    for path in (path for folder in FOLDERS for path in (package / folder).rglob("*.py")):
        module = ".".join(("megatron.bridge", *path.relative_to(package).with_suffix("").parts))
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_") or node.returns is None:
                continue
            positional = len(node.args.posonlyargs) + len(node.args.args)
            without_arguments = positional == len(node.args.defaults) and None not in node.args.kw_defaults
            if without_arguments and ast.unparse(node.returns).strip("'\"") == "ConfigContainer":
                yield module, node.name


@pytest.mark.parametrize(
    ("refusal", "setting"),
    [
        ("optimizer.optimizer='muon' with optimizer.offload_optimizer_states=True: no", "optimizer.optimizer='muon'"),
        ("a graph (model.cuda_graph_impl='local') with the flag: no; set ddp.x=True", "model.cuda_graph_impl='local'"),
        ("ddp.use_megatron_fsdp=True with the flag", "ddp.use_megatron_fsdp=True"),
        ("nothing that has a name", "nothing that has a name"),
    ],
)
def test_the_class_of_a_refusal_is_the_setting_that_it_names_first(refusal, setting):
    assert setting_of(refusal) == setting


def test_classes_are_by_outcome_and_reason_and_nothing_is_left_out():
    verdicts = {
        "a": Verdict("refused", ("x.y=1 with",)),
        "b": Verdict("accepted"),
        "c": Verdict("refused", ("x.y=1 with", "x.z=2 with")),
        "d": Verdict("not built", ("KeyError: 'q'",)),
        "e": Verdict("refused", ("x.y=1 with", "x.y=1 as well")),
    }
    classes = by_class(verdicts)
    assert list(classes) == [
        ("accepted", ""),
        ("refused", "x.y=1"),
        ("refused", "x.y=1, x.z=2"),
        ("not built", "KeyError"),
    ]
    assert sorted(name for names in classes.values() for name in names) == sorted(verdicts)
    brief, verbose = (table(verdicts, 7, verbose=wanted) for wanted in (False, True))
    assert brief.startswith("5 config functions under 7 names; 4 build\n") and "KeyError: 'q'" in brief
    assert "x.y=1 as well" not in brief and "x.y=1 as well" in verbose


def test_what_a_function_raises_is_its_verdict():
    def recipe():
        raise FileNotFoundError("te_quant.cfg")

    assert verdict_of(recipe) == Verdict("not built", ("FileNotFoundError: te_quant.cfg",))


@pytest.mark.slow
def test_the_counts_of_the_pages_are_those_of_the_installed_bridge(cpu_standins):
    done = subprocess.run(
        [sys.executable, "tests/tools/reach.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    counted = {(outcome, reason): int(count) for count, outcome, reason in rows(done.stdout)}
    total = sum(counted.values())
    page = (ROOT / "tests/tools/reach.md").read_text()
    assert rows(page) == rows(done.stdout)
    told = re.search(r"\[(\d+) of Bridge's (\d+) configs\]", (ROOT / "README.md").read_text())
    assert told and [int(number) for number in told.groups()] == [counted["accepted", ""], total]
    assert total == len(set(functions_in_sources()))


def rows(text):
    """Return count, outcome and reason of each row of the table in a text."""
    return re.findall(r"^ +(\d+)  (accepted|refused|Bridge refuses|not built) *(.*)$", text, re.MULTILINE)
