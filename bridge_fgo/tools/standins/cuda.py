"""CUDA on a CPU: `device="cuda"` is the CPU, or no memory at all, and streams finish each operation at once.

mcore creates tensors on `torch.cuda.current_device()` or "cuda", uses streams, and reads `Tensor.type()` to tell
dtypes apart. What computes is real: Bridge, mcore, torch, gloo collectives, and torch's AdamW, which mcore takes by
itself if Transformer Engine is absent (`bridge_fgo.tools.standins.hollow`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any, override
from unittest import mock

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ProcessGroupGloo
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

import bridge_fgo.memory.guard  # noqa: F401  (it knows functions of torch by identity: before any is replaced)
from bridge_fgo.tools.standins.hollow import import_bridge

_device_constructors()  # `torch.device("meta")` keeps the functions that take a device: before any is replaced

CPU = torch.device("cpu")
META = torch.device("meta")
HALVES = (torch.float16, torch.bfloat16)

PRODUCTS = ((torch, "matmul"), (torch.Tensor, "matmul"), (torch.Tensor, "__matmul__"), (torch, "addmm"))
"""Functions that multiply matrices. mcore's linear layers call the first two in forward and backward, Muon's update the
last two."""

MADE = ("empty", "full", "ones", "rand", "randint", "randn", "zeros")
PLACED = (
    *((torch, name) for name in (*MADE, *(f"{name}_like" for name in MADE))),
    *((torch, name) for name in ("arange", "as_tensor", "empty_strided", "eye", "linspace", "randperm")),
    *((torch, name) for name in ("scalar_tensor", "tensor", "tril_indices", "triu_indices")),
    (torch.Tensor, "to"),
)
"""Functions that take a `device`."""


def _multiplying(func: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a product of matrices as a GPU computes it: 16-bit factors add up in fp32, and the sum is rounded once.

    PyTorch's own 16-bit products take 10 to 30 times as long on a CPU without AVX-512. Autograd records the same.
    """

    @wraps(func)
    def multiply(*factors: torch.Tensor, **how: Any) -> torch.Tensor:
        half, out = factors[0].dtype if factors else None, how.get("out")
        is_half = half in HALVES and all(factor.dtype == half and factor.device == CPU for factor in factors)
        by_name = any(isinstance(value, torch.Tensor) for name, value in how.items() if name != "out")
        if not is_half or by_name or torch.is_grad_enabled():
            return func(*factors, **how)
        how.pop("out", None)
        result = func(*(factor.float() for factor in factors), **how)
        return result.to(half) if out is None else out.copy_(result)

    return multiply


