"""One arm of the comparison with other sleeps: trains a GPT, and sleeps after each step by what `--by` names.

    python tests/gpu/peers_arm.py --by skyrl --peers .peers --cycles 20 --seconds 12

Prints one JSON object. The functions of SkyRL, verl and NeMo-RL are read from files that `--peers` has (`peers.py` says
which), one by one, without what those files import; torch_memory_saver has to be preloaded. Without a GPU the model is
a tiny one.
"""

import argparse
import ast
import gc
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import phases_arm

FILES = {
    "skyrl": "skyrl/megatron_utils.py",
    "verl": "verl/megatron_utils.py",
    "nemo_rl": "nemo_rl/megatron_policy_worker.py",
}
"""Where `--peers` has the file with a peer's functions."""

OF_OPTIMIZERS = {
    "offload_megatron_optimizer": "optimizers.offload_to_cpu()",
    "load_megatron_optimizer": "optimizers.restore_from_cpu()",
}
LINES = {
    "skyrl": OF_OPTIMIZERS,
    "verl": OF_OPTIMIZERS
    | {
        "offload_megatron_model_to_cpu": "buffer.offload_to_cpu()",
        "load_megatron_model_to_gpu": "buffer.reload_from_cpu(move_grads=load_grad)",
    },
    "nemo_rl": {
        "move_optimizer": "self.optimizer.offload_to_cpu() if device == 'cpu' else self.optimizer.restore_from_cpu()"
    },
}
"""What `bridge_fgo/sleep/PEERS.md` changes in a peer's functions: the new body of the function, or of its loop over
`buffer` where it has one."""

Verb = Callable[[], int | None]
"""Sleeps or wakes; returns the bytes that crossed the link where it counts them."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by", choices=tuple(VERBS), default="ours")
    parser.add_argument(
        "--with-ours", action="store_true", help="with this package installed, and a peer's lines changed"
    )
    parser.add_argument("--peers", type=Path, help="folder with the peers' files")
    parser.add_argument("--cycles", type=int, default=20, help="at most")
    parser.add_argument("--seconds", type=float, default=12.0, help="after which no cycle from the fourth on begins")
    parser.add_argument("--after", type=int, default=2, help="steps after the last cycle")
    phases_arm.add_model_options(parser)
    return parser.parse_args(arguments)


def functions(options: argparse.Namespace, *names: str) -> SimpleNamespace:
    """Returns a peer's functions, by their own source; methods as plain functions of `self`."""
    import torch
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import ChainedOptimizer
    from megatron.core.parallel_state import get_global_memory_buffer

    file = options.peers / FILES[options.by]
    tree = ast.parse(file.read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names]
    missing = set(names) - {node.name for node in found}
    assert not missing, f"{file}: no {', '.join(sorted(missing))}"
    for node in found:
        if options.with_ours and (line := LINES[options.by].get(node.name)):
            inside = [each for each in ast.walk(node) if isinstance(each, ast.For)]
            loops = [each for each in inside if isinstance(each.target, ast.Name) and each.target.id == "buffer"]
            (loops[0] if loops else node).body = ast.parse(line).body
    scope: dict[str, Any] = {
        "torch": torch,
        "gc": gc,
        "logger": logging.getLogger(file.stem),
        "DDP": DistributedDataParallel,
        "DistributedDataParallel": DistributedDataParallel,
        "FullyShardedDataParallelV1": type("V1", (), {}),
        "FullyShardedDataParallelV2": type("V2", (), {}),
        "ChainedOptimizer": ChainedOptimizer,
        "get_global_memory_buffer": get_global_memory_buffer,
        "get_device_id": torch.cuda.current_device,  # verl's own ask for a GPU or an NPU
        "get_torch_device": lambda: torch.cuda,
    }
    # Their annotations name types that are not here.
    body = [*ast.parse("from __future__ import annotations").body, *found]
    exec(compile(ast.Module(body=body, type_ignores=[]), str(file), "exec", dont_inherit=True), scope)
    return SimpleNamespace(**{name: scope[name] for name in names})


# Each returns what sleeps and what wakes a trainer.


def ours(trainer: phases_arm.Trainer, options: argparse.Namespace) -> tuple[Verb, Verb]:
    """By `bridge_fgo.Residency`."""
    import bridge_fgo

    trainer.res = res = bridge_fgo.Residency(trainer.ddp, trainer.optimizer)
    return lambda: res.offload().copied, lambda: res.reload().copied


