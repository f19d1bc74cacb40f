"""The command that runs upstream's own tests."""

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
    (tmp_path / "megatron" / "core").mkdir(parents=True)  # as of Megatron-LM
    (folder.parent / "test_layer_wise_optimizer.py").touch()
    assert suite.what_to_run(tmp_path) == ["tests/unit_tests/test_layer_wise_optimizer.py"]
