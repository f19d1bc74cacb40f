"""A GPT of the CPU lane whose first layer has mcore's gated delta net in the place of attention."""

import cpu_model
import rank_child
import torch
from torch.distributed.checkpoint import FileSystemReader

PARTS = {"in_proj.weight": ("query", "key", "value", "z", "beta", "alpha"), "conv1d.weight": ("query", "key", "value")}
"""Into what `fsdp_dtensor` checkpoints split its fused parameters."""

SIZES = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


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


def assert_split(checkpoint) -> None:
    """Check that a checkpoint has each part of a fused parameter, of the model and of each moment, and no whole one."""
    names = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    for fused, parts in PARTS.items():
        of_model = {name for name in names if name.startswith("model.") and fused in name}
        assert {name.rpartition(f"{fused}.")[2] for name in of_model} == set(parts), of_model
        for moment in ("exp_avg", "exp_avg_sq"):
            of_states = {name for name in names if fused in name and name.endswith(f".{moment}")}
            assert {name.rpartition(f"{fused}.")[2] for name in of_states} == {f"{part}.{moment}" for part in parts}


def train(rank, job) -> dict:
    """As `rank_child.train`, in a process whose models have one such layer."""
    from megatron.core.ssm.gated_delta_net import common

    # In deterministic mode it is plain PyTorch but for this norm.
    common.HAVE_FLA, common.l2norm = True, lambda tensor: torch.nn.functional.normalize(tensor, dim=-1)
    cpu_model.layer_spec = _layer_spec
    with torch._dynamo.config.patch(disable=True):  # to compile takes longer than a test trains
        return rank_child.train(rank, job)
