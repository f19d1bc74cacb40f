"""Shows whether weights still move after mcore's optimizer was sent to the CPU and brought back.

    python patches/mcore/precision_aware_offload.py [--steps N]

Trains a small model by mcore's DDP and DistributedOptimizer with the precision-aware Adam, and prints a checksum of all
weights after each step: N steps, `optimizer.offload_to_cpu()` and `optimizer.restore_from_cpu()`, N steps. Exits with 1
where weights stop moving, and with 2 where it cannot run. Needs a GPU, Transformer Engine and megatron-core alone.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

HIDDEN = 64


def train(steps: int) -> tuple[list[int], list[int]]:
    """Train, send the optimizer away and back, and train on.

    Args:
        steps: training steps before, and after.

    Returns:
        Checksums of all weights: at the start and after each step before the round trip; after the round trip and
        after each step that follows.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    store: Any = torch.distributed.HashStore()  # type: ignore[reportPrivateImportUsage]
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    torch.manual_seed(1)
    layers = [torch.nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(2)]
    config = TransformerConfig(num_layers=1, hidden_size=HIDDEN, num_attention_heads=4)
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(use_distributed_optimizer=True),
        torch.nn.Sequential(*layers).bfloat16().cuda(),
    )
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-2, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True,
        use_precision_aware_optimizer=True,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(settings, [model])
    inputs = torch.randn(8, HIDDEN).bfloat16().cuda()

    def step() -> int:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        model(inputs).float().pow(2).mean().backward()
        model.finish_grad_sync()
        optimizer.step()
        return checksum(model)

    before = [checksum(model), *(step() for _ in range(steps))]
    optimizer.offload_to_cpu()
    optimizer.restore_from_cpu()
    after = [checksum(model), *(step() for _ in range(steps))]
    torch.distributed.destroy_process_group()
    return before, after


def checksum(model: torch.nn.Module) -> int:
    """Return a sum over the bits of all weights, each weighted by its place."""
    weights = torch.cat([weight.detach().view(-1) for weight in model.parameters()]).view(torch.int16).long()
    return int((weights * torch.arange(1, weights.numel() + 1, device=weights.device)).sum())


def main(steps: int) -> int:
    """Train and print; return the status to exit with."""
    before, after = train(steps)
    print("weights at the start  ", before[0])
    for number, value in enumerate(before[1:], 1):
        print(f"weights after step {number:3}", value)
    print("offload_to_cpu(), restore_from_cpu()")
    print("weights after that    ", after[0])
    for number, value in enumerate(after[1:], steps + 1):
        print(f"weights after step {number:3}", value)
    if len(set(before)) < len(before):
        print("precision_aware_offload.py: weights did not move before the round trip either", file=sys.stderr)
        return 2
    if after[0] != before[-1]:
        print("FAIL: the round trip changed the weights")
        return 1
    if len(set(after)) < len(after):
        print("FAIL: after the round trip the optimizer updates memory that the model does not read")
        return 1
    print("OK: weights move after the round trip as before it")
    return 0


def missing() -> str:
    """Return what is needed and not there; empty where all is."""
    if not torch.cuda.is_available():
        return "a GPU: torch.cuda.is_available() is False"
    try:
        from transformer_engine.pytorch.optimizers import FusedAdam  # noqa: F401
    except ImportError as error:
        return f"Transformer Engine's FusedAdam: {error}"
    return ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="training steps before the round trip, and after it")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: give at least 1")
    if needed := missing():
        print(f"precision_aware_offload.py needs {needed}", file=sys.stderr)
        sys.exit(2)
    sys.exit(main(options.steps))
