"""Shows whether mcore's activation offload changes gradients.

    python patches/mcore/activation_offload.py [--steps N] [--runs N] [--modules NAME ...]

Trains a small GPT with megatron-core, Transformer Engine and torch's AdamW: twice without activation offload, then with
it. Prints the first step whose loss or gradient norm differs. Exits with 1 if a run with activation offload differs.
Exits with 2 where it cannot tell: without a GPU or Transformer Engine, or if the two runs without it differ already.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from typing import Any

import torch

MODULES = ("core_attn", "attn_proj", "mlp_norm", "qkv_linear")
MICROBATCHES = 4
VOCABULARY = 1024

Steps = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


def train(steps: int, modules: list[str], hidden: int = 2048, length: int = 2048) -> Steps:
    """Train four layers from the same weights on the same tokens.

    Args:
        steps: training steps.
        modules: mcore's `offload_modules`; empty for no activation offload.
        hidden: hidden size.
        length: tokens of a sequence, of which a microbatch has two.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnBackend

    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=4, hidden_size=hidden, num_attention_heads=16, hidden_dropout=0.0, attention_dropout=0.0, bf16=True,
        params_dtype=torch.bfloat16, cross_entropy_loss_fusion=False, min_offloaded_tensor_size=hidden * length,
        fine_grained_activation_offloading=bool(modules), offload_modules=modules,
        attention_backend=AttnBackend.unfused,  # deterministic, and needs no cuDNN
    )  # fmt: skip
    spec = get_gpt_layer_with_transformer_engine_spec()
    model = GPTModel(config, spec, VOCABULARY, length, position_embedding_type="rope").cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    positions = torch.arange(length, device="cuda").expand(2, length)

    def forward(batches: Any, model: Any) -> tuple[torch.Tensor, Any]:
        tokens = next(batches)
        losses = model(tokens, positions, None, labels=tokens.roll(-1, 1))
        return losses, lambda losses: (losses.float().mean(), losses.detach().float().mean())

    records = []
    for _ in range(steps):
        batches = torch.randint(VOCABULARY, (MICROBATCHES, 2, length), device="cuda")
        optimizer.zero_grad()
        losses = forward_backward_no_pipelining(
            forward_step_func=forward, data_iterator=iter(batches), model=model, num_microbatches=MICROBATCHES,
            seq_length=length, micro_batch_size=2,
        )  # fmt: skip
        gradients = [param.grad for param in model.parameters() if param.grad is not None]
        norm = math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients))
        optimizer.step()
        records.append((sum(loss.item() for loss in losses) / MICROBATCHES, norm))
    PipelineOffloadManager.reset_instance()
    return records


def compare(name: str, resident: Steps, other: Steps) -> bool:
    """Print whether a run's steps are those of the resident run, and where not, the first that is not."""
    for number, (expected, found) in enumerate(zip(resident, other, strict=True), 1):
        if expected != found:
            print(f"{name}: differs from step {number} on")
            print(f"  loss          {found[0]!r} beside {expected[0]!r}")
            print(f"  gradient norm {found[1]!r} beside {expected[1]!r}")
            return False
    print(f"{name}: equal")
    return True


def main(steps: int, runs: int, modules: list[str], **sizes: int) -> int:
    """Train and print; return the status to exit with."""
    from megatron.core import parallel_state

    store: Any = torch.distributed.HashStore()  # type: ignore[reportPrivateImportUsage]
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    try:
        resident = train(steps, [], **sizes)
        print(f"without activation offload: loss {resident[-1][0]!r} after {steps} steps")
        if not compare("without it again", resident, train(steps, [], **sizes)):
            print("activation_offload.py: set NVTE_ALLOW_NONDETERMINISTIC_ALGO=0", file=sys.stderr)
            return 2
        offloaded = [
            compare(f"with it, run {run + 1}", resident, train(steps, modules, **sizes)) for run in range(runs)
        ]
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
    print("equal" if all(offloaded) else "differs")
    return int(not all(offloaded))


def missing() -> str:
    """Return what is needed and not there; empty where all is."""
    if not torch.cuda.is_available():
        return "a GPU: torch.cuda.is_available() is False"
    try:
        import transformer_engine.pytorch  # noqa: F401
    except ImportError as error:
        return f"Transformer Engine: {error}"
    return ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="training steps of a run")
    parser.add_argument("--runs", type=int, default=3, help="runs with activation offload")
    parser.add_argument("--modules", nargs="+", default=list(MODULES), help="mcore's offload_modules")
    options = parser.parse_args()
    if options.steps < 1 or options.runs < 1:
        parser.error(f"--steps {options.steps} --runs {options.runs}: give at least 1 of each")
    os.environ.setdefault("NVTE_CPU_OFFLOAD_V1", "1")  # read when Transformer Engine is imported
    if needed := missing():
        print(f"activation_offload.py needs {needed}", file=sys.stderr)
        sys.exit(2)
    sys.exit(main(options.steps, options.runs, options.modules))
