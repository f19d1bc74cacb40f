"""An arm that trains by Bridge, and sleeps and wakes after each step by the functions that `--by` names.

    PYTHONPATH=tests python -m harness.arms.sleeper --by skyrl --checkout DIR --steps 7 --events FILE

A framework's functions are those of the files that `FILES` names, from its checkout; `real_files` stands in for the
rest of it. Other options and the events are those of `harness.arms.gpu`. A step's event has `moves`: what each call
after it took, in seconds, and gave back to the driver, in bytes; of this package also what it copied and freed.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from harness.arms import gpu
from harness.arms.real_files import import_real

FILES = {
    "skyrl": (
        "skyrl/backends/skyrl_train/distributed/megatron/megatron_utils.py",
        "skyrl/backends/skyrl_train/distributed/strategy.py",
        "skyrl/backends/skyrl_train/distributed/megatron/megatron_strategy.py",
    ),
    "verl": (
        "verl/utils/megatron_utils.py",
        "verl/workers/engine/base.py",
        "verl/workers/engine/megatron/transformer_impl.py",
    ),
    "nemo_rl": ("nemo_rl/models/policy/workers/megatron_policy_worker.py",),
}
"""The files of a framework that are loaded, the one whose class is called last."""

type Verbs = dict[str, Callable[[], Any]]
"""Functions by name: "sleep" offloads all, "sync" (not every framework has it) reloads and offloads weights, "wake"
reloads all."""


def framework(options: argparse.Namespace, **given: dict[str, Any]) -> ModuleType:
    """Return a framework's module, imported from its checkout."""
    return import_real(options.checkout, FILES[options.by], given)[-1]


def ours(model: Any, optimizer: Any, options: argparse.Namespace) -> Verbs:
    """Sleep by `bridge_fgo.Residency`."""
    import bridge_fgo

    res = bridge_fgo.Residency(model, optimizer)

    def sync() -> None:
        res.reload("params")
        res.offload("params")

    return {"sleep": res.offload, "sync": sync, "wake": res.reload}


def mcore(model: Any, optimizer: Any, options: argparse.Namespace) -> Verbs:
    """Sleep by mcore's six methods."""
    import torch

    (ddp,) = model
    buffers = ddp.buffers + ddp.expert_parallel_buffers

    def sleep() -> None:
        ddp.offload_grad_buffers(synchronize=False, empty_cache=False)
        for buffer in buffers:
            buffer.offload_to_cpu(move_grads=False)
        optimizer.offload_to_cpu()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def wake() -> None:
        for buffer in buffers:
            buffer.reload_from_cpu(move_grads=False)
        ddp.restore_grad_buffers(synchronize=False)
        optimizer.restore_from_cpu()

    return {"sleep": sleep, "wake": wake}


def skyrl(model: Any, optimizer: Any, options: argparse.Namespace) -> Verbs:
    """Sleep by SkyRL's MegatronStrategy, as its workers call it."""
    strategy = object.__new__(framework(options).MegatronStrategy)

    def sync() -> None:
        strategy.backload_to_gpu(model, optimizer, backload_optimizer=False)
        strategy.offload_to_cpu(model, optimizer, offload_optimizer=False)

    return {
        "sleep": lambda: strategy.offload_to_cpu(model, optimizer),
        "sync": sync,
        "wake": lambda: strategy.backload_to_gpu(model, optimizer),
    }


def verl(model: Any, optimizer: Any, options: argparse.Namespace) -> Verbs:
    """Sleep by verl's Megatron engine: `to`, and what it calls before it exports weights."""
    import torch

    device = {
        "get_device_id": torch.cuda.current_device,  # verl's own ask for a GPU or an NPU
        "get_device_name": lambda: "cuda",
        "get_torch_device": lambda: torch.cuda,
    }
    module = framework(options, **{"verl.utils.device": device})
    engine = object.__new__(module.MegatronEngine)
    engine.module, engine.optimizer = model, optimizer

    def sync() -> None:
        module.load_megatron_model_to_gpu(engine.module, load_grad=False)
        engine.to("cpu", model=True, optimizer=False, grad=False)

    return {"sleep": lambda: engine.to("cpu"), "sync": sync, "wake": lambda: engine.to("cuda")}


