"""A pytest plugin for upstream's own tests: what stands in without a GPU, and this package installed where asked."""

import os
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

ASSETS = "tests.test_utils.python_scripts.download_unit_tests_dataset"


def stand_in_for_mcores_tests() -> None:
    """Have mcore's tests, which ask for NCCL and a GPU each, run on the CPU by gloo, and download nothing."""
    from bridge_fgo.standins.cuda import install_standins

    install_standins()
    init_process_group = torch.distributed.init_process_group

    def with_gloo(*arguments: Any, **how: Any) -> None:
        init_process_group(*arguments, **{**how, "backend": "gloo"})

    torch.distributed.init_process_group = with_gloo
    torch.cuda.set_device = lambda device: None
    assets = ModuleType(ASSETS)
    vars(assets)["download_and_extract_asset"] = lambda **where: None
    sys.modules[ASSETS] = assets


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Have each rank leave a report of its own."""
    if "RANK" in os.environ and config.option.xmlpath:
        folder, name = os.path.split(config.option.xmlpath)
        config.option.xmlpath = os.path.join(folder, f"{os.environ['RANK']}.{name}")


if not torch.cuda.is_available():
    from bridge_fgo.standins.hollow import import_bridge

    import_bridge()
    if os.path.isdir("megatron/core"):  # a checkout of Megatron-LM
        stand_in_for_mcores_tests()

if os.environ.get("BRIDGE_FGO_INSTALL") == "1":
    import bridge_fgo

    bridge_fgo.install()
