"""The series in `patches/` on a copy of the installed wheel, on the repository's layout of its files, on checkouts.

Checkouts of Bridge, each with the mcore of a checkout of Megatron-LM, are those that BRIDGE_FGO_BRIDGE_CHECKOUTS names:
"BRIDGE,MEGATRON_LM:BRIDGE,MEGATRON_LM".
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from apply import SERIES, apply
from installed import folder_of

PROJECT = Path(__file__).parents[2]
WHEEL = folder_of("megatron.bridge")
IDENTITY = {"user.name": "test", "user.email": "test@example.com"}
SERIES_TESTS = "tests/unit_tests/training/test_optimizer_state_offload.py"


def git(folder, *command):
    return subprocess.run(["git", *command], cwd=folder, check=True, capture_output=True, text=True).stdout


def commit_all(folder):
    """Make a repository of a folder and commit all of it, with an identity for the commits of `git am`."""
    git(folder, "init", "--quiet")
    for name, value in IDENTITY.items():
        git(folder, "config", name, value)
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "as it was")


def run_tests(repository, path):
    """Run the series' tests and tests/bridge with a patched Bridge first on the path; return how many passed."""
    what = [
        "tests/patches/on_patched_bridge.py",
        "tests/bridge",
        "--ignore=tests/bridge/test_activation_offload.py",  # of mcore alone
        # What it says is no longer so: the flag is a field of the patched Bridge.
        "--deselect=tests/bridge/test_flag.py::test_without_the_package_released_mcore_refuses_it",
        str(repository / SERIES_TESTS),
    ]
    path = [*map(str, path), str(PROJECT / "tests/upstream"), str(PROJECT), os.environ.get("PYTHONPATH", "")]
    # Without the project's --strict-markers: Bridge has markers of its own.
    options = ["-q", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "upstream_plugin", "--rootdir", str(PROJECT)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *what], cwd=PROJECT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)}, capture_output=True, text=True, timeout=1500,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    return int(passed[1])


def touched() -> list[str]:
    """Return the files that the series changes and the wheel has, as `megatron/bridge/...`."""
    paths = {path for patch in SERIES for path in re.findall(r"^--- a/src/(.*)$", patch.read_text(), re.MULTILINE)}
    return sorted(path for path in paths if (WHEEL.parents[1] / path).exists())


def make_repository(folder):
    """Make a repository that holds what the series touches, as a clone of Megatron-Bridge does."""
    for path in touched():
        (folder / "src" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(WHEEL.parents[1] / path, folder / "src" / path)
    commit_all(folder)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """The repository's layout, with the series applied."""
    folder = tmp_path_factory.mktemp("repository")
    make_repository(folder)
    apply(folder)
    return folder


@pytest.fixture(scope="module")
def site_packages(tmp_path_factory):
    """A copy of the wheel, with the series applied; it lies in a git repository, as a `.venv` does."""
    folder = tmp_path_factory.mktemp("project")
    git(folder, "init", "--quiet")
    site = folder / ".venv"
    shutil.copytree(WHEEL, site / "megatron/bridge")  # with compiled files: most stay valid
    apply(site)
    return site


def test_both_layouts_end_alike_each_patch_is_a_commit_with_its_reason_and_none_is_applied_again(
    repository, site_packages
):
    changed = touched()
    assert changed
    for path in changed:
        assert (site_packages / path).read_bytes() != (WHEEL.parents[1] / path).read_bytes()
    for path in (*changed, "megatron/bridge/training/optimizer_state_offload.py"):
        assert (site_packages / path).read_bytes() == (repository / "src" / path).read_bytes()
    messages = git(repository, "log", "--format=%b%x00", f"-{len(SERIES)}").split("\0")[: len(SERIES)]
    assert len(messages) == len(SERIES) == 6
    assert all(len(message.split()) > 30 for message in messages)
    for folder in (repository, site_packages):
        with pytest.raises(ValueError, match="applied already"):
            apply(folder)
    with pytest.raises(ValueError, match="give a clone or site-packages"):
        apply(Path(__file__).parent)


@pytest.mark.parametrize("layout", ["repository", "site-packages"])
def test_where_one_patch_does_not_fit_nothing_is_changed(tmp_path, layout):
    make_repository(tmp_path)
    mimo = tmp_path / "src/megatron/bridge/training/train_megatron_mimo.py"
    mimo.write_text("# another version\n")
    git(tmp_path, "commit", "--quiet", "--all", "--message", "another version")
    with pytest.raises(RuntimeError, match="train_megatron_mimo"):
        apply(tmp_path if layout == "repository" else tmp_path / "src")
    assert git(tmp_path, "status", "--porcelain") == ""
    assert len(git(tmp_path, "log", "--format=%h").split()) == 2


def test_what_bridges_main_has_between_the_lines_stops_no_patch(tmp_path):
    folder = tmp_path / "src/megatron/bridge/training"
    make_repository(tmp_path)
    for name, before, line in (
        ("config.py", "from megatron.bridge.training.mixed_precision import", "import fsdp_compat\n"),
        ("setup.py", "        return model_config.provide_distributed_model(", "        model_config.finalize()\n"),
    ):
        text = (folder / name).read_text()
        assert text.count(before) == 1
        (folder / name).write_text(text.replace(before, line + before))
    git(tmp_path, "commit", "--quiet", "--all", "--message", "main")
    apply(tmp_path)
    assert len(git(tmp_path, "log", "--format=%h").split()) == 2 + len(SERIES)


@pytest.mark.slow
def test_the_series_tests_and_the_wiring_tests_pass_on_the_patched_wheel(repository, site_packages):
    assert run_tests(repository, [site_packages]) > 130


PAIRS = [pair.split(",") for pair in os.environ.get("BRIDGE_FGO_BRIDGE_CHECKOUTS", "").split(":") if pair]


@pytest.mark.slow
@pytest.mark.skipif(not PAIRS, reason="BRIDGE_FGO_BRIDGE_CHECKOUTS names no checkouts of Bridge and Megatron-LM")
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