def mcore(trainer: phases_arm.Trainer, options: argparse.Namespace) -> tuple[Verb, Verb]:
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


def by_functions(
    options: argparse.Namespace, off: list[tuple[str, Any]], on: list[tuple[str, Any]], *helpers: str, empties: bool
) -> tuple[Verb, Verb]:
    """Returns verbs that call a peer's functions one after another.

    Args:
        options: of the arm.
        off: the functions that sleep, each with its argument.
        on: those that wake.
        helpers: what those call.
        empties: whether the peer empties PyTorch's cache after a sleep.
    """
    import torch

    helpers = ("offload_megatron_copy_params", "load_megatron_copy_params", *helpers)
    by = functions(options, *(name for name, _ in (*off, *on)), *helpers)

    def verb(calls: list[tuple[str, Any]]) -> None:
        for name, argument in calls:
            getattr(by, name)(argument)
        torch.cuda.synchronize()
        if empties and calls is off:
            torch.cuda.empty_cache()

    return lambda: verb(off), lambda: verb(on)


def skyrl(trainer: phases_arm.Trainer, options: argparse.Namespace) -> tuple[Verb, Verb]:
    """By SkyRL's functions, in the order of its MegatronStrategy."""
    model, optimizer = [trainer.ddp], trainer.optimizer
    off, on = (
        [(f"{verb}_megatron_{what}_to_{to}", model) for what in ("model", "grads")]
        + [(f"{verb}_megatron_optimizer", optimizer)]
        for verb, to in (("offload", "cpu"), ("load", "gpu"))
    )
    return by_functions(options, off, on, empties=True)


def verl(trainer: phases_arm.Trainer, options: argparse.Namespace) -> tuple[Verb, Verb]:
    """By verl's functions, in the order of its Megatron engine's `to`."""
    model, optimizer = [trainer.ddp], trainer.optimizer
    off = [("offload_megatron_model_to_cpu", model), ("offload_megatron_optimizer", optimizer)]
    on = [("load_megatron_model_to_gpu", model), ("load_megatron_optimizer", optimizer)]  # gradients too, by default
    helpers = ("_can_safely_resize_storage", "_clear_te_fp8_weight_workspaces")
    return by_functions(options, off, on, *helpers, empties=False)


def nemo_rl(trainer: phases_arm.Trainer, options: argparse.Namespace) -> tuple[Verb, Verb]:
    """By NeMo-RL's two methods, as its worker's `offload_after_refit` and `prepare_for_training` call them."""
    import torch

    by = functions(options, "move_model", "move_optimizer")
    worker = SimpleNamespace(model=trainer.ddp, optimizer=trainer.optimizer)

    def sleep() -> None:
        with torch.no_grad():
            by.move_model(worker, worker.model, "cpu")
            by.move_optimizer(worker, "cpu")
            gc.collect()
            torch.cuda.empty_cache()
        torch.cuda.synchronize()

    def wake() -> None:
        by.move_model(worker, worker.model, "cuda", move_grads=True, move_params=True)
        by.move_optimizer(worker, "cuda")
        torch.cuda.synchronize()

    return sleep, wake


def memory_saver(trainer: phases_arm.Trainer, options: argparse.Namespace) -> tuple[Verb, Verb]:
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


def never(trainer: phases_arm.Trainer, options: argparse.Namespace) -> tuple[Verb, Verb]:
    """Not at all: what the others' bits are compared with."""
    return lambda: 0, lambda: 0


VERBS = {
    "never": never,
    "ours": ours,
    "mcore": mcore,
    "skyrl": skyrl,
    "verl": verl,
    "nemo_rl": nemo_rl,
    "memory_saver": memory_saver,
}


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
        bridge_fgo.install()
    sleep, wake = VERBS[options.by](trainer, options)
    if options.by == "ours" and trainer.is_cuda:
        result["link"] = phases_arm.link()
    result["pinned"] = [pinned(trainer)]
    began = time.perf_counter()
    for number in range(1, options.cycles + 1):
        if number > 3 and options.by != "never" and time.perf_counter() - began > options.seconds:
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
        for move, name, way in ((sleep, "sleep", "out"), (wake, "wake", "back")):
            if is_counted:
                cycle[way] = crossing(move)
            else:
                start = time.perf_counter()
                cycle[way] = move()
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
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
