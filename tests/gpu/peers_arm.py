"""One arm of the comparison with other sleeps: trains a GPT, and sleeps after each step by what `--by` names.

    python tests/gpu/peers_arm.py --by skyrl --peers .peers --cycles 20 --seconds 12

Prints one JSON object last. SkyRL, verl and NeMo-RL are their own files, which `--peers` has; `real_files.py` stands in
for the rest of them. torch_memory_saver has to be preloaded. Without a GPU the model is a tiny one.
"""

import argparse
import gc
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import phases_arm
from real_files import import_real

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

OF_EACH_RANK = ("losses", "sums", "sums_by_step")
"""The printed result has these of every rank; all other figures are rank 0's."""

Verb = Callable[[], Any]
"""Sleeps, wakes, or wakes the parameters and sleeps again; returns the bytes that crossed the link where it counts."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by", choices=tuple(VERBS), default="ours")
    parser.add_argument("--with-ours", action="store_true", help="with this package installed for the peer")
    parser.add_argument("--peers", type=Path, help="folder with a checkout of each peer, or of one")
    parser.add_argument("--sync", action="store_true", help="wake the parameters alone in each sleep, and sleep again")
    parser.add_argument("--cycles", type=int, default=20, help="at most")
    parser.add_argument("--seconds", type=float, default=12.0, help="after which no cycle from the fourth on begins")
    parser.add_argument("--after", type=int, default=2, help="steps after the last cycle")
    phases_arm.add_model_options(parser)
    return parser.parse_args(arguments)


def framework(options: argparse.Namespace, **given: dict[str, Any]) -> ModuleType:
    """Returns a framework's module, imported as it is in `--peers`."""
    folder = options.peers / options.by
    return import_real(folder if folder.is_dir() else options.peers, FILES[options.by], given)[-1]


# Each returns what sleeps and what wakes a trainer, and where it can what wakes the parameters alone and sleeps again.


def ours(trainer: phases_arm.Trainer, options: argparse.Namespace) -> tuple[Verb, ...]:
    """By `bridge_fgo.Residency`."""
    import bridge_fgo

    trainer.res = res = bridge_fgo.Residency(trainer.ddp, trainer.optimizer)

    def sync() -> int:
        return res.reload("params").copied + res.offload("params").copied

    return lambda: res.offload().copied, lambda: res.reload().copied, sync


def mcore(trainer: phases_arm.Trainer, options: argparse.Namespace) -> tuple[Verb, ...]:
    """By mcore's six methods."""
    import torch

    ddp, optimizer = trainer.ddp, trainer.optimizer
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
        torch.cuda.synchronize()

    return sleep, wake


def skyrl(trainer: phases_arm.Trainer, options: argparse.Namespace) -> tuple[Verb, ...]:
    """By SkyRL's MegatronStrategy, as its workers call it."""
    strategy, of = object.__new__(framework(options).MegatronStrategy), ([trainer.ddp], trainer.optimizer)

    def sync() -> None:
        strategy.backload_to_gpu(*of, backload_optimizer=False)
        strategy.offload_to_cpu(*of, offload_optimizer=False)

    return lambda: strategy.offload_to_cpu(*of), lambda: strategy.backload_to_gpu(*of), sync


def verl(trainer: phases_arm.Trainer, options: argparse.Namespace) -> tuple[Verb, ...]:
    """By verl's Megatron engine: `to`, and what it calls before it exports weights."""
    import torch

    device = {
        "get_device_id": torch.cuda.current_device,  # verl's own ask for a GPU or an NPU
        "get_device_name": lambda: "cuda",
        "get_torch_device": lambda: torch.cuda,
    }
    module = framework(options, **{"verl.utils.device": device})
    engine = object.__new__(module.MegatronEngine)
    engine.module, engine.optimizer = [trainer.ddp], trainer.optimizer

    def sync() -> None:
        module.load_megatron_model_to_gpu(engine.module, load_grad=False)
        engine.to("cpu", model=True, optimizer=False, grad=False)

    return lambda: engine.to("cpu"), lambda: engine.to("cuda"), sync


def nemo_rl(trainer: phases_arm.Trainer, options: argparse.Namespace) -> tuple[Verb, ...]:
    """By NeMo-RL's Megatron policy worker."""
    of_ray = {"get_runtime_env_for_policy_worker": lambda *of: {}}
    module = framework(options, **{"nemo_rl.models.policy.utils": of_ray})
    worker = object.__new__(module.MegatronPolicyWorkerImpl)
    worker.model, worker.optimizer, worker.rank, worker.fp8_cfg = trainer.ddp, trainer.optimizer, 0, None
    worker.optimizer_cpu_offload, worker.offload_optimizer_for_refit = False, True
    worker.cfg = {"megatron_cfg": {"empty_unused_memory_level": 0}}
    worker._async_checkpoint_cuda_cache_active = False
    worker.mcore_state = SimpleNamespace(cfg=SimpleNamespace(checkpoint=SimpleNamespace(async_save=False)))

    def sync() -> None:
        worker.move_model(worker.model, "cuda", move_params=True, move_grads=False)
        worker.move_model(worker.model, "cpu", move_params=True, move_grads=False)

    return worker.offload_after_refit, worker.prepare_for_training, sync


def memory_saver(trainer: phases_arm.Trainer, options: argparse.Namespace) -> tuple[Verb, ...]:
    """By torch_memory_saver, preloaded: everything that is allocated, as slime and AReaL have it."""
    import torch
    from torch_memory_saver import torch_memory_saver as saver  # pyright: ignore[reportMissingImports]

    def sleep() -> int:
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        saver.pause()
        return torch.cuda.memory_reserved()

    def wake() -> int:
        saver.resume()
        torch.cuda.synchronize()
        return torch.cuda.memory_reserved()

    return sleep, wake


