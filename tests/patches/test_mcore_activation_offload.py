"""The patch for mcore's activation offload, on a copy of the installed module, and the script that shows the races."""

import importlib.util
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import test_activation_offload as on_streams
import torch
from installed import apply_patch, folder_of
from stream_order import Race
from test_activation_offload import EVERY, FIRST_OF_TWO, LENGTHS, MODULE, train

offload = on_streams.offload
PATH = f"{MODULE.replace('.', '/')}.py"
PATCHES = Path(__file__).parents[2] / "patches/mcore"
PATCH = PATCHES / "0002-activation-offload-waits.patch"
SCRIPT = PATCHES / "activation_offload.py"
UNIT_TEST = "tests/unit_tests/pipeline_parallel/test_activation_offload_waits.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a patched copy of the installed module, and the patch's unit test."""
    folder = tmp_path_factory.mktemp("mcore")
    (folder / PATH).parent.mkdir(parents=True)
    shutil.copy(folder_of("megatron.core").parents[1] / PATH, folder / PATH)
    apply_patch(folder, PATCH)
    return folder


@pytest.fixture
def plain(cpu_standins):
    """The installed module."""
    return importlib.import_module(MODULE)


def load(folder):
    """Return the patched module, which nothing else has imported."""
    spec = importlib.util.spec_from_file_location(MODULE, folder / PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def patched(plain, folder, monkeypatch):
    """The patched module, in the place of the installed one."""
    module = load(folder)
    monkeypatch.setitem(sys.modules, MODULE, module)
    return module


@pytest.fixture
def unit_tests(folder, monkeypatch):
    """Return what runs the patch's unit tests on made-up streams, and returns whether each of them raced."""
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)

    def races(test):
        try:
            test()
        except Race:
            return True
        return False

    def run():
        tests = runpy.run_path(str(folder / UNIT_TEST))["TestActivationOffloadWaits"]()
        return [races(getattr(tests, name)) for name in dir(tests) if name.startswith("test_")]

    return run


@EVERY
@pytest.mark.parametrize("rows", [((2,) * 4,) * 3, LENGTHS])
def test_the_patched_module_does_not_race(patched, offload, schedule, rows):
    assert offload.module is patched
    train(offload, schedule, rows)


def test_the_patched_module_races_without_either_of_its_waits(plain, patched, offload, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Race, match="a write"):
        patch.setattr(patched, "OffloadTensorPool", plain.OffloadTensorPool)
        train(offload, FIRST_OF_TWO, LENGTHS)
    with monkeypatch.context() as patch, pytest.raises(Race, match="a read"):
        patch.setattr(patched.ChunkOffloadHandler, "tensor_pop", plain.ChunkOffloadHandler.tensor_pop)
        train(offload, FIRST_OF_TWO, LENGTHS)


def test_the_patchs_own_unit_tests_fail_without_it(offload, unit_tests):
    assert unit_tests() == [True] * 3


def test_the_patchs_own_unit_tests_pass_with_it(patched, offload, unit_tests):
    assert unit_tests() == [False] * 3


@pytest.mark.slow
def test_the_script_races_on_the_installed_module_and_finds_equal_bits_with_the_patch(
    plain, offload, folder, monkeypatch, capsys
):  # fmt: skip
    from megatron.core.models.gpt import gpt_layer_specs

    local = gpt_layer_specs.get_gpt_layer_local_spec
    monkeypatch.setattr(gpt_layer_specs, "get_gpt_layer_with_transformer_engine_spec", local)
    # mcore empties what it has offloaded; to an `Order` no address may be used twice.
    monkeypatch.setattr(torch.UntypedStorage, "resize_", lambda storage, nbytes: storage)
    script = runpy.run_path(str(SCRIPT))["main"]
    sizes = {"steps": 2, "runs": 1, "modules": ["core_attn", "attn_proj"], "hidden": 64, "length": 16}
    with pytest.raises(Race, match="a read"):
        script(**sizes)
    patched = load(folder)
    monkeypatch.setattr(plain, "OffloadTensorPool", patched.OffloadTensorPool)
    monkeypatch.setattr(plain.ChunkOffloadHandler, "tensor_pop", patched.ChunkOffloadHandler.tensor_pop)
    plain.PipelineOffloadManager.reset_instance()
    assert script(**sizes) == 0
    assert capsys.readouterr().out.endswith("with it, run 1: equal\nequal\n")


@pytest.mark.parametrize("name", ["activation_offload.py", "precision_aware_offload.py"])
def test_a_script_names_what_it_needs_and_has_not(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    monkeypatch.setenv("NVTE_CPU_OFFLOAD_V1", "1")  # which the script sets otherwise
    for has_gpu, needed in ((False, "a GPU: torch.cuda.is_available"), (True, "Transformer Engine")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        with pytest.raises(SystemExit, match="2"):
            runpy.run_path(str(PATCHES / name), run_name="__main__")
        assert capsys.readouterr().err.startswith(f"{name} needs {needed}")
