"""Stand-ins for Transformer Engine's quantized tensors, which compute: by name, exact class and verbs as mcore asks."""

import torch
from torch.utils._pytree import tree_map


class QuantizedTensor(torch.Tensor):
    """bf16 to whoever asks; `_rowwise_data` has its bytes, and `_columnwise_data`, where it is used, the transposed."""

    _columnwise_data = None

    @staticmethod
    def __new__(cls, data):
        shape = (*data.shape[:-1], cls.in_a_byte * data.shape[-1])
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16, device=data.device)

    def __init__(self, data):
        self._rowwise_data = data

    @classmethod
    def of(cls, tensor):
        return cls(cls.encode(tensor.float()))

    def get_usages(self):
        return {"rowwise": True, "columnwise": self._columnwise_data is not None}

    def update_usage(self, rowwise_usage, columnwise_usage):
        assert rowwise_usage
        if not columnwise_usage:
            self._columnwise_data = None
        elif self._columnwise_data is None:
            self._columnwise_data = self._rowwise_data.T.contiguous()

    def dequantize(self):
        return self.decode(self._rowwise_data).bfloat16()

    def float(self):
        return self.dequantize().float()

    def expand_as(self, other):
        return Identity.apply(self)  # DDP finds the node of its gradient by this

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return type(args[0])(args[0]._rowwise_data)
        if func is torch.ops.aten.clone.default:
            return type(args[0])(args[0]._rowwise_data.clone())
        plain = tree_map(lambda each: each.dequantize() if isinstance(each, QuantizedTensor) else each, (args, kwargs))
        return func(*plain[0], **plain[1] or {})

    __torch_function__ = torch._C._disabled_torch_function_impl


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.detach()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Float8Tensor(QuantizedTensor):
    in_a_byte = 1

    @staticmethod
    def encode(tensor):
        return (tensor * 16).to(torch.float8_e4m3fn).view(torch.uint8)

    @staticmethod
    def decode(data):
        return data.view(torch.float8_e4m3fn).float() / 16


class Float8BlockwiseQTensor(Float8Tensor):
    _is_2D_scaled = True


class NVFP4Tensor(QuantizedTensor):
    in_a_byte = 2

    @staticmethod
    def encode(tensor):
        low, high = ((tensor * 64).round().clamp(-8, 7) + 8).to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
        return low | high << 4

    @staticmethod
    def decode(data):
        return (torch.stack([data & 15, data >> 4], -1).flatten(-2).float() - 8) / 64


def have_mcore_know_them(patch):
    """Have mcore take them for Transformer Engine's, and lay them out in DDP's buffers."""
    from megatron.core import fp4_utils, fp8_utils

    def replace(weight, data):
        data.copy_(weight._rowwise_data)
        weight._rowwise_data = data

    for module, name, value in (
        (fp8_utils, "HAVE_TE_FP8_TENSOR_CLASS", True),
        (fp8_utils, "FP8_TENSOR_CLASS", QuantizedTensor),
        (fp4_utils, "HAVE_TE_FP4_TENSOR_CLASS", True),
        (fp4_utils, "FP4_TENSOR_CLASS", NVFP4Tensor),
        (fp8_utils, "_modify_underlying_storage_impl", replace),
    ):
        patch.setattr(module, name, value, raising=False)


def have_mcore_quantize(kind, patch):
    """Have mcore's DDP keep the matrices of layers in a class, and its DistributedOptimizer quantize their masters."""
    from megatron.core import fp8_utils
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import distrib_optimizer

    def quantize(weights, masters, starts, group, shards=None):
        for weight, master in zip(weights, masters, strict=True):
            assert type(weight) is kind
            weight._rowwise_data.copy_(kind.encode(master.view(weight.shape)))  # one rank has all of it

    have_mcore_know_them(patch)
    patch.setattr(fp8_utils, "_quantize_param_shard_impl", quantize, raising=False)
    patch.setattr(distrib_optimizer, "quantize_nvfp4_param_shard", quantize, raising=False)
    init = DistributedDataParallel.__init__

    def init_quantized(self, config, ddp_config, module, **more):
        for name, layer in module.named_modules():
            if name.rpartition(".")[2].startswith("linear_"):
                plain, layer.weight = layer.weight, torch.nn.Parameter(kind.of(layer.weight))
                vars(layer.weight).update(vars(plain))
        init(self, config, ddp_config, module, **more)

    patch.setattr(DistributedDataParallel, "__init__", init_quantized)
