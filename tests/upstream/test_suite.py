"""The command that runs upstream's own tests."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).with_name("suite.py")

TESTS = """
import os

def test_the_same():
    import megatron.bridge

def test_not_the_same():
    assert os.environ["BRIDGE_FGO_INSTALL"] == "0"

def test_it_is_installed_where_asked():
    from bridge_fgo.bridge.settings import is_installed
    assert is_installed() == (os.environ["BRIDGE_FGO_INSTALL"] == "1")
"""


def run(checkout):
    return subprocess.run([sys.executable, str(SUITE), str(checkout)], capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_an_outcome_that_the_package_changes_is_named(tmp_path):
    folder = tmp_path / "tests" / "unit_tests" / "training"
    folder.mkdir(parents=True)
    (folder / "test_something.py").write_text(TESTS)
    done = run(tmp_path)
    lines = done.stdout.splitlines()
    assert lines[:2] == ["without bridge_fgo: 3 passed", "with bridge_fgo: 1 failed, 2 passed"], done
    assert len(lines) == 3
    assert lines[2].endswith("::test_not_the_same: passed without, failed with")
    assert done.returncode == 1


def test_a_folder_without_tests_is_said(tmp_path):
    assert run(tmp_path).returncode == 2


def test_of_a_checkout_of_megatron_lm_its_tests_of_optimizers_are_run_as_far_as_they_are_there(tmp_path):
    what_to_run = runpy.run_path(str(SUITE))["what_to_run"]
    folder = tmp_path / "tests" / "unit_tests"
    (folder / "training").mkdir(parents=True)
    assert what_to_run(tmp_path) == ["tests/unit_tests/training"]
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (folder / "dist_checkpointing").mkdir()
    there = ["test_layer_wise_optimizer.py", "dist_checkpointing/test_optimizer.py"]
    for name in there:
        (folder / name).touch()
    assert what_to_run(tmp_path) == [f"tests/unit_tests/{name}" for name in there]
