"""Each worker of pytest-xdist has GPUs of its own; where there are none, arms are only checked for refusals."""

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forked import LaunchedRanks, Server

from harness.arms import runner

NO_GPU = "no CUDA device; its arms would not be refused"
MOST_SAID = 4000
"""Characters that a test says as it ends."""


def pytest_configure(config: pytest.Config) -> None:
    """Has each test of this folder say at once what it measured, or why it failed: a machine may go before the end."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(SaysAtOnce(config))


class SaysAtOnce:
    """Prints what a test has printed, and how it failed, when it ends."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called for each phase of a test, with pytest-xdist too."""
        said = report.capstdout if report.when == "call" else ""
        said += f"\n{report.longreprtext}" if report.failed else ""
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if said and terminal is not None and report.nodeid.startswith("tests/gpu/"):
            terminal.ensure_newline()
            terminal.write_line(f"{report.nodeid}\n{said[-MOST_SAID:]}")


@pytest.fixture(scope="session", autouse=True)
def arms_are_forked() -> Iterator[None]:
    """Has all arms of a worker have Megatron imported, which else takes half a minute an arm."""
    import torch

    if not torch.cuda.is_available():
        yield
        return
    forking = vars(subprocess) | {"Popen": partial(LaunchedRanks, Server("megatron_on_gpu"))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "subprocess", SimpleNamespace(**forking))
        yield


@pytest.fixture(autouse=True)
def arm_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has arms find the modules of this folder, and each worker of pytest-xdist begin with another GPU."""
    path = [*map(str, Path(__file__).parents[:2]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    import torch

    every = ",".join(str(i) for i in range(torch.cuda.device_count()))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", every).split(",")
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = (2 * worker + worker // max(1, len(gpus) // 2)) % len(gpus)  # pairs of their own, then what lies between
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(gpus[first:] + gpus[:first]))


@pytest.fixture(scope="module", autouse=True)
def arms_are_only_checked_without_a_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where there is no GPU, has no arm run: a test is skipped at its first offloaded one, or fails if that is refused.

    A refusal that a change brought would else show only when somebody has GPUs.
    """
    import torch

    if torch.cuda.is_available():
        yield
        return
    request.getfixturevalue("cpu_standins")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 4)
        patch.setitem(sys.modules, "transformer_engine.pytorch.optimizers", SimpleNamespace(FusedAdam=fused_adam))  # pyright: ignore[reportArgumentType]
        patch.setattr(runner, "run_arm", check_arm)
        yield


def fused_adam(params, master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype, use_decoupled_grad) -> None:
    """Has the arguments that mcore looks for in Transformer Engine's FusedAdam."""


def check_arm(name: str, module: str, options: list[str], folder: Path, **how: Any) -> runner.ArmRun:
    """Stands in for ``runner.run_arm``."""
    from bridge_fgo.bridge.refusals import refuse_config
    from harness.arms import gpu
    from harness.arms.gpu import build_config, offload_config

    own = options[1:] if module == "debug_transfers" else options  # which is told what to run first
    arm = gpu.parse([*own, "--events", str(folder / name)])
    if arm.offload == "off":
        return runner.ArmRun(name)
    config = build_config(arm)
    config.optimizer.finalize()  # by Bridge's validation, which comes first in training and needs GPUs
    refuse_config(config, offload_config(arm))
    pytest.skip(NO_GPU)
