"""A CPU arm with an Adam that mcore takes for Transformer Engine's, on a checkout's mcore with an offloader of its own.

    python fused_child.py CHUNK_NUMEL [OPTIONS OF cpu_arm.py]

CHUNK_NUMEL: `optimizer.offload_optimizer_states_chunk_numel` of Megatron-LM #6544; 0 leaves it unset. What upstream
asks of a tensor's device before it moves or checks its memory is answered as on a GPU; the rest is upstream's code.
"""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import cpu_arm
import cpu_training
import fused_adam
import pytest
import torch

from bridge_fgo.tools.standins.cuda import install_standins


class FusedAdam(fused_adam.FusedAdam):
    """Has no masters of its own."""

    master_weights = False


FusedAdam.__module__ = "transformer_engine.pytorch.optimizers"


def as_on_a_gpu(patch):
    """Have the checkout's OptimizerStateOffloader take tensors in host memory for such on a GPU."""
    from megatron.core.optimizer import distrib_optimizer

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


def main():
    chunk_numel, *arguments = sys.argv[1:]
    install_standins()
    make_config = cpu_training.make_config

    def with_chunks(options):
        config = make_config(options)
        if options.offload and int(chunk_numel):
            config.optimizer.offload_optimizer_states_chunk_numel = int(chunk_numel)
        return config

    with pytest.MonkeyPatch.context() as patch:
        fused_adam.have_mcore_take_it(patch.setattr, FusedAdam)
        patch.setitem(sys.modules, FusedAdam.__module__, SimpleNamespace(FusedAdam=FusedAdam))
        patch.setattr(cpu_training, "make_config", with_chunks)
        as_on_a_gpu(patch)
        cpu_arm.main(arguments)


if __name__ == "__main__":
    main()
