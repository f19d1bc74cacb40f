"""A pytest plugin for upstream's own tests: what stands in without a GPU, and this package installed where asked."""

import os
import sys
from contextlib import ExitStack
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

ASSETS = "tests.test_utils.python_scripts.download_unit_tests_dataset"

CPU = torch.device("cpu")
_until_the_end = ExitStack()


class PlacesAsCpu(TorchFunctionMode):
    """Makes a CUDA device that is given by its place mean the CPU, as `Module.to` and `DTensor.from_local` give it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function with the CPU in the place of each such device."""
        names = (torch.device, str) if func is torch.Tensor.to else (torch.device,)
        given = [CPU if isinstance(arg, names) and str(arg).startswith("cuda") else arg for arg in args]
        return func(*given, **(kwargs or {}))


def scale_before_the_sum() -> None:
    """Have Megatron-FSDP multiply gradients before they are added up, as it does in bf16: gloo cannot in one go."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as module

    prepare = module.gradient_reduce_preprocessing

    def not_fused(grad_data: torch.Tensor, scaling_factor: float | None, ddp_config: Any) -> Any:
        asked = SimpleNamespace(
            average_in_collective=ddp_config.average_in_collective, gradient_reduce_div_fusion=False
        )
        return prepare(grad_data, scaling_factor, asked)

    module.gradient_reduce_preprocessing = not_fused


def stand_in_for_mcores_tests() -> None:
    """Have mcore's tests, which ask for NCCL and a GPU each, run on the CPU by gloo, and download nothing."""
    from bridge_fgo.tools.standins.cuda import fsdp_on_cpu, install_standins

    install_standins()
    _until_the_end.enter_context(fsdp_on_cpu())
    _until_the_end.enter_context(PlacesAsCpu())
    scale_before_the_sum()
    init_process_group = torch.distributed.init_process_group

    def with_gloo(*arguments: Any, **how: Any) -> None:
        init_process_group(*arguments, **{**how, "backend": "gloo"})

    torch.distributed.init_process_group = with_gloo
    torch.cuda.set_device = lambda device: None
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(name="none", major=9, minor=0)
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
    from bridge_fgo.tools.standins.hollow import import_bridge

    import_bridge()
    if os.path.isdir("megatron/core"):  # a checkout of Megatron-LM
        stand_in_for_mcores_tests()

if os.environ.get("BRIDGE_FGO_INSTALL") == "1":
    import bridge_fgo

    bridge_fgo.install()
