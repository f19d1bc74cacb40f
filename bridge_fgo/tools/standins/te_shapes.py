"""Transformer Engine's layers as shapes alone, so that mcore builds the model that it builds on a GPU.

With these, mcore's own layer specs give every parameter of a rank by name, shape and order, on torch's meta device,
with no GPU, whether Transformer Engine is installed or not. Only the names and the order of each layer's parameters are
taken from it (2.17). mamba_ssm and deep_ep stand in too: mcore asks for them and has all parameters itself.

Nothing here computes. To be installed before Megatron is imported, in a process of its own.
"""

import contextlib
import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, override

import torch

_quantized = False


class QuantizedWeight(torch.nn.Parameter):
    """A parameter, of its high-precision dtype, that Transformer Engine would keep in FP8: in `_data`, uint8."""

    _data: torch.Tensor

    def get_high_precision_init_val(self) -> torch.Tensor:
        """Return what a master is made of."""
        return torch.empty_like(self, dtype=self.dtype).detach()

    def clear_high_precision_init_val(self) -> None:
        """Free it; nothing is kept here."""


@contextlib.contextmanager
def fp8_model_init(enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False) -> Any:
    """Context in which weights are made quantized."""
    global _quantized
    before, _quantized = _quantized, enabled
    try:
        yield
    finally:
        _quantized = before


def parameter(*shape: int, dtype: torch.dtype, may_be_quantized: bool = False) -> torch.nn.Parameter:
    """Return a parameter without memory."""
    values = torch.empty(shape, device="meta", dtype=dtype)
    if not (_quantized and may_be_quantized):
        return torch.nn.Parameter(values)
    weight = QuantizedWeight(values)
    weight._data = torch.empty_like(values, dtype=torch.uint8)
    return weight


class Linear(torch.nn.Module):
    """`weight` (out, in) and `bias` (out) of this rank; several of each with a number behind their names."""

    save_original_input = False  # mcore sets it, where the real layer has it
    has_norm = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        num_gemms: int | None = None,
        tp_size: int = 1,
        parallel_mode: str | None = None,
        bias: bool = True,
        params_dtype: torch.dtype = torch.float32,
        normalization: str = "LayerNorm",
        **ignored: Any,
    ) -> None:
        super().__init__()
        if self.has_norm:
            self.layer_norm_weight = parameter(in_features, dtype=params_dtype)
            if normalization == "LayerNorm":
                self.layer_norm_bias = parameter(in_features, dtype=params_dtype)
        self.num_gemms, self.use_bias, self.tp_size, self.parallel_mode = num_gemms, bias, tp_size, parallel_mode
        self.in_features = in_features // (tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (tp_size if parallel_mode == "column" else 1)
        for end in [""] if num_gemms is None else map(str, range(num_gemms)):
            weight = parameter(self.out_features, self.in_features, dtype=params_dtype, may_be_quantized=True)
            self.register_parameter(f"weight{end}", weight)
            self.register_parameter(f"bias{end}", parameter(self.out_features, dtype=params_dtype) if bias else None)


class LayerNormLinear(Linear):
    """A Linear with the norm before it: `layer_norm_weight` (in), and `layer_norm_bias` (in) of a LayerNorm."""

    has_norm = True


class GroupedLinear(Linear):
    """`weight0` ... of (out, in) and `bias0` ... of (out), one for each expert of this rank."""

    def __init__(self, num_gemms: int, in_features: int, out_features: int, **others: Any) -> None:
        super().__init__(in_features, out_features, num_gemms=num_gemms, **others)

    def set_tensor_parallel_group(self, group: Any) -> None:
        """Do nothing; mcore calls it."""


class RMSNorm(torch.nn.Module):
    """`weight` (hidden)."""

    has_bias = False

    def __init__(
        self, normalized_shape: int | None = None, *, params_dtype: torch.dtype = torch.float32, **others: Any
    ) -> None:
        super().__init__()
        size = normalized_shape if normalized_shape is not None else others["hidden_size"]
        self.weight = parameter(size, dtype=params_dtype)
        if self.has_bias:
            self.bias = parameter(size, dtype=params_dtype)


