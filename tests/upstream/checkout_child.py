"""Trains six steps, one rerun and one skipped, on a checkout's mcore; prints losses and digests as JSON.

    python checkout_child.py resident|native|mcore [fused]

fused: with an Adam that mcore takes for Transformer Engine's. What upstream's offloader asks of a tensor's device
before it moves or checks its memory is answered as on a GPU; the rest is upstream's code.
"""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import fused_adam
import pytest
import torch
from both import bits, steps, training

import bridge_fgo


class FusedAdam(fused_adam.FusedAdam):
    """Has no masters of its own."""

    master_weights = False


FusedAdam.__module__ = "transformer_engine.pytorch.optimizers"


def as_on_a_gpu(patch):
    """Have the checkout's OptimizerStateOffloader take tensors in host memory for such on a GPU."""
    from megatron.core.optimizer import distrib_optimizer

    fused_adam.have_mcore_take_it(patch.setattr, FusedAdam)
    patch.setitem(sys.modules, FusedAdam.__module__, SimpleNamespace(FusedAdam=FusedAdam))
    module = importlib.import_module("megatron.core.optimizer.cpu_offloading.optimizer_state_offloader")
    assert module.__file__ is not None
    source = Path(module.__file__).read_text(encoding="utf-8")
    assert ".is_cuda" in source
    source = source.replace(".is_cuda", ".is_leaf")  # states are leaves, all of them
    exec(compile(source, module.__file__, "exec"), vars(module))
    patch.setattr(distrib_optimizer, "OptimizerStateOffloader", module.OptimizerStateOffloader)
    patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    empty = torch.empty
    patch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **how: empty(*sizes, **how))


def main(engine, fused=""):
    offload, trouble = engine != "resident", {"rerun_steps": frozenset({3}), "grad_norm_skip_steps": frozenset({4})}
    config = bridge_fgo.OffloadConfig(engine=engine if offload else "auto")
    with pytest.MonkeyPatch.context() as patch:
        if fused:
            as_on_a_gpu(patch)
        with training(offload, config, **trouble) as run:
            numbers, held, stats = steps(run, 6), max(run.live_bytes), bridge_fgo.stats()
            same = {"numbers": numbers, "bits": bits(run)}
            print(json.dumps({"same": same, "held": held, "engine": stats and stats.engine}), flush=True)


if __name__ == "__main__":
    from bridge_fgo.tools.standins.cuda import install_standins

    install_standins()
    main(*sys.argv[1:])
