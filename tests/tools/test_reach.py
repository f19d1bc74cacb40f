"""What the offload accepts of the configs that Bridge ships: the listing, one config of each class, all of them."""

import re
import sys
from pathlib import Path

import children
import pytest
from reach import table, verdict_of

from bridge_fgo.tools.demo import missing_packages

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^ +(\d+)  (accepted|refused|Bridge refuses|not built) *(.*)$", re.MULTILINE)

CONFIGS = [
    ("recipes.llama.h100.llama3", "llama32_1b_pretrain_1gpu_h100_bf16_config", "accepted", ""),
    ("perf_recipes.deepseek.b300.deepseek_v3", "deepseek_v3_pretrain_256gpu_b300_fp8mx_config", "accepted", ""),
    ("perf_recipes.gpt_oss.b300.gpt_oss", "gpt_oss_20b_pretrain_64gpu_b300_fp8mx_config", "accepted", ""),
    ("perf_recipes.deepseek.gb300.deepseek_v3", "deepseek_v3_pretrain_64gpu_gb300_bf16_fsdp_config", "accepted", ""),
    ("perf_recipes.deepseek.gb300.deepseek_v3", "deepseek_v3_pretrain_128gpu_gb300_fp8mx_hsdp_config", "accepted", ""),
    ("perf_recipes.kimi.b200.kimi_k2", "kimi_k2_pretrain_256gpu_b200_bf16_config", "accepted", ""),
    ("recipes.deepseek.gb200.deepseek_v4", "deepseek_v4_flash_pretrain_64gpu_gb200_bf16_muon_config", "accepted", ""),
    ("recipes.gemma.h100.gemma2", "gemma2_27b_peft_4gpu_h100_bf16_config", "accepted", ""),
    ("recipes.qwen_vl.h100.qwen35_vl", "qwen35_vl_35b_a3b_sft_2gpu_h100_bf16_fsdp_config",
     "Bridge refuses", "AssertionError"),
    ("perf_recipes.nemotronh.b200.nemotronh", "nemotron_3_super_pretrain_64gpu_b200_nvfp4_config",
     "not built", "FileNotFoundError"),
    ("recipes.qwen.h100.qwen3_next", "qwen3_next_80b_a3b_peft_1gpu_h100_bf16_config",
     "not built", "NotImplementedError"),
]  # fmt: skip


@pytest.fixture(scope="module")
def printed():
    """What `just reach --verbose` prints."""
    if missing_packages():
        pytest.skip("Megatron is not installed")
    done = children.run_python([sys.executable, "tests/tools/reach.py", "--verbose"], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_each_class_of_the_listing_has_its_verdict_and_reason(printed):
    rows = list(ROW.finditer(printed))
    ends = [row.start() for row in rows[1:]] + [len(printed)]
    of_class = {row.groups()[1:]: printed[row.end() : end] for row, end in zip(rows, ends, strict=True)}
    for module, name, outcome, reason in CONFIGS:
        assert f"megatron.bridge.{module}.{name}" in of_class[outcome, reason].split()


@pytest.mark.slow
def test_the_counts_of_the_pages_are_those_of_the_installed_bridge(printed):
    rows = ROW.findall(printed)
    assert rows == ROW.findall((ROOT / "tests/tools/reach.md").read_text())
    told = re.search(r"\[(\d+) of Bridge's (\d+) configs\]", (ROOT / "README.md").read_text())
    assert rows[0][1:] == ("accepted", "") and told
    assert [int(number) for number in told.groups()] == [int(rows[0][0]), sum(int(count) for count, *_ in rows)]


def test_classes_are_by_outcome_and_reason_nothing_is_left_out_and_what_a_function_raises_is_its_verdict():
    def recipe():
        raise FileNotFoundError("te_quant.cfg")

    verdicts = {"a": ("refused", "x.y=1 with", ""), "b": ("accepted", "", ""), "c": ("refused", "x.y=1 with", "")}
    verdicts["d"] = verdict_of(recipe)
    brief, verbose = (table(verdicts, 7, verbose=wanted) for wanted in (False, True))
    assert brief.startswith("4 config functions under 7 names; 3 build\n") and "d  te_quant.cfg" in brief
    rows = [("1", "accepted", ""), ("2", "refused", "x.y=1 with"), ("1", "not built", "FileNotFoundError")]
    assert ROW.findall(brief) == ROW.findall(verbose) == rows
    assert sorted(re.findall(r"^ {23}(\w)\b", verbose, re.MULTILINE)) == sorted(verdicts)