def nemo_rl(model: Any, optimizer: Any, options: argparse.Namespace) -> Verbs:
    """Sleep by NeMo-RL's Megatron policy worker."""
    of_ray = {"get_runtime_env_for_policy_worker": lambda *of: {}}
    worker = object.__new__(framework(options, **{"nemo_rl.models.policy.utils": of_ray}).MegatronPolicyWorkerImpl)
    (worker.model,), worker.optimizer, worker.rank, worker.fp8_cfg = model, optimizer, 0, None
    worker.optimizer_cpu_offload, worker.offload_optimizer_for_refit = False, True
    worker.cfg = {"megatron_cfg": {"empty_unused_memory_level": 0}}
    worker._async_checkpoint_cuda_cache_active = False
    worker.mcore_state = SimpleNamespace(cfg=SimpleNamespace(checkpoint=SimpleNamespace(async_save=False)))

    def sync() -> None:
        worker.move_model(worker.model, "cuda", move_params=True, move_grads=False)
        worker.move_model(worker.model, "cpu", move_params=True, move_grads=False)

    return {"sleep": worker.offload_after_refit, "sync": sync, "wake": worker.prepare_for_training}


def never(model: Any, optimizer: Any, options: argparse.Namespace) -> Verbs:
    """Sleep not at all: what the others' bits are compared with."""
    return {}


VERBS = {"never": never, "ours": ours, "mcore": mcore, "skyrl": skyrl, "verl": verl, "nemo_rl": nemo_rl}


def on_the_cpu() -> contextlib.AbstractContextManager[Any]:
    """Context in which PyTorch does on the CPU what peers ask of a GPU: it pins nothing, and `cpu()` copies."""
    import torch
    from torch.overrides import TorchFunctionMode

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.pin_memory or (func is torch.Tensor.to and args[1:] == ("cuda",)):
                return args[0]
            if func is torch.Tensor.cpu:
                return args[0].clone()
            return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})

    return OnCpu()


def measured(move: Callable[[], Any], is_on_cpu: bool) -> dict[str, float]:
    """Make a call; return its seconds, the bytes that the driver got, and what a Residency has copied and freed."""
    import torch

    from bridge_fgo.sleep.moved import Moved

    def free() -> int:
        return 0 if is_on_cpu else torch.cuda.mem_get_info()[0]

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, began = free(), time.perf_counter()
    with on_the_cpu() if is_on_cpu else contextlib.nullcontext():
        moved = move()
    torch.cuda.synchronize()
    figures: dict[str, float] = {"seconds": time.perf_counter() - began, "returned": free() - before}
    return figures | ({"copied": moved.copied, "freed": moved.freed} if isinstance(moved, Moved) else {})


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the arm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by", choices=tuple(VERBS), required=True)
    parser.add_argument("--checkout", type=Path, help="of the framework")
    parser.add_argument("--with-ours", action="store_true", help="with this package installed for the framework")
    options, others = parser.parse_known_args(arguments)
    is_on_cpu = "--cpu" in others
    if is_on_cpu:
        gpu.have_the_cpu_stand_in()
    import bridge_fgo
    from harness.arms import gpu_recorder

    if options.with_ours:
        bridge_fgo.install(frameworks=[options.by])
    name = "CpuRecorder" if is_on_cpu else "ArmRecorder"
    recorder: Any = getattr(gpu_recorder, name)

    class Sleeper(recorder):
        verbs: Verbs | None = None

        def on_train_step_end(self, context: Any) -> None:
            super().on_train_step_end(context)
            if self.verbs is None:
                self.verbs = VERBS[options.by](context.model, context.optimizer, options)
            self.newest["moves"] = {move: measured(act, is_on_cpu) for move, act in self.verbs.items()}

    setattr(gpu_recorder, name, Sleeper)
    gpu.main(others)


if __name__ == "__main__":
    main()
