"""Imports run one way, without circles: the contracts in pyproject.toml hold."""

import subprocess
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1]


def test_the_contracts_on_imports_hold():
    contracts = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(contracts)} kept, 0 broken" in done.stdout
