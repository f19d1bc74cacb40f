"""Repositories that the series is applied to, and tests that run on what came of it."""

import os
import re
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[2]
SERIES_TESTS = "tests/unit_tests/training/test_optimizer_state_offload.py"


def git(folder, *command):
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    return subprocess.run(["git", *identity, *command], cwd=folder, check=True, capture_output=True, text=True).stdout


def commit_all(folder):
    """Make a repository of a folder and commit all of it, with an identity for the commits of `git am`."""
    git(folder, "init", "--quiet")
    git(folder, "config", "user.name", "test")
    git(folder, "config", "user.email", "test@example.com")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "as it was")


def run_tests(repository, path):
    """Run the series' tests and tests/bridge with a patched Bridge first on the path; return how many passed."""
    what = [
        "tests/patches/on_patched_bridge.py",
        "tests/bridge",
        # What it says is no longer so: the flag is a field of the patched Bridge.
        "--deselect=tests/bridge/test_flag.py::test_without_the_package_released_mcore_refuses_it",
        str(repository / SERIES_TESTS),
    ]
    path = [*map(str, path), str(PROJECT / "tests/upstream"), str(PROJECT), os.environ.get("PYTHONPATH", "")]
    # Without the project's --strict-markers: Bridge has markers of its own.
    options = ["-q", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "upstream_plugin", "--rootdir", str(PROJECT)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *what],
        cwd=PROJECT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    return int(passed[1])
