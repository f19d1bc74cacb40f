"""A GPT of the CPU lane whose first layer has mcore's gated delta net in the place of attention."""

import cpu_model
import rank_child
import torch

PARTS = {"in_proj.weight": ("query", "key", "value", "z", "beta", "alpha"), "conv1d.weight": ("query", "key", "value")}
"""Into what `fsdp_dtensor` checkpoints split its fused parameters."""

SIZES = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


def uncompiled():
    """Return a context in which nothing is compiled, which would take longer than a test trains."""
    return torch._dynamo.config.patch(disable=True)


def have_the_first_layer_take_it(patch) -> None:
    """Have every model that is made from now on have one such layer; `patch` is `setattr`, or undoes what it sets."""
    from megatron.core.ssm.gated_delta_net import common

    # In deterministic mode it is plain PyTorch but for this norm.
    patch(common, "HAVE_FLA", True)
    patch(common, "l2norm", lambda tensor: torch.nn.functional.normalize(tensor, dim=-1))
    patch(cpu_model, "layer_spec", _layer_spec)


_of_attention = cpu_model.layer_spec


def _layer_spec(config, vp_stage=None):
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    config.deterministic_mode = True
    for name, size in SIZES.items():
        setattr(config, name, size)
    spec = _of_attention(config, vp_stage)
    first = spec.layer_specs[0]
    parts = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear)
    first.submodules.self_attention = ModuleSpec(module=GatedDeltaNet, submodules=parts)
    return spec


def train(rank, job) -> dict:
    """As `rank_child.train`, with that layer."""
    have_the_first_layer_take_it(setattr)
    with uncompiled():
        return rank_child.train(rank, job)