def _placing(func: Callable[..., Any], place: torch.device) -> Callable[..., Any]:

    @wraps(func)
    def make(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = place
        return func(*args, **kwargs)

    return make


def _named_type(tensor: torch.Tensor, *args: Any, _type: Any = torch.Tensor.type, **kwargs: Any) -> Any:
    """Stand in for `Tensor.type`: where it is asked for a name, name CUDA's types."""
    result = _type(tensor, *args, **kwargs)
    is_named = not args and not kwargs and not result.startswith("torch.cuda.")  # it is: a TorchFunctionMode asks
    return f"torch.cuda.{result.rpartition('.')[2]}" if is_named else result  # also of "torch.meta.FloatTensor"


def _cuda_as(place: torch.device) -> list[tuple[object, str, object]]:
    """Return (owner, attribute, stand-in) of torch's functions that know devices: device="cuda" is `place`.

    Functions are replaced, and no TorchFunctionMode sees all of them: a small training took a quarter longer with it.
    """
    return [
        *((owner, name, _placing(getattr(owner, name), place)) for owner, name in PLACED),
        *((owner, name, _multiplying(getattr(owner, name))) for owner, name in PRODUCTS),
        (torch.Tensor, "type", _named_type),
    ]


class NoStream:
    """A stream or event on a device that finishes each operation before the next begins."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __enter__(self) -> NoStream:
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def synchronize(self, *args: object) -> None:
        """Return at once, as every other wait here does."""

    wait_stream = wait_event = record = wait = synchronize

    def record_event(self, event: NoStream | None = None) -> NoStream:
        """Return the event, which has happened already."""
        return event or NoStream()

    def query(self) -> bool:
        """Return that all is done, as it always is."""
        return True

    def elapsed_time(self, later: object) -> float:
        """Return the milliseconds between two events: none, as neither has a time."""
        return 0.0


def _nothing(*args: object, **kwargs: object) -> None:
    pass


_make_gloo = ProcessGroupGloo.__init__


def _make_gloo_with_one_worker(
    group: Any, store: Any, rank: int, size: int, options: Any = None, **settings: Any
) -> None:
    """Make a gloo group whose collectives are done one after another, as a CUDA stream's are.

    By default it has two threads for them. Both note the name of what they have done in one string of the group,
    without a lock (PyTorch 2.15, `ProcessGroupGloo::runLoop`), and may free its memory twice: with several coalesced
    all-gathers under way, whose name is long, a rank died in one of some fifty short trainings.
    """
    make_options: Any = ProcessGroupGloo._Options  # type: ignore[reportAttributeAccessIssue]
    if not isinstance(options, make_options):
        timeout = options
        options = make_options()
        options._devices = [ProcessGroupGloo.create_default_device()]
        if timeout is not None:
            options._timeout = timeout
        for name, value in settings.items():
            name = "_timeout" if name == "timeout" else name
            assert hasattr(options, name), name
            setattr(options, name, value)
    options._threads = 1
    _make_gloo(group, store, rank, size, options)


def _itself(module_or_tensor: Any, *args: object, **kwargs: object) -> Any:
    return module_or_tensor


def _replacements() -> list[tuple[object, str, object]]:
    """Return (owner, attribute, stand-in) of each CUDA entry point that a training step reaches."""
    from megatron.bridge.training import setup
    from megatron.core.inference import communication_utils
    from megatron.core.tensor_parallel import random as mcore_random

    cuda = torch.cuda
    return [
        *_cuda_as(CPU),
        (cuda, "current_device", lambda: CPU),
        (cuda, "device_count", lambda: 1),
        (cuda, "get_device_name", lambda device=None: "cpu"),
        (cuda, "memory_snapshot", lambda: []),
        # Each a function of its own: torch.compile keeps a rule for a function by its name, and these have other rules.
        *((cuda, name, lambda *args: None) for name in ("set_device", "reset_peak_memory_stats")),
        *((cuda, name, NoStream) for name in ("current_stream", "stream", "Stream", "Event")),
        *((cuda, name, _nothing) for name in ("synchronize", "empty_cache")),
        *((cuda.nvtx, name, _nothing) for name in ("range_push", "range_pop")),
        # One generator serves both devices: the rerun machine and mcore's RNG tracker save and restore
        # "CUDA" states, and dropout on the CPU must follow them.
        (cuda, "manual_seed", torch.manual_seed),
        (cuda, "get_rng_state", lambda *args, **kwargs: torch.get_rng_state()),
        (cuda.random, "get_rng_state", lambda *args, **kwargs: torch.get_rng_state()),
        (cuda, "set_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state)),
        (mcore_random, "_set_cuda_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state)),
        (torch.Tensor, "cuda", _itself),
        (torch.nn.Module, "cuda", _itself),
        (ProcessGroupGloo, "__init__", _make_gloo_with_one_worker),
        (setup, "initialize_megatron", partial(setup.initialize_megatron, allow_no_cuda=True)),
        (setup, "set_jit_fusion_options", _nothing),  # compiles fused functions, which a model of plain torch has not
        (communication_utils, "_is_cuda", _nothing),  # an assertion, before pipeline stages of inference talk
    ]


_installed: ExitStack | None = None


def install_standins() -> None:
    """Make Bridge's train_step run on the CPU in this process, until `remove_standins`. Idempotent.

    Imports Bridge before CUDA is replaced, as its imports look at the real `torch.cuda`; raises as `import_bridge`.
    """
    global _installed
    if _installed is not None:
        return
    import_bridge()
    stack = ExitStack()
    for owner, name, stand_in in _replacements():
        stack.enter_context(mock.patch.object(owner, name, stand_in))
    _installed = stack


def remove_standins() -> None:
    """Give CUDA's entry points back. The hollow modules stay, because what Bridge imported cannot be undone."""
    global _installed
    if _installed is not None:
        _installed.close()
        _installed = None


@contextlib.contextmanager
def without_gpu() -> Iterator[None]:
    """Context in which mcore and Bridge build a model without a GPU: its memory is meta, streams do nothing."""
    from megatron.core.ssm import gated_delta_net
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer import transformer_config

    with ExitStack() as stack:
        for owner, name, stand_in in _cuda_as(META):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        stack.enter_context(
            mock.patch.multiple(
                torch.cuda,
                current_device=lambda: META,
                # One that every dispatcher of tokens takes: Bridge asks for DeepEP by the name.
                get_device_properties=lambda device=None: SimpleNamespace(name="NVIDIA B200", major=10, minor=0),
                get_device_capability=lambda device=None: (10, 0),
                **dict.fromkeys(("current_stream", "stream", "Stream", "Event"), NoStream),
            )
        )
        # Nothing is drawn for memory that is not there.
        no_fork = mock.patch.object(CudaRNGStatesTracker, "fork", lambda *args, **kwargs: contextlib.nullcontext())
        stack.enter_context(no_fork)
        # Kernels of sparse and linear attention change no tensor; mcore asks for a GPU and packages. Not every mcore.
        common, gdn = (getattr(gated_delta_net, part, gated_delta_net) for part in ("common", "gdn"))
        for owner, name, stand_in in (
            (transformer_config, "_validate_dsa_kernel_backend_dependencies", _nothing),
            (common, "HAVE_FLA", True),
            (gdn, "chunk_gated_delta_rule", _nothing),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in, create=True))
        yield


# Megatron-FSDP on a CPU or without memory: what it asks beside.

IS_META: Any = vars(torch._C.TensorBase)["is_meta"].__get__  # type: ignore[reportAttributeAccessIssue]


@contextlib.contextmanager
def fsdp_on_cpu() -> Iterator[None]:
    """Context in which Megatron-FSDP wraps and trains a model on the CPU, with gloo; CUDA stands in already.

    It formats the current device as an integer, and makes its meshes of CUDA devices.
    """
    from_group = DeviceMesh.from_group
    of_cpus = staticmethod(lambda group, device_type, *args, **kwargs: from_group(group, "cpu", *args, **kwargs))
    with (
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
        mock.patch.object(DeviceMesh, "from_group", of_cpus),
    ):
        yield


class MetaAsMemory(TorchFunctionMode):
    """Has tensors without memory say that they have it, and stay where they are: Megatron-FSDP asks for memory."""

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == IS_META:
            return False
        if func is torch.Tensor.to and args[0].is_meta:
            args = tuple(args[0].device if isinstance(arg, str | torch.device) else arg for arg in args)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def fsdp_on_meta() -> Iterator[None]:
    """Context in which Megatron-FSDP wraps a model without memory; CUDA stands in already."""
    with fsdp_on_cpu(), MetaAsMemory():
        yield
