"""What the tests of this folder share: sizes of models, arms by Bridge's own ``pretrain()``, and arms that print JSON.

Each arm is a process (under torchrun: several), so that neither of two inherits anything from the other. All are forked
from one that has Megatron imported, and nothing else.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from bridge_fgo.tools.link import launcher
from harness.arms import runner

HERE = Path(__file__).parent
NEEDS_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LEAST_RETURNED = 0.98
"""Of what sleeps, the share that the driver has to get."""
ARM = "harness.arms.gpu"

# 128M parameters, 1.5 GB of masters and moments; four microbatches a step.
SMALL = ("--layers", "4", "--hidden", "1024", "--heads", "16", "--seq", "1024", "--mbs", "2", "--gbs", "8")
# The same parameters with larger microbatches. Attention scores of 16 heads over 4 x 2048
# tokens and the logits hold several GB more than the states do. So the peak lies in the
# backward pass, and not in the optimizer step, where the states have to be resident.
MANY_ACTIVATIONS = (*SMALL[:6], "--seq", "2048", "--mbs", "4", "--gbs", "16")
# The same with so few tokens that the states are larger than all else but weights and gradients.
FEW_ACTIVATIONS = (*SMALL[:6], "--seq", "256", "--mbs", "1", "--gbs", "4")
PRECISION_AWARE = ("--precision-aware", "--moments-dtype", "bf16")
PACKED = ("--master-remainders",)
"""For runs that are over before masters are packed by default."""
EXPERTS = ("--experts", "4", "--topk", "2")
ACTIVATIONS = ("--offload-activations", "core_attn,attn_proj,mlp_norm,qkv_linear")


def arm(name: str, folder: Path, *options: str, ranks: int = 1, timeout: float = 300) -> runner.ArmRun:
    """Runs an arm; ends it long before NCCL's ten minutes are over where it hangs.

    Options like "NAME=VALUE" are of its environment, and ask for changes of ``changed_arm``.
    """
    environment = dict(option.split("=", 1) for option in options if re.fullmatch(r"[A-Z_]+=.*", option))
    options = tuple(option for option in options if option.partition("=")[0] not in environment)
    first, *others = in_debug_mode("changed_arm" if environment else ARM)
    how = {"environment": environment, "launcher": launcher(ranks), "timeout": timeout}
    return runner.run_arm(name, first, [*others, *options], folder, **how)


def in_debug_mode(program: str) -> list[str]:
    """Returns a module or a script and, where the environment asks for the debug mode, what runs it in that."""
    return ["debug_transfers", program] if os.environ.get("BRIDGE_FGO_DEBUG") else [program]


def side_by_side[T](run: Callable[[T], runner.ArmRun], arms: Sequence[T] = ("off", "on")) -> list[runner.ArmRun]:
    """Calls ``run`` with each of ``arms`` at the same time."""
    with ThreadPoolExecutor(len(arms)) as pool:
        started = [pool.submit(run, arm) for arm in arms]
    return [future.result() for future in started]


def both_arms(folder: Path, *options: str, steps: int, ranks: int = 1, at_once: bool = True) -> list[runner.ArmRun]:
    """Runs the resident and the offloaded arm, on the same GPUs; one after the other if they do not fit at once.

    Checks that they are bitwise equal, and that the comparison is one: all steps ran, and states did leave the GPU.
    """

    def run(offload: str) -> runner.ArmRun:
        name = {"off": "resident", "on": "offloaded"}[offload]
        return arm(name, folder, *options, "--steps", str(steps), "--offload", offload, ranks=ranks)

    arms = side_by_side(run) if at_once else [run("off"), run("on")]
    assert_bitwise_equal(*arms, steps=steps)
    return arms


def assert_bitwise_equal(resident: runner.ArmRun, offloaded: runner.ArmRun, steps: int) -> None:
    """Also checks that all steps ran, and that states did leave the GPU."""
    assert len(resident.steps) == len(offloaded.steps) == steps
    assert all(loss is not None for loss in resident.values("loss"))
    assert resident.result["released_bytes"] == 0 < offloaded.result["released_bytes"]
    same = runner.compare(resident, offloaded)
    first = next((index + 1 for index, equal in enumerate(same.steps) if not equal), None)
    assert same.bitwise_equal, f"{same.parts}, first different step: {first}"


def needs_gpus(count: int) -> None:
    """Skips the test where fewer than ``count`` GPUs are visible."""
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")


def saving_arm(name: str, folder: Path, ranks: int, *options: str) -> runner.ArmRun:
    """Runs an arm of eight steps that saves after the fourth and the eighth where it is told a folder."""
    steps = ("--steps", "8", "--save-interval", "4", "--fully-reshardable")
    return arm(name, folder, *SMALL, *steps, *options, ranks=ranks, timeout=240)


def assert_same_shards(mine: Path, theirs: Path) -> set[str]:
    """Checks that two folders have the same files with tensors, byte for byte; returns their paths in it."""
    found = [{str(path.relative_to(folder)): path for path in folder.rglob("*.distcp")} for folder in (mine, theirs)]
    assert found[0].keys() == found[1].keys() and found[0]
    assert not [name for name, path in found[0].items() if path.read_bytes() != found[1][name].read_bytes()]
    return {*found[0]}


def printed(module: str, *options: str, allocator: str = "", timeout: float = 600) -> dict[str, Any]:
    """Returns what a module of this folder prints last, as JSON. allocator: settings of PyTorch's."""
    path = [str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    if allocator:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = allocator
    program = in_debug_mode(str(HERE / f"{module}.py"))
    command = [sys.executable, *(["-m"] if len(program) > 1 else []), *program, *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])