class LayerNorm(RMSNorm):
    """`weight` and `bias` (hidden)."""

    has_bias = True


class DotProductAttention(torch.nn.Module):
    """`softmax_offset` (heads of this rank) where the softmax has one to learn, else nothing."""

    def __init__(self, num_attention_heads: int, *args: Any, softmax_type: str = "vanilla", **others: Any) -> None:
        super().__init__()
        if softmax_type == "learnable":
            heads = num_attention_heads // (others.get("tp_size") or 1)
            self.softmax_offset = parameter(heads, dtype=torch.float32)


class FusedAdam(torch.optim.Optimizer):
    """The settings that say which states it has; it makes none, and does not step."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        master_weights: bool = False,
        use_decoupled_grad: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        store_param_remainders: bool = False,
        **ignored: Any,
    ) -> None:
        super().__init__(params, {"lr": lr})
        self.master_weights, self.store_param_remainders = master_weights, store_param_remainders
        self.name_to_dtype_map = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            "master_param": master_weight_dtype,
        }


LAYERS = (Linear, LayerNormLinear, GroupedLinear, RMSNorm, LayerNorm, DotProductAttention, FusedAdam)
REAL: dict[str, Any] = {cls.__name__: cls for cls in LAYERS} | {
    "QuantizedTensor": QuantizedWeight,
    "fp8_model_init": fp8_model_init,
    "quantized_model_init": fp8_model_init,
}


class _Hollow(type):
    """Metaclass of classes with any attribute, made from anything. They stand for what must only exist: FP8 recipes."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Hollow(name, (_HollowLayer,), {})


class _HollowLayer(torch.nn.Module):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


PACKAGES = ("transformer_engine", "mamba_ssm", "deep_ep", "nvidia_resiliency_ext")
"""Top-level names that stand in, whether they are installed or not."""
HIDDEN = ("transformer_engine.pytorch.cpu_offload", "transformer_engine.pytorch.tensor.grouped_tensor")
"""mcore takes the absence of these, and would call their hollow functions while it builds."""
SUBMODULES = ("pytorch", "common", "recipe", "ops", "fp8", "distributed", "tensor", "optimizers")
"""Names that mcore reaches as attributes, without importing them."""


class ShapesModule(ModuleType):
    """A module whose attributes are made when they are first asked for."""

    __version__ = "2.17.1"

    def __getattr__(self, name: str) -> Any:
        full = f"{self.__name__}.{name}"
        if name in SUBMODULES and full not in HIDDEN:
            value = importlib.import_module(full)
        elif name.startswith("__"):  # importlib and inspect probe for those and rely on AttributeError
            raise AttributeError(f"stand-in module {self.__name__!r} has no {name!r}")
        else:
            # `REAL` has the layers with parameters; any other name is a class that is only imported.
            value = REAL.get(name) or _Hollow(name, (_HollowLayer,), {})
        setattr(self, name, value)
        return value


class ShapesFinder(MetaPathFinder, Loader):
    """Answers for `PACKAGES` before the finders that may know the real ones."""

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.split(".")[0] not in PACKAGES:
            return None
        if fullname in HIDDEN:
            # Raised here, because the finders after this one might know the real package.
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return ModuleSpec(fullname, self, is_package=True)

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ShapesModule(spec.name)

    @override
    def exec_module(self, module: ModuleType) -> None:
        pass  # attributes are made when they are asked for


def install() -> None:
    """Put the shapes in Transformer Engine's place from now on; RuntimeError if Megatron is imported already."""
    if "megatron.core" in sys.modules:
        raise RuntimeError("megatron.core is imported already: shapes need a process of their own")
    sys.meta_path.insert(0, ShapesFinder())


def is_quantized(tensor: torch.Tensor) -> bool:
    """Return whether Transformer Engine would keep this parameter in FP8."""
    return isinstance(tensor, QuantizedWeight)
