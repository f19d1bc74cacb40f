"""The series on checkouts of Bridge, each with the mcore of a checkout of Megatron-LM.

Runs where BRIDGE_FGO_BRIDGE_CHECKOUTS names them: "BRIDGE,MEGATRON_LM:BRIDGE,MEGATRON_LM".
"""

import os
import shutil
from pathlib import Path

import pytest
from apply import SERIES, apply
from patched import commit_all, git, run_tests

PAIRS = [pair.split(",") for pair in os.environ.get("BRIDGE_FGO_BRIDGE_CHECKOUTS", "").split(":") if pair]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PAIRS, reason="BRIDGE_FGO_BRIDGE_CHECKOUTS names no checkouts of Bridge and Megatron-LM"),
]


@pytest.mark.parametrize(("bridge", "megatron_lm"), PAIRS or [("", "")])
def test_git_am_makes_a_commit_of_each_patch_and_the_tests_pass(tmp_path, bridge, megatron_lm):
    for name in ("src", "tests"):
        shutil.copytree(Path(bridge) / name, tmp_path / name)
    commit_all(tmp_path)
    apply(tmp_path)
    subjects = git(tmp_path, "log", "--format=%s", f"-{len(SERIES)}").splitlines()
    assert all(subject.startswith("[training] ") for subject in subjects)
    assert git(tmp_path, "status", "--porcelain") == ""
    assert run_tests(tmp_path, [tmp_path / "src", megatron_lm]) > 130
