"""One arm of the tests of background saves beside sleeps: a GPT that is saved every third step, and sleeps after each.

    python tests/gpu/saves_arm.py --strategy nvrx --constant-structure

By mcore's `dist_checkpointing` with the worker that `--strategy` names: weights, masters and moments from the GPU. A
sleep comes while the worker may still write. Prints one JSON object. Without a GPU the model is a tiny one, on the CPU,
and the worker is forked: that the arm runs is all that this shows.
"""

import argparse
import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

from phases_arm import Trainer, add_model_options, memory, spoil

STEPS = 9
EACH = 3


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", choices=("nvrx", "mcore"), default="nvrx")
    parser.add_argument("--constant-structure", action="store_true")
    add_model_options(parser)
    return parser.parse_args(arguments)


def sharded_tensors(trainer: Trainer) -> dict[str, Any]:
    """Returns the state dictionary of a checkpoint."""
    model = trainer.ddp.module.module.sharded_state_dict()
    metadata = {"distrib_optim_sharding_type": "dp_reshardable"}
    return {"model": model, "optimizer": trainer.optimizer.sharded_state_dict(model, metadata=metadata)}


def copies(state: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Returns key, place and bytes of each tensor that is to be saved."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    tensors = [each for each in nested_values(state) if isinstance(each, ShardedTensor)]
    return [(each.key, each.global_slice(), bits(each.data)) for each in tensors]


def bits(tensor: Any) -> Any:
    """Returns a tensor's bytes on the host."""
    import torch

    return tensor.detach().cpu().clone().reshape(-1).view(torch.uint8)


def read(folder: Path) -> dict[str, Any]:
    """Returns the tensors of a checkpoint, by PyTorch alone."""
    import torch
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = checkpoint.FileSystemReader(folder)
    parts = reader.read_metadata().state_dict_metadata.items()
    found = {
        key: torch.empty(each.size, dtype=each.properties.dtype)
        for key, each in parts
        if isinstance(each, TensorStorageMetadata)
    }
    checkpoint.load(found, storage_reader=reader, no_dist=True)
    return found


def main(arguments: list[str] | None = None) -> None:
    """Runs the arm."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    options = parse(arguments)
    trainer = Trainer(options)
    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy, get_async_strategy

    import bridge_fgo

    calls = get_async_strategy(options.strategy, "AsyncCallsQueue")[1](persistent=trainer.is_cuda)
    strategy = TorchDistSaveShardedStrategy(cached_metadata=options.constant_structure)
    res = bridge_fgo.Residency(trainer.ddp, trainer.optimizer)
    result: dict[str, Any] = {"parameters": trainer.parameters, "stale": {}, "sleeps": [], "warnings": []}
    expected = {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in range(1, STEPS + 1):
            trainer.step(number)
            if number % EACH == 0:
                state = sharded_tensors(trainer)
                expected[number] = copies(state)
                to = Path(folder) / str(number)
                to.mkdir()
                request = dist_checkpointing.save(
                    state, str(to), strategy, async_sharded_save=True, async_strategy=options.strategy
                )
                del state
                calls.schedule_async_request(request)
                del request
            moved = res.offload()
            sleep = {"step": number, "unfinished": calls.get_num_unfinalized_calls(), "after": memory()}
            result["sleeps"].append({**sleep, "stays": moved.stays, "freed": moved.freed, "returned": moved.returned})
            spoil(1)
            res.reload()
            calls.maybe_finalize_async_calls(blocking=True)
        calls.close()
        result["warnings"] = [str(each.message) for each in said if "still taken" in str(each.message)]
        for number, tensors in expected.items():
            saved = read(Path(folder) / str(number))
            stale = [key for key, place, wanted in tensors if not torch.equal(bits(saved[key][place]), wanted)]
            result["stale"][number] = sorted(set(stale))
            result["tensors"] = len(tensors)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
