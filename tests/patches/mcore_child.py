"""Runs what is for mcore and a GPU on the CPU, with the installed mcore or another one's optimizers.

python mcore_child.py TESTS SCRIPT [CORE]    # pytest, on one of mcore's unit tests; then the script's `main`, 3 steps

CORE: the folder of the other `megatron.core`.

Exit status: 0, 1 where the script fails, and 2 more where a test does.
"""

import runpy
import sys
from pathlib import Path
from types import ModuleType

import fused_adam
import pytest
from two_devices import TwoDevices

from bridge_fgo.tools.standins.cuda import install_standins


class Utils:
    """What a test on one rank takes of mcore's `tests.unit_tests.test_utilities.Utils`, which is for GPUs."""

    @staticmethod
    def initialize_model_parallel():
        import torch
        from megatron.core import parallel_state

        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()

    @staticmethod
    def destroy_model_parallel():
        import torch
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def run_tests(file):
    """Run one of mcore's unit tests by pytest; return its status."""
    for name in ("tests", "tests.unit_tests", "tests.unit_tests.test_utilities"):
        sys.modules[name] = ModuleType(name)
    sys.modules[name].Utils = Utils
    folder = str(Path(file).parent)
    options = ["-p", "no:cacheprovider", "--noconftest", "--rootdir", folder, "--import-mode=importlib"]
    return pytest.main(["-q", *options, file])


def take_optimizers_from(folder):
    """Have mcore's optimizers imported from there, anew where they are imported already."""
    import megatron.core

    megatron.core.__path__.insert(0, folder)
    name = "megatron.core.optimizer"
    for module in [module for module in sys.modules if module == name or module.startswith(f"{name}.")]:
        del sys.modules[module]


if __name__ == "__main__":
    tests, script, *cores = sys.argv[1:]
    install_standins()
    for core in cores:
        take_optimizers_from(core)
    with pytest.MonkeyPatch.context() as patch:
        fused_adam.have_mcore_make_it_precision_aware(patch)
        TwoDevices(patch)
        from megatron.core import utils
        from megatron.core.optimizer import optimizer

        patch.setattr(utils, "is_te_min_version", lambda version: True)  # which mcore's tests ask
        print("mcore:", optimizer.__file__)
        failed = bool(run_tests(tests))
        sys.exit(2 * failed + runpy.run_path(script)["main"](3))
