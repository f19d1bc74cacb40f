"""The patch for mcore's activation offload, on a copy of the installed module, and the script that shows the races."""

import importlib.util
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from stream_order import Race
from test_activation_offload import EVERY, FIRST_OF_TWO, LENGTHS, MODULE, offload, train  # noqa: F401 (a fixture)

PATCHES = Path(__file__).parents[2] / "patches/mcore"
PATCH = PATCHES / "0002-activation-offload-waits.patch"
SCRIPT = PATCHES / "activation_offload.py"
UNIT_TEST = "tests/unit_tests/pipeline_parallel/test_activation_offload_waits.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a patched copy of the installed module, and the patch's unit test."""
    folder = tmp_path_factory.mktemp("mcore")
    path = Path(f"{MODULE.replace('.', '/')}.py")
    (folder / path).parent.mkdir(parents=True)
    core = importlib.util.find_spec("megatron.core")
    assert core is not None and core.origin is not None
    shutil.copy(Path(core.origin).parents[2] / path, folder / path)
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    subprocess.run(["git", "apply", PATCH], cwd=folder, env=environment, check=True, capture_output=True)
    return folder


@pytest.fixture
def plain(cpu_standins):
    """The installed module."""
    return importlib.import_module(MODULE)


@pytest.fixture
def patched(plain, folder, monkeypatch):
    """The patched module, in the place of the installed one."""
    spec = importlib.util.spec_from_file_location(MODULE, folder / f"{MODULE.replace('.', '/')}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, MODULE, module)
    return module


@pytest.fixture
def unit_tests(folder, monkeypatch):
    """Return what runs the patch's unit tests on made-up streams, and returns whether each of them raced."""
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)

    def run():
        tests = runpy.run_path(str(folder / UNIT_TEST))["TestActivationOffloadWaits"]()
        results = {}
        for name in ("test_reload_in_backward_waits_for_offload", "test_offload_waits_for_reload_from_its_buffer"):
            try:
                getattr(tests, name)()
                results[name] = False
            except Race:
                results[name] = True
        return list(results.values())

    return run


@EVERY
@pytest.mark.parametrize("rows", [((2,) * 4,) * 3, LENGTHS])
def test_the_patched_module_does_not_race(patched, offload, schedule, rows):  # noqa: F811
    assert offload.module is patched
    train(offload, schedule, rows)


def test_the_installed_module_races_and_so_does_the_patched_one_without_either_of_its_waits(
    plain, patched, offload, monkeypatch  # noqa: F811
):
    with monkeypatch.context() as patch, pytest.raises(Race, match="a write"):
        patch.setattr(patched, "OffloadTensorPool", plain.OffloadTensorPool)
        train(offload, FIRST_OF_TWO, LENGTHS)
    with monkeypatch.context() as patch, pytest.raises(Race, match="a read"):
        patch.setattr(patched.ChunkOffloadHandler, "tensor_pop", plain.ChunkOffloadHandler.tensor_pop)
        train(offload, FIRST_OF_TWO, LENGTHS)


def test_the_patchs_own_unit_tests_fail_without_it(offload, unit_tests):  # noqa: F811
    assert unit_tests() == [True, True]


def test_the_patchs_own_unit_tests_pass_with_it(patched, offload, unit_tests):  # noqa: F811
    assert unit_tests() == [False, False]