def never(trainer: phases_arm.Trainer, options: argparse.Namespace) -> tuple[Verb, ...]:
    """Not at all: what the others' bits are compared with."""
    return lambda: 0, lambda: 0


VERBS = {
    "never": never, "ours": ours, "mcore": mcore, "skyrl": skyrl, "verl": verl, "nemo_rl": nemo_rl,
    "memory_saver": memory_saver,
}  # fmt: skip


def crossing(verb: Verb) -> int:
    """Returns the bytes that PyTorch's operators copy between GPU and host within a call."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        nbytes = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            ops = torch.ops.aten
            if func in (ops._to_copy.default, ops.copy_.default):
                source = args[0] if func is ops._to_copy.default else args[1]
                if source.device.type != result.device.type:
                    self.nbytes += source.nbytes
            return result

    with Counter() as counter:
        verb()
    return counter.nbytes


def stand_in_for_a_gpu() -> None:
    """Has PyTorch do on the CPU what peers ask of a GPU: no memory is pinned, and a copy to the host is one."""
    import torch
    from torch.overrides import TorchFunctionMode

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.pin_memory or (func is torch.Tensor.to and args[1:] == ("cuda",)):
                return args[0]
            if func is torch.Tensor.cpu:
                return args[0].clone()
            return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})

    OnCpu().__enter__()


def held(trainer: phases_arm.Trainer) -> dict[str, int]:
    """Returns the bytes on the GPU of each kind, by storages."""
    buffers = trainer.ddp.buffers + trainer.ddp.expert_parallel_buffers
    leaves = trainer.optimizer.chained_optimizers
    inner = [leaf.optimizer for leaf in leaves]
    shards = [param for each in inner for group in each.param_groups for param in group["params"]]
    states = [(name, value) for each in inner for state in each.state.values() for name, value in state.items()]
    of_shards = [getattr(param, name, None) for param in shards for name in ("grad", "decoupled_grad")]
    masters = [master for leaf in leaves for group in leaf.shard_fp32_from_float16_groups for master in group]
    masters += [value for name, value in states if name == "master_param"]
    kinds = {
        "params": [buffer.param_data for buffer in buffers],
        "grads": [buffer.grad_data for buffer in buffers]
        + [extra for buffer in buffers for extra in buffer.extra_main_grads]
        + [gradient for gradient in of_shards if gradient is not None],
        "masters": [master for master in masters if master is not None],
        "moments": [value for name, value in states if name.startswith("exp_avg")],
    }
    counted: set[int] = set()
    result = {}
    for kind, tensors in kinds.items():
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors if t.device == trainer.device}
        result[kind] = sum(storage.nbytes() for key, storage in storages.items() if key not in counted)
        counted |= set(storages)
    return result


def pinned(trainer: phases_arm.Trainer) -> int:
    """Returns the page-locked bytes that PyTorch has handed out, and our own."""
    import torch

    own = trainer.res.pinned_bytes if hasattr(trainer, "res") else 0
    if not trainer.is_cuda:
        return own
    return own + torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)


def main(arguments: list[str] | None = None) -> None:
    """Runs the arm."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    options = parse(arguments)
    import torch

    import bridge_fgo

    trainer = phases_arm.Trainer(options)
    if not trainer.is_cuda:
        stand_in_for_a_gpu()
    result: dict[str, Any] = {"by": options.by, "parameters": trainer.parameters, "losses": [], "cycles": []}
    result["losses"].append(trainer.step(0))  # states exist from here on
    result["sums_by_step"] = [trainer.sums()]
    result["managed"] = held(trainer)
    if options.with_ours:
        bridge_fgo.install(frameworks=[options.by] if options.by in FILES else [])
    sleep, wake, *others = VERBS[options.by](trainer, options)
    syncs = others if options.sync else []
    if options.by == "ours" and trainer.is_cuda:
        result["link"] = phases_arm.link()
    result["pinned"] = [pinned(trainer)]
    began = time.perf_counter()
    for number in range(1, options.cycles + 1):
        late = time.perf_counter() - began > options.seconds and trainer.ranks == 1  # ranks would not end as one
        if number > 3 and options.by != "never" and late:
            break
        result["losses"].append(trainer.step(number))
        if options.by == "never":
            result["sums_by_step"].append(trainer.sums())
            continue
        if trainer.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        cycle: dict[str, Any] = {"before": phases_arm.memory()}
        is_counted = number == 1 and options.by not in ("ours", "memory_saver")
        moves = [(sleep, "sleep", "out"), *((sync, "sync", "synced") for sync in syncs), (wake, "wake", "back")]
        for move, name, way in moves:
            if is_counted:
                cycle[way] = crossing(move)
            else:
                start = time.perf_counter()
                cycle[way] = move()
                if trainer.is_cuda:
                    torch.cuda.synchronize()
                cycle[name] = time.perf_counter() - start
            if move is sleep:
                cycle["after"], cycle["left"] = phases_arm.memory(), held(trainer)
        result["cycles"].append(cycle)
        result["pinned"].append(pinned(trainer))
    slept = trainer.sums()["params"]
    for _ in range(options.after):
        result["losses"].append(trainer.step(len(result["losses"])))
        result["sums_by_step"].append(trainer.sums())
    result["sums"] = trainer.sums()
    result["moves"] = result["sums"]["params"] != slept  # whether training still changes weights
    every: list[Any] = [None] * trainer.ranks
    torch.distributed.all_gather_object(every, {name: result[name] for name in OF_EACH_RANK})
    if trainer.rank == 0:
        print(json.dumps(result | {name: [each[name] for each in every] for name in OF_EACH_RANK}), flush=True)


if __name__ == "__main__":
    main()
