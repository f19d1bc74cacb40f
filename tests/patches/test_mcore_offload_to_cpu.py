"""The patch for mcore's `offload_to_cpu`, on a copy of the installed optimizers, and the script that shows the bug."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from children import run_python
from installed import apply_patch, folder_of

HERE = Path(__file__).parent
CORE = folder_of("megatron.core")
PROJECT = HERE.parents[1]
PATCH = PROJECT / "patches/mcore/0001-offload-to-cpu.patch"
SCRIPT = PROJECT / "patches/mcore/precision_aware_offload.py"
UNIT_TEST = "tests/unit_tests/optimizer/test_offload_to_cpu.py"


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    """A folder with the installed mcore, whose optimizers are a patched copy, and the patch's unit test."""
    folder = tmp_path_factory.mktemp("mcore")
    target = folder / "megatron/core"
    target.mkdir(parents=True)
    for path in CORE.iterdir():
        if path.name == "optimizer":
            shutil.copytree(path, target / "optimizer", ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (target / path.name).symlink_to(path)
    apply_patch(folder, PATCH)
    return folder


@pytest.fixture(scope="module")
def run(patched):
    """Run the unit test and the script by stand-ins: with the installed mcore, and with the patched optimizers."""

    path = [*map(str, (PROJECT, HERE, HERE.parent)), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    command = [sys.executable, HERE / "mcore_child.py", patched / UNIT_TEST, SCRIPT]
    runs = {"as it is": [], "patched": [patched / "megatron/core"]}
    return {name: run_python([*command, *first], env=environment, cwd=HERE) for name, first in runs.items()}


def weights(done):
    """Return the checksums of the weights that the script printed before and after the round trip."""
    before, _, after = done.stdout.partition("restore_from_cpu()")
    return [
        [int(line.split()[-1]) for line in part.splitlines() if line.startswith("weights")] for part in (before, after)
    ]


def test_the_patch_changes_the_installed_optimizers_and_adds_a_test(patched):
    changed = ["optimizer.py", "distrib_optimizer.py"]
    for name in changed:
        ours, theirs = (folder / "optimizer" / name for folder in (patched / "megatron/core", CORE))
        assert "_is_model_memory" in ours.read_text() and "_is_model_memory" not in theirs.read_text()
    assert (patched / UNIT_TEST).exists()


@pytest.mark.slow
def test_after_mcores_round_trip_weights_stop_moving_and_the_script_and_the_unit_test_fail(run):
    done = run["as it is"]
    assert done.returncode == 3 and "2 failed" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    assert f"mcore: {CORE}" in done.stdout
    before, after = weights(done)
    assert len(set(before)) == len(before) == 4 == len(after)
    assert set(after) == {before[-1]}
    assert "FAIL: after the round trip" in done.stdout


@pytest.mark.slow
def test_with_the_patch_weights_move_on_and_its_own_unit_test_passes(run, patched):
    done = run["patched"]
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    assert f"mcore: {patched}" in done.stdout
    before, after = weights(done)
    assert len({*before, *after}) == 7 and after[0] == before[-1]
