"""The command that runs the CPU lane on checkouts of Bridge and Megatron-LM."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from installed import folder_of

from bridge_fgo.bridge.table import patches

CHECKOUTS = Path(__file__).with_name("checkouts.py")


def run(*arguments):
    command = [sys.executable, str(CHECKOUTS), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture
def checkouts(tmp_path):
    """Checkouts of the installed Bridge and mcore; Bridge's loop is a copy, and the rest are links."""
    bridge, megatron_lm = tmp_path / "bridge", tmp_path / "megatron_lm"
    (bridge / "src/megatron/bridge/training").mkdir(parents=True)
    for folder in (".", "training"):
        for path in (folder_of("megatron.bridge") / folder).iterdir():
            if not (copy := bridge / "src/megatron/bridge" / folder / path.name).exists():
                copy.symlink_to(path)
    train = bridge / "src/megatron/bridge/training/train.py"
    train.unlink()
    shutil.copy(folder_of("megatron.bridge") / "training/train.py", train)
    (megatron_lm / "megatron").mkdir(parents=True)
    (megatron_lm / "megatron/core").symlink_to(folder_of("megatron.core"))
    return bridge, megatron_lm, train


@pytest.mark.slow
def test_a_binding_that_no_longer_fits_is_named_and_fails_the_run(checkouts):
    bridge, megatron_lm, train = checkouts
    text = train.read_text()
    assert text.count("def train_step(") == 1 and text.count("def _handle_mxfp8_param_buffer_copy(") == 1
    train.write_text(
        text.replace("def train_step(", "def a_step(").replace(
            "def _handle_mxfp8_param_buffer_copy(", "def _handle_mxfp8_param_buffer_copy(what): ...\ndef _before("
        )
    )
    done = run(bridge, megatron_lm, "--version")  # of pytest, in place of the tests
    assert done.returncode == 1, done.stdout + done.stderr
    assert str(bridge) in done.stdout and str(megatron_lm) in done.stdout
    count = sum(patch.module.startswith("megatron.") for patch in patches())
    assert f"{count - 2} of {count} bindings fit" in done.stdout
    assert "  megatron.bridge.training.train.train_step: bridge_fgo cannot patch" in done.stdout
    assert "it has no parameter model, optimizer any more" in done.stdout


MOVED = ("train", "setup", "eval", "train_megatron_mimo", "setup_megatron_mimo")
"""Modules of Bridge's training that lie in Megatron-LM's, in a checkout in which upstream has begun to move them."""
WHICH_AND_TESTS = """
import sys
import pytest
from bridge_fgo.bridge.table import patches
print(*sorted({patch.module for patch in patches() if "training." in patch.module}), flush=True)
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.fixture
def moved(tmp_path):
    """The environment of a Bridge that has moved in part; all but `eval` are found by their old names too."""
    megatron = {package: tmp_path / "megatron" / package for package in ("bridge", "training")}
    for package, folder in megatron.items():
        folder.mkdir(parents=True)
        for path in folder_of(f"megatron.{package}").iterdir():
            (folder / path.name).symlink_to(path)
    old = re.compile(rf"\bmegatron\.bridge\.training\.({'|'.join(MOVED)})\b")
    (megatron["bridge"] / "training").unlink()
    training = megatron["bridge"] / "training"
    shutil.copytree(folder_of("megatron.bridge") / "training", training, ignore=shutil.ignore_patterns("__pycache__"))
    for path in training.rglob("*.py"):
        path.write_text(old.sub(r"megatron.training.\1", path.read_text()))
    for name in MOVED:
        (training / f"{name}.py").rename(megatron["training"] / f"{name}.py")
    for name in set(MOVED) - {"eval"}:
        alias = f"import sys\n\nfrom megatron.training import {name}\n\nsys.modules[__name__] = {name}\n"
        (training / f"{name}.py").write_text(alias)
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(CHECKOUTS.parents[2])])}


@pytest.mark.slow
def test_functions_are_found_where_upstream_moves_them_and_training_is_bitwise_equal(moved):
    tests = ["-q", "-p", "no:cacheprovider", "tests/test_parity.py", "-k", "plain or trouble or fsdp"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WHICH_AND_TESTS, *tests], cwd=CHECKOUTS.parents[2], env=moved,
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    names = done.stdout.partition("\n")[0].split()
    assert {name for name in names if ".bridge." not in name} == {f"megatron.training.{name}" for name in MOVED}
    assert "megatron.bridge.training.config" in names
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]
