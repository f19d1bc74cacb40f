"""Imports run one way, without circles: the contracts in pyproject.toml hold."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
CONTRACTS = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


@pytest.mark.parametrize("contract", [contract["id"] for contract in CONTRACTS])
def test_the_contract_on_imports_holds(contract):
    lint = Path(sys.executable).with_name("lint-imports")
    command = [lint, "--no-cache", "--no-logo", "--contract", contract]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 kept, 0 broken" in done.stdout
