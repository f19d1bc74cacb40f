"""The command that runs upstream's own tests."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import suite
from children import run_python

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


@pytest.mark.slow
def test_an_outcome_that_the_package_changes_is_named(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "tests" / "unit_tests" / "training"
    folder.mkdir(parents=True)
    (folder / "test_something.py").write_text(TESTS)
    monkeypatch.setattr(sys, "argv", ["suite.py", str(tmp_path)])
    monkeypatch.setattr(suite, "subprocess", SimpleNamespace(run=run_python))
    assert suite.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["without bridge_fgo: 3 passed", "with bridge_fgo: 1 failed, 2 passed"]
    assert len(lines) == 3
    assert lines[2].endswith("::test_not_the_same: passed without, failed with")


def test_a_checkouts_tests_of_optimizers_are_run_as_far_as_they_are_there_and_a_folder_without_is_said(tmp_path):
    done = subprocess.run([sys.executable, suite.__file__, tmp_path], capture_output=True, text=True)
    assert done.returncode == 2 and "has neither Bridge's" in done.stdout
    folder = tmp_path / "tests" / "unit_tests"
    (folder / "training").mkdir(parents=True)
    assert suite.what_to_run(tmp_path) == ["tests/unit_tests/training"]
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (folder / "dist_checkpointing").mkdir()
    there = ["test_layer_wise_optimizer.py", "dist_checkpointing/test_optimizer.py"]
    for name in there:
        (folder / name).touch()
    assert suite.what_to_run(tmp_path) == [f"tests/unit_tests/{name}" for name in there]
